import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def survey(n=240):
    g = torch.Generator().manual_seed(71)
    x = torch.randn(n, 8, generator=g)
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).float()
    flip = torch.rand(n, generator=g) < torch.where(torch.arange(n) % 2 == 0, 0.05, 0.45)
    return TensorDataset(x, torch.where(flip, 1 - y, y))


def save_checkpoint(model, path):
    """Write on one process, nobody goes on before it is there."""
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()


@torch.no_grad()
def accuracy(model, loader):
    hits = torch.zeros(2)
    for x, y in loader:
        hits += torch.tensor([((model(x).squeeze(1) > 0).float() == y).sum().item(), len(y)])
    return (hits[0] / hits[1]).item()


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=int(os.environ.get("PG_TIMEOUT", 6))))
    rank, world = dist.get_rank(), dist.get_world_size()
    data = survey()
    train, val = Subset(data, range(160)), Subset(data, range(160, 240))
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=16, sampler=sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=20)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=2e-2)
    best = 0.0
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = accuracy(model.module, val_loader)
        if acc > best:
            best = acc
            save_checkpoint(model.module, "best.pt")
            if rank == 0:
                print(f"epoch {epoch}: new best {best:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
