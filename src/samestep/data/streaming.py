"""Partitions a stream into global steps: the same global batches on any number of ranks and workers.

Any iterable is partitioned by position: element i belongs to step i // G, and within the step to the rank that the same
even split gives it as in a dataset with a length. Every rank and every worker reads the full stream and keeps its own
part, so each finds the end by itself and no collective is needed. The cost: the stream is read ranks x workers times.
Yield cheap records (a path, undecoded bytes) and leave the rest to `decode`, which gets only the records that are kept.

A dataset with `num_shards` and `shard(i)` is partitioned by shards: each shard feeds a fixed part of every step, so a
rank reads only the shards that feed its own part, and global batches are still the same on any number of ranks. The
cost: if shards differ in length, the last steps are smaller, and the ranks must sum up to know the samples of a step.
Its `count` is None, and a rank may end before others do.

A dataset whose order differs between processes (a shuffle seeded by the clock, a split by RANK inside the dataset)
would lose and repeat samples, so the first records of all processes are compared. Three optional methods of a dataset
are used: `set_epoch(epoch)` is called before reading; `seek(position)`, or `state_dict()` and `load_state_dict(state)`
as in torchdata and Hugging Face datasets, let a run resume without reading the stream from its beginning.
"""

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, count
from typing import Any, Final

from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from samestep.data.content_probe import FIRST_RECORDS, Probe, make_probe
from samestep.data.global_rng import Seed, find_seedable, keyed_globals, seed_transforms
from samestep.data.loader import sample_error
from samestep.data.partition import Partition, PositionRange, split_evenly
from samestep.data.permutation import Purpose
from samestep.data.sample_rng import SampleContext
from samestep.errors import DataError, StateError
from samestep.messages import info

_STAGES: Final = "_ex_iterable"  # the stages of a stream of Hugging Face datasets, which are not public


def is_sharded(dataset: Any) -> bool:
    """Return whether a dataset has `num_shards` and `shard(i)`; a `shard` with more arguments does not count."""
    try:
        inspect.signature(dataset.shard).bind(0)
        return hasattr(dataset, "num_shards")
    except (AttributeError, TypeError):
        return False


def _is_stateful(dataset: object) -> bool:
    has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
    return has_state and not _has_shuffle_buffer(getattr(dataset, _STAGES, None))


def _has_shuffle_buffer(reader: Any) -> bool:
    """Whether a stream of Hugging Face datasets shuffles: the records in its buffer are not in its state."""
    if reader is None or "BufferShuffled" in type(reader).__name__:
        return reader is not None
    stages = (getattr(reader, "ex_iterable", None), *(getattr(reader, "ex_iterables", None) or ()))
    return any(map(_has_shuffle_buffer, stages))


def check_stream(dataset: Any) -> None:
    """Raise `DataError` if a dataset cannot be read as a stream."""
    name = type(dataset).__name__
    # torch gives every Dataset, even an IterableDataset, a __getitem__ that only raises.
    has_items = getattr(type(dataset), "__getitem__", Dataset.__getitem__) is not Dataset.__getitem__
    if has_items and hasattr(dataset, "__len__"):
        raise DataError(f"{name} has a length and items, so it is not a stream: use run.shard")
    if hasattr(dataset, "__next__"):
        raise DataError(
            f"{name} is an iterator, which can be read only once and not by workers: pass an IterableDataset whose "
            "__iter__ returns a new iterator"
        )
    if not hasattr(dataset, "__iter__"):
        raise DataError(f"{name} has no __iter__, so it is not a stream: pass a torch.utils.data.IterableDataset")
    if is_sharded(dataset) and dataset.num_shards < 1:
        raise DataError(f"{name}.num_shards is {dataset.num_shards} and must be at least 1")


