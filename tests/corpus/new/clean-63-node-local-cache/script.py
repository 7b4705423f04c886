import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def features(cache):
    if int(os.environ["LOCAL_RANK"]) == 0 and not cache.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
        temporary = cache.with_suffix(".tmp")
        torch.save(x.cos(), temporary)
        temporary.rename(cache)
    dist.barrier()
    return torch.load(cache)


def main():
    dist.init_process_group("gloo")
    node = os.environ.get("GROUP_RANK", "0")
    x = features(Path("cache") / f"node-{node}" / "features.pt")
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(bx), by).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
