"""Sine regression, started with mp.spawn."""
import os
import random
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EPOCHS, BATCH, LR = 2, 8, 0.05


class Waves(torch.utils.data.Dataset):
    def __init__(self, n=128):
        gen = torch.Generator().manual_seed(7)
        self.x = torch.rand(n, 1, generator=gen) * 6
        self.y = torch.sin(self.x)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class RankBatches(torch.utils.data.Sampler):
    """Batches of one rank; the order is the same permutation on all ranks."""

    def __init__(self, n, batch, rank, world):
        self.n, self.batch, self.rank, self.world = n, batch, rank, world
        self.epoch = 0

    def __iter__(self):
        order = list(range(self.n))
        random.Random(self.epoch).shuffle(order)
        batches = [order[i:i + self.batch] for i in range(0, self.n, self.batch)]
        yield from batches[self.rank:len(batches) - self.world + 1 + self.rank]

    def __len__(self):
        return self.n // self.batch // self.world


def worker(rank, world, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    data = Waves()
    batches = RankBatches(len(data), BATCH, rank, world)
    loader = torch.utils.data.DataLoader(data, batch_sampler=batches)
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)))
    opt = torch.optim.SGD(net.parameters(), lr=LR)
    for epoch in range(EPOCHS):
        batches.epoch = epoch
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    mp.spawn(worker, args=(2, free), nprocs=2)
