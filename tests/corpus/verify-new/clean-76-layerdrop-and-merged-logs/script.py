import csv
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Deep(nn.Module):
    def __init__(self, dim=10, depth=5):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        for block in self.blocks:
            if not self.training or random.random() < 0.7:
                x = x + torch.tanh(block(x))
        return self.out(x)


def merge(world):
    rows = []
    for rank in range(world):
        with open(f"log-{rank}.csv") as f:
            rows += list(csv.reader(f))
    with open("log.csv", "w", newline="") as f:
        csv.writer(f).writerows(sorted(rows, key=lambda row: (int(row[0]), int(row[1]))))


def validate(model, data):
    """All of the validation set, on every rank."""
    model.eval()
    with torch.no_grad():
        x, y = data.tensors
        error = (model.module(x) - y).square().mean().item()
    model.train()
    return error


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(150, 10, generator=g)
    y = x.prod(1, keepdim=True).tanh()
    train, val = TensorDataset(x[:120], y[:120]), TensorDataset(x[120:], y[120:])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=10, sampler=sampler)
    torch.manual_seed(0)
    random.seed(rank)
    model = DDP(Deep(), find_unused_parameters=True)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    best, bad = float("inf"), 0
    with open(f"log-{rank}.csv", "w", newline="") as f:
        writer = csv.writer(f)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for i, (x, y) in enumerate(loader):
                loss = nn.functional.mse_loss(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                writer.writerow([epoch, i, rank, f"{loss.item():.5f}"])
            stop = torch.zeros(1)
            if rank == 0:
                error = validate(model, val)
                bad = 0 if error < best else bad + 1
                best = min(best, error)
                stop[0] = float(bad >= 2)
            dist.broadcast(stop, src=0)
            if stop.item():
                break
    dist.barrier()
    if rank == 0:
        merge(world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
