import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, Dataset


class Glyphs(Dataset):
    def __init__(self, n=144, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.label = torch.randint(0, 6, (n,), generator=g)
        self.img = torch.rand(n, 1, 6, 6, generator=g)
        self.img[torch.arange(n), 0, self.label] += 0.6

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.img[i], self.label[i]


class GlyphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.fc = nn.Linear(216, 6)

    def forward(self, x):
        return self.fc(F.relu(self.conv(x)).flatten(1))


def run(fabric, epochs=2):
    fabric.seed_everything(30)
    model = GlyphNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    model, optimizer = fabric.setup(model, optimizer)
    loader = DataLoader(Glyphs(), batch_size=12, shuffle=True)
    for epoch in range(epochs):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        model.train()
        total = 0.0
        for img, label in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(img), label)
            fabric.backward(loss)
            optimizer.step()
            total += loss.item()
        fabric.print(f"epoch {epoch}: loss {total / len(loader):.4f}", flush=True)


def main():
    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), strategy="ddp")
    fabric.launch()
    run(fabric)


if __name__ == "__main__":
    main()