@dataclass(frozen=True)
class StreamStep:
    """One rank's part of one global step of a stream."""

    number: int
    samples: list[object]  # the decoded samples of this rank; may be empty
    positions: Sequence[int]  # the global position of each sample, which keys its RNG together with seed and epoch
    count: int | None  # samples in the step over all ranks; None if the ranks must sum up to know it
    state: object  # the `state_dict` of the stream after this step, for `start_state`; None if it has none
    padding_sample: object = None
    """If this rank has no samples: a sample to pad a batch with, or None if the stream has none."""
    probes: tuple[Probe, ...] = ()  # in the first step of each worker: the first records that it has read


_Lane = tuple[PositionRange, PositionRange, Iterator[object]]
"""A part of every step that some shards feed: its range in a step, the part of it that this rank keeps, its records."""


_END: Final = object()  # a value that no stream yields


@dataclass(frozen=True, eq=False)
class StreamPartition(IterableDataset[StreamStep]):
    """One rank's part of every global step of a stream, in order; for a DataLoader with `batch_size=None`.

    Worker w of W yields every W-th step, and the DataLoader puts them in order again. Each worker holds up to one
    global batch of undecoded records.

    >>> class Count(IterableDataset[int]):
    ...     def __iter__(self) -> Iterator[int]:
    ...         return iter(range(7))
    >>> [step.samples for step in StreamPartition(Count(), rank=0, world_size=2, global_batch=4)]
    [[0, 1], [4, 5]]
    >>> [step.samples for step in StreamPartition(Count(), rank=1, world_size=2, global_batch=4)]
    [[2, 3], [6]]
    """

    dataset: Iterable[object]
    rank: int
    world_size: int
    global_batch: int
    start_step: int = 0
    """The first step. A stream with neither `seek` nor `start_state` is read from its beginning up to it."""
    start_state: object = None  # the `state` of step `start_step` - 1
    seed: int = 0
    epoch: int = 0
    decode: Callable[[object], object] | None = None
    """Called with each record that this rank keeps; `sample_rng()` works in it as in the stream itself."""
    drop_last: bool = False  # leave out a last step with fewer than `global_batch` samples
    probe: bool = False  # whether to return probes of the first records

    def __post_init__(self) -> None:
        check_stream(self.dataset)
        Partition(1, self.global_batch, self.rank, self.world_size)  # raises if rank or global batch is invalid
        if self.start_step < 0:
            raise StateError(f"step {self.start_step} does not exist: steps are counted from 0")
        if self.drop_last and is_sharded(self.dataset):
            raise DataError(
                "drop_last=True needs to know which step is the last, and shards end at different steps: leave "
                "drop_last out, or remove num_shards from the dataset and yield everything in its __iter__"
            )
        if self.rank == 0 and self._replayed_steps:
            remedy = "implement seek(position), or state_dict() and load_state_dict(), to avoid that"
            if hasattr(self.dataset, "load_state_dict"):
                remedy = "its state does not contain the records in its shuffle buffer, which would be lost"
            info(
                f"{type(self.dataset).__name__} cannot seek: to resume at step {self.start_step} it is read from its "
                f"beginning ({remedy})"
            )

    def __iter__(self) -> Iterator[StreamStep]:
        worker_info = get_worker_info()
        worker, workers = (worker_info.id, worker_info.num_workers) if worker_info else (0, 1)
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self.epoch)
        if is_sharded(self.dataset):
            return self._read_by_shards(self.dataset, worker, workers)
        return self._read_by_position(worker, workers)

    @cached_property
    def _transforms(self) -> list[Any]:
        """The transforms of `decode` that have generators of their own."""
        return find_seedable(self.decode)

    @property
    def _replayed_steps(self) -> int:
        """The number of steps that are read and discarded before the first."""
        seeks = hasattr(self.dataset, "seek") or (_is_stateful(self.dataset) and self.start_state is not None)
        return 0 if seeks and not is_sharded(self.dataset) else self.start_step

    def _read_by_position(self, worker: int, workers: int) -> Iterator[StreamStep]:
        records, probes, first = self._open_stream(), list[Probe](), self.start_step - self._replayed_steps
        for number in count(first):
            own = self._belongs_to(number, worker, workers)
            positions = range(number * self.global_batch, (number + 1) * self.global_batch)
            # A smaller last step moves a rank's part towards the front, never further back.
            keep = split_evenly(self.global_batch, self.world_size, self.rank)[1] if own else 0
            found, kept = self._take(records, positions, (0, keep), probes if self.probe and number == first else None)
            ends = found < self.global_batch
            counts = found > 0 and not (ends and self.drop_last)
            if ends and number + counts < self.start_step:
                raise StateError(
                    f"the stream ends at position {positions.start + found} and should resume at "
                    f"{self.start_step * self.global_batch}: it is not the stream that was saved; use the same data, "
                    "or start from scratch in another folder"
                )
            if own and counts:
                start, stop = split_evenly(found, self.world_size, self.rank)
                step = self._make_step(number, positions[start:stop], kept[start:stop], found, (kept[0], positions[0]))
                yield replace(step, probes=tuple(probes))
                probes.clear()
            if ends:
                return

    def _read_by_shards(self, dataset: Any, worker: int, workers: int) -> Iterator[StreamStep]:
        lanes = list(_open_lanes(dataset, self.global_batch, self.rank, self.world_size))
        probes = self._probe_shards(dataset) if self.probe else []
        padding: tuple[object, int] | None = None
        for number in count():
            own = self._belongs_to(number, worker, workers)
            found, positions, samples = self._take_from_lanes(lanes, number, keep=own or number == 0)
            if number == 0:  # a rank that resumes after its own end, or has no records, still needs a padding sample
                padding = (samples[0], positions[0]) if samples else self._first_record(dataset)
            if own or (not found and number <= self.start_step):
                step = self._make_step(number, positions, samples, None, padding)
                yield replace(step, probes=tuple(probes))
                probes.clear()
            if not found:
                return

    def _probe_shards(self, dataset: Any) -> list[Probe]:
        """Return the probes of the first records of the first and the last shard, which every rank reads for that."""
        probes = list[Probe]()
        for shard in sorted({0, dataset.num_shards - 1}):
            self._take(iter(dataset.shard(shard)), range(shard, shard + 1), (0, 0), probes)
        return probes

    def _take_from_lanes(self, lanes: list[_Lane], number: int, keep: bool) -> tuple[int, list[int], list[object]]:
        """Return how many records this rank's lanes have for a step, and the kept ones with their positions."""
        total, positions, samples = 0, list[int](), list[object]()
        for (start, stop), (keep_from, keep_to), records in lanes:
            lane = range(number * self.global_batch + start, number * self.global_batch + stop)
            found, kept = self._take(records, lane, (keep_from, keep_to) if keep else (0, 0))
            total += found
            positions += lane[keep_from : keep_from + len(kept)]
            samples += kept
        return total, positions, samples

    def _first_record(self, dataset: Any) -> tuple[object, int] | None:
        """Return the first record of any shard, for a rank whose own shards are empty."""
        records = chain.from_iterable(map(dataset.shard, range(dataset.num_shards)))
        _, kept = self._take(records, range(1), (0, 1))
        return (kept[0], 0) if kept else None

    def _open_stream(self) -> Iterator[object]:
        """Return the stream from its beginning, or from the start step if it can seek."""
        position = self.start_step * self.global_batch
        try:
            dataset: Any = self.dataset
            if hasattr(dataset, "seek"):
                dataset.seek(position)
            elif _is_stateful(dataset) and self.start_state is not None:
                dataset.load_state_dict(self.start_state)
            elif _is_stateful(dataset) and hasattr(dataset, _STAGES):
                dataset.load_state_dict(None)  # otherwise it starts again at a state that was loaded before
            with keyed_globals(Purpose.OPEN_STREAM, self.seed, self.epoch) as seed_globals, hide_worker():
                seed_globals(0)
                return iter(self.dataset)
        except Exception as error:
            raise sample_error(f"the stream could not start at position {position}", self.rank, error) from error

    def _belongs_to(self, number: int, worker: int, workers: int) -> bool:
        return number >= self.start_step and (number - self.start_step) % workers == worker

    def _take(
        self, records: Iterator[object], positions: range, keep: PositionRange, probes: list[Probe] | None = None
    ) -> tuple[int, list[object]]:
        """Read these positions; return how many the stream still has, and the records in the range `keep` of them.

        The probes of the first records are added to `probes`.
        """
        kept, position = list[object](), positions.start
        try:
            # Every process that reads these positions reads all of them in order: one seed makes all draws the same.
            with keyed_globals(Purpose.READ_SAMPLE, self.seed, self.epoch) as seed_globals, hide_worker():
                seed_globals(position)
                for offset, position in enumerate(positions):
                    with SampleContext(self.seed, self.epoch, position):
                        record = next(records, _END)
                    if record is _END:
                        return offset, kept
                    if probes is not None and offset < FIRST_RECORDS:
                        probes.append(make_probe(self.epoch, position, record))
                    if keep[0] <= offset < keep[1]:
                        kept.append(record)
        except Exception as error:
            raise sample_error(f"the stream failed at position {position}", self.rank, error) from error
        return len(positions), kept

    def _make_step(
        self,
        number: int,
        positions: Sequence[int],
        records: list[object],
        found: int | None,
        padding: tuple[object, int] | None,
    ) -> StreamStep:
        samples, padding_sample = records, padding[0] if padding and not records else None
        if self.decode is not None:
            with keyed_globals(Purpose.READ_SAMPLE, self.seed, self.epoch) as seed_globals:
                decode = partial(self._decode, self.decode, seed_globals)
                samples = [decode(record, position) for record, position in zip(records, positions, strict=True)]
                padding_sample = decode(*padding) if padding and not samples else None
        dataset: Any = self.dataset
        stateful = found is not None and _is_stateful(dataset) and not hasattr(dataset, "seek")
        state = dataset.state_dict() if stateful else None
        return StreamStep(number, samples, positions, found, state, padding_sample)

    def _decode(self, decode: Callable[[object], object], seed_globals: Seed, record: object, position: int) -> object:
        try:
            with SampleContext(self.seed, self.epoch, position):
                seed_globals(position)
                seed_transforms(self._transforms, self.seed, self.epoch, position)
                return decode(record)
        except Exception as error:
            raise sample_error(f"decode failed at position {position}", self.rank, error) from error


