import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset


def spectra(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 16, generator=g)
    return TensorDataset(x, (x * torch.linspace(0, 1, 16)).sum(1, keepdim=True))


class Unmixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.seq = nn.Sequential(nn.Linear(16, 20), nn.SiLU(), nn.Linear(20, 1))

    def forward(self, x):
        return self.seq(x)


def validate(fabric, model, loader):
    model.eval()
    err, n = torch.zeros(()), torch.zeros(())
    with torch.no_grad():
        for x, y in loader:
            err += (model(x) - y).abs().sum()
            n += len(y)
    err, n = fabric.all_reduce(err, reduce_op="sum"), fabric.all_reduce(n, reduce_op="sum")
    model.train()
    return (err / n).item(), int(n)


def main():
    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(6)
    model = Unmixer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    train, val = fabric.setup_dataloaders(
        DataLoader(spectra(160, 0), batch_size=8, shuffle=True), DataLoader(spectra(64, 1), batch_size=16)
    )
    accumulate = 2
    for epoch in range(2):
        if hasattr(train.sampler, "set_epoch"):
            train.sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(train):
            more = (i + 1) % accumulate != 0
            with fabric.no_backward_sync(model, enabled=more):
                loss = F.mse_loss(model(x), y)
                fabric.backward(loss / accumulate)
            if not more:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        mae, n = validate(fabric, model, val)
        fabric.print(f"epoch {epoch}: mae {mae:.4f} on {n}", flush=True)
        fabric.save("last.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})
    fabric.barrier()


if __name__ == "__main__":
    main()
