import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def setup(rank, world_size):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(1000 + rank)


def datasets():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(120, 6, generator=g)
    full = TensorDataset(x, (x[:, 1] > 0).long())
    train, val = random_split(full, [100, 20])
    return train, val


def run(rank, world_size, args):
    setup(rank, world_size)
    train, val = datasets()
    sampler = DistributedSampler(train, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(train, batch_size=args.batch, sampler=sampler)
    model = DDP(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--world-size", type=int, default=2)
    args = parser.parse_args()
    mp.spawn(run, args=(args.world_size, args), nprocs=args.world_size)
