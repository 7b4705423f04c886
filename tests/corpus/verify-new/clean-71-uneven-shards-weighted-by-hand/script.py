"""No DDP and no sampler: contiguous shards, exact weighting."""
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

N, BATCH, EPOCHS = 133, 11, 2


def make():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, 5, generator=g)
    return x, x.abs().sum(1, keepdim=True)


def shard_of(order, rank, world):
    bounds = [round(i * len(order) / world) for i in range(world + 1)]
    return order[bounds[rank]:bounds[rank + 1]]


def step(net, x, y, opt):
    net.zero_grad()
    total = (net(x) - y).square().sum() if len(x) else 0 * sum(p.sum() for p in net.parameters())
    total.backward()
    numbers = torch.tensor([float(len(x)), float(total.detach())], dtype=torch.float64)
    dist.all_reduce(numbers)
    flat = torch.cat([p.grad.flatten() for p in net.parameters()])
    dist.all_reduce(flat)
    flat /= numbers[0]
    start = 0
    for p in net.parameters():
        p.grad.copy_(flat[start:start + p.numel()].view_as(p))
        start += p.numel()
    opt.step()
    return numbers


def main(rank, world, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    x, y = make()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(EPOCHS):
        order = torch.randperm(N, generator=torch.Generator().manual_seed(epoch)).tolist()
        mine = shard_of(order, rank, world)
        longest = -(-(-(-N // world)) // BATCH)
        seen = torch.zeros(2, dtype=torch.float64)
        for i in range(longest):
            idx = mine[i * BATCH:(i + 1) * BATCH]
            seen += step(net, x[idx], y[idx], opt)
        if rank == 0:
            print(f"epoch {epoch}: mse {(seen[1] / seen[0]).item():.4f} over {int(seen[0])} samples")
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(main, args=(2, port), nprocs=2)
