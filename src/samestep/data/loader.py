"""Reads batches of given dataset indices with DataLoader workers.

`Loader.read` turns batch requests into batches. In a data worker `_KeyedDataset` reads the samples, each with its own
RNG, and `KeyedCollate` makes a batch of them. The result does not depend on the number of workers. `batches_on_device`
(training_data.py) moves the batches to the device.
"""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing import resource_tracker, util
from types import FrameType
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, default_collate, get_worker_info

from samestep.data.content_probe import Probe, failed_probe, make_probe
from samestep.data.global_rng import KeyedCalls, Seed, draws_nothing, find_seedable, seed_transforms
from samestep.data.permutation import Purpose
from samestep.data.sample_rng import SampleContext
from samestep.errors import DataError, SampleError
from samestep.messages import WarnOnce

CollateFn = Callable[[list[object]], object]

_JOB_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_PARENT_CHECK_SECONDS: Final = 0.25
_NO_SHARED_MEMORY: Final = "unable to allocate shared memory"  # how torch words a full /dev/shm
_ORDER_TRIES: Final = 3  # batches whose order is checked, until one has enough different rows
_ENOUGH_ROWS: Final = 4  # different rows: with fewer, those of a collate_fn that sorts could be in order by chance


class MapDataset(Protocol):
    """Anything with a length and items, such as a torch Dataset or a list."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> object:
        """Return the sample with this index."""
        ...


@dataclass(frozen=True)
class BatchRequest:
    """One batch to read."""

    epoch: int  # the epoch, which keys the RNG of each sample
    indices: np.ndarray  # dataset indices, including those of padding rows
    setting: object
    """The epoch's setting. It travels with the indices, so a prefetched batch cannot see that of a later epoch."""


@dataclass(frozen=True)
class ProbeRequest:
    """Samples to compare with those of other ranks, read before the first batch, in the process that reads batches."""

    indices: list[int]
    setting: object  # that of epoch 0


