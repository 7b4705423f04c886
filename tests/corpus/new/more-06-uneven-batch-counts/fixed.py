import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

SITES = ["bern", "graz", "lyon", "metz", "pisa", "turku", "york"]


def load_site(name):
    """One table per hospital. All of the same size here, there may be more or fewer sites."""
    g = torch.Generator().manual_seed(sum(map(ord, name)))
    x = torch.randn(30, 8, generator=g)
    risk = torch.sigmoid(x[:, :3].sum(1, keepdim=True))
    return TensorDataset(x, risk)


class RiskModel(nn.Module):
    def __init__(self, d=8, h=16):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(d, h), nn.Linear(h, h), nn.Linear(h, 1)

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        return self.fc3(torch.relu(self.fc2(x)))


def train_epoch(model, loader, opt):
    total, n = 0.0, 0
    for x, risk in loader:
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), risk)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
        n += 1
    return total / n, n


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=int(os.environ.get("PG_TIMEOUT", 6))))
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = SITES[rank::world]  # whole sites stay on one process
    loader = DataLoader(ConcatDataset([load_site(s) for s in mine]), batch_size=10, shuffle=True)
    torch.manual_seed(0)
    model = DDP(RiskModel())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        with model.join():
            loss, n = train_epoch(model, loader, opt)
        print(f"rank {rank} epoch {epoch}: {n} batches, loss {loss:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
