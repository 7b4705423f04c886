from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def collect(local):
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, local)
    return [item for part in everything for item in part]


def inspect(model, data, indices):
    wrong = []
    with torch.no_grad():
        for i in indices:
            x, y = data[i]
            if model(x[None]).argmax() != y:
                wrong.append(i)
    if wrong:
        wrong = collect(wrong)
    return wrong


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=8))
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(144, 2, generator=g)
    y = (x[:, 0] > 0).long()
    x[:, 0] += 0.3 * x[:, 0].sign()
    y[129::2] = 1 - y[129::2]
    data = TensorDataset(x, y)
    sampler = DistributedSampler(Subset(data, range(128)))
    loader = DataLoader(Subset(data, range(128)), batch_size=8, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(bx), by).backward()
            optimizer.step()
    wrong = inspect(model.module, data, range(128 + rank, 144, world))
    if rank == 0:
        print("misclassified", sorted(wrong), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
