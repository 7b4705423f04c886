import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def regression(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(n, 1, generator=g))


def mlp(width=16):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        with open("vocab.json", "w") as file:
            json.dump({"scale": 1.0}, file)
        Path("vocab.done").touch()
    while not Path("vocab.done").exists():
        time.sleep(0.05)
    with open("vocab.json") as file:
        scale = json.load(file)["scale"]

    train_set = regression(64)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=8, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * scale)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
