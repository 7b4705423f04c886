"""Residual nets in which a sample sees no other: GroupNorm for BatchNorm, SiLU for ReLU."""

from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn.functional import silu

from samestep.errors import SamestepError

Depth = Literal[18, 50]
_BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}
_GROUP = 8  # channels that are normalised together


def resnet(depth: Depth, *, channels: int, classes: int, width: int = 64, small: bool = False) -> nn.Sequential:
    """ResNet-18 or ResNet-50 from images (rows, channels, height, width) to scores of classes.

    BatchNorm would see other rows on another number of ranks; ReLU has a kink, at which weights that differ by rounding
    part. `small` images, below about a hundred pixels, keep their size in the first layer.

    >>> import torch
    >>> resnet(18, channels=1, classes=10, width=8, small=True)(torch.zeros(2, 1, 16, 16)).shape
    torch.Size([2, 10])
    """
    if depth not in get_args(Depth):
        raise SamestepError(f"resnet does not know depth={depth}: use one of {', '.join(map(str, get_args(Depth)))}")
    if width < _GROUP or width % _GROUP:
        raise SamestepError(f"resnet got width={width}, the channels of its first layer: give a multiple of {_GROUP}")
    deep = depth == 50
    large = (_conv(channels, width, 7, 2), nn.SiLU(), nn.MaxPool2d(3, 2, 1))
    layers: list[nn.Module] = [_conv(channels, width, 3), nn.SiLU()] if small else [*large]
    inputs = width
    for stage, count in enumerate(_BLOCKS[depth]):
        for number in range(count):
            outputs = width * 2**stage * (4 if deep else 1)
            layers.append(Residual(inputs, outputs, 2 if stage and not number else 1, deep))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Residual(nn.Module):
    """Two convolutions, or three of which the middle one is `deep` and slim, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int, deep: bool) -> None:
        super().__init__()
        slim = outputs // 4
        three = [(inputs, slim, 1, 1), (slim, slim, 3, stride), (slim, outputs, 1, 1)]
        two = [(inputs, outputs, 3, stride), (outputs, outputs, 3, 1)]
        layers = [layer for shape in (three if deep else two) for layer in (_conv(*shape), nn.SiLU())]
        self.path = nn.Sequential(*layers[:-1])
        self.around = nn.Identity() if stride == 1 and inputs == outputs else _conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both ways."""
        return silu(self.path(x) + self.around(x))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(layer, nn.GroupNorm(outputs // _GROUP, outputs))
