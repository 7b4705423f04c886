"""Handwritten digits with two dropout layers and a learning rate per epoch, after pytorch/examples/mnist."""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from samestep import Run

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=14)
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--micro-batch", type=int)
args = parser.parse_args()

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
train_set, test_set = TensorDataset(images[:300], labels[:300]), TensorDataset(images[300:400], labels[300:400])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


with Run(global_batch=64, seed=1, folder=args.out) as run:
    net = Net()
    model = run.wrap(net)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    train, test = run.shard(train_set, shuffle=True, micro_batch=args.micro_batch), run.shard(test_set)

    for epoch in train.epochs(args.epochs):
        for step in epoch:
            for data, target in step:
                step.mean(F.nll_loss(model(data), target, reduction="none")).backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()

        with run.evaluate(model) as eval_model:
            accuracy = run.mean(eval_model(data).argmax(1) == target for data, target in test)
        run.log({"test/accuracy": accuracy}, step=epoch.number)

    run.once(torch.save, net.state_dict(), run.folder / "weights.pt")
