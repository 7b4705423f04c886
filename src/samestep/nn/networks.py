"""Modules of the recipes: ResNet, transformer blocks, language models with a prefix, guidance and discrete diffusion.

Conditioning dropout of classifier-free guidance is keyed per sample.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, Final, Literal, get_args
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

from samestep.data.sample_rng import micro_batch_keys, uniform
from samestep.errors import SamestepError, StepError
from samestep.nn.linear_loss import linear_cross_entropy

Depth = Literal[18, 50]
Null = Literal["learned", "zeros"]
_BLOCKS: Final = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}
_GROUP: Final = 8  # channels per group of GroupNorm
_SALT: Final = 0x434F4E44 << 16  # far from the salts 1, 2, 3, ... of step.random and step.normal
_NULL_STD: Final = 0.02  # of the initial null, as for embeddings of transformers


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
    Gradients reach both through the model, such as the `module` of a `run.teacher` placement. Padding has a loss of
    zero. The logits of all tokens never exist (`linear_cross_entropy`), unless the head of the model is not a plain
    linear layer, or the model changes what its head returns, as with soft-capped logits.
    """
    text, text_mask = embed_tokens(lm, tokens)
    prefix = soft_tokens, soft_mask, list(key_values)
    head = lm.get_output_embeddings()
    if type(head) is nn.Linear and lm not in _OTHER_HEADS:
        with _last_position_only(head) as seen:
            output = _call_with_prefix(lm, text, text_mask, *prefix)
        if len(seen) == 2 and output.logits is seen[1] and seen[0].device == head.weight.device:
            return linear_cross_entropy(seen[0][:, :-1], head.weight, tokens[:, 1:], head.bias, ignore_index=-1)
        _OTHER_HEADS.add(lm)
    losses = next_token_losses(_call_with_prefix(lm, text, text_mask, *prefix).logits, tokens)
    return losses.masked_fill(tokens[:, 1:] < 0, 0.0)


_OTHER_HEADS: WeakSet[nn.Module] = WeakSet()
"""Language models whose logits are not those of a linear layer."""


