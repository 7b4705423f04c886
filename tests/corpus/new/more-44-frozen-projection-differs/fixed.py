import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class FourierFeatures(nn.Module):
    """Fixed random projection; nothing to learn here."""

    def __init__(self, d_in, n, scale=2.0):
        super().__init__()
        self.proj = nn.Linear(d_in, n, bias=True)
        nn.init.normal_(self.proj.weight, std=scale)
        nn.init.uniform_(self.proj.bias, 0, 6.2832)
        self.requires_grad_(False)

    def forward(self, x):
        return torch.cos(self.proj(x))


class Field(nn.Module):
    def __init__(self, n=48):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(n, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, feats):
        return self.mlp(feats)


def image_samples(n=256):
    g = torch.Generator().manual_seed(13)
    uv = torch.rand(n, 2, generator=g)
    return TensorDataset(uv, (8 * uv[:, :1]).sin() * (5 * uv[:, 1:]).cos())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--features", type=int, default=48)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed + rank)

    lift = FourierFeatures(2, args.features)
    for p in lift.parameters():
        dist.broadcast(p.data, src=0)
    field = DDP(Field(args.features))
    opt = torch.optim.Adam(field.parameters(), lr=1e-2)
    ds = image_samples()
    sampler = DistributedSampler(ds, seed=args.seed)
    loader = DataLoader(ds, batch_size=32, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for uv, value in loader:
            jitter = uv + 0.002 * torch.randn_like(uv)
            loss = F.mse_loss(field(lift(jitter)), value)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: mse {loss.item():.4f}", flush=True)
    if rank == 0:
        torch.save({"lift": lift.state_dict(), "field": field.module.state_dict()}, "field.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
