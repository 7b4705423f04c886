"""Sampling from discrete diffusion with an absorbing state: all is hidden at first, each pass shows some more."""

from collections.abc import Callable
from typing import Final, Literal, get_args

import torch
from torch import Tensor, nn

from samestep.data import sample_rng as keyed
from samestep.data.sample_rng import micro_batch_keys
from samestep.errors import SamestepError, StepError

Null = Literal["learned", "zeros"]
_SALT: Final = 0x434F4E44 << 16  # far from the salts 1, 2, 3, ... of step.random and step.normal
_SPREAD: Final = 0.02  # what embeddings of transformers begin with


class ConditioningDropout(nn.Module):
    """Gives a share `p` of the samples a null for their conditioning, in training; in evaluation all passes unchanged.

    Whether a sample is dropped follows from (seed, epoch, sample) alone: the same on any ranks and micro-batches, and
    in the second forward pass of gradient checkpointing. Null and conditioning are blended, never branched between, so
    every parameter (of the encoder before it, and the learned null) has a gradient at every step on every rank.

    `shape` is that of the learned null: of one sample's conditioning, or what broadcasts to it ((768,) for one vector
    that stands for each token of a (77, 768) text). Modules of one `stream` drop the same samples, those of different
    streams independently.

    >>> text = ConditioningDropout(0.1, null="learned", shape=(768,)).eval()
    >>> tokens = torch.randn(4, 77, 768)
    >>> torch.equal(text(tokens), tokens)
    True
    >>> text(tokens, drop=torch.ones(4, dtype=torch.bool)).shape  # the unconditional pass when sampling
    torch.Size([4, 77, 768])
    """

    def __init__(self, p: float, null: Null, shape: tuple[int, ...] | None = None, stream: int = 0) -> None:
        super().__init__()
        _check_wish(p, null, shape)
        self.p, self.stream = p, stream
        self.null = nn.Parameter(torch.randn(shape) * _SPREAD) if shape is not None else None

    def forward(self, conditioning: Tensor, drop: Tensor | None = None) -> Tensor:
        """`conditioning`, (rows, ...), with null in the rows that are dropped; `drop` names them, in any mode."""
        if drop is None and not self.training:
            return conditioning
        self._check_conditioning(conditioning)
        rows = self._draw(conditioning) if drop is None else _checked_drop(drop, conditioning)
        rows = rows.to(conditioning.device).reshape(-1, *[1] * (conditioning.dim() - 1))
        null = conditioning.new_zeros(()) if self.null is None else self.null.to(conditioning.dtype)
        return torch.where(rows, null, conditioning)

    def extra_repr(self) -> str:
        """What print(model) shows."""
        null = "zeros" if self.null is None else f"learned {tuple(self.null.shape)}"
        return f"p={self.p}, null={null}, stream={self.stream}"

    def _draw(self, conditioning: Tensor) -> Tensor:
        keys, rows = micro_batch_keys(), conditioning.shape[0]
        if keys is None:
            raise StepError(
                "ConditioningDropout was called in training mode outside a step, where there is no sample to draw for: "
                "call the model inside `for batch in step:`, put it into evaluation mode (model.eval(), run.evaluate), "
                "or say which rows with drop="
            )
        if len(keys) != rows:
            raise StepError(
                f"ConditioningDropout got {rows} rows of conditioning in a micro-batch of {len(keys)} samples: give "
                "one row a sample, in the order of the batch, or say which rows with drop="
            )
        return keyed.uniform(keys, (), _SALT + self.stream) < self.p

    def _check_conditioning(self, conditioning: Tensor) -> None:
        shape = tuple(conditioning.shape)
        if not shape or not conditioning.is_floating_point():
            raise StepError(
                f"ConditioningDropout got {conditioning.dtype} of shape {shape}: it blends floating point conditioning "
                "of shape (rows, ...); embed class labels first, and drop the embedding"
            )
        if self.null is not None and not _broadcasts(tuple(self.null.shape), shape[1:]):
            raise StepError(
                f"ConditioningDropout has a null of shape {tuple(self.null.shape)} and got conditioning of shape "
                f"{shape[1:]} a sample: make it with shape={shape[1:]}, or with one that broadcasts to it"
            )


