"""Variational autoencoder on handwritten digits, after pytorch/examples/vae: the noise is drawn in `forward`."""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Run

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--micro-batch", type=int)
args = parser.parse_args()

images = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 16
train_set, test_set = TensorDataset(images[:300]), TensorDataset(images[300:400])


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 48)
        self.fc21 = nn.Linear(48, 6)
        self.fc22 = nn.Linear(48, 6)
        self.fc3 = nn.Linear(6, 48)
        self.fc4 = nn.Linear(48, 64)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def forward(self, x):
        h1 = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h1), self.fc22(h1)
        z = self.reparameterize(mu, logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def loss_terms(reconstruction, x, mu, logvar):
    """Reconstruction and KL divergence of every image."""
    bce = F.binary_cross_entropy(reconstruction, x, reduction="none").sum(1)
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1)
    return bce, kld


with Run(global_batch=64, seed=1, folder=args.out) as run:
    vae = VAE()
    model = run.wrap(vae)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train = run.shard(train_set, shuffle=True, micro_batch=args.micro_batch)
    test = run.shard(test_set)

    for epoch in train.epochs(args.epochs):
        for step in epoch:
            for (x,) in step:
                reconstruction, mu, logvar = model(x)
                bce, kld = loss_terms(reconstruction, x, mu, logvar)
                step.log({"train/reconstruction": bce, "train/kl": kld})
                step.mean(bce + kld).backward()
            optimizer.step()
            optimizer.zero_grad()

        with run.evaluate(model) as net:  # the test loss is noisy too: `forward` samples z in evaluation as well
            losses = []
            for (x,) in test:
                reconstruction, mu, logvar = net(x)
                losses.append(sum(loss_terms(reconstruction, x, mu, logvar)))
            test_loss = run.mean(losses)
        run.log({"test/loss": test_loss}, step=epoch.number)

    run.once(torch.save, vae.state_dict(), run.folder / "weights.pt")
