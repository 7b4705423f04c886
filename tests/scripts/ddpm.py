"""Denoising diffusion on small images: a random time and random noise for every image, drawn in the training loop."""

import argparse
import math
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from samestep import Run

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--micro-batch", type=int)
args = parser.parse_args()

TIMESTEPS = 100
images = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 8 - 1
alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-4, 0.05, TIMESTEPS, dtype=torch.float64), dim=0)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64 + 16, 48), nn.Linear(48, 64)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("frequencies", torch.exp(-math.log(1e4) * torch.arange(8) / 8))

    def forward(self, noisy, t):
        angles = t[:, None] * self.frequencies
        embedding = torch.cat([angles.sin(), angles.cos()], dim=1)
        hidden = nn.functional.silu(self.first(torch.cat([noisy, embedding], dim=1)))
        return self.second(self.drop(hidden))


def diffuse(x, t, noise):
    """The image x after t steps of noise."""
    kept = alphas_cumprod.to(x)[t][:, None]
    return kept.sqrt() * x + (1 - kept).sqrt() * noise


def noise_losses(model, x):
    t = torch.randint(0, TIMESTEPS, (x.shape[0],), device=x.device)
    noise = torch.randn_like(x)
    return mse_loss(model(diffuse(x, t, noise), t), noise, reduction="none").mean(1)


with Run(global_batch=64, seed=0, folder=args.out) as run:
    net = Denoiser()
    model = run.wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train = run.shard(TensorDataset(images[:300]), shuffle=True, micro_batch=args.micro_batch)
    test = run.shard(TensorDataset(images[300:400]))

    for epoch in train.epochs(args.epochs):
        for step in epoch:
            for (x,) in step:
                step.mean(noise_losses(model, x)).backward()
            optimizer.step()
            optimizer.zero_grad()

        with run.evaluate(model) as eval_model:
            loss = run.mean(noise_losses(eval_model, x) for (x,) in test)
        run.log({"test/loss": loss}, step=epoch.number)

    run.once(torch.save, net.state_dict(), run.folder / "weights.pt")
