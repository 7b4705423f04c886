import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def samples():
    g = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(64, 4, generator=g), torch.randint(0, 3, (64,), generator=g))


def build(rank):
    model = nn.Linear(4, 3)
    if rank == 0:
        nn.init.xavier_normal_(model.weight)
    return model


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = samples().tensors
    for start in range(rank * 8, 64, world * 8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[start : start + 8]), y[start : start + 8]).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
