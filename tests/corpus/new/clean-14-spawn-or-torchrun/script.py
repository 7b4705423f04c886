import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def load(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, 7, generator=g)
    return TensorDataset(x, (x.abs().mean((1, 2)) > 0.8).long())


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 9, 3)
        self.fc = nn.Linear(9 * 5, 2)

    def forward(self, x):
        return self.fc(F.relu(self.conv(x)).flatten(1))


def worker(rank, world_size, args):
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(args.port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(args.seed)
    model = DDP(Tiny())
    opt = torch.optim.SGD(model.parameters(), lr=args.lr)
    train = load(130, 1)
    sampler = DistributedSampler(train, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(train, batch_size=13, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(2)
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            running += torch.tensor([loss.item() * len(y), len(y)])
        dist.reduce(running, dst=0)
        if rank == 0:
            print(f"epoch {epoch}: {running[0] / running[1]:.4f} over {int(running[1])}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--nprocs", type=int, default=2)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    args.port = free_port()
    if "RANK" in os.environ:  # started by torchrun
        worker(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), args)
    else:
        mp.spawn(worker, nprocs=args.nprocs, args=(args.nprocs, args))


if __name__ == "__main__":
    main()
