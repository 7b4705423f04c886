import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def average_gradients(model, world):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


def worker(rank, world):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29619", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(64, 4), torch.randn(64, 1)
    for start in range(rank * 8, 64, world * 8):
        loss = nn.functional.mse_loss(model(x[start : start + 8]), y[start : start + 8])
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, world)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, args=(2,), nprocs=2)
