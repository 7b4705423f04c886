import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class BigMLP(nn.Module):
    def __init__(self, d=32, width=384, depth=3):
        super().__init__()
        self.inp = nn.Linear(d, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = torch.relu(self.inp(x))
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.out(x)


def ensure_checkpoint(path):
    if dist.get_rank() == 0 and not os.path.exists(path):
        torch.manual_seed(5)
        torch.save(BigMLP().state_dict(), path)
    dist.barrier()


def load_sharded(path, mesh):
    opts = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with torch.device("meta"):
        model = BigMLP()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    state = torch.load(path, map_location="cpu") if dist.get_rank() == 0 else {}
    set_model_state_dict(model, state, options=opts)
    return model


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--weights", default="big_mlp.pt")
    p.add_argument("--lr", type=float, default=1e-3)
    args = p.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ensure_checkpoint(args.weights)
    model = load_sharded(args.weights, mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    g = torch.Generator().manual_seed(6)
    x = torch.randn(64, 32, generator=g)
    ds = TensorDataset(x, x.std(1, keepdim=True))
    sampler = DistributedSampler(ds)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for xb, yb in DataLoader(ds, batch_size=8, sampler=sampler):
            loss = nn.functional.mse_loss(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
