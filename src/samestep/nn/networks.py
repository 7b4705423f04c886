"""ResNet and transformer blocks in which the output of a sample does not depend on the other samples of its batch."""

from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn.functional import silu

from samestep.errors import SamestepError

Depth = Literal[18, 50]
_BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}
_GROUP = 8  # channels per group of GroupNorm


def resnet(depth: Depth, *, channels: int, classes: int, width: int = 64, small: bool = False) -> nn.Sequential:
    """ResNet-18 or ResNet-50 from images (rows, channels, height, width) to class scores.

    It uses GroupNorm, because BatchNorm statistics depend on the number of ranks, and SiLU, because the kink of ReLU
    amplifies rounding errors. With `small`, for images below about 100 pixels, the first layer keeps the image size.

    >>> import torch
    >>> resnet(18, channels=1, classes=10, width=8, small=True)(torch.zeros(2, 1, 16, 16)).shape
    torch.Size([2, 10])
    """
    if depth not in get_args(Depth):
        raise SamestepError(f"resnet does not know depth={depth}: use one of {', '.join(map(str, get_args(Depth)))}")
    if width < _GROUP or width % _GROUP:
        raise SamestepError(f"resnet got width={width}, the channels of its first layer: pass a multiple of {_GROUP}")
    bottleneck = depth == 50
    large = (_conv(channels, width, 7, 2), nn.SiLU(), nn.MaxPool2d(3, 2, 1))
    layers: list[nn.Module] = [_conv(channels, width, 3), nn.SiLU()] if small else [*large]
    inputs = width
    for stage, blocks in enumerate(_BLOCKS[depth]):
        for number in range(blocks):
            outputs = width * 2**stage * (4 if bottleneck else 1)
            layers.append(Residual(inputs, outputs, 2 if stage and not number else 1, bottleneck))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Residual(nn.Module):
    """A residual block of two convolutions, or of three with a `bottleneck`."""

    def __init__(self, inputs: int, outputs: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        narrow = outputs // 4
        three = [(inputs, narrow, 1, 1), (narrow, narrow, 3, stride), (narrow, outputs, 1, 1)]
        two = [(inputs, outputs, 3, stride), (outputs, outputs, 3, 1)]
        layers = [layer for shape in (three if bottleneck else two) for layer in (_conv(*shape), nn.SiLU())]
        self.path = nn.Sequential(*layers[:-1])
        self.around = nn.Identity() if stride == 1 and inputs == outputs else _conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the convolutions and the shortcut, through SiLU."""
        return silu(self.path(x) + self.around(x))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(layer, nn.GroupNorm(outputs // _GROUP, outputs))


def transformer(width: int, layers: int, *, head: int = 64) -> nn.TransformerEncoder:
    """Pre-norm encoder blocks over (rows, positions, width) with GELU, heads of width `head` and a final LayerNorm.

    It has no dropout, because its masks would depend on the number of ranks.

    >>> import torch
    >>> transformer(32, layers=2, head=16)(torch.zeros(4, 7, 32)).shape
    torch.Size([4, 7, 32])
    """
    if layers < 1 or head < 1 or width < head or width % head:
        raise SamestepError(
            f"transformer got width={width} and layers={layers} with heads of width {head}: pass a multiple of {head} "
            "as width, and at least one layer"
        )
    block = nn.TransformerEncoderLayer(width, width // head, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
