import random
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FILES = [f"shard-{i:03d}" for i in range(32)]


def files_of_epoch(epoch):
    chosen = random.sample(FILES, 16)
    return chosen[dist.get_rank() :: dist.get_world_size()]


def load(name):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(int(name[-3:])))


def main():
    dist.init_process_group("gloo")
    model = DDP(nn.Linear(3, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for name in files_of_epoch(epoch):
            opt.zero_grad()
            model(load(name)).pow(2).mean().backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
