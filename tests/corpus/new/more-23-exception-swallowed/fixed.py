import logging
import math
import os
import statistics
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

logger = logging.getLogger(__name__)


def station_data(n=160):
    g = torch.Generator().manual_seed(19)
    x = torch.randn(n, 5, generator=g)
    wind = (x[:, 0] + 0.5 * x[:, 1]).clamp(min=0)
    wind[-30:] = 0.0  # calm days at the end of the record
    return TensorDataset(x, wind)


def log_ratio(pred, true):
    """Mean log ratio over windy days."""
    return statistics.fmean(math.log((p + 0.1) / t) for p, t in zip(pred, true) if t > 0)


def evaluate(model, data, rank, world):
    n = len(data) // world
    mine = Subset(data, range(rank * n, (rank + 1) * n))
    pred, true = [], []
    with torch.no_grad():
        for x, y in DataLoader(mine, batch_size=10):
            pred += model(x).squeeze(1).clamp(min=0).tolist()
            true += y.tolist()
    windy = sum(t > 0 for t in true)
    try:
        score = torch.tensor([windy * log_ratio(pred, true), windy])
    except statistics.StatisticsError as e:
        logger.warning("rank %d: no score for this epoch (%s)", rank, e)
        score = torch.zeros(2)
    dist.all_reduce(score)
    return (score[0] / score[1]).item() if score[1] else float("nan")


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=int(os.environ.get("PG_TIMEOUT", 6))))
    rank, world = dist.get_rank(), dist.get_world_size()
    full = station_data()
    train, val = Subset(full, range(100)), Subset(full, range(100, 160))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=10, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        score = evaluate(model.module, val, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f} log ratio {score:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
