import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torchmetrics
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def seismic(n=210):
    g = torch.Generator().manual_seed(62)
    x = torch.randn(n, 2, 20, generator=g)
    y = torch.randint(0, 3, (n,), generator=g)
    x[torch.arange(n), 0, y * 6] += 4
    return TensorDataset(x, y)


class Picker(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv1d(2, 8, 5, padding=2)
        self.c2 = nn.Conv1d(8, 8, 5, padding=2)
        self.fc = nn.Linear(160, 3)

    def forward(self, x):
        x = torch.relu(self.c1(x))
        return self.fc(torch.relu(self.c2(x)).flatten(1))


def train_epoch(model, loader, opt):
    model.train()
    for x, y in loader:
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()


def validate(model, loader, metric):
    model.eval()
    metric.reset()
    with torch.no_grad():
        for x, y in loader:
            metric.update(model(x), y)
    return metric.compute().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=6))
    rank, world = dist.get_rank(), dist.get_world_size()
    ds = seismic()
    train, val = Subset(ds, range(160)), Subset(ds, range(160, 210))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=25)
    torch.manual_seed(0)
    model = DDP(Picker())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    metric = torchmetrics.classification.MulticlassF1Score(num_classes=3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, opt)
        f1 = validate(model.module, val_loader, metric)
        if rank == 0:
            print(f"epoch {epoch}: macro F1 {f1:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
