"""A stream cut into global steps: the same global batches on any number of ranks and workers, nothing twice or lost.

By position (any iterable): element i of the stream belongs to step i // G, and within it to the rank that the same even
cut gives it as in a dataset with a length. Every rank and every worker reads the whole stream and keeps its own part,
so each sees its end by itself and no collective is needed. The price: the stream is read ranks x workers times. It pays
to yield cheap records (a path, undecoded bytes) and to leave the costly part to `decode`, which sees kept ones only.

By shards, where the dataset declares them (`num_shards`, and `shard(i)` gives an iterable): each shard feeds a fixed
part of every step, so a rank reads only the shards that feed its own part, and global batches are still the same on any
layout. The price: where shards differ in length the last steps are smaller, and only all ranks together know how many
samples a step has: its `count` is None, and a rank may end before others do.

Neither can know that a dataset gives another order in each process (a shuffle seeded by the clock, a split by RANK of
its own): such a stream loses and repeats samples. Its order must follow from what is the same everywhere; where it has
`set_epoch(epoch)`, that is called before it is read.
"""

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import chain, count
from typing import Protocol, TypeGuard, runtime_checkable

from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from samestep.data.partition import Partition, PositionRange, split_evenly
from samestep.data.sample_rng import SampleContext
from samestep.errors import DataError, SampleError, StateError
from samestep.messages import info


@runtime_checkable
class Seekable(Protocol):
    """A stream that can begin anywhere."""

    def seek(self, position: int) -> object:
        """Make the next `__iter__` begin at element number `position`."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A stream that can tell where it stands, as those of torchdata and Hugging Face do."""

    def state_dict(self) -> object:
        """Where the stream stands: after the last element it gave."""
        ...

    def load_state_dict(self, state: object) -> object:
        """Make the next `__iter__` continue there."""
        ...


class Sharded(Protocol):
    """A stream in parts, each of which can be read without the others."""

    num_shards: int

    def shard(self, index: int) -> Iterable[object]:
        """Part number `index`, from its beginning."""
        ...


def is_sharded(dataset: object) -> TypeGuard[Sharded]:
    """Whether a dataset has `num_shards` and a `shard(i)`; a `shard` that wants more arguments is another thing."""
    shard = getattr(dataset, "shard", None)
    if not hasattr(dataset, "num_shards") or not callable(shard):
        return False
    try:
        inspect.signature(shard).bind(0)
    except TypeError:
        return False
    return True


def check_stream(dataset: object) -> None:
    """Complain of what cannot be read as a stream, and say what to use for it."""
    name = type(dataset).__name__
    if _has_items(dataset) and hasattr(dataset, "__len__"):
        raise DataError(f"{name} has a length and items, so it is no stream: use run.shard")
    if hasattr(dataset, "__next__"):
        raise DataError(
            f"{name} is an iterator, which can be read only once and not by workers: give an IterableDataset whose "
            "__iter__ makes a new one"
        )
    if not hasattr(dataset, "__iter__"):
        raise DataError(f"{name} has no __iter__, so it is no stream: give a torch.utils.data.IterableDataset")
    if is_sharded(dataset) and dataset.num_shards < 1:
        raise DataError(f"{name}.num_shards is {dataset.num_shards} and must be at least 1")


def _has_items(dataset: object) -> bool:
    # torch gives every Dataset, iterable ones too, a __getitem__ that only raises.
    return getattr(type(dataset), "__getitem__", Dataset.__getitem__) is not Dataset.__getitem__


@contextmanager
def unsplit() -> Generator[None]:
    """While the block lasts, `get_worker_info()` says that this is no worker."""
    info = get_worker_info()
    if info is None:
        yield
        return
    torch_worker._worker_info = None  # pyright: ignore[reportPrivateUsage]  # see the module's docstring
    try:
        if get_worker_info() is not None:
            raise DataError(
                "this version of torch does not let a stream be read whole in a worker, and one that splits itself "
                "over workers would lose samples: read it with workers=0"
            )
        yield
    finally:
        torch_worker._worker_info = info  # pyright: ignore[reportPrivateUsage]


_Lane = tuple[PositionRange, PositionRange, Iterator[object]]
"""A part of every step that some shards feed: its places in a step, those of them this rank keeps, and the records."""


class _End(Enum):
    """What no stream yields."""

    REACHED = "end of the stream"