@contextmanager
def _last_position_only(head: nn.Linear) -> Generator[list[Tensor]]:
    """Let the head compute the last position only; the list gets its input at all positions and what it returns."""
    seen: list[Tensor] = []

    def enter(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        seen.append(inputs[0])
        return (inputs[0][:, -1:],)

    def leave(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        seen.append(output)

    hooks = head.register_forward_pre_hook(enter), head.register_forward_hook(leave)
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _call_with_prefix(
    lm: Any, text: Tensor, text_mask: Tensor, soft_tokens: Tensor, soft_mask: Tensor, key_values: list[Tensor]
) -> Any:
    """Call the model with a new cache, since a call changes it."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer, (keys, values) in enumerate(key_values):
        cache.update(keys.to(lm.dtype), values.to(lm.dtype), layer)
    cached = cache.get_seq_length()
    mask = torch.cat([text_mask.new_ones(len(text_mask), cached), soft_mask, text_mask], dim=1)
    return lm(
        inputs_embeds=torch.cat([soft_tokens, text], dim=1).to(lm.dtype),
        past_key_values=cache,
        attention_mask=mask.long(),
        position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, cached:],
        logits_to_keep=text.shape[1],
    )


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


class ConditioningDropout(nn.Module):
    """Replaces the conditioning of a fraction `p` of the samples by a null embedding, in training only.

    Whether a sample is dropped depends on (seed, epoch, sample) only: it is the same on any number of ranks, for any
    micro-batch size and in the second forward pass of activation checkpointing. Every parameter (of the encoder and of
    the learned null) has a gradient in every step on every rank, however many samples are dropped.

    `shape` is the shape of the learned null: that of one sample's conditioning or one that broadcasts to it, such as
    (768,) for every token of a (77, 768) text. Modules with the same `stream` drop the same samples; those with
    different streams drop independently.

    >>> text = ConditioningDropout(0.1, null="learned", shape=(768,)).eval()
    >>> tokens = torch.randn(4, 77, 768)
    >>> torch.equal(text(tokens), tokens)
    True
    >>> text(tokens, drop=torch.ones(4, dtype=torch.bool)).shape  # the unconditional pass when sampling
    torch.Size([4, 77, 768])
    """

    def __init__(self, p: float, null: Null, shape: tuple[int, ...] | None = None, stream: int = 0) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise SamestepError(f"ConditioningDropout got p={p}: pass a probability from 0 to 1, such as 0.1")
        if null not in get_args(Null):
            choices = ", ".join(map(repr, get_args(Null)))
            raise SamestepError(f"ConditioningDropout does not know null={null!r}: use one of {choices}")
        if null == "learned" and shape is None:
            raise SamestepError("null='learned' needs the shape of one sample's conditioning, such as shape=(768,)")
        if null == "zeros" and shape is not None:
            raise SamestepError(f"null='zeros' fits any conditioning and takes no shape, got shape={shape}: omit it")
        self.p, self.stream = p, stream
        self.null = nn.Parameter(torch.randn(shape) * _NULL_STD) if shape is not None else None

    def forward(self, conditioning: Tensor, drop: Tensor | None = None) -> Tensor:
        """`conditioning`, (rows, ...), with the null in dropped rows; `drop` selects them, also in evaluation mode."""
        if drop is None and not self.training:
            return conditioning
        self._check_conditioning(conditioning)
        if drop is None:
            drop = self._draw(conditioning)
        elif drop.dtype != torch.bool or drop.shape != conditioning.shape[:1]:
            raise StepError(
                f"drop is {drop.dtype} of shape {tuple(drop.shape)} and must be torch.bool of shape "
                f"({conditioning.shape[0]},): one value per row, True for the null"
            )
        rows = drop.to(conditioning.device).reshape(-1, *[1] * (conditioning.dim() - 1))
        null = conditioning.new_zeros(()) if self.null is None else self.null.to(conditioning.dtype)
        return torch.where(rows, null, conditioning)

    def extra_repr(self) -> str:
        """The options that print(model) shows."""
        null = "zeros" if self.null is None else f"learned {tuple(self.null.shape)}"
        return f"p={self.p}, null={null}, stream={self.stream}"

    def _draw(self, conditioning: Tensor) -> Tensor:
        keys, rows = micro_batch_keys(), conditioning.shape[0]
        if keys is None:
            raise StepError(
                "ConditioningDropout was called in training mode outside of a step, without samples to draw for: call "
                "the model inside `for batch in step:`, use evaluation mode (model.eval(), run.evaluate), "
                "or select rows with drop="
            )
        if len(keys) != rows:
            raise StepError(
                f"ConditioningDropout got {rows} rows of conditioning in a micro-batch of {len(keys)} samples: pass "
                "one row per sample, in the order of the batch, or select rows with drop="
            )
        return uniform(keys, (), _SALT + self.stream) < self.p

    def _check_conditioning(self, conditioning: Tensor) -> None:
        shape = tuple(conditioning.shape)
        if not shape or not conditioning.is_floating_point():
            raise StepError(
                f"ConditioningDropout got {conditioning.dtype} of shape {shape}: pass floating point conditioning of "
                "shape (rows, ...); embed class labels first, and drop the embedding"
            )
        null = () if self.null is None else tuple(self.null.shape)
        # Broadcasting aligns the last dimensions; it must not enlarge a sample.
        if len(null) >= len(shape) or any(a not in (1, b) for a, b in zip(null[::-1], shape[::-1], strict=False)):
            raise StepError(
                f"ConditioningDropout has a null of shape {null} and got conditioning of shape "
                f"{shape[1:]} per sample: create it with shape={shape[1:]}, or with a shape that broadcasts to it"
            )


def guided(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """`unconditional + scale * (conditional - unconditional)`: scale 1 is the conditional prediction.

    Papers that write (1 + w) * conditional - w * unconditional use w = scale - 1.

    >>> import torch
    >>> guided(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 1.0]), scale=3.0)
    tensor([ 4., 10.])
    """
    if conditional.shape != unconditional.shape:
        raise SamestepError(
            f"guided got a conditional prediction of shape {tuple(conditional.shape)} and an unconditional one of "
            f"shape {tuple(unconditional.shape)}: pass two predictions for the same samples"
        )
    return unconditional + scale * (conditional - unconditional)


def unmasking_noise(positions: int, levels: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The randomness of one sample for `unmask`: the order of its positions, and Gumbel noise for each level.

    Draw it with `sample_rng()` in the `__getitem__` of a dataset, so that the samples do not depend on the ranks.

    >>> order, noise = unmasking_noise(4, 2, torch.Generator().manual_seed(0))
    >>> sorted(order.tolist()), noise.shape
    ([0, 1, 2, 3], torch.Size([4, 2]))
    """
    order = torch.rand(positions, generator=generator).argsort()
    noise = torch.rand(positions, levels, generator=generator).clamp(1e-9)
    return order, -noise.log().neg().log()


def unmask(predict: Callable[[Tensor], Tensor], order: Tensor, noise: Tensor, passes: int) -> Tensor:
    """Sample from a discrete diffusion model with an absorbing state; returns levels of shape (rows, positions).

    `predict` maps the levels so far, (rows, positions), to scores (rows, positions, levels). A masked position has the
    value `levels`, one more than the last level. `order` and `noise` are stacked from `unmasking_noise`. Each pass
    samples the next part of the positions with the Gumbel-max trick.
    """
    if passes < 1:
        raise SamestepError(f"unmask got passes={passes}: pass an integer from 1 to the number of positions")
    positions, masked = order.shape[1], noise.shape[2]
    levels = torch.full_like(order, masked)
    for number in range(passes):
        now = (order >= number * positions // passes) & (order < (number + 1) * positions // passes)
        levels = torch.where(now, (predict(levels) + noise).argmax(dim=-1), levels)
    return levels
