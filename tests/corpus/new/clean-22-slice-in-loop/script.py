import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def regression(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(n, 1, generator=g))


def mlp(width=16):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(regression(64), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        for x, y in loader:
            x, y = x.chunk(world)[rank], y.chunk(world)[rank]
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
