"""This rank's part of a stream: steps of the global batch from data that has no length."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from samestep.data.ledger import ShardDescription, ShardLedger
from samestep.data.loader import CollateFn, WorkerSetup, check_num_workers, defer_signals, move_to_device
from samestep.data.partition import Partition
from samestep.data.sample_rng import sample_keys
from samestep.data.streaming import StreamPartition, StreamStep, check_stream, is_sharded
from samestep.errors import DataError, StateError
from samestep.training.data_config import Terms
from samestep.training.shard import Epoch, note_if_trained, under_way
from samestep.training.step import MicroBatch, Step, StepPlace

_NOTHING = StreamStep(-1, [], [], None, None)


@dataclass(frozen=True)
class StreamSource:
    """Where a stream's samples come from and how they are read."""

    dataset: Iterable[object]
    """The user's iterable dataset."""
    decode: Callable[[object], object] | None
    """Makes a sample of a record that this rank keeps."""
    collate: CollateFn | None
    """Makes a batch of samples; None: torch's default."""
    workers: int
    """Data workers of this rank; each reads the whole stream and keeps its steps."""
    micro_batch: int | None
    """The most rows that go through the model at once."""
    drop_last: bool
    """Leave out a last, smaller step."""


class Stream:
    """This rank's part of an iterable dataset: the same global batches on any number of ranks and workers.

    `for epoch in stream.epochs(1)` trains; `for batch in stream` passes over everything once, for evaluation.
    """

    def __init__(self, source: StreamSource, terms: Terms, account: ShardLedger | None) -> None:
        self._source, self._terms, self._engine, self._account = source, terms, terms.engine, account
        self._epoch = self._step = self._number = 0
        self._place: object = None
        self._ended = False
        self._spare: list[object] = []

    def epochs(self, count: int) -> Iterator[Epoch]:
        """Passes over the stream from where this one stands up to `count` in all."""
        note_if_trained(self._epoch, count)
        while self._epoch < count:
            number = self._engine.epoch = self._epoch
            yield Epoch(number, self.steps, None)
            if self._epoch == number:  # the loop over its steps was left early
                self._begin_epoch(number + 1)

    def __iter__(self) -> Iterator[Any]:
        """Everything once, in batches of this rank; not for sharded models, whose ranks need equally many batches."""
        if self._engine.lockstep:
            raise DataError(
                "a sharded model cannot be evaluated on a stream: its ranks need equally many batches, and a stream "
                "does not "
                "know how many it has; give run.shard a dataset with a length"
            )
        collate = self._source.collate or default_collate
        for part in self._read(epoch=0, first=0, state=None, drop_last=False):
            rows = self._source.micro_batch or len(part.samples) or 1
            for at in range(0, len(part.samples), rows):
                yield move_to_device(collate(part.samples[at : at + rows]), self._terms.device)

    def state_dict(self) -> dict[str, object]:
        """Where training stands, the same on every rank: valid on any world size and any number of workers."""
        return {
            "epoch": self._epoch,
            "step": self._step,
            "number": self._number,
            "seed": self._terms.seed,
            "global_batch": self._terms.global_batch,
            "stream": self._place,
            "ended": self._ended,
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Stand where `state` was taken; a stream that can neither seek nor restore itself is read up to there."""
        for name, here in (("global_batch", self._terms.global_batch), ("seed", self._terms.seed)):
            if state.get(name) != here:
                raise StateError(
                    f"the saved position has {name}={state.get(name)} and this stream has {name}={here}: the samples "
                    f"already seen would not be the same; pass Run({name}={state.get(name)})"
                )
        self._epoch, self._step, self._number = (int(str(state[key])) for key in ("epoch", "step", "number"))
        self._place, self._ended = state.get("stream"), bool(state.get("ended"))
        self._engine.epoch = under_way(self._epoch, self._step)

    def steps(self, epoch: int) -> Iterator[Step]:
        """The steps of one pass from where this stream stands; it ends on all ranks together."""
        self._engine.trained.add(self)
        if self._account:
            self._account.begin(epoch, self._step)
        parts = iter(()) if self._ended else self._read(epoch, self._step, self._place, self._source.drop_last)
        for part, count, largest in self._together(parts):
            micro_batches = list(self._micro_batches(part, largest, epoch))
            place = StepPlace(self._number, self._step, epoch, count, len(micro_batches))
            step = Step(place, iter(micro_batches), self._engine, partial(self._count, place, part))
            yield from self._engine.hand_out(step)
            self._stand_behind(place, part)
            self._engine.end_step(step)
        if not self._step:
            raise DataError(_tell_nothing(self._source))
        self._begin_epoch(epoch + 1)

    def _begin_epoch(self, number: int) -> None:
        self._epoch, self._step, self._place, self._ended = number, 0, None, False

    def _count(self, place: StepPlace, part: StreamStep) -> None:
        """Stand behind a step whose samples have been learnt from, and write that down."""
        self._stand_behind(place, part)
        if self._account:
            first = part.positions[0] if part.positions else place.index * self._terms.global_batch
            self._account.record_training(place.epoch, place.index, first, len(part.positions))

    def _stand_behind(self, place: StepPlace, part: StreamStep) -> None:
        self._step, self._number, self._place = place.index + 1, place.number + 1, part.state
        # one that was read to its end may tell that it stands at its beginning again
        self._ended = part.count is not None and part.count < self._terms.global_batch

    def _read(self, epoch: int, first: int, state: object, drop_last: bool) -> Iterator[StreamStep]:
        source, terms = self._source, self._terms
        cut = StreamPartition(
            source.dataset, terms.world.rank, terms.world.size, terms.global_batch, first, state, terms.seed, epoch,
            source.decode, drop_last,
        )  # fmt: skip
        loader: DataLoader[StreamStep] = DataLoader(
            _typed(cut),
            batch_size=None,
            num_workers=source.workers,
            collate_fn=_as_it_is,  # pyright: ignore[reportArgumentType]  # without automatic batches it is given one item
            generator=torch.Generator(),
            worker_init_fn=WorkerSetup() if source.workers else None,
        )
        with defer_signals():
            return iter(loader)

    def _together(self, parts: Iterator[StreamStep]) -> Iterator[tuple[StreamStep, int, int]]:
        """Each part, the samples of the whole step and of its fullest rank; for shards the other ranks are asked."""
        size = self._terms.world.size
        if not is_sharded(self._source.dataset):
            for part in parts:
                assert part.count is not None
                yield part, part.count, -(-part.count // size)
            return
        while True:
            part = next(parts, _NOTHING)
            counts = self._engine.exchange_counts("a step of run.stream", len(part.samples))
            if not sum(counts):
                return
            yield part, sum(counts), max(counts)

    def _micro_batches(self, part: StreamStep, largest: int, epoch: int) -> Iterator[MicroBatch]:
        """Equally many of equal shape on every rank; one with too few samples repeats a sample without weight."""
        samples, positions = part.samples, np.asarray(part.positions, dtype=np.int64)
        self._spare = samples[-1:] or ([part.padding_sample] if part.padding_sample is not None else self._spare)
        assert self._spare  # a step has a sample on some rank, and a rank without any is given one of theirs
        cut = Partition(largest, largest, 0, 1, self._source.micro_batch)
        collate, fewest = self._source.collate or default_collate, self._engine.fewest_rows
        for rows in cut.micro_batches(0):
            chosen, at = samples[rows.start : rows.stop], positions[rows.start : rows.stop]
            missing = rows.rows - len(chosen)
            if fewest:  # BatchNorm is to see no copies where it can do without
                missing = min(missing, max(0, fewest - len(chosen)))
            at = np.concatenate([at, np.zeros(missing, dtype=np.int64)])
            data = move_to_device(collate(chosen + missing * self._spare), self._terms.device)
            weights = (torch.arange(len(at)) < len(chosen)).float().to(self._terms.device)
            yield MicroBatch(data, weights, partial(self._keys, epoch, at), at.tolist(), full=not missing)

    def _keys(self, epoch: int, at: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(sample_keys(self._terms.seed, epoch, at).view(np.int64)).to(self._terms.device)


def open_stream(terms: Terms, source: StreamSource) -> Stream:
    """A stream under the terms of a run."""
    check_stream(source.dataset)
    check_num_workers(source.workers)
    if is_sharded(source.dataset) and terms.ledger:
        raise DataError(
            "ledger=True cannot keep account of a stream in shards: only its end tells how long they were; leave "
            "num_shards out of the "
            "dataset, or run with ledger=False"
        )
    description = ShardDescription(
        n=None, seed=terms.seed, shuffle=False, global_batch=terms.global_batch, drop_last=source.drop_last
    )
    source = replace(source, micro_batch=terms.rows(source.micro_batch))
    return Stream(source, terms, terms.account(None, "stream", description))


def _tell_nothing(source: StreamSource) -> str:
    name = type(source.dataset).__name__
    if source.drop_last:
        return f"{name} gave fewer records than one global batch, and drop_last=True drops them all: leave it out"
    return f"{name} gave no record at all: there is nothing to train on; check the path it reads from"


def _as_it_is(part: StreamStep) -> StreamStep:
    return part


def _typed(cut: StreamPartition) -> IterableDataset[StreamStep]:
    return cut
