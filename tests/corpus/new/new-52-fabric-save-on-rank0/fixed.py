import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_epoch(fabric, model, optimizer, loader):
    for x, y in loader:
        loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    return fabric.all_reduce(loss.detach())


if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(2)
    model = nn.Sequential(nn.Linear(7, 14), nn.ReLU(), nn.Linear(14, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    x = torch.randn(128, 7, generator=torch.Generator().manual_seed(0))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, (x.sum(1) > 0).float()), batch_size=8, shuffle=True))
    best = float("inf")
    for epoch in range(3):
        loss = train_epoch(fabric, model, optimizer, loader)
        fabric.print(f"epoch {epoch}: {loss:.4f}")
        state = {"model": model, "optimizer": optimizer, "epoch": epoch}
        fabric.save("last.ckpt", state)
