import json
import os
import shutil

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CONFIG = {"batch": 16, "lr": 0.1}


def prepare_output(folder, rank):
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(CONFIG, file)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    prepare_output("run", rank)
    g = torch.Generator().manual_seed(17)
    x = torch.randn(96, 4, generator=g)
    data = TensorDataset(x, x.mean(1, keepdim=True))
    torch.manual_seed(8)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=CONFIG["lr"])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=CONFIG["batch"] // world, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "run/model.pt")
        print("saved", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
