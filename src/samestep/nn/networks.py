"""Networks of the recipes: ResNet and transformer blocks, and causal language models with soft tokens or a prefix."""

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

from samestep.errors import SamestepError, StepError

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


def next_token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """The cross entropy of every token but the first: (rows, length - 1), in fp32.

    `logits` are (rows, length, vocabulary) for the `tokens` (rows, length) themselves, not shifted. Padding is -1; its
    losses are meaningless, so exclude them with `step.mean(losses, mask=tokens[:, 1:] >= 0)`.

    >>> import torch
    >>> next_token_losses(torch.zeros(2, 5, 7), torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 4])
    """
    if logits.dim() != 3 or logits.shape[:2] != tokens.shape:
        raise StepError(
            f"next_token_losses got logits of shape {tuple(logits.shape)} for tokens of shape {tuple(tokens.shape)}: "
            "pass (rows, length, vocabulary) and (rows, length) for the same tokens"
        )
    targets = tokens[:, 1:].clamp(min=0).flatten()
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, reduction="none").view(len(tokens), -1)


def embed_tokens(lm: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The input embeddings of tokens (rows, length) in fp32, and the mask of real tokens; padding is -1."""
    return lm.get_input_embeddings()(tokens.clamp(min=0)).float(), tokens >= 0


def losses_with_prefix(
    lm: Any, tokens: Tensor, soft_tokens: Tensor, soft_mask: Tensor, key_values: Iterable[Tensor] = ()
) -> Tensor:
    """Next-token losses (rows, length - 1) of a language model that reads a prefix before the tokens.

    The prefix consists of `soft_tokens`, embeddings (rows, positions, width) with a mask (rows, positions), and of
    `key_values`: for every layer keys and values of shape (2, rows, heads, positions, head width), see `prefix_shape`.
    Gradients reach both through the model, such as the `module` of a `run.teacher` placement.
    """
    from transformers import DynamicCache

    text, text_mask = embed_tokens(lm, tokens)
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(key_values):
        cache.update(keys.to(lm.dtype), values.to(lm.dtype), layer)
    cached = cache.get_seq_length()
    mask = torch.cat([text_mask.new_ones(len(text_mask), cached), soft_mask, text_mask], dim=1)
    output = lm(
        inputs_embeds=torch.cat([soft_tokens, text], dim=1).to(lm.dtype),
        past_key_values=cache,
        attention_mask=mask.long(),
        position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, cached:],
        logits_to_keep=tokens.shape[1],
    )
    return next_token_losses(output.logits, tokens)


def prefix_shape(config: Any) -> tuple[int, int, int, int]:
    """The shape of the keys and values of one token: layers, 2, key-value heads, head width.

    It comes from a transformers configuration, so that every rank builds the same prefix, with or without the model.
    """
    required = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    if missing := [name for name in required if not hasattr(config, name)]:
        raise SamestepError(
            f"prefix_shape got a {type(config).__name__} without {', '.join(missing)}: pass the configuration of a "
            "causal language model, AutoConfig.from_pretrained(folder)"
        )
    heads = config.num_attention_heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, 2, key_value_heads, head_width
