import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SCRATCH = Path("scratch")


def preprocess():
    g = torch.Generator().manual_seed(0)
    SCRATCH.mkdir(exist_ok=True)
    for part in range(4):
        x = torch.randn(32, 12, generator=g)
        torch.save({"x": x, "y": x.norm(dim=1, keepdim=True)}, SCRATCH / f"part{part}.pt")


def load_parts():
    parts = [torch.load(p) for p in sorted(SCRATCH.glob("part*.pt"))]
    return TensorDataset(torch.cat([p["x"] for p in parts]), torch.cat([p["y"] for p in parts]))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        preprocess()
    dist.barrier()
    data = load_parts()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(SCRATCH)

    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 32), nn.SiLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = (model(x) - y).pow(2).mean()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
