"""How a global step is partitioned over ranks and into micro-batches of equal shape.

Global step g holds positions g*G to (g+1)*G - 1 of the sample order on every world size; only the partition inside it
depends on the number of ranks. Each rank takes a contiguous slice (sizes differ by at most one) and splits it into the
same number of micro-batches with the same number of rows. Missing rows are padding: they repeat a sample with weight 0.
"""

from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt

from samestep.errors import DataError

PositionRange = tuple[int, int]
"""Positions from start up to, not including, stop."""
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MicroBatchRows:
    """The rows of one micro-batch: the samples at positions start to stop - 1, then padding rows with weight 0."""

    start: int
    stop: int
    padding: int  # number of padding rows, added so that every rank has the same shape
    padding_position: int  # the position whose sample fills the padding rows; this rank reads it in any case

    @property
    def real(self) -> int:
        """Number of rows that are samples."""
        return self.stop - self.start

    @property
    def rows(self) -> int:
        """Number of all rows."""
        return self.stop - self.start + self.padding


@dataclass(frozen=True, slots=True)
class Partition:
    """Which positions of the sample order this rank takes in each training step, and in which micro-batches.

    >>> partition = Partition(n=10, global_batch=7, rank=1, world_size=2, micro_batch=2)
    >>> partition.slice(0)
    (4, 7)
    >>> [(rows.start, rows.stop, rows.padding) for rows in partition.micro_batches(0)]
    [(4, 6, 0), (6, 7, 1)]
    """

    n: int  # samples in the dataset
    global_batch: int  # samples in a step, over all ranks
    rank: int
    world_size: int
    micro_batch: int | None = None
    """The maximum number of rows in a micro-batch; None: a rank's whole slice is one micro-batch."""
    drop_last: bool = False  # leave out the last, smaller step of an epoch
    _end: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_end", min(self.steps * self.global_batch, self.n))
        _check_rank(self.rank, self.world_size)
        if self.micro_batch is not None and self.micro_batch < 1:
            raise DataError(
                f"micro_batch is {self.micro_batch} and must be at least 1: pass micro_batch=1 or more, "
                "or leave it out to compute each rank's part of a step at once"
            )

    @property
    def steps(self) -> int:
        """Steps in an epoch, the same on every rank and every world size."""
        return steps_per_epoch(self.n, self.global_batch, self.drop_last)

    @property
    def dropped(self) -> int:
        """Samples that `drop_last` leaves out of each epoch."""
        return self.n - self._end

    @property
    def padding(self) -> int:
        """Padding rows of an epoch, over all ranks.

        >>> Partition(n=10, global_batch=7, rank=0, world_size=2, micro_batch=2).padding
        2
        """
        steps = {self.steps - 1: 1} | ({0: self.steps - 1} if self.steps > 1 else {})  # all but the last are alike
        rows = sum(times * self.world_size * prod(self.shape(step)) for step, times in steps.items())
        return rows - self._end

    def positions(self, step: int) -> PositionRange:
        """Return the positions of a step over all ranks."""
        start = step * self.global_batch
        stop = min(start + self.global_batch, self._end)
        if not 0 <= start < stop:
            raise DataError(f"step {step} is not in an epoch of {self.steps} steps: steps are 0 to {self.steps - 1}")
        return start, stop

    def slice(self, step: int) -> PositionRange:
        """Return the positions of a step that belong to this rank; empty if a step has fewer samples than ranks."""
        first, last = self.positions(step)
        start, stop = split_evenly(last - first, self.world_size, self.rank)
        return first + start, first + stop

    def read_range(self, step: int) -> PositionRange:
        """Return the positions that this rank reads: its slice or, if that is empty, the step's first, for padding."""
        start, stop = self.slice(step)
        first = step * self.global_batch
        return (start, stop) if start < stop else (first, first + 1)

    def shape(self, step: int) -> tuple[int, int]:
        """Return (number of micro-batches, rows in each) of a step, the same on every rank."""
        first, last = self.positions(step)
        return _shape(-(-(last - first) // self.world_size), self.micro_batch)

    def micro_batches(self, step: int) -> list[MicroBatchRows]:
        """Return the micro-batches of this rank in a step, which together hold its slice once."""
        count, rows = self.shape(step)
        own, padding_position = self.slice(step), self.read_range(step)[0]
        return [_micro_batch(own, count, rows, k, padding_position) for k in range(count)]


@dataclass(frozen=True, slots=True)
class EvaluationPartition:
    """One evaluation of every sample exactly once: a contiguous slice per rank, in batches of at most `rows`.

    Without `lockstep` nothing is padded, and a rank may have fewer batches than another, or none. That is right if the
    forward pass needs no collective. With `lockstep` all ranks have the same number of batches of the same shape.
    """

    n: int
    rows: int
    rank: int
    world_size: int
    lockstep: bool = False

    def __post_init__(self) -> None:
        check_sizes(self.n)
        _check_rank(self.rank, self.world_size)
        if self.rows < 1:
            raise DataError(
                f"an evaluation batch must have at least 1 row, got {self.rows}: pass micro_batch=1 or more"
            )

    def __len__(self) -> int:
        start, stop = self.slice
        return self._shape[0] if self.lockstep else -(-(stop - start) // self.rows)

    @property
    def slice(self) -> PositionRange:
        """The positions of this rank; empty on some ranks if there are fewer samples than ranks."""
        return split_evenly(self.n, self.world_size, self.rank)

    def read_range(self, k: int) -> PositionRange:
        """Return the positions that this rank reads for batch k: its samples or, if it has none, one for padding."""
        batch = self.batch(k)
        return (batch.start, batch.stop) if batch.real else (batch.padding_position, batch.padding_position + 1)

    def batch(self, k: int) -> MicroBatchRows:
        """Return batch k of this rank."""
        if not 0 <= k < len(self):
            raise DataError(
                f"batch {k} is not in an evaluation of {len(self)} batches on rank {self.rank} of {self.world_size}"
            )
        start, stop = self.slice
        if self.lockstep:
            return _micro_batch(self.slice, *self._shape, k, start if start < stop else 0)
        first = start + k * self.rows
        return MicroBatchRows(first, min(first + self.rows, stop), padding=0, padding_position=first)

    def number(self, k: int) -> int:
        """Return the number by which random draws that belong to no sample are keyed."""
        return k

    @property
    def _shape(self) -> tuple[int, int]:
        return _shape(-(-self.n // self.world_size), self.rows)


@dataclass(frozen=True, slots=True)
class PredictionPartition:
    """One pass over every sample exactly once, in batches that are the same on any number of ranks.

    Batch b holds positions b * rows to (b + 1) * rows - 1, and rank b % world_size computes it. With `lockstep` a rank
    without a batch in the last round gets one padding row.

    >>> partition = PredictionPartition(n=10, rows=4, rank=1, world_size=2)
    >>> [(partition.number(k), partition.read_range(k)) for k in range(len(partition))]
    [(1, (4, 8))]
    """

    n: int
    rows: int
    rank: int
    world_size: int
    lockstep: bool = False

    def __len__(self) -> int:
        batches = -(-self.n // self.rows)
        return -(-(batches if self.lockstep else batches - self.rank) // self.world_size)

    def number(self, k: int) -> int:
        """Return the number of this rank's batch k among those of all ranks."""
        return k * self.world_size + self.rank

    def read_range(self, k: int) -> PositionRange:
        """Return the positions that this rank reads for batch k: its samples or, if it has none, the first one."""
        batch = self.batch(k)
        return (batch.start, batch.stop) if batch.real else (0, 1)

    def batch(self, k: int) -> MicroBatchRows:
        """Return batch k of this rank."""
        start = min(self.number(k) * self.rows, self.n)
        stop = min(start + self.rows, self.n)
        return MicroBatchRows(start, stop, padding=int(start == stop), padding_position=0)


def split_evenly(n: int, parts: int, k: int) -> PositionRange:
    """Return the range of part k when n items are split into parts that differ by at most one, larger parts first.

    >>> [split_evenly(10, 4, k) for k in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    share, extra = divmod(n, parts)
    start = k * share + min(k, extra)
    return start, start + share + (k < extra)


def steps_per_epoch(n: int, global_batch: int, drop_last: bool) -> int:
    """Return the steps in an epoch of n samples; `drop_last` leaves out a last step that is smaller than the others."""
    check_sizes(n, global_batch)
    if not drop_last:
        return -(-n // global_batch)
    if n < global_batch:
        raise DataError(
            f"the dataset has {n} samples, the global batch is {global_batch}, and drop_last=True drops them all: "
            f"use drop_last=False, or global_batch={n} or less"
        )
    return n // global_batch


def _shape(largest_slice: int, micro_batch: int | None) -> tuple[int, int]:
    """Return the smallest number of micro-batches that the limit allows, and the smallest number of rows for it."""
    count = 1 if micro_batch is None else -(-largest_slice // micro_batch)
    return count, -(-largest_slice // count)


def _micro_batch(own: PositionRange, count: int, rows: int, k: int, padding_position: int) -> MicroBatchRows:
    """Return part k of a slice. Only a slice with fewer samples than micro-batches has one that is all padding."""
    start, stop = split_evenly(own[1] - own[0], count, k)
    start, stop = own[0] + start, own[0] + stop
    return MicroBatchRows(start, stop, rows - (stop - start), start if start < stop else padding_position)


def check_sizes(n: int, global_batch: int = 1) -> None:
    """Raise `DataError` if a dataset of n samples is empty, or if a step would be."""
    if n < 1:
        raise DataError(f"the dataset is empty: it has {n} samples and needs at least 1; check what it reads from")
    if global_batch < 1:
        raise DataError(f"global_batch is {global_batch} and must be at least 1: pass, for example, global_batch=256")


def _check_rank(rank: int, world_size: int) -> None:
    if world_size < 1:
        raise DataError(f"world_size is {world_size} and must be at least 1")
    if not 0 <= rank < world_size:
        raise DataError(f"rank {rank} is not in a world of {world_size}: ranks are 0 to {world_size - 1}")


@dataclass(frozen=True)
class Ranges:
    """Ranges of positions, one per row of the two arrays."""

    start: Positions
    stop: Positions

    @property
    def total(self) -> int:
        """The number of positions in all ranges."""
        return int((self.stop - self.start).sum())

    def blocks(self, size: int, limit: int) -> tuple[int, ...]:
        """Return the first blocks of `size` positions that have one of these positions."""
        found = dict[int, None]()
        for start, stop in zip(self.start.tolist(), self.stop.tolist(), strict=True):
            found.update(dict.fromkeys(range(start // size, min((stop - 1) // size, start // size + limit) + 1)))
            if len(found) >= limit:
                break
        return tuple(found)[:limit]

    def head(self, limit: int) -> tuple[int, ...]:
        """Return the first positions."""
        found: list[int] = []
        for start, stop in zip(self.start[:limit].tolist(), self.stop[:limit].tolist(), strict=True):
            found += range(start, min(stop, start + limit - len(found)))
        return tuple(found)


def find_gaps(first: Positions, count: Positions, start: int, stop: int) -> tuple[Ranges, Ranges]:
    """Return (missing, repeated) positions of ranges that should cover start to stop - 1 exactly once.

    Repeated positions are found outside of start to stop too. A position that is in three ranges is repeated twice.

    >>> missing, repeated = find_gaps(np.array([0, 3, 4]), np.array([2, 2, 4]), start=0, stop=10)
    >>> missing.head(9), repeated.head(9)
    ((2, 8, 9), (4,))
    """
    order = np.argsort(first, kind="stable")
    begins = first[order]
    ends = begins + count[order]
    furthest = np.maximum.accumulate(ends)
    covered = np.clip(np.concatenate([[start], furthest]), start, stop)
    nexts = np.clip(np.concatenate([begins, [stop]]), start, stop)
    gap = nexts > covered
    again = np.flatnonzero(begins[1:] < furthest[:-1]) + 1
    missing = Ranges(covered[gap], nexts[gap])
    return missing, Ranges(begins[again], np.minimum(ends[again], furthest[again - 1]))
