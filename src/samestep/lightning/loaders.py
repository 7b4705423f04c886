"""The loaders that a Trainer iterates over: steps of the global batch in training, every sample once in evaluation.

A batch has this rank's rows of a step without padding rows, so ranks may differ by one row. Only a batch without any
sample is filled, with one row of weight 0, since every rank needs the same number of backward passes.

What a module draws is keyed by sample, as in a Run, from when its loader yields a batch, before the hooks that transfer
and augment it, until its `on_..._batch_end`: forward, loss, backward pass and what activation checkpointing computes
again are inside.

In `trainer.predict` each rank predicts whole batches of the user's DataLoader, so that the list of predictions is that
of one rank, whatever a predict_step returns. Callbacks that write predictions see only those of their rank.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.overrides.distributed import (
    _IndexBatchSamplerWrapper,  # pyright: ignore[reportPrivateUsage]  # the only way to pass indices to its writers
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from samestep.data.content_probe import Probe, check_same_options, check_same_samples, hash_values, probe_indices
from samestep.data.loader import BatchRequest, Loader, MapDataset, ProbeRequest
from samestep.data.partition import Partition, split_evenly
from samestep.data.permutation import OrderReader, SampleOrder
from samestep.data.sample_rng import NO_SETTING, sample_keys, set_micro_batch
from samestep.errors import DataError, StateError
from samestep.lightning.trainer_ranks import gather
from samestep.messages import WarnOnce, warn
from samestep.parallel.model_randomness import Kind, ModelRandomness
from samestep.training.mistakes import check_setting
from samestep.training.training_data import batches_on_device, evaluation_epoch, move_without_waiting

EpochSettings = Callable[[int], object]
_REPLACED = "SameStep makes the order of every epoch itself"
_BATCHES_PER_EXCHANGE = 16  # on GPUs the exchanged bytes are on the device for a moment


@dataclass(frozen=True)
class LoaderSpec:
    """What SameStep uses of a user's DataLoader."""

    given: "DataLoader[Any]"  # of it: dataset, collate_fn, num_workers, drop_last, and batch_size in evaluation
    n: int
    shuffle: bool
    weights: npt.NDArray[np.float64] | None  # of a WeightedRandomSampler

    def setting(self, settings: EpochSettings | None, epoch: int) -> object:
        """Return the setting of an epoch, which data workers can receive."""
        return NO_SETTING if settings is None else check_setting(settings(epoch), self.given.num_workers)

    def open(self, trainer: Trainer, seed: int) -> Loader:
        """Start the data workers."""
        given, pin_memory = self.given, trainer.strategy.root_device.type == "cuda"
        dataset = cast("MapDataset", given.dataset)
        return Loader(dataset, seed, trainer.global_rank, given.collate_fn, given.num_workers, pin_memory)


def read_spec(loader: object, hook: str, warn: Callable[[str], None]) -> LoaderSpec:
    """Read the DataLoader that `hook` returned; raise `DataError` if it cannot be partitioned over ranks."""
    if not isinstance(loader, DataLoader):
        raise DataError(
            f"{hook}() returned a {type(loader).__name__}, and SameStep reads one torch DataLoader (in evaluation also "
            "a list of them): return the DataLoader itself"
        )
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            f"the dataset of {hook}() has no length, so its samples cannot be numbered: implement __len__ and "
            "__getitem__, or train with samestep.Run and run.stream"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise DataError(
            f"the DataLoader of {hook}() uses a custom batch_sampler: pass batch_size= and shuffle= "
            f"instead; {_REPLACED}"
        )
    options = ("worker_init_fn", "multiprocessing_context", "timeout")
    if ignored := [name for name in options if getattr(loader, name)]:
        warn(
            f"{', '.join(ignored)} of the DataLoader of {hook}() is ignored: SameStep reads with its own data workers; "
            "for random numbers use samestep.sample_rng()"
        )
    n = len(dataset)  # pyright: ignore[reportArgumentType]  # it has __len__
    if n == 0:
        raise DataError(f"the dataset of {hook}() is empty: check the path it reads from")
    return LoaderSpec(loader, n, *_read_sampler(loader.sampler, n, hook))


