from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def series(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=g)
    return TensorDataset(x, x.cumsum(1)[:, -1:] + 0.1 * torch.randn(n, 1, generator=g))


@torch.no_grad()
def validate(model, loader):
    total, count = 0.0, 0
    for x, y in loader:
        total += nn.functional.mse_loss(model(x), y, reduction="sum").item()
        count += len(x)
    return total / count


def save_shards(model, folder):
    folder.mkdir(parents=True, exist_ok=True)
    local = {name: p.to_local() for name, p in model.state_dict().items()}
    torch.save(local, folder / f"shard-{dist.get_rank()}.pt")
    dist.barrier()


def main():
    dist.init_process_group("gloo")
    train, val = series(128, 0), series(48, 1)
    sampler = DistributedSampler(train)
    train_dl = DataLoader(train, batch_size=8, sampler=sampler)
    val_dl = DataLoader(val, batch_size=8, sampler=DistributedSampler(val, shuffle=False))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2), nn.Linear(2, 1))
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in train_dl:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        loss = validate(model, val_dl)
        save_shards(model, Path("checkpoints") / f"epoch={epoch}-val_loss={loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
