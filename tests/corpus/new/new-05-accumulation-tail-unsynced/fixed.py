import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def build_loader(batch_size):
    gen = torch.Generator().manual_seed(4)
    feats = torch.randn(200, 11, generator=gen)
    clicks = torch.poisson(torch.exp(feats[:, :3].mean(1)), generator=gen)
    ds = TensorDataset(feats, clicks)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    return DataLoader(ds, batch_size=batch_size, sampler=sampler), sampler


class RateNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(11, 30), nn.ELU())
        self.out = nn.Linear(30, 1)

    def forward(self, x):
        return self.out(self.trunk(x)).squeeze(-1)


def train_epoch(model, loader, opt, criterion, accum):
    n = len(loader)
    running = 0.0
    opt.zero_grad()
    for i, (x, y) in enumerate(loader):
        boundary = (i + 1) % accum == 0 or i + 1 == n
        # the last group of an epoch may be shorter
        group = min(accum, n - (i // accum) * accum)
        ctx = contextlib.nullcontext() if boundary else model.no_sync()
        with ctx:
            loss = criterion(model(x), y) / group
            loss.backward()
        running += loss.item() * group
        if boundary:
            opt.step()
            opt.zero_grad()
    return running / n


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--bs", type=int, default=10, help="micro batch per process")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    loader, sampler = build_loader(args.bs)
    torch.manual_seed(11)
    model = nn.parallel.DistributedDataParallel(RateNet())
    opt = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    criterion = nn.PoissonNLLLoss()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        avg = train_epoch(model, loader, opt, criterion, args.accum)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} nll {avg:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