def _read_sampler(sampler: object, n: int, hook: str) -> tuple[bool, npt.NDArray[np.float64] | None]:
    """Return (shuffle, weights)."""
    if isinstance(sampler, SequentialSampler):
        return False, None
    if isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == n:
        return True, None
    if isinstance(sampler, WeightedRandomSampler) and sampler.replacement and sampler.num_samples == n:
        return True, sampler.weights.double().numpy()
    raise DataError(
        f"the DataLoader of {hook}() uses a {type(sampler).__name__}: use shuffle=True, or a WeightedRandomSampler "
        f"with replacement and num_samples={n}, the length of the dataset; {_REPLACED}"
    )


@dataclass
class _Comparison:
    """Compares what the ranks read, before the first batch of a loader."""

    trainer: Trainer
    spec: LoaderSpec
    seed: int
    epoch_settings: EpochSettings | None

    def take(self) -> tuple[ProbeRequest | None, Callable[[list[Probe]], None] | None]:
        """Return what `Loader.read` needs for the comparison; nothing if it is done or there is one rank."""
        if self.trainer.world_size == 1 or self._done:
            return None, None
        setting = self.spec.setting(self.epoch_settings, 0)
        return ProbeRequest(probe_indices(self.spec.n, self.seed), setting), self._compare

    def __post_init__(self) -> None:
        self._done = False

    def _compare(self, probes: list[Probe]) -> None:
        spec, self._done = self.spec, True
        options = {"length": spec.n, "shuffle": spec.shuffle, "weights": hash_values(spec.weights)}
        by_rank = gather(self.trainer, (options, probes))
        check_same_options("the DataLoader", [each for each, _ in by_rank])
        check_same_samples(spec.given.dataset, [each for _, each in by_rank], "SameStep does")


@dataclass(frozen=True)
class BatchInfo:
    """The step and weight of one training batch of this rank."""

    step: int  # the number of its optimizer step since training began, the same on any world size
    number: int  # of this batch among those of the rank in the step
    samples: int  # samples in the step, over all ranks and batches
    real: int  # samples in this batch; 0 for a padding batch, which has weight 0
    last: bool  # whether the optimizer steps after this batch
    indices: list[int]  # the dataset indices of its rows
    make_keys: Callable[[], torch.Tensor]  # makes one 64-bit key per row, from (seed, epoch, sample)

    def share(self) -> float:
        """Return the batch's share of the samples of its step."""
        return self.real / self.samples


class BatchRandomness:
    """Keys the draws of the current batch."""

    def __init__(self, seed: int, batch_dim: int | None) -> None:
        self._seed, self._batch_dim = seed, batch_dim
        self._randomness: ModelRandomness | None = None
        self._warnings = WarnOnce()
        self._keys: Callable[[], torch.Tensor] | None = None
        self._draws = 0
        self._batch: AbstractContextManager[None] | None = None

    def begin(self, trainer: Trainer, kind: Kind, step: int, number: int, keys: Callable[[], torch.Tensor]) -> None:
        """Start a batch: the `number`-th of this rank in its step, or in the evaluation of an epoch."""
        self.end()
        if self._randomness is None:
            device, warn = trainer.strategy.root_device, self._warnings.warn_once if trainer.is_global_zero else _ignore
            self._randomness = ModelRandomness(self._seed, trainer.global_rank, device, warn)
            self._randomness.add_model(trainer.lightning_module, self._batch_dim)
        self._keys, self._draws = keys, 0
        set_micro_batch(keys)
        batch = self._batch = self._randomness.micro_batch(kind, step, number, keys)
        batch.__enter__()

    def end(self, error: BaseException | None = None) -> None:
        """End the batch, if one has begun."""
        if self._batch is not None:
            self._batch.__exit__(error if error is None else type(error), error, None)
            self._batch = None
            set_micro_batch(None)
            self._keys = None

    def close(self, error: BaseException | None = None) -> None:
        """End the batch and forget the module."""
        self.end(error)
        self._randomness = None

    def next_draw(self) -> tuple[torch.Tensor, int] | None:
        """Return the keys of the rows and a new salt for a draw of the user; None outside a batch."""
        if self._keys is None:
            return None
        self._draws += 1
        return self._keys(), self._draws  # ModelRandomness keys the draws of the module by other salts