def _open_lanes(dataset: Any, global_batch: int, rank: int, world_size: int) -> Iterator[_Lane]:
    """Yield the lanes from which this rank keeps records."""
    lanes = min(dataset.num_shards, global_batch)
    low, high = split_evenly(global_batch, world_size, rank)
    for lane in range(lanes):
        start, stop = split_evenly(global_batch, lanes, lane)
        keep = max(start, low) - start, min(stop, high) - start
        if keep[0] < keep[1]:
            shards = range(lane, dataset.num_shards, lanes)
            yield (start, stop), keep, chain.from_iterable(dataset.shard(index) for index in shards)


@contextmanager
def hide_worker() -> Generator[None]:
    """Make `get_worker_info()` return None in this block, so that a dataset does not split itself over workers."""
    worker_info = get_worker_info()
    if worker_info is None:
        yield
        return
    torch_worker._worker_info = None  # pyright: ignore[reportPrivateUsage]  # torch has no public way
    try:
        if get_worker_info() is not None:
            raise DataError(
                "this version of torch does not let samestep read a full stream in a worker, and a dataset that splits "
                "itself over workers would lose samples: use num_workers=0"
            )
        yield
    finally:
        torch_worker._worker_info = worker_info  # pyright: ignore[reportPrivateUsage]
