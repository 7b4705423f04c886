import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Mixer(nn.Module):
    def __init__(self, tokens=6, dim=16, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU()) for _ in range(depth))
        self.out = nn.Linear(tokens * dim, 1)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x.flatten(1))


def make_data(n=96):
    g = torch.Generator().manual_seed(14)
    x = torch.randn(n, 6, 16, generator=g)
    return TensorDataset(x, x.mean((1, 2)).unsqueeze(1).tanh())


def save_full(model, path):
    opts = StateDictOptions(full_state_dict=True, cpu_offload=True)
    if dist.get_rank() == 0:
        state = get_model_state_dict(model, options=opts)
        torch.save(state, path)
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps_per_save", type=int, default=1)
    ap.add_argument("--epochs", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=6))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Mixer()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = make_data()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.5f}", flush=True)
        save_full(model, "mixer.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