@dataclass(frozen=True)
class StreamStep:
    """One rank's part of one global step of a stream."""

    number: int
    samples: list[object]
    """What this rank keeps, decoded; may be empty."""
    positions: Sequence[int]
    """The global position of each sample: with seed and epoch the key of its randomness."""
    count: int | None
    """Samples in the whole step over all ranks; None where ranks can only find it together, by a sum."""
    state: object
    """Where a stream with `state_dict` stands after this step, to be given as `start_state`; None for others."""
    padding_sample: object = None
    """The step's first sample where this rank has none of its own, to fill a batch with; None otherwise."""


@dataclass(frozen=True, eq=False)
class StreamPartition(IterableDataset[StreamStep]):
    """One rank's part of every global step of a stream, in order; for a DataLoader with `batch_size=None`.

    Worker w of W gives every W-th step, which the DataLoader's turns put in order again. Each holds up to one global
    batch of undecoded records at a time.

    >>> class Count(IterableDataset[int]):
    ...     def __iter__(self) -> Iterator[int]:
    ...         return iter(range(7))
    >>> [step.samples for step in StreamCut(Count(), rank=0, size=2, global_batch=4)]
    [[0, 1], [4, 5]]
    >>> [step.samples for step in StreamCut(Count(), rank=1, size=2, global_batch=4)]
    [[2, 3], [6]]
    """

    dataset: Iterable[object]
    rank: int
    size: int
    """Number of ranks in the world."""
    global_batch: int
    start_step: int = 0
    """The step to begin with. A stream with neither `seek` nor `start_state` is read from its beginning up to there."""
    start_state: object = None
    """The `state` of step number `start_step` - 1."""
    seed: int = 0
    epoch: int = 0
    decode: Callable[[object], object] | None = None
    """Called with each record that this rank keeps; `sample_rng()` works in it as it does in the stream itself."""
    drop_last: bool = False
    """Leave out a last step of fewer than `global_batch` samples."""

    def __post_init__(self) -> None:
        check_stream(self.dataset)
        Partition(1, self.global_batch, self.rank, self.size)  # complains of a rank or a global batch that cannot be
        if self.start_step < 0:
            raise StateError(f"step {self.start_step} does not exist: steps are counted from 0")
        if self.drop_last and is_sharded(self.dataset):
            raise DataError(
                "drop_last=True needs to know which step is the last, and shards end one by one: leave drop_last out, "
                "or take num_shards from the dataset and yield everything in its __iter__"
            )
        if self.rank == 0 and self._replayed:
            info(
                f"{type(self.dataset).__name__} cannot jump: to continue at step {self.start_step} it is read from its "
                "beginning (a seek(position), or state_dict() and load_state_dict(), would spare that)"
            )

    def __iter__(self) -> Iterator[StreamStep]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self.epoch)
        if is_sharded(self.dataset):
            return self._by_shards(self.dataset, worker, workers)
        return self._by_position(worker, workers)

    @property
    def _replayed(self) -> int:
        """How many steps are read and thrown away before the first."""
        jumps = not is_sharded(self.dataset) and (
            isinstance(self.dataset, Seekable) or (isinstance(self.dataset, Stateful) and self.start_state is not None)
        )
        return 0 if jumps else self.start_step

    def _by_position(self, worker: int, workers: int) -> Iterator[StreamStep]:
        records = self._begin()
        for number in count(self.start_step - self._replayed):
            mine = self._is_mine(number, worker, workers)
            places = range(number * self.global_batch, (number + 1) * self.global_batch)
            # A tail has fewer samples, which moves a rank's part towards the front and never further back.
            keep = split_evenly(self.global_batch, self.size, self.rank)[1] if mine else 0
            found, kept = self._take(records, places, (0, keep))
            ends = found < self.global_batch
            counts = found > 0 and not (ends and self.drop_last)
            if ends and number + counts < self.start_step:
                raise self._too_short(places.start + found)
            if mine and counts:
                start, stop = split_evenly(found, self.size, self.rank)
                yield self._step(number, places[start:stop], kept[start:stop], found, (kept[0], places[0]))
            if ends:
                return

    def _by_shards(self, dataset: Sharded, worker: int, workers: int) -> Iterator[StreamStep]:
        lanes = list(_lanes(dataset, self.global_batch, self.rank, self.size))
        spare: tuple[object, int] | None = None
        for number in count():
            mine = self._is_mine(number, worker, workers)
            found, positions, samples = self._take_lanes(lanes, number, keep=mine or number == 0)
            if number == 0:  # one that resumes behind its own end, or has none, still needs something to pad with
                spare = (samples[0], positions[0]) if samples else self._of_others(dataset)
            if mine or (not found and number <= self.start_step):
                yield self._step(number, positions, samples, None, spare)
            if not found:
                return

    def _take_lanes(self, lanes: list[_Lane], number: int, keep: bool) -> tuple[int, list[int], list[object]]:
        """How much of a step this rank's lanes still have, and what it keeps of that with its positions."""
        any_found, positions, samples = 0, list[int](), list[object]()
        for (start, stop), (keep_from, keep_to), records in lanes:
            places = range(number * self.global_batch + start, number * self.global_batch + stop)
            found, kept = self._take(records, places, (keep_from, keep_to) if keep else (0, 0))
            any_found += found
            positions += places[keep_from : keep_from + len(kept)]
            samples += kept
        return any_found, positions, samples

    def _of_others(self, dataset: Sharded) -> tuple[object, int] | None:
        """The first record that any shard has, for a rank whose own have none."""
        records = chain.from_iterable(map(dataset.shard, range(dataset.num_shards)))
        _, kept = self._take(records, range(1), (0, 1))
        return (kept[0], 0) if kept else None

    def _begin(self) -> Iterator[object]:
        """The stream from where it is read: its beginning, or the start step where it can jump there."""
        position = self.start_step * self.global_batch
        try:
            if isinstance(self.dataset, Seekable):
                self.dataset.seek(position)
            elif isinstance(self.dataset, Stateful) and self.start_state is not None:
                self.dataset.load_state_dict(self.start_state)
            with unsplit():
                return iter(self.dataset)
        except Exception as error:
            raise self._failed("the stream cannot begin", position, error) from error

    def _is_mine(self, number: int, worker: int, workers: int) -> bool:
        return number >= self.start_step and (number - self.start_step) % workers == worker

    def _take(self, records: Iterator[object], positions: range, keep: PositionRange) -> tuple[int, list[object]]:
        """How many of these positions the stream still has, and the records at the kept ones of them."""
        kept, position = list[object](), positions.start
        try:
            with unsplit():
                for place, position in enumerate(positions):
                    with SampleContext(self.seed, self.epoch, position):
                        record = next(records, _End.REACHED)
                    if record is _End.REACHED:
                        return place, kept
                    if keep[0] <= place < keep[1]:
                        kept.append(record)
        except Exception as error:
            raise self._failed("the stream failed", position, error) from error
        return len(positions), kept

    def _step(
        self,
        number: int,
        positions: Sequence[int],
        records: list[object],
        found: int | None,
        spare: tuple[object, int] | None = None,
    ) -> StreamStep:
        samples = [self._decoded(record, position) for record, position in zip(records, positions, strict=True)]
        pad = self._decoded(*spare) if spare and not samples else None
        return StreamStep(number, samples, positions, found, self._state(), pad)

    def _state(self) -> object:
        if isinstance(self.dataset, Seekable) or is_sharded(self.dataset):
            return None
        return self.dataset.state_dict() if isinstance(self.dataset, Stateful) else None

    def _decoded(self, record: object, position: int) -> object:
        if self.decode is None:
            return record
        try:
            with SampleContext(self.seed, self.epoch, position):
                return self.decode(record)
        except Exception as error:
            raise self._failed("decode failed", position, error) from error

    def _failed(self, what: str, position: int, error: Exception) -> SampleError:
        info = get_worker_info()
        where = "in the training process" if info is None else f"worker {info.id}"
        return SampleError(
            f"{what} at position {position} on rank {self.rank}, {where}: {type(error).__name__}: {error}"
        )

    def _too_short(self, end: int) -> StateError:
        return StateError(
            f"the stream ends at position {end} and was to continue at {self.start_step * self.global_batch}: it is "
            "not the stream that was saved; give the same data, or start anew in another folder"
        )


def _lanes(dataset: Sharded, global_batch: int, rank: int, size: int) -> Iterator[_Lane]:
    """For each part of a step that some shards feed: its places, those of them this rank keeps, and the records."""
    lanes = min(dataset.num_shards, global_batch)
    low, high = split_evenly(global_batch, size, rank)
    for lane in range(lanes):
        start, stop = split_evenly(global_batch, lanes, lane)
        keep = max(start, low) - start, min(stop, high) - start
        if keep[0] < keep[1]:
            shards = range(lane, dataset.num_shards, lanes)
            yield (start, stop), keep, chain.from_iterable(dataset.shard(index) for index in shards)
