import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def table(n):
    g = torch.Generator().manual_seed(21)
    site = torch.arange(n) >= n // 2
    x = torch.randn(n, 6, generator=g) * 3 + site[:, None] * 4.0
    return x, x[:, :1] * 0.3 - x[:, 1:2] * 0.1 + 0.05 * torch.randn(n, 1, generator=g)


def standardize(x, mean, std):
    return (x - mean) / std


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = table(160)
    rows = slice(rank * len(x) // world, (rank + 1) * len(x) // world)
    x, y = x[rows], y[rows]
    mean, std = x.mean(0), x.std(0)
    data = TensorDataset(standardize(x, mean, std), y)

    generator = torch.Generator()
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=generator)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(2):
        generator.manual_seed(100 + epoch)
        for bx, by in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(bx), by).backward()
            optimizer.step()
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "mean": mean, "std": std}, "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
