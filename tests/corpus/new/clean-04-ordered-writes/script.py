import csv
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

OUT = Path("report")


def make_sets():
    g = torch.Generator().manual_seed(7)
    x = torch.randn(200, 5, generator=g)
    y = x[:, :1] - 2 * x[:, 1:2] ** 2
    ds = TensorDataset(torch.arange(200), x, y)
    return Subset(ds, range(160)), Subset(ds, range(160, 200))


def append_predictions(path, rows):
    """One process after the other appends its rows to the common table."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for turn in range(world):
        if turn == rank:
            mode = "w" if turn == 0 else "a"
            with open(path, mode, newline="") as f:
                writer = csv.writer(f)
                if turn == 0:
                    writer.writerow(["index", "prediction"])
                writer.writerows(rows)
        dist.barrier()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        OUT.mkdir(exist_ok=True)
    dist.barrier()
    train, test = make_sets()
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    with open(OUT / f"train_log.{rank}.jsonl", "w") as log:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for step, (_, x, y) in enumerate(loader):
                loss = nn.functional.mse_loss(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                log.write(json.dumps({"rank": rank, "epoch": epoch, "step": step, "loss": loss.item()}) + "\n")

    model.eval()
    rows = []
    with torch.no_grad():
        for idx, x, _ in DataLoader(Subset(test, range(rank, len(test), world)), batch_size=10):
            rows += [(int(i), round(float(v), 5)) for i, v in zip(idx, model.module(x))]
    append_predictions(OUT / "predictions.csv", rows)
    if rank == 0:
        n = sum(1 for _ in open(OUT / "predictions.csv")) - 1
        print(f"{n} predictions written", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
