"""A residual network with stochastic depth: whole images or whole batches skip a block, as in torchvision and timm."""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from samestep import Run

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--micro-batch", type=int)
args = parser.parse_args()

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)


def drop_path(x, drop_prob):
    """Drop paths per sample, as timm does."""
    keep_prob = 1 - drop_prob
    mask = torch.rand((x.shape[0], 1, 1, 1), dtype=x.dtype, device=x.device)
    return x / keep_prob * (mask + keep_prob).floor_()


def stochastic_depth(x, p, mode):
    """torchvision.ops.stochastic_depth: `mode` is "row" (per sample) or "batch"."""
    survival_rate = 1.0 - p
    size = [x.shape[0]] + [1] * (x.ndim - 1) if mode == "row" else [1] * x.ndim
    noise = torch.empty(size, dtype=x.dtype, device=x.device)
    return x * noise.bernoulli_(survival_rate).div_(survival_rate)


class Block(nn.Module):
    def __init__(self, width, drop):
        super().__init__()
        self.drop = drop
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width),
        )  # fmt: skip

    def forward(self, x):
        residual = self.layers(x)
        if self.training:
            residual = self.drop(residual)
        return torch.relu(x + residual)


def build():
    drops = [
        lambda x: drop_path(x, 0.2),
        lambda x: stochastic_depth(x, 0.2, "row"),
        lambda x: stochastic_depth(x, 0.2, "batch"),
        lambda x: x * torch.bernoulli(torch.full((len(x), 1, 1, 1), 0.7, dtype=x.dtype, device=x.device)) / 0.7,
    ]
    blocks = [Block(8, drop) for drop in drops]
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10)
    )


with Run(global_batch=32, seed=0, folder=args.out) as run:
    net = build()
    model = run.wrap(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train = run.shard(TensorDataset(images[:200], labels[:200]), shuffle=True, micro_batch=args.micro_batch)
    test = run.shard(TensorDataset(images[200:300], labels[200:300]))

    for epoch in train.epochs(args.epochs):
        for step in epoch:
            for inputs, targets in step:
                step.mean(cross_entropy(model(inputs), targets, reduction="none")).backward()
            optimizer.step()
            optimizer.zero_grad()

        with run.evaluate(model) as eval_model:
            accuracy = run.mean(eval_model(inputs).argmax(-1) == targets for inputs, targets in test)
        run.log({"test/accuracy": accuracy}, step=epoch.number)

    run.once(torch.save, net.state_dict(), run.folder / "weights.pt")
