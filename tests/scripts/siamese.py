"""Siamese network: are two digits the same? Pairs are drawn in the dataset, after pytorch/examples/siamese_network."""

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
parser.add_argument("--epochs", type=int, default=14)
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--micro-batch", type=int)
parser.add_argument("--num-workers", type=int)
args = parser.parse_args()


class Pairs(Dataset):
    """An image, and another one that shows the same digit in every second sample."""

    def __init__(self, start, stop):
        digits = load_digits()
        self.images = torch.tensor(digits.images[start:stop], dtype=torch.float32).unsqueeze(1) / 16
        labels = digits.target[start:stop].tolist()
        self.labels = labels
        self.groups = [[i for i, label in enumerate(labels) if label == digit] for digit in range(10)]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        digit = self.labels[index]
        same = index % 2 == 0
        if not same:
            digit = random.choice([other for other in range(10) if other != digit])
        return self.images[index], self.images[random.choice(self.groups[digit])], torch.tensor(float(same))


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 24)
        )
        self.fc = nn.Sequential(nn.Linear(48, 24), nn.ReLU(inplace=True), nn.Linear(24, 1))

    def forward(self, left, right):
        pair = torch.cat((self.features(left), self.features(right)), 1)
        return self.fc(pair).squeeze(1)


with Run(global_batch=64, seed=1, folder=args.out) as run:
    net = SiameseNetwork()
    model = run.wrap(net)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    train = run.shard(Pairs(0, 300), shuffle=True, micro_batch=args.micro_batch, num_workers=args.num_workers)
    test = run.shard(Pairs(300, 400))

    for epoch in train.epochs(args.epochs):
        for step in epoch:
            for left, right, same in step:
                losses = F.binary_cross_entropy_with_logits(model(left, right), same, reduction="none")
                step.mean(losses).backward()
            optimizer.step()
            optimizer.zero_grad()

        with run.evaluate(model) as eval_model:
            accuracy = run.mean((eval_model(left, right) > 0) == (same > 0.5) for left, right, same in test)
        run.log({"test/accuracy": accuracy}, step=epoch.number)

    run.once(torch.save, net.state_dict(), run.folder / "weights.pt")
