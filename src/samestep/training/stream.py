"""This rank's part of a stream: steps of the global batch from an iterable dataset without a length."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from samestep.data.content_probe import check_same_options, check_same_records, check_same_workers
from samestep.data.ledger import ShardDescription
from samestep.data.loader import CollateFn, KeyedCollate, WorkerSetup, defer_signals, move_to_device
from samestep.data.partition import MicroBatchRows, Partition, split_evenly
from samestep.data.sample_rng import evaluation_batch
from samestep.data.streaming import StreamPartition, StreamStep, check_stream, is_sharded
from samestep.errors import DataError, StateError
from samestep.training.mistakes import check_data
from samestep.training.step import Step
from samestep.training.step_loop import StepLoop
from samestep.training.step_loss import MicroBatch, StepPosition
from samestep.training.training_data import (
    Epoch,
    TrainingData,
    batches_on_device,
    check_num_workers,
    choose_micro_batch,
    evaluation_epoch,
    open_ledger,
)

_NO_SAMPLES = StreamStep(-1, [], [], None, None)


class Stream(TrainingData):
    """This rank's part of an iterable dataset: the same global batches on any number of ranks and workers.

    `for epoch in stream.epochs(1)` trains; `for batch in stream` passes over all records once, for evaluation.
    """

    def __init__(
        self,
        loop: StepLoop,
        dataset: Iterable[object],
        *,
        decode: Callable[[object], object] | None,
        collate_fn: CollateFn | None,
        num_workers: int,
        drop_last: bool,
        micro_batch: int | None,
        passes: int,
    ) -> None:
        super().__init__(loop, passes)
        self._dataset = dataset
        check_data(dataset, "run.stream")
        check_stream(dataset)
        check_num_workers(num_workers)
        context = self._context
        config = context.config
        if is_sharded(dataset) and config.ledger:
            raise DataError(
                "ledger=True does not support a stream in shards, since their lengths are known only at the end: "
                "remove num_shards from the dataset, or pass ledger=False"
            )
        self._decode, self._drop_last = decode, drop_last
        self._collate, self._num_workers = KeyedCollate(collate_fn, config.seed, context.world.rank), num_workers
        self._micro_batch = choose_micro_batch(context, micro_batch)
        shards = int(cast("Any", dataset).num_shards) if is_sharded(dataset) else None
        options = {"drop_last": drop_last, "micro_batch": self._micro_batch, "num_shards": shards}
        check_same_options("run.stream", context.comm.exchange_objects("run.stream", options))
        description = ShardDescription(
            n=None, seed=config.seed, shuffle=False, global_batch=config.global_batch, drop_last=bool(drop_last)
        )
        self._ledger = open_ledger(context, f"stream-{len(context.ledgers)}", description)
        context.record("data", name="stream", dataset=type(dataset).__name__, samples=None, drop_last=bool(drop_last))
        self._number = 0
        self._state: object = None
        self._ended = False
        self._padding: list[object] = []

    def epochs(self, count: int) -> Iterator[Epoch]:
        """The passes over the stream from the current position up to `count` in all."""
        yield from self._epochs(count, self.steps, None)

    def steps(self, epoch: int) -> Iterator[Step]:
        """The steps of one pass from the current position; it ends on all ranks at the same step."""
        self._context.training_data.add(self)
        if self._ledger:
            self._ledger.begin(epoch, self._step)
        parts = iter(()) if self._ended else self._read(epoch, self._step, self._state, self._drop_last)
        read: deque[tuple[StreamStep, int, int, int]] = deque()  # the steps whose micro-batches are read
        micro_batches = self._micro_batches(self._with_counts(parts), read, epoch)
        while (first := next(micro_batches, None)) is not None:
            part, samples, count, first_row = read.popleft()
            position = StepPosition(self._number, self._step, epoch, samples, count, first_row)
            advance, rest = partial(self._advance, position, part), islice(micro_batches, count - 1)
            yield from self._loop.run(Step(self._context, position, chain([first], rest), advance, self._passes))
        if not self._step:
            raise DataError(self._empty_message())
        if self._ledger and not self._ended:
            self._ledger.record_stream_end(epoch, self._step, self._step * self._context.config.global_batch)
        self._begin_epoch(epoch + 1)

    def _evaluation_batches(self) -> Iterator[Any]:
        """All records once, in batches of this rank; not for sharded models, which need the same number per rank."""
        if self._context.predicts:
            raise DataError(
                "run.predict got values of a stream, whose batches depend on the number of ranks: pass a dataset with "
                "a length to run.shard"
            )
        if self._context.lockstep:
            raise DataError(
                "a sharded model cannot be evaluated on a stream: its ranks need the same number of batches, and the "
                "length of a stream is unknown; pass a dataset with a length to run.shard"
            )
        if self._ledger and self._must_compare:
            self._ledger.begin(self._epoch, self._step)
        read: deque[tuple[int, Sequence[int]]] = deque()  # the first row in its step, and the positions of the rows

        def batches() -> Iterator[object]:
            for part in self._read(epoch=0, first=0, state=None, drop_last=False):
                rows = self._micro_batch or len(part.samples) or 1
                for start in range(0, len(part.samples), rows):
                    read.append((start, part.positions[start : start + rows]))
                    yield self._make_batch(part.samples[start : start + rows], 0, part.positions[start])

        for data in self._on_device(batches()):
            start, positions = read.popleft()
            keys = partial(self._keys, evaluation_epoch(self._context.progress.epoch), np.asarray(positions))
            with self._context.padding.batch(len(positions)), evaluation_batch(None, keys):
                yield from self._evaluate_batch(data, start, keys)

    def state_dict(self) -> dict[str, object]:
        """The position of training, the same on every rank; valid on any world size and number of workers."""
        return {
            "epoch": self._epoch,
            "step": self._step,
            "number": self._number,
            "seed": self._context.config.seed,
            "global_batch": self._context.config.global_batch,
            "stream": self._state,
            "ended": self._ended,
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue from a saved position; a stream that can neither seek nor restore itself is read up to there."""
        config = self._context.config
        for name, here in (("global_batch", config.global_batch), ("seed", config.seed)):
            if state.get(name) != here:
                raise StateError(
                    f"the saved position has {name}={state.get(name)} and this stream has {name}={here}, so the "
                    f"samples already trained would differ: pass Run({name}={state.get(name)})"
                )
        epoch, step, self._number = (int(str(state[key])) for key in ("epoch", "step", "number"))
        self._set_position(epoch, step)
        self._state, self._ended = state.get("stream"), bool(state.get("ended"))

    def _begin_epoch(self, number: int) -> None:
        super()._begin_epoch(number)
        self._state, self._ended = None, False

    def _advance(self, position: StepPosition, part: StreamStep, trained: bool) -> None:
        """Advance the position past a step, and record its samples in the ledger, with weight 0 if it was skipped."""
        global_batch = self._context.config.global_batch
        self._step, self._number, self._state = position.index + 1, position.number + 1, part.state
        # a stream that was read to its end may report the state of its beginning
        self._ended = part.count is not None and part.count < global_batch
        if self._ledger:
            first, weight = part.positions[0] if part.positions else position.index * global_batch, float(trained)
            self._ledger.record_training(position.epoch, position.index, first, len(part.positions), weight)
            if self._ended:
                self._ledger.record_stream_end(
                    position.epoch, self._step, position.index * global_batch + position.samples
                )

    def _read(self, epoch: int, first: int, state: object, drop_last: bool) -> Iterator[StreamStep]:
        config, world = self._context.config, self._context.world
        partition = StreamPartition(
            self._dataset, world.rank, world.size, config.global_batch, first, state, config.seed, epoch,
            self._decode, drop_last, self._must_compare or (self._num_workers > 1 and not self._compared),
        )  # fmt: skip
        loader: DataLoader[StreamStep] = DataLoader(
            _as_dataset(partition),
            batch_size=None,
            num_workers=self._num_workers,
            collate_fn=_identity,  # pyright: ignore[reportArgumentType]  # without automatic batching it gets one item
            generator=torch.Generator(),
            worker_init_fn=WorkerSetup() if self._num_workers else None,
        )
        with defer_signals():
            parts = iter(loader)
        return self._compare(parts) if partition.probe else parts

    def _compare(self, parts: Iterator[StreamStep]) -> Iterator[StreamStep]:
        """The same parts; before the first one all ranks, and then all workers, compare the records they begin with."""
        first = next(parts, None)
        probes = first.probes if first is not None else ()
        check_same_records(self._dataset, self._gather_probes(probes))
        for part in chain([] if first is None else [first], parts):
            if part.probes:
                check_same_workers(self._dataset, probes, part.probes)
            yield part

    def _with_counts(self, parts: Iterator[StreamStep]) -> Iterator[tuple[StreamStep, int, int, int]]:
        """Each part with the samples of the step over all ranks, the largest number of any rank, and lower ranks' sum.

        For a stream in shards the ranks exchange their counts.
        """
        rank, size = self._context.world.rank, self._context.world.size
        if not is_sharded(self._dataset):
            for part in parts:
                assert part.count is not None
                yield part, part.count, -(-part.count // size), split_evenly(part.count, size, rank)[0]
            return
        while True:
            part = next(parts, _NO_SAMPLES)
            counts = self._context.comm.exchange_objects("a step of run.stream", len(part.samples))
            if not sum(counts):
                return
            yield part, sum(counts), max(counts), sum(counts[:rank])

    def _micro_batches(
        self,
        steps: Iterator[tuple[StreamStep, int, int, int]],
        read: deque[tuple[StreamStep, int, int, int]],
        epoch: int,
    ) -> Iterator[MicroBatch]:
        """The micro-batches of all steps; each step is appended to `read`, with the number of its micro-batches."""
        chosen: deque[tuple[np.ndarray, int]] = deque()  # of each batch the positions, and how many of them are samples

        def batches() -> Iterator[object]:
            for part, samples, largest, first_row in steps:
                rows = Partition(largest, largest, 0, 1, self._micro_batch).micro_batches(0)
                read.append((part, samples, len(rows), first_row))
                for records, positions, real in self._pad(part, rows):
                    chosen.append((positions, real))
                    yield self._make_batch(records, epoch, int(positions[0]))

        for data in self._context.times.time_reads(self._on_device(batches())):
            positions, real = chosen.popleft()
            weights, make_keys = self._row_weights(len(positions), real), partial(self._keys, epoch, positions)
            yield MicroBatch(data, weights, make_keys, positions.tolist(), real)

    def _pad(self, part: StreamStep, all_rows: list[MicroBatchRows]) -> Iterator[tuple[list[object], np.ndarray, int]]:
        """The same number of equally shaped micro-batches on every rank; missing rows repeat a sample with weight 0."""
        min_rows = self._context.min_rows
        samples, positions = part.samples, np.asarray(part.positions, dtype=np.int64)
        self._padding = samples[-1:] or ([part.padding_sample] if part.padding_sample is not None else self._padding)
        assert self._padding  # some rank has a sample of this step, and a rank without any receives one of them
        for rows in all_rows:
            chosen, row_positions = samples[rows.start : rows.stop], positions[rows.start : rows.stop]
            missing = rows.rows - len(chosen)
            if min_rows:  # BatchNorm should see no padding if it can do without
                missing = min(missing, max(0, min_rows - len(chosen)))
            row_positions = np.concatenate([row_positions, np.zeros(missing, dtype=np.int64)])
            yield chosen + missing * self._padding, row_positions, len(chosen)

    def _make_batch(self, samples: list[object], epoch: int, first: int) -> object:
        batch = self._collate(samples, epoch, first)
        if warning := self._collate.warning:
            self._context.warn_once(warning)
        return batch

    def _on_device(self, batches: Iterator[object]) -> Iterator[object]:
        """The batches on the device; those of a stream in shards are not copied ahead.

        Its ranks exchange counts when they read a step: an error in reading the next step must not wait until this
        step is trained, since the other ranks would wait for its count.
        """
        device, dtype = self._context.device, self._context.convert_to
        if is_sharded(self._dataset):
            return (move_to_device(batch, device, dtype) for batch in batches)
        return batches_on_device(batches, device, dtype)

    def _empty_message(self) -> str:
        name = type(self._dataset).__name__
        if self._drop_last:
            return f"{name} has fewer records than one global batch, and drop_last=True drops them all: omit drop_last"
        return f"{name} has no records, so there is nothing to train on: check the path it reads from"


def _identity(part: StreamStep) -> StreamStep:
    return part


def _as_dataset(partition: StreamPartition) -> IterableDataset[StreamStep]:
    return partition
