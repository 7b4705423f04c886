import json
import time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def prepare(path):
    torch.manual_seed(0)
    torch.save(torch.randn(32, 3), path)


def run(rank, world):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29617", rank=rank, world_size=world)
    if rank == 0:
        prepare("prepared.pt")
    dist.barrier()
    data = torch.load("prepared.pt", map_location="cpu")
    model = DDP(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(rank * 4, len(data), world * 4):
        optimizer.zero_grad()
        model(data[start : start + 4]).pow(2).mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, args=(2,), nprocs=2)
