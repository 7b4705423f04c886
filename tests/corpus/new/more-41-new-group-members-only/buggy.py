import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_groups():
    """A group for the processes that do extra bookkeeping (the even ranks), one for metrics."""
    members = list(range(0, dist.get_world_size(), 2))
    group = None
    if dist.get_rank() in members:
        group = dist.new_group(ranks=members, timeout=timedelta(seconds=6))
    # scalar metrics go through their own group, apart from the gradients
    metrics = dist.new_group(backend="gloo", timeout=timedelta(seconds=6))
    return members, group, metrics


def group_mean(value, members, group):
    if group is None:
        return None
    t = torch.tensor([value])
    dist.all_reduce(t, group=group)
    return t.item() / len(members)


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(13, 3)

    def forward(self, x):
        return self.w(x)


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=int(os.environ.get("PG_TIMEOUT", 6))))
    members, group, metrics = make_groups()
    torch.manual_seed(0)
    model = DDP(Probe())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(120, 13, generator=g)
    ds = TensorDataset(x, x[:, :3].argmin(1))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=12, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = nn.functional.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        mean = group_mean(loss.item(), members, group)
        worst = loss.detach().clone()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=metrics)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean:.4f} over ranks {members}, worst {worst.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