def _ignore(text: str) -> None:
    """Rank 0 warns for all ranks."""


class TrainLoader:
    """What a Trainer iterates over in training. It is not a DataLoader, so Lightning does not replace its sampler."""

    def __init__(
        self,
        trainer: Trainer,
        spec: LoaderSpec,
        order: SampleOrder,
        partition: Partition,
        epoch_settings: EpochSettings | None,
        randomness: BatchRandomness,
    ) -> None:
        self._trainer, self._order, self._partition, self._randomness = trainer, order, partition, randomness
        self._spec, self._epoch_settings = spec, epoch_settings
        self.batches_per_step = partition.shape(0)[0]
        """Batches of a full step on every rank: what the Trainer must accumulate."""
        self.current: BatchInfo | None = None
        self._reader = OrderReader(order, partition.read_range, partition.steps)
        self._loader: Loader | None = spec.open(trainer, order.seed)
        self._comparison = _Comparison(trainer, spec, order.seed, epoch_settings)
        self.dataset = spec.given.dataset

    def __len__(self) -> int:
        return self._batches_before(self._partition.steps)

    def __iter__(self) -> Iterator[object]:
        """Yield the remaining batches of the Trainer's epoch, which is known when the first batch is requested."""
        accumulate = self._trainer.accumulate_grad_batches
        if accumulate != self.batches_per_step:
            raise DataError(
                f"Trainer.accumulate_grad_batches is {accumulate}, and a step of SameStep has {self.batches_per_step} "
                "batch(es): remove what changes it (GradientAccumulationScheduler), and pass SameStep(micro_batch=...) "
                "instead"
            )
        epoch, first = self._trainer.current_epoch, self._progress().ready // self.batches_per_step
        requested: deque[BatchInfo] = deque()
        assert self._loader is not None
        reading = self._loader.read(self._requests(epoch, first, requested), *self._comparison.take())
        for data in batches_on_device(reading, self._trainer.strategy.root_device):
            self.current = info = requested.popleft()
            self._randomness.begin(self._trainer, "training", info.step, info.number, info.make_keys)
            yield data
            self._randomness.end()  # before the next samples are read

    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch, which limit_train_batches may shorten."""
        return int(min(self._partition.steps, -(-self._trainer.num_training_batches // self.batches_per_step)))

    @property
    def identity(self) -> dict[str, int]:
        """What must be the same in a run that resumes from a checkpoint of this one."""
        return {"n": self._partition.n, "global_batch": self._partition.global_batch, "seed": self._order.seed}

    def state_dict(self) -> dict[str, int]:
        """Return the position in steps, valid on any world size and any accumulation."""
        done = self._progress().processed
        step = self._partition.steps if done >= len(self) else done // self.batches_per_step
        return {"step": step, **self.identity}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set Lightning's batch counters to the saved step.

        An interrupted accumulation window starts again: its gradients were not saved.
        """
        self.check_identity(state)
        progress, batch = self._progress(), self._batches_before(state["step"])
        # If saved in on_train_batch_end, a batch is processed but not completed; Lightning checks the difference.
        lag = progress.processed - progress.completed
        progress.ready = progress.started = progress.processed = batch
        progress.completed = batch - lag

    def check_identity(self, saved: Mapping[str, int]) -> None:
        """Raise `StateError` if the checkpoint is from other data, another global batch or another seed."""
        remedies = {
            "n": "use the same dataset, or start without ckpt_path",
            "global_batch": f"pass SameStep(global_batch={saved.get('global_batch')})",
            "seed": f"pass SameStep(seed={saved.get('seed')})",
        }
        for name, value in self.identity.items():
            if saved.get(name) != value:
                raise StateError(
                    f"the checkpoint has {name}={saved.get(name)} and this training has {name}={value}, so its "
                    f"position does not refer to the same samples: {remedies[name]}"
                )

    def close(self) -> None:
        """End the data workers."""
        self._loader = self.current = None

    def _progress(self) -> Any:
        """Return Lightning's counters of batches in this epoch: ready, started, processed, completed."""
        return self._trainer.fit_loop.epoch_loop.batch_progress.current

    def _batches_before(self, step: int) -> int:
        last = self._partition.steps - 1
        if step <= last:
            return step * self.batches_per_step
        return last * self.batches_per_step + self._partition.shape(last)[0]

    def _requests(self, epoch: int, first: int, requested: deque[BatchInfo]) -> Iterator[BatchRequest]:
        """Yield what to read, in order; append the info of each batch to `requested`."""
        setting = self._spec.setting(self._epoch_settings, epoch)
        for index in range(first, self._partition.steps):
            indices, start = self._reader.read(epoch, index), self._partition.read_range(index)[0]
            (begin, end), micro_batches = self._partition.positions(index), self._partition.micro_batches(index)
            for number, rows in enumerate(micro_batches):
                chosen = indices[rows.start - start : rows.stop - start]
                if not rows.real:
                    chosen = indices[rows.padding_position - start : rows.padding_position - start + 1]
                step, last = epoch * self.steps + index, number == len(micro_batches) - 1
                make_keys = partial(_make_keys, self._trainer, self._order.seed, epoch, chosen)
                requested.append(BatchInfo(step, number, end - begin, rows.real, last, chosen.tolist(), make_keys))
                yield BatchRequest(epoch, chosen, setting)


