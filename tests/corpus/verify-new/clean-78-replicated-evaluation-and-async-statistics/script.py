import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


class Meter:
    """Sum of a number over ranks, reduced in the background."""

    def __init__(self):
        self.pending, self.buffer, self.total = None, None, 0.0

    def add(self, value):
        self.flush()
        self.buffer = value.detach().clone()
        self.pending = dist.all_reduce(self.buffer, async_op=True)

    def flush(self):
        if self.pending is not None:
            self.pending.wait()
            self.total += self.buffer.item() / dist.get_world_size()
            self.pending = None


def regression(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 3, generator=g) * 2 - 1
    return TensorDataset(x, (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:])


def validate(model, loader):
    model.eval()
    with torch.no_grad():
        sums = [(nn.functional.mse_loss(model(x), y, reduction="sum").item(), len(x)) for x, y in loader]
    model.train()
    return sum(s for s, _ in sums) / sum(n for _, n in sums)


def main(opts):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train, val = regression(300, 0), regression(45, 1)
    own = torch.Generator().manual_seed(50 + rank)
    draws = RandomSampler(train, replacement=True, num_samples=opts.draws, generator=own)
    loader = DataLoader(train, batch_size=16, sampler=draws)
    val_loader = DataLoader(val, batch_size=20)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=opts.lr, momentum=0.9)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5)
    for epoch in range(3):
        meter = Meter()
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            meter.add(loss)
        meter.flush()
        error = validate(model.module, val_loader)
        plateau.step(error)
        spread = torch.tensor([loss.item()])
        dist.reduce(spread, dst=0, op=dist.ReduceOp.MAX)
        if rank == 0:
            print(f"epoch {epoch} train {meter.total / len(loader):.4f} val {error:.4f} worst {spread.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=96)
    parser.add_argument("--lr", type=float, default=0.05)
    main(parser.parse_args())
