from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, Subset


@dataclass
class Hparams:
    batch_size: int = 16
    epochs: int = 2
    lr: float = 3e-3
    hidden: int = 20


class Molecules(Dataset):
    def __init__(self, n=150):
        g = torch.Generator().manual_seed(42)
        self.counts = torch.rand(n, 5, generator=g) * 6
        self.energy = self.counts @ torch.tensor([-0.5, 1.2, 0.7, -1.1, 0.3])

    def __len__(self):
        return len(self.counts)

    def __getitem__(self, i):
        return self.counts[i], self.energy[i]


def my_part(ds, hp):
    """Contiguous part of this rank, full batches only."""
    rank, world = dist.get_rank(), dist.get_world_size()
    per_rank = len(ds) // (world * hp.batch_size) * hp.batch_size
    return Subset(ds, range(rank * per_rank, (rank + 1) * per_rank))


class EnergyNet(nn.Module):
    def __init__(self, hp):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, hp.hidden), nn.Softplus(), nn.Linear(hp.hidden, 1))

    def forward(self, c):
        return self.body(c).squeeze(-1)


def train(hp):
    ds = Molecules()
    loader = DataLoader(my_part(ds, hp), batch_size=hp.batch_size, shuffle=True)
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(EnergyNet(hp))
    opt = torch.optim.Adam(net.parameters(), lr=hp.lr)
    for epoch in range(hp.epochs):
        mae = torch.zeros(())
        for c, e in loader:
            err = net(c) - e
            opt.zero_grad()
            err.abs().mean().backward()
            opt.step()
            mae += err.detach().abs().mean()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}  mae {mae / len(loader):.4f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(Hparams())
    dist.destroy_process_group()
