"""Samples of given indices, read by DataLoader workers, on the device: the same on any number of workers."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker, util
from numbers import Integral
from types import FrameType
from typing import Final, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset, default_collate, get_worker_info

from samestep.data.sample_rng import batch_luck, sample_luck
from samestep.errors import DataError, SampleError

_RIDES_ALONG = (str, bytes, bool, int, float, complex, type(None))


@runtime_checkable
class Movable(Protocol):
    """A batch class of the user's that knows how to move itself."""

    def to(self, device: torch.device) -> "Movable":
        """The same on `device`."""
        ...


def map_tensors(tree: object, function: Callable[[torch.Tensor], object], path: str = "batch") -> object:
    """`tree` with every tensor replaced by `function` of it; strings and numbers ride along unchanged."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return _rebuild_mapping(tree, {k: map_tensors(v, function, f"{path}[{k!r}]") for k, v in tree.items()})
    if isinstance(tree, tuple | list):
        return _rebuild(tree, [map_tensors(v, function, f"{path}[{i}]") for i, v in enumerate(tree)])
    if isinstance(tree, _RIDES_ALONG):
        return tree
    raise DataError(
        f"{path} is of class {type(tree).__name__}: a batch is a tensor, or tuples, lists and dicts of them (strings "
        "and "
        "numbers may ride along); give run.shard a collate= that makes one"
    )


def move_to_device(tree: object, device: torch.device) -> object:
    """`tree` on `device`; on CUDA the copies from pinned memory are asynchronous."""
    if not isinstance(tree, torch.Tensor | Mapping | tuple | list) and isinstance(tree, Movable):
        return tree.to(device)
    return map_tensors(tree, lambda tensor: tensor.to(device, non_blocking=True))


def tensors_of(tree: object) -> list[torch.Tensor]:
    """Every tensor in `tree`."""
    found: list[torch.Tensor] = []
    if not isinstance(tree, torch.Tensor | Mapping | tuple | list) and isinstance(tree, Movable):
        return found
    map_tensors(tree, found.append)
    return found


def _rebuild(like: tuple[object, ...] | list[object], values: list[object]) -> object:
    if isinstance(like, list):
        return values
    if hasattr(like, "_fields"):  # a named tuple takes its fields one by one
        return type(like)(*values)  # pyright: ignore[reportArgumentType]
    return tuple(values)


def _rebuild_mapping(like: Mapping[object, object], values: dict[object, object]) -> object:
    return values if type(like) is dict else type(like)(values)  # pyright: ignore[reportCallIssue]  # a mapping class of the user's


_OF_THE_JOB: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_SECONDS: Final = 0.25


class WorkerSetup:
    """Called in each data worker when it starts; a DataLoader's `worker_init_fn`."""

    def __init__(self) -> None:
        # Read by the workers, which hear no SIGTERM of their own rank either when that ends.
        self._ending = torch.zeros(1, dtype=torch.uint8).share_memory_()
        # Python runs this before it asks the workers to end and waits for them.
        util.Finalize(self, self._ending.fill_, args=(1,), exitpriority=0)
        self._collecting = gc.isenabled()

    def __call__(self, worker: int) -> None:
        """WorkerSetup this worker from its rank's signals and garbage, and let it end with its rank."""
        gc.freeze()  # all that came with the fork; see _garbage_kept
        if self._collecting:
            gc.enable()
        for number in _OF_THE_JOB:  # not SIG_IGN, which programs that a worker starts would inherit
            signal.signal(number, _leave_it_to_the_rank)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_JOB)
        threading.Thread(target=self._end_with, args=[os.getppid()], name="samestep worker watch", daemon=True).start()

    def _end_with(self, parent: int) -> None:
        while not self._ending.item() and os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os._exit(0)


@contextmanager
def defer_signals() -> Generator[None]:
    """Hold these signals and all garbage back while workers start, so that none dies of what its rank left behind.

    What is held back reaches this process afterwards. A server that forks workers (Python's forkserver) goes on holding
    the signals back: its end is its rank's, not a signal.
    """
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method == "forkserver":
        resource_tracker.ensure_running()  # else it starts meanwhile, and lets SIGTERM through before the server starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_JOB)
    try:
        with _garbage_kept():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _garbage_kept() -> Generator[None]:
    """Let no worker that is forked meanwhile collect what was garbage here; its `Shield` sets it aside for good.

    The wrapped model of an earlier Run is a cycle that holds its process group, whose end waits for threads. A worker
    has a copy of it and none of the threads: collecting it there hangs the worker, or kills it.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _leave_it_to_the_rank(number: int, frame: FrameType | None) -> None:
    """The rank has heard it as well, and decides."""


Collate = Callable[[list[object]], object]
_MOST_WORKERS = 8


class MapDataset(Protocol):
    """Anything with a length and items, such as a torch Dataset or a list."""

    def __len__(self) -> int:
        """How many samples there are."""
        ...

    def __getitem__(self, index: int, /) -> object:
        """The sample of this index."""
        ...


@dataclass(frozen=True)
class Request:
    """One batch to read: which samples, of which epoch, under which setting."""

    epoch: int
    """The epoch, for the luck of each sample."""
    indices: np.ndarray
    """Dataset indices, padding included."""
    setting: object
    """The epoch's value of `settings`; it travels with the indices, so a prefetched batch cannot see a later one."""


