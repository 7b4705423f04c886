import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EarlyStopping:
    def __init__(self, patience=2):
        self.patience = patience
        self.best = float("inf")
        self.bad = 0

    def update(self, value):
        if value < self.best:
            self.best = value
            self.bad = 0
        else:
            self.bad += 1
        return self.bad >= self.patience


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return TensorDataset(x, x.mean(1, keepdim=True))


def loader_for(data, shuffle, batch):
    sampler = DistributedSampler(data, shuffle=shuffle)
    return DataLoader(data, batch_size=batch, sampler=sampler), sampler


@torch.no_grad()
def validation_loss(model, loader):
    total, count = 0.0, 0
    for x, y in loader:
        total += F.mse_loss(model(x), y, reduction="sum").item()
        count += len(x)
    sums = torch.tensor([total, count])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=5, type=int)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train, sampler = loader_for(make(128, 0), True, 8)
    val, _ = loader_for(make(64, 1), False, 8)
    stopper = EarlyStopping(patience=1)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in train:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        if stopper.update(validation_loss(model, val)):
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
