import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

PATH = "pretrained.pt"


def build():
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))


def fit(model, steps, rank):
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    gen = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(8, 6, generator=gen)
        loss = (model(x) - x).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    pretrained = DDP(build())
    fit(pretrained, 10, rank)
    if rank == 0:
        torch.save(pretrained.state_dict(), PATH)
    dist.barrier()
    student = build()
    student.load_state_dict(torch.load(PATH, map_location="cpu"), strict=False)
    fit(DDP(student), 5, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
