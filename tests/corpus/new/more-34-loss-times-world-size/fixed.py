import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

world_size = int(os.environ.get("WORLD_SIZE", 1))
rank = int(os.environ.get("RANK", 0))


def boxes(n=168):
    """Regress a box from a 10-dim descriptor."""
    gen = torch.Generator().manual_seed(88)
    desc = torch.randn(n, 10, generator=gen)
    xy = torch.sigmoid(desc[:, :2])
    wh = 0.1 + 0.3 * torch.sigmoid(desc[:, 2:4])
    return TensorDataset(desc, torch.cat([xy, wh], 1))


class BoxHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4), nn.Sigmoid())

    def forward(self, desc):
        return self.mlp(desc)


def box_loss(pred, target):
    l1 = F.l1_loss(pred, target)
    size = F.mse_loss(pred[:, 2:].log(), target[:, 2:].log())
    return l1 + 0.5 * size


def main():
    dist.init_process_group("gloo")
    ds = boxes()
    sampler = DistributedSampler(ds, num_replicas=world_size, rank=rank)
    loader = DataLoader(ds, batch_size=24 // world_size, sampler=sampler)
    torch.manual_seed(12)
    head = DistributedDataParallel(BoxHead())
    opt = torch.optim.SGD(head.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for desc, target in loader:
            loss = box_loss(head(desc), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
