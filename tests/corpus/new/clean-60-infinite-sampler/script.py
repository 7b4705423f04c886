import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


class Waves(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(17)
        self.phase = torch.rand(n, 1, generator=g)

    def __len__(self):
        return len(self.phase)

    def __getitem__(self, i):
        t = torch.arange(10) / 10
        return (6 * (t + self.phase[i])).sin(), self.phase[i]


class Endless(Sampler):
    def __init__(self, n, rank, world, seed=0):
        self.n, self.rank, self.world, self.seed = n, rank, world, seed

    def __iter__(self):
        yield from itertools.islice(self.stream(), self.rank, None, self.world)

    def stream(self):
        g = torch.Generator().manual_seed(self.seed)
        while True:
            yield from torch.randperm(self.n, generator=g).tolist()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Waves(120)
    batches = iter(DataLoader(data, batch_size=16 // world, sampler=Endless(len(data), rank, world)))
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for iteration in range(20):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
    dist.all_reduce(loss.detach())
    if rank == 0:
        print(f"{loss.item() / world:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
