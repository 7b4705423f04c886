import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class AllGather(torch.autograd.Function):
    """all_gather whose backward sums the gradients of all ranks and takes the own slice."""

    @staticmethod
    def forward(ctx, x):
        out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return tuple(out)

    @staticmethod
    def backward(ctx, *grads):
        stacked = torch.stack(grads)
        dist.all_reduce(stacked)
        return stacked[dist.get_rank()]


class Projector(nn.Module):
    def __init__(self, d=14, e=8):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(d, 28), nn.ReLU())
        self.proj = nn.Linear(28, e)

    def forward(self, x):
        return F.normalize(self.proj(self.backbone(x)), dim=-1)


def nt_xent(a, b, tau=0.3):
    """SimCLR loss of the own anchors against the candidates of all ranks."""
    rank, n = dist.get_rank(), len(a)
    all_a, all_b = torch.cat(AllGather.apply(a)), torch.cat(AllGather.apply(b))
    pos = torch.arange(n) + rank * n
    sim_ab = a @ all_b.t() / tau
    sim_aa = a @ all_a.t() / tau
    sim_aa = sim_aa.scatter(1, pos.unsqueeze(1), float("-inf"))
    return F.cross_entropy(torch.cat([sim_ab, sim_aa], 1), pos)


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    g = torch.Generator().manual_seed(3)
    base = torch.randn(192, 14, generator=g)
    views = TensorDataset(base + 0.1 * torch.randn(192, 14, generator=g), base + 0.1 * torch.randn(192, 14, generator=g))
    sampler = DistributedSampler(views, shuffle=True)
    loader = DataLoader(views, batch_size=32 // world, sampler=sampler, drop_last=True)
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(Projector())
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for v1, v2 in loader:
            za, zb = model(torch.cat([v1, v2])).chunk(2)
            loss = 0.5 * (nt_xent(za, zb) + nt_xent(zb, za))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: nt-xent {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