def _make_keys(trainer: Trainer, seed: int, epoch: int, indices: np.ndarray) -> torch.Tensor:
    words = sample_keys(seed, epoch, indices).view(np.int64)
    return move_without_waiting(torch.from_numpy(words), trainer.strategy.root_device)


class EvalLoader:
    """What a Trainer iterates over in validation and test, in the order of the dataset, or of its first `n` samples.

    All ranks have the same number of batches, so that collectives in a batch (a value logged with `sync_dist`, a
    sharded model) cannot hang. Batches differ in size instead: with batch_size=1, a batch may have two rows.
    """

    def __init__(
        self,
        trainer: Trainer,
        spec: LoaderSpec,
        seed: int,
        epoch_settings: EpochSettings | None,
        randomness: BatchRandomness,
        n: int | None = None,
    ) -> None:
        self._trainer, self._epoch_settings, self._seed, self._randomness = trainer, epoch_settings, seed, randomness
        self._spec = spec
        world_size, n = trainer.world_size, spec.n if n is None else n
        if n < world_size:
            raise DataError(
                f"an evaluation of {n} sample(s) cannot be split over {world_size} ranks, since Lightning needs a "
                f"batch on each: use at least {world_size} samples, or evaluate on {n} rank(s)"
            )
        self._slice = split_evenly(n, world_size, trainer.global_rank)
        largest, batch_size = -(-n // world_size), spec.given.batch_size or 1
        self._batches = min(-(-largest // batch_size), n // world_size)
        self._loader: Loader | None = spec.open(trainer, seed)
        self._comparison = _Comparison(trainer, spec, seed, epoch_settings)
        self.dataset = spec.given.dataset

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[object]:
        assert self._loader is not None
        epoch, requested = self._epoch(), deque[np.ndarray]()
        reading = self._loader.read(self._requests(epoch, requested), *self._comparison.take())
        for number, data in enumerate(batches_on_device(reading, self._trainer.strategy.root_device)):
            keys = partial(_make_keys, self._trainer, self._seed, evaluation_epoch(epoch), requested.popleft())
            self._randomness.begin(self._trainer, "evaluation", epoch, number, keys)
            yield data
            self._randomness.end()

    def close(self) -> None:
        """End the data workers."""
        self._loader = None

    def batch_range(self, k: int) -> tuple[int, int]:
        """Return the samples of batch k of this rank, from the first to before the last."""
        begin, end = self._slice
        start, stop = split_evenly(end - begin, self._batches, k)
        return begin + start, begin + stop

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the samples of each batch of this rank."""
        return map(self.batch_range, range(self._batches))

    def _requests(self, epoch: int, requested: deque[np.ndarray]) -> Iterator[BatchRequest]:
        setting = self._spec.setting(self._epoch_settings, epoch)
        for start, stop in self.ranges():
            requested.append(np.arange(start, stop))
            yield BatchRequest(0, requested[-1], setting)

    def _epoch(self) -> int:
        """Return the current epoch; after training, the last one."""
        epochs = self._trainer.max_epochs
        return min(self._trainer.current_epoch, epochs - 1) if epochs and epochs > 0 else self._trainer.current_epoch


class PredictLoader(EvalLoader):
    """What a Trainer iterates over in `trainer.predict`.

    A rank has whole batches of the user's DataLoader, one more or less than others. Fewer batches than ranks are split,
    and with a sharded model, for which all ranks must run the same number of batches, the batches are smaller too.
    """

    def __init__(
        self,
        trainer: Trainer,
        spec: LoaderSpec,
        seed: int,
        epoch_settings: EpochSettings | None,
        randomness: BatchRandomness,
    ) -> None:
        limit, rows = trainer.limit_predict_batches, spec.given.batch_size or 1
        n = min(spec.n, limit * rows) if isinstance(limit, int) else spec.n
        super().__init__(trainer, spec, seed, epoch_settings, randomness, n)
        batches = -(-n // rows)
        self._rows: int | None = None
        if batches >= trainer.world_size and isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy):
            self._rows, (self._first, end) = rows, split_evenly(batches, trainer.world_size, trainer.global_rank)
            self._batches, self._n = end - self._first, n
        self.batch_sampler = _IndexBatchSamplerWrapper(_Ranges(self))  # pyright: ignore[reportArgumentType]

    def batch_range(self, k: int) -> tuple[int, int]:
        """Return the samples of batch k of this rank."""
        if self._rows is None:
            return super().batch_range(k)
        start = (self._first + k) * self._rows
        return start, min(start + self._rows, self._n)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the samples of each batch of this rank; Lightning's writers read their indices from the sampler."""
        for indices in self.batch_sampler:
            yield indices[0], indices[-1] + 1


class _Ranges:
    """The batches of a loader as lists of indices, which Lightning's sampler records."""

    def __init__(self, loader: PredictLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[int]]:
        return (list(range(*self._loader.batch_range(k))) for k in range(len(self)))


def gather_predictions(trainer: Trainer) -> None:
    """Replace the predictions that the Trainer returns by those of all ranks; all ranks must call it."""
    loop = trainer.predict_loop
    if trainer.world_size == 1 or not loop.return_predictions:
        return
    loaders = trainer.predict_dataloaders
    if not all(isinstance(loader, PredictLoader) for loader in (loaders if isinstance(loaders, list) else [loaders])):
        if trainer.is_global_zero:
            warn(
                "trainer.predict got data that does not come from SameStep, so each of the "
                f"{trainer.world_size} ranks returns the predictions of its own samples only: pass "
                "trainer.predict(module, datamodule=same.dataloaders(predict=...)), or same.datamodule(...) of a "
                "datamodule with a predict_dataloader"
            )
        return
    for own in [loop.predictions] if loop.num_dataloaders == 1 else loop.predictions:
        own[:] = _gather_batches(trainer, own)


def _gather_batches(trainer: Trainer, own: list[Any]) -> list[Any]:
    """Return the batches of all ranks; ranks have contiguous parts of the dataset."""
    by_rank: list[list[Any]] = [[] for _ in range(trainer.world_size)]
    for start in range(0, max(gather(trainer, len(own))), _BATCHES_PER_EXCHANGE):
        parts = gather(trainer, own[start : start + _BATCHES_PER_EXCHANGE])
        for batches, part in zip(by_rank, parts, strict=True):
            batches += part
    return [batch for batches in by_rank for batch in batches]
