"""How a global step is cut over ranks and into micro-batches of equal shape.

Global step g holds positions g*G .. (g+1)*G of the order on every world size; only the cutting inside it depends on the
world. Each rank takes a contiguous slice (sizes differ by at most one), and every rank cuts its slice into the same
number of micro-batches with the same number of rows. Rows that are missing repeat a sample, which then weighs 0.
"""

from dataclasses import dataclass, field

from samestep.errors import DataError

PositionRange = tuple[int, int]
"""Positions from start up to, not including, stop."""


def split_evenly(n: int, parts: int, k: int) -> PositionRange:
    """Part k of n things in a row cut into parts that differ by at most one; the first parts take the larger share.

    >>> [split_evenly(10, 4, k) for k in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    share, extra = divmod(n, parts)
    start = k * share + min(k, extra)
    return start, start + share + (k < extra)


def steps_per_epoch(n: int, global_batch: int, drop_last: bool) -> int:
    """Steps in one pass over n samples; the last is smaller where G does not divide n, or left out with `drop_last`."""
    _at_least_one(n, global_batch)
    if not drop_last:
        return -(-n // global_batch)
    if n < global_batch:
        raise DataError(
            f"the dataset has {n} samples, the global batch is {global_batch}, and drop_last=True drops them all: "
            f"use drop_last=False, or global_batch={n} or less"
        )
    return n // global_batch


@dataclass(frozen=True, slots=True)
class MicroBatchRows:
    """Rows that go through the model together: first the real positions, then padding that weighs 0."""

    start: int
    stop: int
    padding: int
    """How many rows are added so that every rank has the same shape."""
    pad: int
    """The position whose sample fills these rows; one this rank reads in any case."""

    @property
    def real(self) -> int:
        """Rows that count."""
        return self.stop - self.start

    @property
    def rows(self) -> int:
        """All rows."""
        return self.stop - self.start + self.padding


@dataclass(frozen=True, slots=True)
class Partition:
    """Which positions of the order this rank takes in each step of an epoch, and in which micro-batches.

    >>> cut = Cut(n=10, global_batch=7, rank=1, size=2, micro_batch=2)
    >>> cut.slice(0), cut.micro_batches(0)
    ((4, 7), [MicroBatch(start=4, stop=6, padding=0, pad=4), MicroBatch(start=6, stop=7, padding=1, pad=6)])
    """

    n: int
    """Samples in the dataset."""
    global_batch: int
    """Samples in a step, over all ranks."""
    rank: int
    size: int
    """Number of ranks in the world."""
    micro_batch: int | None = None
    """The most rows that go through the model at once; None: a rank's whole slice does."""
    drop_last: bool = False
    """Leave out the last, smaller step of an epoch."""
    _end: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        whole = steps_per_epoch(self.n, self.global_batch, self.drop_last) * self.global_batch
        object.__setattr__(self, "_end", min(whole, self.n))
        _check_rank(self.rank, self.size)
        if self.micro_batch is not None and self.micro_batch < 1:
            raise DataError(
                f"micro_batch is {self.micro_batch} and must be at least 1: pass micro_batch=1 or more, "
                "or leave it out to take each rank's part of a step at once"
            )

    @property
    def steps(self) -> int:
        """Steps in an epoch, the same on every rank and every world size."""
        return steps_per_epoch(self.n, self.global_batch, self.drop_last)

    @property
    def dropped(self) -> int:
        """Samples that `drop_last` leaves out of each epoch."""
        return self.n - self._end

    def positions(self, step: int) -> PositionRange:
        """All positions of a step, over all ranks."""
        start = step * self.global_batch
        stop = min(start + self.global_batch, self._end)
        if not 0 <= start < stop:
            raise DataError(f"step {step} is not in an epoch of {self.steps} steps: steps are 0 to {self.steps - 1}")
        return start, stop

    def slice(self, step: int) -> PositionRange:
        """Positions of a step that this rank takes: empty where a step has fewer samples than there are ranks."""
        first, last = self.positions(step)
        start, stop = split_evenly(last - first, self.size, self.rank)
        return first + start, first + stop

    def span(self, step: int) -> PositionRange:
        """Positions this rank reads in a step: its slice, or where that is empty the step's first, to pad with."""
        first, last = self.positions(step)
        start, stop = split_evenly(last - first, self.size, self.rank)
        return (first + start, first + stop) if start < stop else (first, first + 1)

    def shape(self, step: int) -> tuple[int, int]:
        """(number of micro-batches, rows of each) of a step, the same on every rank."""
        first, last = self.positions(step)
        return _shape(-(-(last - first) // self.size), self.micro_batch)

    def micro_batches(self, step: int) -> list[MicroBatchRows]:
        """Micro-batches of this rank in a step, which together hold its slice once."""
        number, rows = self.shape(step)
        whole, pad = self.slice(step), self.span(step)[0]
        return [_micro_batch(whole, number, rows, k, pad) for k in range(number)]


@dataclass(frozen=True, slots=True)
class EvaluationPartition:
    """One evaluation of everything exactly once: a contiguous slice for each rank, in batches of at most `rows`.

    Without `lockstep` nothing is padded, and a rank may have fewer batches than another, or none: right where the
    forward pass needs no collective. With it all ranks have equally many batches of one shape, and padding is counted.
    """

    n: int
    rows: int
    rank: int
    size: int
    lockstep: bool = False

    def __post_init__(self) -> None:
        _at_least_one(self.n, 1)
        _check_rank(self.rank, self.size)
        if self.rows < 1:
            raise DataError(f"an evaluation batch of {self.rows} rows holds nothing: pass micro_batch=1 or more")

    def __len__(self) -> int:
        start, stop = self.slice
        return self._shape[0] if self.lockstep else -(-(stop - start) // self.rows)

    @property
    def slice(self) -> PositionRange:
        """Positions of this rank: empty on some ranks where there are fewer samples than ranks."""
        return split_evenly(self.n, self.size, self.rank)

    def span(self, k: int) -> PositionRange:
        """The positions this rank reads for its batch number k: the real ones, or the one to pad with."""
        batch = self.batch(k)
        return (batch.start, batch.stop) if batch.real else (batch.pad, batch.pad + 1)

    def batch(self, k: int) -> MicroBatchRows:
        """Batch number k of this rank."""
        if not 0 <= k < len(self):
            raise DataError(f"batch {k} is not in a pass of {len(self)} batches on rank {self.rank} of {self.size}")
        start, stop = self.slice
        if self.lockstep:
            number, rows = self._shape
            return _micro_batch(self.slice, number, rows, k, start if start < stop else 0)
        first = start + k * self.rows
        return MicroBatchRows(first, min(first + self.rows, stop), padding=0, pad=first)

    @property
    def _shape(self) -> tuple[int, int]:
        return _shape(-(-self.n // self.size), self.rows)


def _shape(largest: int, micro_batch: int | None) -> tuple[int, int]:
    """Partition the largest slice into as few micro-batches as allowed, and these as small as that number allows."""
    number = 1 if micro_batch is None else -(-largest // micro_batch)
    return number, -(-largest // number)


def _micro_batch(whole: PositionRange, number: int, rows: int, k: int, pad: int) -> MicroBatchRows:
    """Even parts, so that a micro-batch is all padding only where its slice has fewer samples than micro-batches."""
    first, last = whole
    start, stop = split_evenly(last - first, number, k)
    start, stop = first + start, first + stop
    return MicroBatchRows(start, stop, rows - (stop - start), start if start < stop else pad)


def _at_least_one(n: int, global_batch: int) -> None:
    if n < 1:
        raise DataError(f"the dataset is empty: it has {n} samples and needs at least 1; check what it reads from")
    if global_batch < 1:
        raise DataError(f"global_batch is {global_batch} and must be at least 1: pass, for example, global_batch=256")


def _check_rank(rank: int, size: int) -> None:
    if size < 1:
        raise DataError(f"a world of {size} ranks holds no data: its size must be at least 1")
    if not 0 <= rank < size:
        raise DataError(f"rank {rank} is not in a world of {size}: ranks are 0 to {size - 1}")
