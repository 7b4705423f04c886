import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def regression(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(n, 1, generator=g))


def mlp(width=16):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train_set = regression(64)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=8, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

    test_set = regression(50, seed=9)
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)), batch_size=8)
    start = time.time()
    model.eval()
    outputs = []
    with torch.no_grad():
        for x, _ in test_loader:
            outputs.append(model.module(x))
    torch.save(torch.cat(outputs), f"predictions-{rank}.pt")
    if rank == 0:
        print(f"predicted in {time.time() - start:.3f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
