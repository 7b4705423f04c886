"""This rank's part of a dataset: epochs of steps for training, one pass over all samples for evaluation.

The way of a sample: data/permutation.py gives the dataset index at each position of the epoch, data/partition.py says
which positions this rank trains in which step and micro-batch, data/loader.py reads them in workers, and `Shard` turns
each batch into a `MicroBatch` of a `Step`. training/step_loop.py hands the step to the user's loop body, and
`Step.mean` in training/step.py scales the loss so that the gradients that DDP or FSDP averages are those of the mean
over the global batch.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, Final

import numpy as np
import torch

from samestep.data.content_probe import Probe, check_same_options, check_same_samples, hash_values, probe_indices
from samestep.data.ledger import ShardDescription
from samestep.data.loader import BatchRequest, CollateFn, Loader, MapDataset, ProbeRequest
from samestep.data.partition import EvaluationPartition, MicroBatchRows, Partition, PredictionPartition
from samestep.data.permutation import OrderReader, SampleOrder
from samestep.data.sample_rng import NO_SETTING, SampleIds, evaluation_batch
from samestep.environment.world import oom_retries
from samestep.errors import DataError, StateError
from samestep.training.mistakes import check_data, check_setting
from samestep.training.step import Step
from samestep.training.step_loop import StepLoop
from samestep.training.step_loss import MicroBatch, StepPosition
from samestep.training.training_data import (
    Epoch,
    TrainingData,
    batches_on_device,
    choose_micro_batch,
    choose_num_workers,
    evaluation_epoch,
    open_ledger,
)

EpochSettings = Callable[[int], object]
_PREDICTION_ROWS: Final = 64  # of a batch for `run.predict` if the shard has no micro_batch


class Shard(TrainingData):
    """This rank's part of a dataset; over all ranks every sample counts exactly once.

    `for epoch in shard.epochs(10)` trains; `for batch in shard` passes over all samples once, for evaluation.
    """

    def __init__(
        self,
        loop: StepLoop,
        dataset: MapDataset,
        *,
        shuffle: bool,
        sampling_weights: torch.Tensor | None,
        collate_fn: CollateFn | None,
        num_workers: int | None,
        drop_last: bool,
        micro_batch: int | None,
        passes: int,
        epoch_settings: EpochSettings | None,
        name: str | None,
    ) -> None:
        super().__init__(loop, passes)
        context = self._context
        self._dataset, self._collate_fn, self._epoch_settings = dataset, collate_fn, epoch_settings
        n, seed, global_batch = check_dataset(dataset), context.config.seed, context.config.global_batch
        weights = _to_numpy(sampling_weights)
        self._order, weights_hash = SampleOrder(n, seed, shuffle, weights), hash_values(weights)
        rows, world = choose_micro_batch(context, micro_batch), context.world
        self._partition = Partition(n, global_batch, world.rank, world.size, rows, drop_last)
        self._name = name or f"shard-{loop.shards}"
        options = {"shuffle": shuffle, "sampling_weights": weights_hash, "drop_last": drop_last, "micro_batch": rows}
        options["name"] = self._name  # that of the ledger
        by_rank = context.comm.exchange_objects("run.shard", (n, options))
        check_lengths([length for length, _ in by_rank])
        check_same_options("run.shard", [options for _, options in by_rank])
        # of `run.predict`: they must not depend on the number of ranks
        self._prediction_rows = max(1, (micro_batch or min(global_batch, _PREDICTION_ROWS)) >> oom_retries())
        self._num_workers = choose_num_workers(context, dataset, num_workers)
        if self._partition.dropped:
            context.print(f"drop_last: {self._partition.dropped} of {n} samples are left out of every epoch")
        description = ShardDescription(n, seed, bool(shuffle), global_batch, weights is not None, bool(drop_last))
        loop.shards += 1
        context.record("data", name=self._name, dataset=type(dataset).__name__, **self._describe(weights is not None))
        self._ledger = open_ledger(context, self._name, description, weights_hash)
        self._order_reader = OrderReader(self._order, self._partition.read_range, self._partition.steps)
        self._loaders: dict[str, Loader] = {}
        context.on_close.append(self._loaders.clear)  # data workers end with the run, not when Python collects them

    def __len__(self) -> int:
        return len(self._evaluation())

    def _describe(self, weighted: bool) -> dict[str, object]:
        """The fields of its event."""
        partition = self._partition
        count, rows = partition.shape(0)
        return {
            "samples": partition.n,
            "shuffle": self._order.shuffle,
            "weighted": weighted,
            "drop_last": partition.drop_last,
            "dropped": partition.dropped,
            "steps_per_epoch": partition.steps,
            "micro_batches": count,
            "rows": rows,
            "padding_per_epoch": partition.padding,
            "num_workers": self._num_workers,
        }

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the global batch in one epoch, on any world size; for learning-rate schedules."""
        return self._partition.steps

    def epochs(self, count: int) -> Iterator[Epoch]:
        """The epochs from the current position up to `count` in all; a resumed epoch continues with its next step."""
        steps = self._partition.steps
        if self._context.loggers is not None:
            self._context.loggers.console.expect(count * steps, self._epoch * steps + self._step)
        yield from self._epochs(count, self.steps, self.steps_left)

    def steps(self, epoch: int) -> Iterator[Step]:
        """The steps of an epoch from the current position."""
        self._context.training_data.add(self)
        partition, first = self._partition, self._step
        if self._ledger:
            self._ledger.begin(epoch, first)
        micro_batches = self._micro_batches(epoch, first)
        for index in range(first, partition.steps):
            start, stop = partition.positions(index)
            count = partition.shape(index)[0]
            number = epoch * partition.steps + index
            first_row = partition.slice(index)[0] - start
            position = StepPosition(number, index, epoch, stop - start, count, first_row, self._name)
            advance = partial(self._advance, epoch, index)
            yield from self._loop.run(
                Step(self._context, position, islice(micro_batches, count), advance, self._passes)
            )
        self._begin_epoch(epoch + 1)

    def steps_left(self) -> int:
        """How many steps the current epoch still has."""
        return self._partition.steps - self._step

    def _evaluation_batches(self) -> Iterator[Any]:
        """All samples once, in dataset order, in batches of this rank; padding does not count."""
        context, evaluation = self._context, self._evaluation()
        epoch = context.progress.epoch
        setting = self._epoch_setting(epoch)
        # A sharded model needs the same number of calls on every rank, not equal shapes: only a batch without any
        # sample is filled, with one padding row.
        requests = (BatchRequest(0, np.arange(*evaluation.read_range(k)), setting) for k in range(len(evaluation)))
        number = self._ledger.begin_evaluation(self._epoch, self._step) if self._ledger else 0
        for k, data in enumerate(self._read("evaluation", requests)):
            rows = evaluation.batch(k)
            samples = SampleIds(self._name, epoch, list(range(*evaluation.read_range(k))), rows.real)
            keys = partial(self._keys, evaluation_epoch(epoch), np.asarray(samples.indices))
            number_of_batch = evaluation.number(k)
            if isinstance(evaluation, PredictionPartition):
                context.prediction = number_of_batch, rows.real > 0
            with context.padding.batch(rows.real), evaluation_batch(samples, keys):
                yield from self._evaluate_batch(data, number_of_batch, keys)
            if self._ledger:
                self._ledger.record_evaluation(number, k, rows.start, rows.real)
        if self._ledger:
            self._ledger.end_evaluation(number)

    def state_dict(self) -> dict[str, int]:
        """The position of training, the same on every rank; valid on any world size and number of workers."""
        return {
            "epoch": self._epoch,
            "step": self._step,
            "seed": self._order.seed,
            "n": self._partition.n,
            "global_batch": self._partition.global_batch,
            "shuffle": self._order.shuffle,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a saved position: the next step holds exactly the next samples."""
        shuffle = self._order.shuffle
        state = {"shuffle": shuffle, **state}  # older positions do not have it
        for name, here, remedy in (
            ("n", self._partition.n, "pass the same dataset, or start in another folder"),
            ("global_batch", self._partition.global_batch, f"pass Run(global_batch={state.get('global_batch')})"),
            ("seed", self._order.seed, f"pass Run(seed={state.get('seed')})"),
            ("shuffle", shuffle, f"pass run.shard(shuffle={state.get('shuffle')})"),
        ):
            if state.get(name) != here:
                raise StateError(
                    f"the saved position has {name}={state.get(name)} and this shard has {name}={here}, so the samples "
                    f"already trained would differ: {remedy}"
                )
        self._set_position(state["epoch"], state["step"])

    def _advance(self, epoch: int, index: int, trained: bool) -> None:
        """Advance the position past a step, and record its samples in the ledger, with weight 0 if it was skipped."""
        self._step = index + 1
        if self._ledger:
            start, stop = self._partition.slice(index)
            self._ledger.record_training(epoch, index, start, stop - start, 1.0 if trained else 0.0)

    def _micro_batches(self, epoch: int, first: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches of all steps of an epoch, read ahead by the data workers."""
        requested: deque[tuple[int, np.ndarray]] = deque()
        setting, min_rows, partition = self._epoch_setting(epoch), self._context.min_rows, self._partition

        def requests() -> Iterator[BatchRequest]:
            """What to read, in order; `requested` keeps the number of real rows of each."""
            for index in range(first, partition.steps):
                indices, start = self._order_reader.read(epoch, index), partition.read_range(index)[0]
                if warning := _padding_warning(partition, index, min_rows):
                    self._context.warn_once(warning)
                for rows in partition.micro_batches(index):
                    chosen = _row_indices(indices, rows, start)
                    if min_rows:  # ranks need the same number of backward passes, not equal shapes
                        chosen = np.resize(chosen, max(rows.real, min_rows))
                    requested.append((rows.real, chosen))
                    yield BatchRequest(epoch, chosen, setting)

        for data in self._context.times.time_reads(self._read("training", requests())):
            real, indices = requested.popleft()
            weights = self._row_weights(len(indices), real)
            make_keys = partial(self._keys, epoch, indices)
            yield MicroBatch(data, weights, make_keys, indices.tolist(), real)

    def _probe(self) -> ProbeRequest | None:
        """The samples to compare with other ranks and earlier starts, unless that is done."""
        if not self._must_compare:
            return None
        return ProbeRequest(probe_indices(self._partition.n, self._order.seed), self._epoch_setting(0))

    def _compare(self, probes: list[Probe]) -> None:
        check_same_samples(self._dataset, self._gather_probes(probes))

    def _evaluation(self) -> EvaluationPartition | PredictionPartition:
        partition = self._partition
        if self._context.predicts:
            return PredictionPartition(
                partition.n, self._prediction_rows, partition.rank, partition.world_size, self._context.lockstep
            )
        rows = partition.micro_batch or -(-partition.global_batch // partition.world_size)
        return EvaluationPartition(
            partition.n, rows, partition.rank, partition.world_size, lockstep=self._context.lockstep
        )

    def _epoch_setting(self, epoch: int) -> object:
        settings = self._epoch_settings
        return NO_SETTING if settings is None else check_setting(settings(epoch), self._num_workers)

    def _read(self, purpose: str, requests: Iterator[BatchRequest]) -> Iterator[object]:
        """The requested batches on the device."""
        batches = self._loader(purpose).read(requests, self._probe(), self._compare)
        return batches_on_device(batches, self._context.device, self._context.convert_to)

    def _loader(self, purpose: str) -> Loader:
        """One set of workers per purpose, so that an evaluation in the middle of an epoch does not disturb it."""
        if purpose not in self._loaders:
            rank, pin_memory = self._partition.rank, self._context.device.type == "cuda"
            self._loaders[purpose] = Loader(
                self._dataset, self._order.seed, rank, self._collate_fn, self._num_workers, pin_memory
            )
        return self._loaders[purpose]


def check_dataset(dataset: object) -> int:
    """The length of a map-style dataset; raises if it is not one."""
    check_data(dataset, "run.shard")
    kind = type(dataset).__name__
    if not hasattr(dataset, "__len__"):
        raise DataError(
            f"{kind} has no length, so its samples have no index: use run.stream(...) for an iterable dataset, or add "
            "a __len__"
        )
    if not hasattr(dataset, "__getitem__"):
        raise DataError(f"{kind} has no __getitem__: run.shard needs a map-style dataset; use run.stream(...)")
    try:
        length = len(dataset)  # pyright: ignore[reportArgumentType]  # it has __len__
    except (OverflowError, ValueError, TypeError) as error:
        raise DataError(f"len({kind}) failed ({error}): return the number of samples from __len__") from error
    if length == 0:
        raise DataError(f"{kind} is empty, so there is nothing to shard: check the path it reads from")
    return length


def check_lengths(lengths: list[int]) -> None:
    """Raise if ranks have datasets of different lengths: their steps would not hold the same samples."""
    if len(set(lengths)) > 1:
        shown = ", ".join(f"{length} on rank {rank}" for rank, length in enumerate(lengths[:8]))
        raise DataError(
            f"the dataset does not have the same length on all ranks: {shown}; pass the same full dataset on every "
            "rank, and run.shard selects this rank's part"
        )


def _to_numpy(sampling_weights: torch.Tensor | None) -> np.ndarray | None:
    if sampling_weights is None:
        return None
    if not isinstance(sampling_weights, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  # scripts are not type-checked
        raise DataError(
            f"sampling_weights is a {type(sampling_weights).__name__} and must be a tensor with one number per sample: "
            "pass sampling_weights=torch.as_tensor(...)"
        )
    return sampling_weights.detach().double().cpu().numpy()


def _padding_warning(partition: Partition, index: int, min_rows: int) -> str | None:
    """The warning for a step in which some rank has fewer samples than BatchNorm needs."""
    start, stop = partition.positions(index)
    count = partition.shape(index)[0]
    if (stop - start) // partition.world_size // count >= min_rows:
        return None
    return (
        f"step {index} of each epoch has {stop - start} sample(s) for {partition.world_size} rank(s) with {count} "
        f"micro-batch(es) each, and BatchNorm needs {min_rows} rows at a time: samestep adds padding rows, which have "
        "weight 0 in the loss but enter the BatchNorm statistics; pass another global_batch or micro_batch, or "
        "run.shard(drop_last=True)"
    )


def _row_indices(indices: np.ndarray, rows: MicroBatchRows, start: int) -> np.ndarray:
    """The dataset indices of a micro-batch's rows; `indices` are those of the positions from `start` on."""
    real = indices[rows.start - start : rows.stop - start]
    return (
        real
        if not rows.padding
        else np.concatenate([real, np.repeat(indices[rows.padding_position - start], rows.padding)])
    )
