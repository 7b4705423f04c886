"""A stand-in for the reader's own package, which the pages import: a small net and data that it can learn."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

_luck = torch.Generator().manual_seed(0)
_images = torch.randn(1205, 1, 8, 8, generator=_luck)
_labels = _images.flatten(1)[:, :10].argmax(dim=1)

train_set = TensorDataset(_images[:1000], _labels[:1000])
test_set = TensorDataset(_images[1000:], _labels[1000:])


class Net(nn.Sequential):
    """Ten classes of images of 8x8 pixels."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))
