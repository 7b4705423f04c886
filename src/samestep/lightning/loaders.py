"""The validation and test data of a Trainer: every sample once, equally many batches on every rank, no padding."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import Trainer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from samestep.data.loader import BatchRequest, CollateFn, Loader, MapDataset
from samestep.data.partition import Partition, split_evenly
from samestep.data.permutation import OrderReader, SampleOrder
from samestep.data.sample_rng import NO_SETTING, sample_keys
from samestep.errors import DataError, StateError

_REPLACED = "SameStep gives every epoch its own order on any number of ranks"


@dataclass(frozen=True)
class Reading:
    """A DataLoader as SameStep reads it."""

    dataset: MapDataset
    """The user's dataset."""
    n: int
    """Its length."""
    collate: CollateFn
    """Makes a batch of samples."""
    workers: int
    """Data workers of each rank."""
    shuffle: bool
    """Whether the loader shuffles."""
    weights: npt.NDArray[np.float64] | None
    """Draw with replacement by these."""
    rows: int
    """The loader's own number of rows in a batch: kept in evaluation, replaced in training."""
    drop_last: bool
    """Whether the loader leaves out the last, smaller batch."""


def understand(loader: object, hook: str, warn: Callable[[str], None]) -> Reading:
    """What `loader`, returned by `hook`, asks for; refuse what no order over all ranks can stand for."""
    if not isinstance(loader, DataLoader):
        raise DataError(
            f"{hook}() gave a {type(loader).__name__}: SameStep reads one torch DataLoader (in evaluation also a list "
            "of them); give it the DataLoader itself"
        )
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            f"the dataset of {hook}() has no length, so its samples cannot be numbered: give it __len__ and "
            "__getitem__, or train with samestep.Run and run.stream"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise DataError(
            f"the DataLoader of {hook}() makes its batches by a batch_sampler of its own: pass batch_size= and "
            f"shuffle= instead; {_REPLACED}"
        )
    _tell_skipped(loader, hook, warn)
    n = len(dataset)  # pyright: ignore[reportArgumentType]  # it has __len__, as was just seen
    if n == 0:
        raise DataError(f"the dataset of {hook}() is empty: there is nothing to read; check the path it reads from")
    shuffle, weights = _sampling(loader.sampler, n, hook)
    return Reading(
        dataset,  # pyright: ignore[reportArgumentType]  # it is no IterableDataset
        n,
        loader.collate_fn,
        loader.num_workers,
        shuffle,
        weights,
        loader.batch_size,
        loader.drop_last,
    )


def _sampling(sampler: object, n: int, hook: str) -> tuple[bool, npt.NDArray[np.float64] | None]:
    if isinstance(sampler, SequentialSampler):
        return False, None
    if isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == n:
        return True, None
    if isinstance(sampler, WeightedRandomSampler) and sampler.replacement and sampler.num_samples == n:
        return True, sampler.weights.double().numpy()
    raise DataError(
        f"the DataLoader of {hook}() has a {type(sampler).__name__} of its own: use shuffle=True, or a "
        f"WeightedRandomSampler with replacement over as many samples as the dataset has ({n}); {_REPLACED}"
    )


def _tell_skipped(loader: "DataLoader[object]", hook: str, warn: Callable[[str], None]) -> None:
    wishes = {
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "timeout": loader.timeout,
    }
    if skipped := [name for name, value in wishes.items() if value]:
        warn(
            f"{', '.join(skipped)} of the DataLoader of {hook}() is not used: SameStep reads with workers of its own, "
            "in which each sample has its own luck (samestep.sample_rng)"
        )


Settings = Callable[[int], object]


class Progress(Protocol):
    """How far Lightning is in an epoch, in batches."""

    ready: int
    started: int
    processed: int
    completed: int


@dataclass(frozen=True)
class Part:
    """One batch of this rank."""

    number: int
    """Optimizer steps before its own since training began, on any world size."""
    samples: int
    """How many samples its step has, over all ranks and batches."""
    real: int
    """How many of them are in this batch; 0: it is a copy, which weighs nothing."""
    last: bool
    """Whether the optimizer steps after it."""
    indices: list[int]
    """The dataset indices of its rows."""
    make_keys: Callable[[], torch.Tensor]
    """Makes one 64-bit key a row, from (seed, epoch, sample)."""

    def share(self) -> float:
        """Which part of its step this batch is."""
        return self.real / self.samples


