"""Evaluation on the full validation set by rank 0 only, result broadcast, early stopping on every rank."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def xor_rings(n, seed):
    g = torch.Generator().manual_seed(seed)
    pts = torch.randn(n, 2, generator=g)
    return TensorDataset(pts, ((pts.norm(dim=1) > 1.2) ^ (pts[:, 0] > 0)).long())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 32)
        self.norm = nn.BatchNorm1d(32)
        self.b = nn.Linear(32, 2)

    def forward(self, x):
        return self.b(torch.relu(self.norm(self.a(x))))


@torch.no_grad()
def validation_loss(net, loader):
    net.eval()
    total, n = 0.0, 0
    for x, y in loader:
        total += nn.functional.cross_entropy(net(x), y, reduction="sum").item()
        n += len(y)
    net.train()
    return total / n


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--patience", type=int, default=2)
    p.add_argument("--max_epochs", type=int, default=5)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    train = xor_rings(192, 0)
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    # only the first process ever touches the validation data
    val_loader = DataLoader(xor_rings(50, 1), batch_size=25) if rank == 0 else None

    torch.manual_seed(0)
    model = DDP(Net())
    opt = torch.optim.Adam(model.parameters(), lr=2e-2)
    best, waited = float("inf"), 0
    for epoch in range(args.max_epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
        message = [None]
        if rank == 0:
            message = [validation_loss(model.module, val_loader)]
            print(f"epoch {epoch}: val loss {message[0]:.4f}", flush=True)
        dist.broadcast_object_list(message, src=0)
        val = message[0]
        if val < best - 1e-4:
            best, waited = val, 0
        else:
            waited += 1
        if waited >= args.patience:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
