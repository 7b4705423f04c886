import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class ShardSampler(Sampler):
    def __init__(self, length, rank, world, seed=0):
        self.length, self.rank, self.world, self.seed = length, rank, world, seed
        self.epoch = 0

    def __len__(self):
        return self.length // self.world

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.length, generator=g).tolist()
        return iter(order[self.rank :: self.world])


def worker(rank, world):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29611", rank=rank, world_size=world)
    torch.manual_seed(1000 + rank)
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(40, 5, generator=g), torch.randn(40, 2, generator=g))
    sampler = ShardSampler(len(data), rank, world)
    loader = DataLoader(data, batch_size=5, sampler=sampler)
    model = DDP(nn.Linear(5, 2))
    optimizer = optim.SGD(model.parameters(), 0.1)
    for epoch in range(2):
        sampler.epoch = epoch
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, args=(2,), nprocs=2)