def _check_wish(p: float, null: str, shape: tuple[int, ...] | None) -> None:
    if not 0 <= p <= 1:
        raise SamestepError(f"ConditioningDropout(p={p}) is no share of the samples: give p from 0 to 1, such as 0.1")
    if null not in get_args(Null):
        choices = ", ".join(map(repr, get_args(Null)))
        raise SamestepError(f"ConditioningDropout does not know null={null!r}: use one of {choices}")
    if null == "learned" and shape is None:
        raise SamestepError("null='learned' needs the shape of one sample's conditioning, such as shape=(768,)")
    if null == "zeros" and shape is not None:
        raise SamestepError(f"null='zeros' fits any conditioning and takes no shape={shape}: leave it out")


def _checked_drop(drop: Tensor, conditioning: Tensor) -> Tensor:
    if drop.dtype != torch.bool or drop.shape != conditioning.shape[:1]:
        raise StepError(
            f"drop is {drop.dtype} of shape {tuple(drop.shape)} and must be torch.bool of shape "
            f"({conditioning.shape[0]},): one value a row, True where the null takes its place"
        )
    return drop


def _broadcasts(null: tuple[int, ...], sample: tuple[int, ...]) -> bool:
    """Whether `null` fills a sample's shape and does not widen it."""
    ends = sample[max(0, len(sample) - len(null)) :]
    return len(null) <= len(sample) and all(one in (1, other) for one, other in zip(null, ends, strict=True))


def guided(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """`unconditional + scale * (conditional - unconditional)`: 1 follows the condition, more exaggerates it.

    Papers that write (1 + w) * conditional - w * unconditional mean scale = 1 + w.

    >>> import torch
    >>> guided(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 1.0]), scale=3.0)
    tensor([ 4., 10.])
    """
    if conditional.shape != unconditional.shape:
        raise SamestepError(
            f"guided got a conditional prediction of shape {tuple(conditional.shape)} and an unconditional one of "
            f"shape {tuple(unconditional.shape)}: give two predictions for the same samples"
        )
    return unconditional + scale * (conditional - unconditional)


def unmasking_noise(places: int, levels: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """All luck that one sample takes: the pass-by-pass order of its places, and Gumbel noise for each of its levels.

    Draw it with `sample_rng()` in a dataset's `__getitem__`, and each rank makes its part of the same samples.

    >>> order, noise = unmasking_noise(4, 2, torch.Generator().manual_seed(0))
    >>> sorted(order.tolist()), noise.shape
    ([0, 1, 2, 3], torch.Size([4, 2]))
    """
    order = torch.rand(places, generator=generator).argsort()
    noise = torch.rand(places, levels, generator=generator).clamp(1e-9)
    return order, -noise.log().neg().log()


def unmask(predict: Callable[[Tensor], Tensor], order: Tensor, noise: Tensor, passes: int) -> Tensor:
    """Samples (rows, places): `predict` gets what is seen so far, and gives scores (rows, places, levels).

    A place that is hidden holds the number of levels, one above the last. `order` and `noise` are `unmasking_noise` of
    each row; in every pass the next part of the places is drawn by Gumbel's trick, and stays.
    """
    if passes < 1:
        raise SamestepError(f"unmask got passes={passes}: give a whole number from 1 up; as many as places is one each")
    places, hidden = order.shape[1], noise.shape[2]
    seen = torch.full_like(order, hidden)
    for count in range(passes):
        now = (order >= count * places // passes) & (order < (count + 1) * places // passes)
        seen = torch.where(now, (predict(seen) + noise).argmax(dim=-1), seen)
    return seen
