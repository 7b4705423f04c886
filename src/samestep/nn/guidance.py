"""Classifier-free guidance: conditioning dropout keyed per sample, guided predictions, discrete diffusion sampling."""

from collections.abc import Callable
from typing import Final, Literal, get_args

import torch
from torch import Tensor, nn

from samestep.data.sample_rng import micro_batch_keys, uniform
from samestep.errors import SamestepError, StepError

Null = Literal["learned", "zeros"]
_SALT: Final = 0x434F4E44 << 16  # far from the salts 1, 2, 3, ... of step.random and step.normal
_NULL_STD: Final = 0.02  # of the initial null, as for embeddings of transformers


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
