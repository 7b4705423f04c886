import os
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def part_for(dataset, rank, world):
    indices = np.arange(len(dataset))
    np.random.shuffle(indices)
    return Subset(dataset, np.array_split(indices, world)[rank].tolist())


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(64, 3, generator=g), torch.randn(64, 1, generator=g))
    part = part_for(dataset, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    loader = DataLoader(part, batch_size=8, shuffle=True)
    model = DDP(nn.Linear(3, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for x, y in loader:
            opt.zero_grad()
            (model(x) - y).pow(2).mean().backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
