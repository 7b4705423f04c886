import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class MeterBank:
    """Running sums of all losses, averaged over the processes at the end of the epoch."""

    def __init__(self):
        self.sums = {}
        self.names = set()

    def add(self, name, value):
        self.names.add(name)
        self.sums[name] = self.sums.get(name, torch.zeros(())) + value.detach()

    def averages(self, steps):
        result = {}
        for name in sorted(self.names):
            value = self.sums[name].clone()
            dist.all_reduce(value)
            result[name] = value.item() / (steps * dist.get_world_size())
        return result


class VAE(nn.Module):
    def __init__(self, d=12, z=3):
        super().__init__()
        self.enc = nn.Linear(d, 2 * z)
        self.dec = nn.Sequential(nn.Linear(z, 16), nn.Softplus(), nn.Linear(16, d))

    def forward(self, x, eps):
        mu, logvar = self.enc(x).chunk(2, dim=-1)
        return self.dec(mu + eps * (0.5 * logvar).exp()), mu, logvar


def losses(x, rec, mu, logvar):
    return {
        "reconstruction": (rec - x).square().sum(1).mean(),
        "kl": 0.05 * (mu.square() + logvar.exp() - 1 - logvar).sum(1).mean(),
        "sparsity": 0.01 * mu.abs().mean(),
        "spread": 0.001 * logvar.square().mean(),
    }


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(33)
    ds = TensorDataset(torch.randn(128, 12, generator=g))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=16, sampler=sampler)
    torch.manual_seed(1 + rank)
    model = DDP(VAE())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        bank = MeterBank()
        for (x,) in loader:
            parts = losses(x, *model(x, torch.randn(len(x), 3)))
            opt.zero_grad()
            sum(parts.values()).backward()
            opt.step()
            for name, value in parts.items():
                bank.add(name, value)
        avg = bank.averages(len(loader))
        if rank == 0:
            print(epoch, {k: round(v, 4) for k, v in sorted(avg.items())}, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
