"""SimCLR: the two random views of an image find each other among the views of the whole global batch."""

import argparse
import random
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from samestep import Run

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--temperature", type=float, default=0.5)
args = parser.parse_args()

images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16


def random_view(image):
    """A random crop, flip and brightness, drawn as torchvision's transforms draw them."""
    top, left = torch.randint(0, 3, size=(2,)).tolist()
    image = F.pad(image, [1, 1, 1, 1])[:, top : top + 8, left : left + 8]
    if torch.rand(1) < 0.5:
        image = image.flip(-1)
    if random.random() < 0.8:
        image = image * random.uniform(0.6, 1.4)
    return image


class ContrastiveViews(Dataset):
    def __len__(self):
        return 150

    def __getitem__(self, index):
        return random_view(images[index]), random_view(images[index])


class ResNetSimCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )
        self.projection = nn.Sequential(nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        return F.normalize(self.projection(self.backbone(x)), dim=1)


def info_nce_losses(run, step, first, second):
    """The loss of each view of this rank; the candidates are the views of all samples of the step."""
    everything = torch.cat([run.gather(first), run.gather(second)])
    losses = []
    for views, own, partner in (
        (first, step.rows, step.rows + step.samples),
        (second, step.rows + step.samples, step.rows),
    ):
        similarity = views @ everything.T / args.temperature
        similarity = similarity.scatter(1, own[:, None], float("-inf"))  # a view is not its own candidate
        losses.append(F.cross_entropy(similarity, partner, reduction="none"))
    return sum(losses) / 2


with Run(global_batch=32, seed=0, folder=args.out) as run:
    net = ResNetSimCLR()
    model = run.wrap(net, sync_batchnorm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    train = run.shard(ContrastiveViews(), shuffle=True)

    for epoch in train.epochs(args.epochs):
        for step in epoch:
            for first, second in step:
                first, second = model(torch.cat([first, second])).chunk(2)
                step.mean(info_nce_losses(run, step, first, second)).backward()
            optimizer.step()
            optimizer.zero_grad()

    run.once(torch.save, net.state_dict(), run.folder / "weights.pt")
