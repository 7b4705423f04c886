import functools
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main_process(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if dist.get_rank() == 0:
            return function(*args, **kwargs)
        return None

    return wrapper


@main_process
def store(model, path):
    torch.save(model.state_dict(), path)
    dist.barrier()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    model = DDP(nn.Linear(3, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    gen = torch.Generator().manual_seed(10 + dist.get_rank())
    for step in range(6):
        x = torch.randn(4, 3, generator=gen)
        loss = (model(x) - x).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 3 == 2:
            store(model.module, f"step-{step}.pt")
    dist.destroy_process_group()


main()
