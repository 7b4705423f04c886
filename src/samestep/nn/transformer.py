"""Transformer blocks that compute the same on any number of ranks."""

from torch import nn

from samestep.errors import SamestepError


def transformer(width: int, layers: int, *, head: int = 64) -> nn.TransformerEncoder:
    """Pre-norm blocks over (rows, places, width), with heads of `head` and GELU, and a norm at the end.

    There is no dropout in them: its draws would differ with the number of ranks.

    >>> import torch
    >>> transformer(32, layers=2, head=16)(torch.zeros(4, 7, 32)).shape
    torch.Size([4, 7, 32])
    """
    if layers < 1 or head < 1 or width < head or width % head:
        raise SamestepError(
            f"transformer got width={width} and layers={layers} with heads of {head}: give a multiple of {head} as "
            "width, and at least one layer"
        )
    block = nn.TransformerEncoderLayer(width, width // head, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
