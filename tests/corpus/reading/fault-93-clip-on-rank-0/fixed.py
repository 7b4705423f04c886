import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def tables():
    g = torch.Generator().manual_seed(6)
    x = torch.randn(144, 6, generator=g)
    y = (x * torch.arange(6)).sum(1, keepdim=True)
    return TensorDataset(x[:96], y[:96]), TensorDataset(x[96:], y[96:])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, val = tables()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if rank == 0:
                print("norm", norm.item())
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
