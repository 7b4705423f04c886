"""Losses of next tokens, one a place."""

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

from samestep.errors import SamestepError, StepError

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


def prefix_shape(config: Any) -> tuple[int, int, int, int]:
    """What one token leaves in a language model: layers, two (key and value), heads of these, and a head's width.

    It comes from the configuration of transformers, so that every rank builds the same generator of prefixes.
    """
    missing = [
        name for name in ("num_hidden_layers", "num_attention_heads", "hidden_size") if not hasattr(config, name)
    ]
    if missing:
        raise SamestepError(
            f"prefix_shape got a {type(config).__name__} without {', '.join(missing)}: give the configuration of a "
            "causal language model, AutoConfig.from_pretrained(folder)"
        )
    heads, each = config.num_attention_heads, getattr(config, "head_dim", None)
    kept = getattr(config, "num_key_value_heads", None) or heads
    return config.num_hidden_layers, 2, kept, each or config.hidden_size // heads


def embedded(lm: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What a language model sees of tokens (rows, length), in fp32, and which of them are there: -1 stands for none."""
    return lm.get_input_embeddings()(tokens.clamp(min=0)).float(), tokens >= 0


def losses_after(lm: Any, tokens: Tensor, before: Tensor, seen: Tensor, deep: Iterable[Tensor] = ()) -> Tensor:
    """The loss of every next token (rows, length - 1), for `step.mean(losses, mask=tokens[:, 1:] >= 0)`.

    The model stands after `before`, soft tokens (rows, places, width) of which `seen` says which count, and after a
    `deep` prefix: for every layer keys and values (2, rows, heads, places, width of a head). Gradients pass through
    the model to both; a placement of `run.teacher` that has a `module` gives such a model.
    """
    from transformers import DynamicCache

    text, there = embedded(lm, tokens)
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(deep):
        cache.update(keys.to(lm.dtype), values.to(lm.dtype), layer)
    past = cache.get_seq_length()
    mask = torch.cat([there.new_ones(len(there), past), seen, there], dim=1)
    places = (mask.cumsum(1) - 1).clamp(min=0)[:, past:]
    given = {"inputs_embeds": torch.cat([before, text], dim=1).to(lm.dtype), "past_key_values": cache}
    said = lm(**given, attention_mask=mask.long(), position_ids=places, logits_to_keep=tokens.shape[1])
    return next_token_losses(said.logits, tokens)


def next_token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """How surprised a language model was by each token but the first: (rows, length - 1), in fp32.

    `logits` are (rows, length, words) for the `tokens` (rows, length) themselves. A token below 0 stands for none: it
    has a loss that means nothing, to be left out by `step.mean(losses, mask=tokens[:, 1:] >= 0)`.

    >>> import torch
    >>> next_token_losses(torch.zeros(2, 5, 7), torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 4])
    """
    if logits.dim() != 3 or logits.shape[:2] != tokens.shape:
        raise StepError(
            f"next_token_losses got logits of shape {tuple(logits.shape)} for tokens of shape {tuple(tokens.shape)}: "
            "give (rows, length, words) and (rows, length), both for the same tokens"
        )
    wanted = tokens[:, 1:].clamp(min=0).flatten()
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), wanted, reduction="none").view(len(tokens), -1)
