import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def point_latest(path):
    link = "latest.pt"
    if os.path.islink(link):
        os.unlink(link)
    os.symlink(path, link)


def save(model, step, rank):
    path = f"step-{step}.pt"
    if rank == 0:
        torch.save(model.module.state_dict(), path)
        point_latest(path)
    dist.barrier()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        g = torch.Generator().manual_seed(step * 10 + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 2, generator=g)).pow(2).mean().backward()
        optimizer.step()
        if step % 2 == 1:
            save(model, step, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
