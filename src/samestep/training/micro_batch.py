"""The rows that a rank passes through the model at once, and the step they belong to."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from samestep.data.permutation import key64


@dataclass(frozen=True)
class MicroBatch:
    """The rows that this rank passes through the model at once."""

    data: object  # the batch, on the device
    weights: torch.Tensor  # one weight per row: 1 for a sample, 0 for padding
    make_keys: Callable[[], torch.Tensor]  # computes `keys`; called only if a model draws keyed random numbers
    indices: list[int]  # the dataset index of each row
    real: int  # how many rows are samples; the rows after them are padding

    _row_draws: Counter[int] = field(default_factory=Counter[int], init=False)

    @property
    def full(self) -> bool:
        """Whether no row is padding, so that `step.mean` needs no weights."""
        return self.real == len(self.indices)

    @cached_property
    def keys(self) -> torch.Tensor:
        """One 64-bit key per row, from (seed, epoch, sample): the source of its random numbers."""
        return self.make_keys()

    def next_seed(self, row: int, draws: int) -> int:
        """A new seed for the sample of one row, after `draws` draws for all rows.

        Draws are counted per row, since how many rows come before it depends on the number of ranks.
        """
        self._row_draws[row % len(self.keys)] += 1
        draw = draws + self._row_draws[row % len(self.keys)]
        # key64 mixes all bits into the lower 32, the only ones that torch's CPU generator uses
        return key64(int(self.keys[row]), draw) % (1 << 63)


@dataclass(frozen=True)
class StepPosition:
    """Which step this is; the same on every rank and every world size."""

    number: int  # optimizer steps before this one since training began
    index: int  # steps before this one in its epoch
    epoch: int
    samples: int  # samples of the step, over all ranks
    micro_batches: int  # micro-batches that every rank runs
    first_row: int  # samples of the step on lower ranks: the position of this rank's first row in the global batch
    shard: str | None = None  # the name of its shard; None for a stream, whose samples have no stable index
