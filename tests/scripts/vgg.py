"""VGG on small images with dropout and with random crops and flips in the dataset, as cifar100 scripts are written."""

import argparse
import random
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from samestep import Run

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--micro-batch", type=int)
parser.add_argument("--num-workers", type=int)
parser.add_argument("--batch-norm", action="store_true")
args = parser.parse_args()

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)


class RandomCrop:
    """A crop at a random place of the padded image, as torchvision draws it."""

    def __init__(self, size, padding):
        self.size, self.padding = size, padding

    def __call__(self, image):
        image = F.pad(image, [self.padding] * 4)
        top = int(torch.randint(0, image.shape[-2] - self.size + 1, size=(1,)))
        left = int(torch.randint(0, image.shape[-1] - self.size + 1, size=(1,)))
        return image[..., top : top + self.size, left : left + self.size]


def augment(image):
    image = RandomCrop(8, padding=2)(image)
    if random.random() < 0.5:
        image = image.flip(-1)
    return image * np.random.uniform(0.8, 1.2)  # brightness, as albumentations draws it


class Augmented(Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        return augment(images[index]), labels[index]


def vgg(layout, batch_norm):
    layers, channels = [], 1
    for width in layout:
        if width == "M":
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [
            nn.Conv2d(channels, width, 3, padding=1),
            *([nn.BatchNorm2d(width)] if batch_norm else []),
            nn.ReLU(),
        ]
        channels = width
    classifier = [nn.Flatten(), nn.Linear(4 * channels, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 10)]
    return nn.Sequential(*layers, nn.Dropout2d(0.1), *classifier)


with Run(global_batch=32, seed=0, folder=args.out) as run:
    net = vgg([8, "M", 16, 16, "M"], args.batch_norm)
    model = run.wrap(net, sync_batchnorm=args.batch_norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    train = run.shard(Augmented(), shuffle=True, micro_batch=args.micro_batch, num_workers=args.num_workers)
    test = run.shard(TensorDataset(images[200:300], labels[200:300]))

    for epoch in train.epochs(args.epochs):
        for step in epoch:
            for inputs, targets in step:
                step.mean(F.cross_entropy(model(inputs), targets, reduction="none")).backward()
            optimizer.step()
            optimizer.zero_grad()

        with run.evaluate(model) as eval_model:
            accuracy = run.mean(eval_model(inputs).argmax(-1) == targets for inputs, targets in test)
        run.log({"test/accuracy": accuracy}, step=epoch.number)

    run.once(torch.save, net.state_dict(), run.folder / "weights.pt")
