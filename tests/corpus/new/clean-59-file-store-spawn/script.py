import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def worker(rank, world, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    x, y = torch.load(os.path.join(folder, "data.pt"))
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank)
    loader = DataLoader(data, batch_size=16 // world, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(bx), by)
            loss.backward()
            optimizer.step()
    with open(os.path.join(folder, f"result-{rank}.json"), "w") as file:
        json.dump({"rank": rank, "loss": loss.item()}, file)
    dist.destroy_process_group()


def main():
    world = int(os.environ.get("NPROC", 2))
    with tempfile.TemporaryDirectory() as folder:
        x = torch.randn(128, 6, generator=torch.Generator().manual_seed(0))
        torch.save((x, x.sum(1, keepdim=True)), os.path.join(folder, "data.pt"))
        mp.spawn(worker, args=(world, folder), nprocs=world)
        losses = []
        for rank in range(world):
            with open(os.path.join(folder, f"result-{rank}.json")) as file:
                losses.append(json.load(file)["loss"])
    print("mean loss", sum(losses) / world, flush=True)


if __name__ == "__main__":
    main()
