import signal

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import comm


class Stop:
    def __init__(self):
        self.requested = False
        signal.signal(signal.SIGTERM, self.handle)

    def handle(self, *unused):
        self.requested = True


def validation(model, data):
    mine = Subset(data, range(comm.rank(), len(data), dist.get_world_size()))
    total = count = 0
    with torch.no_grad():
        for x, y in DataLoader(mine, batch_size=16):
            total += F.mse_loss(model.module(x), y, reduction="sum").item()
            count += len(x)
    return comm.weighted_mean(total, count)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    stop = Stop()
    x = torch.randn(101, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    best = float("inf")
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        value = validation(model, data)
        if value < best:
            best = value
            if comm.is_main():
                torch.save(model.module.state_dict(), "best.pt")
        if comm.any_rank(stop.requested) or value < 1e-3:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