class TrainLoader:
    """What a Trainer iterates over in training. It is no DataLoader, so Lightning puts no sampler of its own in it."""

    def __init__(
        self, trainer: Trainer, reading: Reading, order: SampleOrder, cut: Partition, settings: Settings | None
    ) -> None:
        self._trainer, self._order, self._cut, self._settings = trainer, order, cut, settings
        self.count = cut.shape(0)[0]
        """Batches of a full step on every rank: what the Trainer must accumulate."""
        self.current: Part | None = None
        self._reader = OrderReader(order, cut.read_range, cut.steps)
        self._device = trainer.strategy.root_device
        self._loader: Loader | None = Loader(
            reading.dataset, order.seed, cut.rank, reading.collate, reading.workers, self._device
        )
        self.dataset = reading.dataset

    def __len__(self) -> int:
        return self._batches_until(self._cut.steps)

    def __iter__(self) -> Iterator[object]:
        """The rest of the epoch that Lightning is in, which it knows when it asks for the first batch, not before."""
        if self._trainer.accumulate_grad_batches != self.count:
            raise DataError(
                f"Trainer.accumulate_grad_batches is {self._trainer.accumulate_grad_batches} and a step of "
                f"SameStep is {self.count} batch(es): it follows from the global batch; leave out what changes it "
                "(GradientAccumulationScheduler), and pass SameStep(micro_batch=...) instead"
            )
        epoch, first = self._trainer.current_epoch, self._progress().ready // self.count
        asked: deque[Part] = deque()
        assert self._loader is not None
        for data in self._loader.read(self._requests(epoch, first, asked)):
            self.current = asked.popleft()
            yield data

    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch, which limit_train_batches may end early."""
        return int(min(self._cut.steps, -(-self._trainer.num_training_batches // self.count)))

    def state_dict(self) -> dict[str, int]:
        """Where training stands, in steps: valid on any world size and any accumulation."""
        done = self._progress().processed
        step = self._cut.steps if done >= len(self) else done // self.count
        return {"step": step, **self.identity}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Turn the batches that Lightning counted on another layout into those of this one.

        A window of accumulation that was under way is begun anew: its gradients were not saved.
        """
        self.check(state)
        progress, place = self._progress(), self._batches_until(state["step"])
        # Saved in on_train_batch_end, a batch is processed and not yet completed; Lightning looks at the difference.
        lag = progress.processed - progress.completed
        progress.ready = progress.started = progress.processed = place
        progress.completed = place - lag

    @property
    def identity(self) -> dict[str, int]:
        """What must be the same in a run that goes on from this one's checkpoints."""
        return {"n": self._cut.n, "global_batch": self._cut.global_batch, "seed": self._order.seed}

    def check(self, saved: Mapping[str, int]) -> None:
        """Refuse to go on from a run with other data, another global batch or another seed."""
        remedies = {
            "n": "give the same dataset, or begin anew without ckpt_path",
            "global_batch": f"pass SameStep(global_batch={saved.get('global_batch')})",
            "seed": f"pass SameStep(seed={saved.get('seed')})",
        }
        for name, here in self.identity.items():
            if saved.get(name) != here:
                raise StateError(
                    f"the checkpoint's position has {name}={saved.get(name)} and this training has {name}={here}: the "
                    f"samples already seen would not be the same; {remedies[name]}"
                )

    def close(self) -> None:
        """End the data workers."""
        self._loader = self.current = None

    def _progress(self) -> Progress:
        return cast("Progress", self._trainer.fit_loop.epoch_loop.batch_progress.current)

    def _batches_until(self, step: int) -> int:
        if step < self._cut.steps:
            return step * self.count
        return (self._cut.steps - 1) * self.count + self._cut.shape(self._cut.steps - 1)[0]

    def _requests(self, epoch: int, first: int, asked: deque[Part]) -> Iterator[BatchRequest]:
        """What to read, in order; what it weighs waits in `asked`."""
        setting = NO_SETTING if self._settings is None else self._settings(epoch)
        for index in range(first, self._cut.steps):
            indices, start = self._reader.read(epoch, index), self._cut.read_range(index)[0]
            (begin, end), parts = self._cut.positions(index), self._cut.micro_batches(index)
            for at, part in enumerate(parts):
                chosen = indices[part.start - start : part.stop - start]
                if not part.real:  # all ranks need equally many backward passes
                    chosen = indices[part.padding_position - start : part.padding_position - start + 1]
                keys = partial(self._keys, epoch, chosen)
                number, last = epoch * self.steps + index, at == len(parts) - 1
                asked.append(Part(number, end - begin, part.real, last, chosen.tolist(), keys))
                yield BatchRequest(epoch, chosen, setting)

    def _keys(self, epoch: int, indices: np.ndarray) -> torch.Tensor:
        words = sample_keys(self._order.seed, epoch, indices).view(np.int64)
        return torch.from_numpy(words).to(self._device)


class EvalLoader:
    """What a Trainer iterates over in validation and test, in the order of the dataset.

    Ranks have equally many batches, so nothing that is done in a batch on all ranks (a value logged with `sync_dist`, a
    sharded model) can hang; batches differ in size instead. With one row a batch, a batch may hold two.
    """

    def __init__(self, trainer: Trainer, reading: Reading, seed: int, settings: Settings | None) -> None:
        self._trainer, self._settings = trainer, settings
        size = trainer.world_size
        if reading.n < size:
            raise DataError(
                f"an evaluation of {reading.n} sample(s) cannot be cut over {size} ranks: Lightning needs a batch on "
                f"each; give it at least {size} samples, or evaluate with {reading.n} rank(s)"
            )
        self._slice = split_evenly(reading.n, size, trainer.global_rank)
        largest = -(-reading.n // size)
        self._count = min(-(-largest // reading.rows), reading.n // size)
        device = trainer.strategy.root_device
        self._loader: Loader | None = Loader(
            reading.dataset, seed, trainer.global_rank, reading.collate, reading.workers, device
        )
        self.dataset = reading.dataset

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[object]:
        assert self._loader is not None
        yield from self._loader.read(self._requests())

    def close(self) -> None:
        """End the data workers."""
        self._loader = None

    def _requests(self) -> Iterator[BatchRequest]:
        setting = NO_SETTING if self._settings is None else self._settings(self._epoch())
        begin, end = self._slice
        for k in range(self._count):
            start, stop = split_evenly(end - begin, self._count, k)
            yield BatchRequest(0, np.arange(begin + start, begin + stop), setting)

    def _epoch(self) -> int:
        """The epoch under way; after training, the last one."""
        epochs = self._trainer.max_epochs
        return min(self._trainer.current_epoch, epochs - 1) if epochs and epochs > 0 else self._trainer.current_epoch