class Loader:
    """Reads batch requests in order with one set of persistent workers; supports one iteration at a time."""

    def __init__(
        self,
        dataset: MapDataset,
        seed: int,
        rank: int,
        collate_fn: CollateFn | None,
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        self._requests = _RequestSampler()
        self._iteration = 0
        self._warnings = WarnOnce() if rank == 0 else None
        self._loader: DataLoader[Any] = DataLoader(
            _KeyedDataset(dataset, seed, rank),  # pyright: ignore[reportArgumentType]  # only __getitems__ is used
            batch_sampler=self._requests,  # pyright: ignore[reportArgumentType]  # its items go to _KeyedDataset only
            collate_fn=_CollateRead(KeyedCollate(collate_fn, seed, rank)),  # pyright: ignore[reportArgumentType]  # gets what _KeyedDataset returns
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,  # for copies to a GPU
            generator=torch.Generator(),  # the workers' base seeds must not come from the global generator
            worker_init_fn=WorkerSetup() if num_workers else None,
        )

    def read(
        self,
        requests: Iterator[BatchRequest],
        probe: ProbeRequest | None = None,
        check: Callable[[list[Probe]], None] | None = None,
    ) -> Iterator[object]:
        """Yield the batches of `requests`, in host memory; the workers read ahead.

        With `probe`, `check` is called first with the probes of its samples.
        """
        self._requests.upcoming = requests if probe is None else chain([probe], requests)
        self._iteration += 1
        with defer_signals():
            batches = iter(self._loader)
        return self._check_iteration(batches, self._iteration, check if probe else None)

    def _check_iteration(
        self, batches: Iterator[Any], number: int, check: Callable[[list[Probe]], None] | None
    ) -> Iterator[object]:
        for *warnings, batch in batches:
            if self._warnings is not None:
                for warning in filter(None, warnings):
                    self._warnings.warn_once(warning)
            if check is not None:  # the first answer has the probes
                check(batch)
                check = None
                continue
            yield batch
            if self._iteration != number:
                raise DataError(
                    "a second iteration over this shard began before the first one ended, and its data workers serve "
                    "only one: use another shard for the inner loop, run.shard(dataset)"
                )


class _RequestSampler(Sampler[BatchRequest | ProbeRequest]):
    """The batch sampler of the DataLoader; `upcoming` is replaced for every iteration."""

    def __init__(self) -> None:
        self.upcoming: Iterator[BatchRequest | ProbeRequest] = iter(())

    def __iter__(self) -> Iterator[BatchRequest | ProbeRequest]:
        return self.upcoming


class _KeyedDataset:
    """The user's dataset, read with the RNG of each sample; an error names the sample."""

    def __init__(self, dataset: MapDataset, seed: int, rank: int) -> None:
        self._dataset, self._seed, self._rank = dataset, seed, rank
        self._calls = None if draws_nothing(dataset) else KeyedCalls(Purpose.READ_SAMPLE)
        self._transforms = [] if self._calls is None else find_seedable(dataset)
        self._at_once = _reads_batches(dataset) and not self._transforms
        self._warning: str | None = None

    def __getitems__(self, request: BatchRequest | ProbeRequest) -> "_ReadBatch":
        if isinstance(request, ProbeRequest):
            return self._probe(request)
        indices = request.indices.tolist()
        samples = self._read(request, indices)
        return _ReadBatch(samples, request.epoch, indices[0], self._warning)

    def _probe(self, request: ProbeRequest) -> "_ReadBatch":
        """Read samples for a comparison, the first one twice: with the same key it must be the same."""
        *probes, again = (
            self._probe_sample(index, request.setting) for index in [*request.indices, request.indices[0]]
        )
        warning = None
        if not probes[0].equals(again):
            warning = (
                f"sample {probes[0].index} of {type(self._dataset).__name__} differs when it is read again with the "
                f"same random state ({probes[0].preview}, then {again.preview}), so results depend on the number of "
                "ranks and workers: draw only from the global generators of torch, random and numpy, or from "
                "sample_rng(), not from a generator of the dataset"
            )
        return _ReadBatch(probes, 0, -1, warning)

    def _probe_sample(self, index: int, setting: object) -> Probe:
        try:
            (sample,) = self._read(BatchRequest(0, np.array([index]), setting), [index])
        except SampleError as error:
            return failed_probe(0, index, error)
        return make_probe(0, index, sample)

    def _read(self, request: BatchRequest, indices: list[int]) -> list[object]:
        read = partial(self._read_samples, request, indices)
        if self._calls is None:
            return read(None)
        samples = self._calls.call(self._seed, request.epoch, read)
        if self._at_once and self._calls.draws:  # many samples at once cannot have random numbers of their own
            if type(self._dataset).__getitem__ is not Dataset.__getitem__:
                self._at_once = False
                return self._read(request, indices)
            self._warning = (
                f"{type(self._dataset).__name__}.__getitems__ draws random numbers for many samples at once, so they "
                "depend on the number of ranks and on micro_batch: implement __getitem__, which samestep then calls "
                "for each sample"
            )
        return samples

    def _read_samples(self, request: BatchRequest, indices: list[int], seed_sample: Seed | None) -> list[object]:
        dataset: Any = self._dataset
        index, samples = None, list[object]()
        try:
            with SampleContext(self._seed, request.epoch, None, request.setting) as context:
                if self._at_once:
                    if seed_sample is not None:
                        seed_sample(indices[0])
                    return list(dataset.__getitems__(indices))
                for index in indices:
                    context.move_to(index)
                    if seed_sample is not None:
                        seed_sample(index)
                    if self._transforms:
                        seed_transforms(self._transforms, self._seed, request.epoch, index)
                    samples.append(dataset[index])
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            if not isinstance(error, Exception) and get_worker_info() is None:
                raise  # Ctrl-C; in a worker it would end the worker without a message
            which = f"one of the samples {indices}" if index is None else f"sample {index}"
            raise sample_error(f"{which} could not be read", self._rank, error) from error
        return samples


def _reads_batches(dataset: Any) -> bool:
    """Return whether a dataset reads many samples at once."""
    while isinstance(dataset, Subset):  # torch's Subset has `__getitems__` in any case
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


@dataclass(frozen=True)
class _ReadBatch:
    """The samples of a batch, before they are collated."""

    samples: Sequence[object]
    epoch: int
    first: int  # the index of the first sample, which keys the random numbers of collate_fn; -1: these are probes
    warning: str | None


class KeyedCollate:
    """The user's collate_fn with the global generators seeded; an error says that collating failed, and where."""

    def __init__(self, collate_fn: CollateFn | None, seed: int, rank: int) -> None:
        self._collate_fn, self._seed, self._rank = collate_fn or default_collate, seed, rank
        self._calls = None if self._collate_fn is default_collate else KeyedCalls(Purpose.COLLATE)
        self._check = _CollateCheck()

    def __call__(self, samples: list[object], epoch: int, first: int) -> object:
        """Return the batch of these samples, the first of which has the index `first`."""
        given = list(samples)  # collate_fn may sort its list
        try:
            batch = self._collate(samples, epoch, first)
        except Exception as error:
            if _NO_SHARED_MEMORY in str(error):
                raise DataError(
                    f"/dev/shm is full, through which data workers pass batches {_cause(self._rank, error)}: start the "
                    "container with --shm-size=8g or --ipc=host, or pass run.shard(num_workers=0)"
                ) from error
            raise DataError(
                f"collate_fn could not make a batch of {len(given)} samples {_cause(self._rank, error)} (if the "
                "samples differ in shape, pass run.shard a collate_fn= that pads them)"
            ) from error
        tensors = list_tensors(batch)  # raises here, in the worker that made it, if it is not a tree of tensors
        if self._calls is not None and not self._calls.draws:
            collate = partial(self._collate, epoch=epoch, first=first)
            self._check.check_count(given, tensors, collate)
            self._check.check_order(given, batch, collate)
        return batch

    def _collate(self, samples: list[object], epoch: int, first: int) -> object:
        def collate(seed_sample: Seed | None) -> object:
            if seed_sample is not None:
                seed_sample(first)
            return self._collate_fn(list(samples))  # a copy, since it may be called again

        return self._collate_fn(samples) if self._calls is None else self._calls.call(self._seed, epoch, collate)

    @property
    def warning(self) -> str | None:
        """The warning for a collate_fn that has drawn random numbers."""
        if self._calls is None or not self._calls.draws:
            return None
        return (
            "collate_fn draws random numbers for the rows of a micro-batch, so they depend on the number of ranks and "
            "on micro_batch: draw them in the dataset's __getitem__, or with step.random in the loop"
        )


@dataclass(frozen=True)
class _CollateRead:
    """The collate_fn of the DataLoader: returns what to warn of, which the training process does, and the batch."""

    collate: KeyedCollate

    def __call__(self, read: _ReadBatch) -> tuple[str | None, str | None, object]:
        if read.first < 0:
            return read.warning, None, read.samples
        batch = self.collate(list(read.samples), read.epoch, read.first)
        return read.warning, self.collate.warning, batch


# Whether collate_fn keeps its samples, one row per sample in the same order: weights of padding, random numbers and the
# ledger go by the position of a row. A batch that has no rows that can be compared is accepted.


class _CollateCheck:
    """Checks the first batches of a process; `collate` makes a batch in the way the first one was made."""

    def __init__(self) -> None:
        self._tries, self._may_drop = _ORDER_TRIES, True

    def check_order(self, samples: Sequence[object], batch: object, collate: CollateFn) -> None:
        """Raise `DataError` if `collate` made `batch` of `samples` in another order."""
        if len(samples) < 2 or not self._tries or is_custom_batch(batch):
            return
        self._tries -= 1
        columns = list(_compare(batch, _try(collate, samples[::-1]), len(samples)))
        # What a collate_fn derives from the rows, such as a negative for each row, may have another order.
        kept = max((column.different for column in columns if column.reversed and column.different > 1), default=0)
        if kept >= _ENOUGH_ROWS:
            self._tries = 0
        moved = {column.path for column in columns if column.moved and column.different > kept}
        # Of equal samples rows are equal. A table of the batch, such as a mask or class counts, is not.
        for sample in (samples[0], samples[-1]) if moved else ():
            same = _try(collate, [sample] * len(samples))
            moved &= {column.path for column in _compare(same, same, len(samples)) if column.different == 1}
        if moved:
            raise DataError(
                f"collate_fn returns the rows of {len(samples)} samples in another order than it got them, so padding "
                "and random numbers would go to the wrong samples: keep the order; if the model needs sorted rows, "
                "sort inside the model and undo it, or use pack_padded_sequence(..., enforce_sorted=False)"
            )

    def check_count(self, samples: Sequence[object], tensors: Sequence[torch.Tensor], collate: CollateFn) -> None:
        """Raise `DataError` if the batch with these tensors lacks some of the samples."""
        rows = {tensor.shape[0] for tensor in tensors if tensor.dim()}
        if not self._may_drop or len(rows) != 1 or (found := rows.pop()) >= len(samples):
            return
        # Fewer rows may also be packed sequences. A sample that is dropped has no row when it is alone, either.
        alone = [_count_rows(_try(collate, [sample])) for sample in samples]
        if sum(alone) == found:
            raise DataError(
                f"collate_fn returns {found} rows for {len(samples)} samples, so the others would not be trained: "
                "return one row per sample; leave out samples before run.shard, for example with "
                "torch.utils.data.Subset"
            )
        self._may_drop = False


@dataclass(frozen=True)
class _Column:
    """One value per sample, at the same place of two batches, of which the second was made of reversed samples."""

    path: tuple[object, ...]
    different: int  # number of different values
    reversed: bool  # the second batch has the values of the first in reversed order
    moved: bool  # it has them in any other order


def _column(path: tuple[object, ...], first: Iterable[object], again: Iterable[object]) -> _Column:
    values, others = [_fingerprint(row) for row in first], [_fingerprint(row) for row in again]
    in_order = others == values[::-1]
    return _Column(path, len(set(values)), in_order, not in_order and Counter(values) == Counter(others))


def _compare(first: Any, again: Any, count: int, path: tuple[object, ...] = ()) -> Iterator[_Column]:
    """The columns of `count` values in two batches."""
    if isinstance(first, torch.Tensor):
        if isinstance(again, torch.Tensor) and is_dense(first) and is_dense(again) and first.shape == again.shape:
            for dim, size in enumerate(first.shape[:2]):  # the second dimension, if batch_first=False
                if size == count:
                    yield _column((*path, "dim", dim), first.unbind(dim), again.unbind(dim))
        return
    parts, other = _parts(first), _parts(again)
    if isinstance(first, tuple | list) and len(parts) == len(other) == count:
        column = _column(path, parts.values(), other.values())
        yield column
        if column.reversed:
            return
    for key in parts.keys() & other.keys():
        yield from _compare(parts[key], other[key], count, (*path, key))


def _parts(tree: Any) -> Mapping[Any, Any]:
    """What is in a part of a batch, by key or number; nothing for classes that are not opened."""
    if isinstance(tree, Mapping):
        return tree  # pyright: ignore[reportUnknownVariableType]
    if isinstance(tree, tuple | list):
        return dict(enumerate(tree))  # pyright: ignore[reportUnknownArgumentType]
    return {}


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a plain array of values: not sparse, nested, quantized or without data."""
    return tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def _fingerprint(value: Any) -> object:
    """A value that can be compared and hashed; equal for tensors of equal bits."""
    if isinstance(value, torch.Tensor):
        if not is_dense(value):
            return str(value.dtype)
        data = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
        data = data.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), data.numpy().tobytes()
    if isinstance(value, Mapping | tuple | list):
        return tuple((repr(key), _fingerprint(part)) for key, part in _parts(value).items())
    return repr(value)


def _count_rows(batch: object) -> int:
    """The number of rows of a batch of one sample, 0 if there is no batch."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 0
    return max((_count_rows(part) for part in _parts(batch).values()), default=0)


def _try(collate: CollateFn, samples: Sequence[object]) -> object:
    """A batch of copies of these samples; an exception if collate_fn cannot make it, for example of one sample."""
    try:
        return collate([_copy(sample) for sample in samples])
    except Exception as error:  # noqa: BLE001 training does not need this batch, and an exception has no rows
        return error


def _copy(sample: Any) -> object:
    """A sample that `collate_fn` may change in place."""
    if isinstance(sample, torch.Tensor | np.ndarray):
        return sample.detach().clone() if isinstance(sample, torch.Tensor) else sample.copy()  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    if type(sample) is dict:
        return {key: _copy(value) for key, value in sample.items()}  # pyright: ignore[reportUnknownVariableType]
    if type(sample) in (list, tuple):
        return type(sample)(_copy(value) for value in sample)
    return sample


def sample_error(problem: str, rank: int, error: BaseException) -> SampleError:
    """Return the error of a sample that could not be read, with the rank and the worker."""
    return SampleError(f"{problem} {_cause(rank, error)}")


def _cause(rank: int, error: BaseException) -> str:
    info = get_worker_info()
    worker = "in the training process" if info is None else f"worker {info.id}"
    return f"on rank {rank}, {worker}: {type(error).__name__}: {error}"


# Starting and ending data workers


@contextmanager
def defer_signals() -> Generator[None]:
    """Block the job's signals and garbage collection while data workers start.

    A worker that starts with its rank's signal handlers and garbage could die of them. Deferred signals reach this
    process afterwards. Python's forkserver keeps them blocked: it ends with its rank, not by a signal.
    """
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method == "forkserver":
        resource_tracker.ensure_running()  # otherwise it starts below and unblocks SIGTERM before the server starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _JOB_SIGNALS)
    collecting = gc.isenabled()
    # The wrapped model of an earlier Run is a cycle that holds its process group, whose destructor waits for threads.
    # A forked worker has a copy of it and none of the threads: collecting it there would hang or kill the worker.
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class WorkerSetup:
    """The `worker_init_fn` of a DataLoader: detaches a worker from its rank's signals and ends it with its rank."""

    def __init__(self) -> None:
        # Shared with the workers, since they ignore the signals that end a rank.
        self._ending = torch.zeros(1, dtype=torch.uint8).share_memory_()
        # At exit Python runs this before it asks the workers to end and waits for them.
        util.Finalize(self, self._ending.fill_, args=(1,), exitpriority=0)
        self._collecting = gc.isenabled()

    def __call__(self, worker: int) -> None:
        """Run in a worker when it starts."""
        gc.freeze()  # never collect what came with the fork; see defer_signals
        if self._collecting:
            gc.enable()
        for number in _JOB_SIGNALS:  # not SIG_IGN, which programs started by a worker would inherit
            signal.signal(number, ignore_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _JOB_SIGNALS)
        threading.Thread(
            target=self._exit_with_parent, args=[os.getppid()], name="samestep worker watch", daemon=True
        ).start()

    def _exit_with_parent(self, parent: int) -> None:
        while not self._ending.item() and os.getppid() == parent:
            time.sleep(_PARENT_CHECK_SECONDS)
        os._exit(0)


def ignore_signal(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing; not SIG_IGN, which child processes would inherit."""


# Trees of tensors


def move_to_device(tree: Any, device: torch.device, dtype: torch.dtype | None = None) -> object:
    """Return `tree` on `device`, its floating-point tensors as `dtype` if one is given.

    On CUDA the copies from pinned memory are asynchronous. A batch class of the user moves itself and keeps its dtypes.
    """
    if is_custom_batch(tree):
        return tree.to(device)
    if dtype is None:
        return map_tensors(tree, lambda tensor: tensor.to(device, non_blocking=True))
    return map_tensors(
        tree, lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)
    )


def list_tensors(tree: object) -> list[torch.Tensor]:
    """Return every tensor in `tree`; none for a batch class of the user."""
    found: list[torch.Tensor] = []
    if not is_custom_batch(tree):
        map_tensors(tree, found.append)
    return found


def is_custom_batch(tree: object) -> bool:
    """Return whether a batch is of a class of the user that moves itself to a device."""
    return not isinstance(tree, torch.Tensor | Mapping | tuple | list) and hasattr(tree, "to")


def map_tensors(tree: object, function: Callable[[torch.Tensor], object], path: str = "batch") -> object:
    """Return `tree` with `function` applied to every tensor; strings and numbers stay as they are."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        values = {key: map_tensors(value, function, f"{path}[{key!r}]") for key, value in tree.items()}
        return values if type(tree) is dict else type(tree)(values)  # pyright: ignore[reportCallIssue]
    if isinstance(tree, tuple | list):
        items = [map_tensors(item, function, f"{path}[{i}]") for i, item in enumerate(tree)]
        if isinstance(tree, list):
            return items
        # A named tuple takes its fields as separate arguments.
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)  # pyright: ignore[reportArgumentType]
    if isinstance(tree, str | bytes | bool | int | float | complex | None):
        return tree
    raise DataError(
        f"{path} is of class {type(tree).__name__}: a batch is a tensor, or tuples, lists and dicts of tensors, "
        "strings and numbers; pass run.shard a collate_fn= that makes one"
    )
