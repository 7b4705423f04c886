"""One optimizer step: this rank's micro-batches of the global batch, and the mean over all of it."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import torch

from samestep.data import sample_rng as keyed
from samestep.data.permutation import key64
from samestep.data.sample_rng import SampleIds, set_micro_batch
from samestep.errors import StepError

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class MicroBatch:
    """What this rank computes at once."""

    data: object
    """The batch, on the device."""
    weights: torch.Tensor
    """One weight a row: 1 for a sample, 0 for padding."""
    make_keys: Callable[[], torch.Tensor]
    """Makes `keys`: few models ask for them."""
    indices: list[int]
    """The dataset indices of the rows."""
    full: bool
    """Whether no row is padding, so that nothing need be weighed."""

    _seeds: Counter[int] = field(default_factory=Counter[int], init=False)

    @cached_property
    def keys(self) -> torch.Tensor:
        """One 64-bit key a row, from (seed, epoch, sample): the source of its luck."""
        return self.make_keys()

    def next_seed(self, row: int, draws: int) -> int:
        """A new seed for one row's sample, after so many draws for all rows.

        Counted for each row by itself: how many others stand before it is a matter of the layout.
        """
        self._seeds[row % len(self.keys)] += 1
        draw = draws + self._seeds[row % len(self.keys)]
        # every bit of both reaches the lower 32 that torch uses
        return key64(int(self.keys[row]), draw) % (1 << 63)


@dataclass(frozen=True)
class StepPlace:
    """Which step this is; the same on every rank and every world size."""

    number: int
    """Optimizer steps before this one since training began."""
    index: int
    """Steps before this one in its epoch."""
    epoch: int
    """The epoch it belongs to."""
    samples: int
    """How many samples count in it, over all ranks."""
    micro_batches: int
    """How many micro-batches every rank runs for it."""
    shard: str | None = None
    """The name of the shard it is of; None where its samples have no lasting numbers."""


class Engine(Protocol):
    """What a step needs from its run."""

    @property
    def size(self) -> int:
        """The world size."""
        ...

    @property
    def loss_scale(self) -> float:
        """The factor that losses carry through the backward pass; 1 but for fp16."""
        ...

    def begin_micro_batches(self) -> None:
        """Called before the first micro-batch."""
        ...

    def begin_micro_batch(self, last: bool) -> None:
        """Called before each micro-batch: gradients travel with the last one only."""
        ...

    def loss_known(self) -> None:
        """Called when a micro-batch's loss is computed: what follows is the backward pass."""
        ...

    def has_gradients(self) -> bool:
        """Whether a gradient other than zero stands on this rank."""
        ...

    def end_micro_batches(self, step: "Step") -> None:
        """Called when all micro-batches are done."""
        ...

    def abandon_step(self, step: "Step") -> None:
        """Called when the step is left early."""
        ...

    def total(self, count: torch.Tensor) -> float:
        """The sum of a count over all ranks, in one small collective."""
        ...

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient of the wrapped models."""
        ...

    def finite(self, step: "Step") -> bool:
        """Whether loss and gradients are finite on all ranks."""
        ...


class Step:
    """One optimizer step. Iterate over it once; each item is a micro-batch, already on the device."""

    def __init__(
        self, place: StepPlace, micro_batches: Iterator[MicroBatch], engine: Engine, count: Callable[[], None]
    ) -> None:
        self.place, self.done, self._over = place, False, False
        self.losses: list[tuple[torch.Tensor, list[int]]] = []
        self.last_samples: list[int] = []
        self._source, self._engine, self._count = micro_batches, engine, count
        self._current: MicroBatch | None = None
        self._masked_count: torch.Tensor | None = None
        self._means = self._masked_means = self._draws = 0
        self._loss_sum: torch.Tensor | None = None
        self._loss_factor = 1.0

    @property
    def under_way(self) -> bool:
        """Whether the loop over the micro-batches has begun and is not over."""
        return self._current is not None

    @property
    def weighed(self) -> bool:
        """Whether a loss of it went through `mean` or `sum`."""
        return self._means > 0

    @property
    def number(self) -> int:
        """Optimizer steps before this one since training began, on any world size."""
        return self.place.number

    @property
    def samples(self) -> int:
        """How many samples this step's mean is over, on all ranks together."""
        return self.place.samples

    @property
    def weights(self) -> torch.Tensor:
        """One weight for each row of the current micro-batch: 1 for a sample, 0 for padding, which counts nowhere."""
        return self._micro().weights

    @property
    def loss(self) -> torch.Tensor | None:
        """What this rank's calls of `mean` added up to, detached; its average over the ranks is the mean loss."""
        if self._loss_sum is None or self._loss_factor == 1.0:
            return self._loss_sum
        return self._loss_sum * self._loss_factor

    def __len__(self) -> int:
        return self.place.micro_batches

    def __iter__(self) -> Iterator[Any]:
        if self._current is not None or self.done:
            raise StepError(f"step {self.number} was iterated twice: its micro-batches can be had once")
        if self._over:
            raise StepError(
                f"step {self.number} is over, and its micro-batches were passed over: read them inside the loop over "
                "the epoch, before it goes on to the next step (list(epoch) goes on to the end)"
            )
        self._engine.begin_micro_batches()
        try:
            for number, micro in enumerate(self._source):
                self._current, self._draws, self.last_samples = micro, 0, micro.indices
                self._engine.begin_micro_batch(last=number == len(self) - 1)
                set_micro_batch(partial(getattr, micro, "keys"), partial(_samples, micro, self.place))
                yield micro.data
            self._settle_masked_mean()
            self.done = True
        finally:
            self._current = None
            set_micro_batch(None)
            if not self.done:
                self._engine.abandon_step(self)
        self._engine.end_micro_batches(self)
        self._count()  # from here on its samples have been learnt from, whatever the body of the loop still does

    def drain(self) -> None:
        """Pass over micro-batches that were not asked for, so that the next step begins with its own."""
        self._over = True
        for _ in self._source:
            pass

    def mean(self, losses: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """The scalar whose gradient, averaged over ranks and added over micro-batches, is that of the global mean.

        `losses` has one value a row, or more with `mask` (or none) saying which count; padding rows never count.
        The loss of a masked place may be inf or nan, its gradient may not: mask what it is computed from as well.
        With a mask and several micro-batches the count is known only at the end of the step: the gradients are then
        brought to the mean when the loop over the micro-batches ends, and `step.loss` tells the true value.
        """
        _check_losses(losses, mask, rows=self._micro().weights.shape[0])
        self._means += 1
        if mask is None:
            value = self._plain_mean(losses)
        elif len(self) == 1:
            weighted, weights = self._weigh(losses, mask)
            count = self._engine.total(weights.sum(dtype=torch.float64))
            value = weighted.sum() * (self._engine.size / _positive(count, self.number))
        else:
            value = self._defer(*self._weigh(losses, mask))
        self._engine.loss_known()
        detached = value.detach()
        self._loss_sum = detached if self._loss_sum is None else self._loss_sum + detached
        return self._handed_out(value)

    def sum(self, losses: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """The scalar whose gradient, averaged over ranks and added over micro-batches, is that of the global sum."""
        _check_losses(losses, mask, rows=self._micro().weights.shape[0])
        self._means += 1
        weighted, _ = self._weigh(losses, mask)
        value = weighted.sum() * self._engine.size
        self._engine.loss_known()
        return self._handed_out(value)

    def finite(self) -> bool:
        """Whether this step's gradients are finite, the same answer on every rank; a warning tells where they are not.

        Call it after the loop over the micro-batches: `if not step.finite(): optimizer.zero_grad(); continue`.
        """
        if not self.done:
            raise StepError("step.finite() was called inside the loop over the micro-batches: call it after the loop")
        return self._engine.finite(self)

    def random(self, *shape: int) -> torch.Tensor:
        """Uniform numbers in [0, 1) of shape (rows, *shape), from each row's (seed, epoch, sample); new every time."""
        return keyed.uniform(self._micro().keys, shape, self._next_draw())

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal numbers of shape (rows, *shape), drawn like `random`."""
        return keyed.normal(self._micro().keys, shape, self._next_draw())

    def rng(self, row: int) -> torch.Generator:
        """A generator on the CPU for one row's sample, for what `random` and `normal` cannot draw."""
        return torch.Generator().manual_seed(self._micro().next_seed(row, self._draws))

    def _handed_out(self, value: torch.Tensor) -> torch.Tensor:
        scale = self._engine.loss_scale
        if value.requires_grad and (len(self) > 1 or scale != 1.0):
            value.register_hook(partial(_check_in_time, self))
        return value if scale == 1.0 else value * scale

    def _next_draw(self) -> int:
        self._draws += 1
        return self._draws

    def _micro(self) -> MicroBatch:
        if self._current is None:
            raise StepError(
                f"step {self.number} has no current micro-batch: call this inside `for batch in step:`, with that step"
            )
        return self._current

    def _plain_mean(self, losses: torch.Tensor) -> torch.Tensor:
        """The mean without a mask; where every row counts, as cheap as torch's own."""
        micro, size = self._micro(), self._engine.size
        rows = losses.shape[0]
        if not micro.full:
            weighted, _ = self._weigh(losses, None)
            return weighted.sum() * (size * rows / (self.samples * losses.numel()))
        self.losses.append((losses.detach(), micro.indices))
        losses = losses.float() if losses.dtype in _HALF else losses
        if rows * size == self.samples:
            return losses.mean()
        return losses.sum() * (size * rows / (self.samples * losses.numel()))

    def _weigh(self, losses: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(losses times weights, weights), of one shape, padding and masked values at zero."""
        weights = self._micro().weights.reshape(-1, *([1] * (losses.dim() - 1))).expand(losses.shape)
        if mask is not None:
            weights = weights * mask
        # a padded or masked loss may be inf or nan, and nan times zero is nan: put zero there instead
        weighted = torch.where(weights != 0, losses * weights, torch.zeros_like(losses))
        self.losses.append((weighted.detach(), self._micro().indices))
        return weighted, weights

    def _defer(self, weighted: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self._masked_count is None and self._engine.has_gradients():
            raise StepError(
                f"step {self.number} begins with gradients of an earlier one, and its masked mean over several "
                "micro-batches is settled by a factor on all gradients: call optimizer.zero_grad() before it, or use a "
                "larger micro_batch"
            )
        self._masked_means += 1
        count = weights.sum(dtype=torch.float64)
        self._masked_count = count if self._masked_count is None else self._masked_count + count
        return weighted.sum() * (self._engine.size / self.samples)

    def _settle_masked_mean(self) -> None:
        if self._masked_count is None:
            return
        if self._means != self._masked_means or self._masked_means != len(self):
            raise StepError(
                f"step {self.number} has {len(self)} micro-batches and mixes a masked mean with other means: their "
                "counts are known only at its end, for one mean a micro-batch; add the losses up before step.mean, or "
                "use a larger micro_batch"
            )
        self._loss_factor = self.samples / _positive(self._engine.total(self._masked_count), self.number)
        self._engine.scale_gradients(self._loss_factor)


def _check_in_time(step: Step, _: torch.Tensor) -> None:
    """Raise where a loss is learnt from when its step is settled: masked means and loss scales would be left out."""
    if step.done:
        raise StepError(
            f"backward() of a loss of step {step.number} came after the loop over its {len(step)} micro-batch(es), "
            "where gradients are complete: call it inside the loop, for every micro-batch"
        )


def _check_losses(losses: torch.Tensor, mask: torch.Tensor | None, rows: int) -> None:
    if (wrong := _wrong_with(losses, rows)) is not None:
        raise StepError(
            f"step.mean and step.sum need one loss for each of the {rows} rows of this micro-batch, got {wrong}: "
            "use reduction='none' (and a mask for tokens that do not count)"
        )
    if mask is not None and mask.shape != losses.shape:
        raise StepError(
            f"the mask has shape {tuple(mask.shape)} and the losses {tuple(losses.shape)}: they must be alike"
        )


def _wrong_with(losses: object, rows: int) -> str | None:
    if not isinstance(losses, torch.Tensor):
        return f"a {type(losses).__name__}"
    if losses.dim() == 0:
        return "a scalar"
    if losses.shape[0] != rows or not losses.numel():
        return f"shape {tuple(losses.shape)}"
    return None if losses.is_floating_point() else f"whole numbers ({losses.dtype}), which have no gradient"


def _samples(micro: MicroBatch, place: StepPlace) -> SampleIds | None:
    if place.shard is None:
        return None
    real = len(micro.indices) if micro.full else int(micro.weights.sum())
    return SampleIds(place.shard, place.epoch, micro.indices, real)


def _positive(count: float, number: int) -> float:
    if count == 0:
        raise StepError(
            f"the masks of step {number} leave nothing that counts on any rank: the mean of nothing is no number; "
            "check how the mask is made, or leave such samples out of the dataset"
        )
    return count
