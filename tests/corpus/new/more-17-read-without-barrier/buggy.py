import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

CACHE = "feature_stats.json"


def raw_rows(n=160, d=7):
    g = torch.Generator().manual_seed(23)
    scale = torch.logspace(-1, 2, d)
    x = torch.randn(n, d, generator=g) * scale + scale
    return x, (x / scale).sum(1)


def compute_stats(x):
    """Slow on the real table, so it is done once and cached."""
    mean, std = [], []
    for col in x.t():
        srt = col.double().sort().values
        mean.append(srt.mean().item())
        std.append(srt.std().item())
    return {"mean": mean, "std": std}


def get_stats(x):
    if dist.get_rank() == 0 and not os.path.exists(CACHE):
        with open(CACHE, "w") as f:
            json.dump(compute_stats(x), f)
    with open(CACHE) as f:
        return json.load(f)


class Table(Dataset):
    def __init__(self):
        x, self.y = raw_rows()
        stats = get_stats(x)
        self.x = (x - torch.tensor(stats["mean"])) / torch.tensor(stats["std"])

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def main():
    dist.init_process_group("gloo")
    table = Table()
    sampler = DistributedSampler(table)
    loader = DataLoader(table, batch_size=16, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(7, 14), nn.ReLU(), nn.Linear(14, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} mse {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