class Loader:
    """Reads requests in order through one set of persistent workers.

    One pass at a time: beginning another ends the one before.
    """

    def __init__(
        self, dataset: MapDataset, seed: int, rank: int, collate: Collate | None, workers: int, device: torch.device
    ) -> None:
        self._requests = _Requests()
        self._passes = 0
        self._device = device
        self._loader: DataLoader[object] = DataLoader(
            _Keyed(dataset, seed, rank),  # pyright: ignore[reportArgumentType]  # it has __getitems__, which is all that is called
            batch_sampler=self._requests,  # pyright: ignore[reportArgumentType]  # what it yields goes to _Keyed alone
            collate_fn=_Collate(collate or default_collate, rank),
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # workers' base seeds must not use up the global generator
            worker_init_fn=WorkerSetup() if workers else None,
        )

    def read(self, requests: Iterator[Request]) -> Iterator[object]:
        """The batches of `requests`, each on the device, the next one on its way while this one is used."""
        self._requests.upcoming = requests
        self._passes += 1
        with defer_signals():
            read = iter(self._loader)
        batches = self._unless_superseded(read, self._passes)
        return _ahead(batches, self._device) if self._device.type == "cuda" else _moved(batches, self._device)

    def _unless_superseded(self, batches: Iterator[object], number: int) -> Iterator[object]:
        for batch in batches:
            yield batch
            if self._passes != number:
                raise DataError(
                    "another pass over this shard was begun before this one ended, and its workers serve one at a "
                    "time: give the "
                    "inner loop a shard of its own, run.shard(dataset)"
                )


def choose_workers(dataset: object, cores: int, ranks: int) -> tuple[int, str]:
    """How many workers a rank gets, and why: one for each spare core, none where reading costs nothing."""
    if isinstance(dataset, TensorDataset | Sequence):
        return 0, "the data is in memory: reading it here is faster than through a worker"
    share = cores // ranks
    workers = max(0, min(_MOST_WORKERS, share - 1))
    return (
        workers,
        f"{cores} cores for {ranks} rank(s) on this node leave {workers} spare each (at most {_MOST_WORKERS})",
    )


def check_workers(wish: int) -> int:
    """The number of workers that was asked for, if it is one."""
    if not isinstance(wish, Integral) or wish < 0:
        raise DataError(f"workers={wish!r} is not a number of data workers: pass 0 or more")
    return wish


class _Requests(Sampler[Request]):
    """What the DataLoader asks its batches from; `upcoming` is set anew for every pass."""

    def __init__(self) -> None:
        self.upcoming: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.upcoming


@dataclass
class _Keyed:
    """The user's dataset, read under each sample's own luck; an error names the sample."""

    dataset: MapDataset
    seed: int
    rank: int

    def __getitems__(self, request: Request) -> list[object]:
        batched = getattr(self.dataset, "__getitems__", None)
        indices = request.indices.tolist()
        if not callable(batched) or not _reads_batches(self.dataset):
            return self._one_by_one(indices, request)
        try:
            with batch_luck(request.setting):
                return list(cast("Iterable[object]", batched(indices)))
        except Exception as error:
            raise self._failed(f"one of the samples {indices}", error) from error

    def _one_by_one(self, indices: list[int], request: Request) -> list[object]:
        samples: list[object] = []
        index = -1
        try:
            with sample_luck(self.seed, request.epoch, index, request.setting) as luck:
                for index in indices:
                    luck.turn_to(index)
                    samples.append(self.dataset[index])
        except Exception as error:
            raise self._failed(f"sample {index}", error) from error
        return samples

    def _failed(self, what: str, error: Exception) -> SampleError:
        return SampleError(
            f"{what} could not be read on rank {self.rank}, {_worker()}: {type(error).__name__}: {error}"
        )


def _reads_batches(dataset: object) -> bool:
    """Whether a dataset itself reads many samples at once; torch's Subset always claims to, and asks what is inside."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


@dataclass(frozen=True)
class _Collate:
    """The user's collate; an error says that it was the collating that failed."""

    collate: Collate
    rank: int

    def __call__(self, samples: list[object]) -> object:
        try:
            batch = self.collate(samples)
        except Exception as error:
            raise DataError(
                f"collate could not make a batch of {len(samples)} samples on rank {self.rank}, {_worker()}: "
                f"{type(error).__name__}: {error} (samples of different shapes? give run.shard a collate= that pads "
                "them)"
            ) from error
        tensors_of(batch)  # complains here, where the worker is known, if it is no tree of tensors
        return batch


def _worker() -> str:
    info = get_worker_info()
    return "in the training process" if info is None else f"worker {info.id}"


def _moved(batches: Iterator[object], device: torch.device) -> Iterator[object]:
    for batch in batches:
        yield move_to_device(batch, device)


def _ahead(batches: Iterator[object], device: torch.device) -> Iterator[object]:
    """Copy the next batch on a stream of its own while the current one computes."""
    stream = torch.cuda.Stream(device)
    following = _send(batches, device, stream)
    while following is not None:
        current_stream = torch.cuda.current_stream(device)
        current_stream.wait_stream(stream)
        batch = following
        for tensor in tensors_of(batch):
            tensor.record_stream(current_stream)  # its memory must not be reused before this stream is done with it
        yield batch
        following = _send(batches, device, stream)  # the GPU still computes what was queued for this batch


def _send(batches: Iterator[object], device: torch.device, stream: torch.cuda.Stream) -> object | None:
    """Begin to copy the next batch, if there is one."""
    batch = next(batches, None)
    if batch is None:
        return None
    if not isinstance(batch, torch.Tensor | Mapping | tuple | list):
        return move_to_device(batch, device)  # a class of the user's: its tensors are not known to the stream
    with torch.cuda.stream(stream):
        return move_to_device(batch, device)
