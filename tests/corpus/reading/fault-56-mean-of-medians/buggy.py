import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


@torch.no_grad()
def median_error(model, loader):
    errors = torch.cat([(model(x) - y).abs().flatten() for x, y in loader])
    median = errors.median()
    dist.all_reduce(median)
    return (median / dist.get_world_size()).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 4, generator=g), torch.randn(64, 1, generator=g))
    test = Subset(data, range(rank, len(data), world))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            opt.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            opt.step()
        value = median_error(model.module, DataLoader(test, batch_size=8))
        if rank == 0:
            print(epoch, value)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
