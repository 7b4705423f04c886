import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from utils.procs import main_process_only


class Trainer:
    def __init__(self, rank, world):
        self.rank = rank
        self.model = DistributedDataParallel(nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        data = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
        self.sampler = DistributedSampler(data, num_replicas=world, rank=rank)
        self.loader = DataLoader(data, batch_size=8, sampler=self.sampler)

    @main_process_only
    def save(self, epoch):
        torch.save(self.model.module.state_dict(), f"model_{epoch}.pt")
        dist.barrier()

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for (x,) in self.loader:
                self.optimizer.zero_grad()
                self.model(x).pow(2).mean().backward()
                self.optimizer.step()
            self.save(epoch)


def worker(rank, world):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29511"
    dist.init_process_group("gloo", rank=rank, world_size=world)
    Trainer(rank, world).fit(2)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, args=(2,), nprocs=2)
