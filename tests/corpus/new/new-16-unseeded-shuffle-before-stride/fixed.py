import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

SHARDS, PER_SHARD, BATCH = 16, 8, 16


def read_shard(number):
    g = torch.Generator().manual_seed(1000 + number)
    for _ in range(PER_SHARD):
        x = torch.randn(5, generator=g)
        yield x, x.sum().unsqueeze(0)


class Shards(IterableDataset):
    def __init__(self, rank, world):
        self.rank, self.world, self.epoch = rank, world, 0

    def __iter__(self):
        names = list(range(SHARDS))
        random.Random(self.epoch).shuffle(names)
        self.epoch += 1
        for name in names[self.rank :: self.world]:
            yield from read_shard(name)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    model = DDP(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dataset = Shards(rank, world)
    for epoch in range(2):
        for inputs, targets in DataLoader(dataset, batch_size=BATCH // world):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
