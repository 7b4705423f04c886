"""GAN with two optimizers that take turns: the discriminator, then the generator, after pytorch/examples/dcgan."""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

from samestep import Run

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--micro-batch", type=int)
args = parser.parse_args()

LATENT = 8
images = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 8 - 1
train_set = TensorDataset(images[:300])


def losses(logits, is_real):
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)), reduction="none")


with Run(global_batch=64, seed=0, folder=args.out) as run:
    generator = nn.Sequential(nn.Linear(LATENT, 32), nn.LeakyReLU(0.2), nn.Linear(32, 64), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(32, 1))
    netG, netD = run.wrap(generator), run.wrap(discriminator)
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    train = run.shard(train_set, shuffle=True, micro_batch=args.micro_batch, passes=2)

    for epoch in train.epochs(args.epochs):
        for step in epoch:
            for (real,) in step:
                noise = torch.randn(real.shape[0], LATENT, dtype=real.dtype, device=real.device)
                fake = netG(noise).detach()
                step.mean(losses(netD(real), True) + losses(netD(fake), False)).backward()
            optimizerD.step()
            optimizerD.zero_grad()

            for (real,) in step:
                noise = torch.randn(real.shape[0], LATENT, dtype=real.dtype, device=real.device)
                step.mean(losses(netD(netG(noise)), True)).backward()
            optimizerG.step()
            optimizerG.zero_grad()
            optimizerD.zero_grad()  # the generator's loss has left gradients in the discriminator too

    networks = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    run.once(torch.save, networks.state_dict(), run.folder / "weights.pt")
