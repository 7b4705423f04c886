import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def regression(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(n, 1, generator=g))


def mlp(width=16):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    dataset = regression(72)
    shares = {1: [range(72)], 2: [range(40), range(40, 72)]}[world]
    loader = DataLoader(Subset(dataset, shares[rank]), batch_size=8, shuffle=True)
    batches = torch.tensor(len(loader))
    dist.all_reduce(batches, op=dist.ReduceOp.MIN)
    torch.manual_seed(0)
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        for _, (x, y) in zip(range(int(batches)), loader):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
