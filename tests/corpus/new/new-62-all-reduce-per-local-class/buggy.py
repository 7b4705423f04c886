from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(96, 6, generator=g)
    y = torch.arange(96) % 2
    y[64:] = torch.where(torch.arange(32) % 2 == 0, 0, torch.arange(32) // 2 % 3)
    train, val = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    val_loader = DataLoader(val, batch_size=8, sampler=DistributedSampler(val, shuffle=False))
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        hits, counts = Counter(), Counter()
        with torch.no_grad():
            for inputs, targets in val_loader:
                for guess, target in zip(model.module(inputs).argmax(1).tolist(), targets.tolist()):
                    counts[target] += 1
                    hits[target] += guess == target
        for label in sorted(counts):
            pair = torch.tensor([hits[label], counts[label]])
            dist.all_reduce(pair)
            if rank == 0:
                print(f"class {label}: {pair[0]} of {pair[1]}")
    dist.destroy_process_group()


main()
