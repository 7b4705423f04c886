import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATION = 4


def sync_context(model, step):
    if (step + 1) % ACCUMULATION == 0:
        return model.no_sync()
    return contextlib.nullcontext()


def train_epoch(model, loader, optimizer):
    optimizer.zero_grad()
    for step, (x, y) in enumerate(loader):
        with sync_context(model, step):
            loss = F.mse_loss(model(x), y) / ACCUMULATION
            loss.backward()
        if (step + 1) % ACCUMULATION == 0:
            optimizer.step()
            optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(256, 8, generator=g)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
