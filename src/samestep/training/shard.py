"""This rank's part of a dataset: epochs of steps for training, a pass over everything for evaluation."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from samestep.data import partition as plan_batch
from samestep.data.ledger import ShardDescription, ShardLedger
from samestep.data.loader import BatchRequest, CollateFn, Loader, MapDataset
from samestep.data.partition import EvaluationPartition, Partition
from samestep.data.permutation import OrderReader, SampleOrder
from samestep.data.sample_rng import NO_SETTING, SampleIds, evaluation_batch, sample_keys
from samestep.errors import DataError, StateError
from samestep.messages import WarnOnce, info
from samestep.training.data_config import Terms
from samestep.training.step import MicroBatch, Step, StepPlace
from samestep.training.step_engine import RunEngine


class Epoch:
    """One pass over the data in steps of the global batch; iterate over it once."""

    def __init__(self, number: int, steps: Callable[[int], Iterator[Step]], left: Callable[[], int] | None) -> None:
        self._steps, self._left, self._begun = steps, left, False
        self.number = number
        """Which pass this is, from 0."""

    def __len__(self) -> int:
        if self._left is None:
            raise DataError(
                "a stream does not know how many steps it has: iterate over it, or give run.shard a dataset with a "
                "length"
            )
        return self._left()

    def __iter__(self) -> Iterator[Step]:
        if self._begun:
            raise DataError(
                f"epoch {self.number} was iterated twice: its samples would count twice; ask for more epochs(...)"
            )
        self._begun = True
        return self._steps(self.number)


def note_if_trained(epoch: int, count: int) -> None:
    """Say so where nothing is left to train: a finished run that is started again would end without a word."""
    if epoch and epoch >= count:
        info(
            f"epochs({count}): {epoch} are trained already, nothing is left to do; epochs({epoch + 1}) trains one more"
        )


def under_way(epoch: int, step: int) -> int:
    """The epoch under way at a position: before the first step of one it is still the one before."""
    return epoch if step else max(0, epoch - 1)


Settings = Callable[[int], object]


@dataclass(frozen=True)
class Source:
    """Where a shard's samples come from and how they are read."""

    dataset: MapDataset
    """The user's dataset."""
    order: SampleOrder
    """Which sample stands at which position."""
    collate: CollateFn | None
    """Makes a batch of samples; None: torch's default."""
    workers: int
    """Data workers of this rank."""
    settings: Settings | None
    """A value for each epoch that reaches every sample of it."""
    device: torch.device
    """Where batches are wanted."""


class Shard:
    """This rank's part of a dataset, exactly once over all ranks.

    `for epoch in shard.epochs(10)` trains; `for batch in shard` passes over everything once, for evaluation.
    """

    def __init__(
        self, source: Source, cut: Partition, engine: RunEngine, account: ShardLedger | None, name: str
    ) -> None:
        self._source, self._cut, self._engine, self._account, self._name = source, cut, engine, account, name
        self._reader = OrderReader(source.order, cut.read_range, cut.steps)
        self._loaders: dict[str, Loader] = {}
        engine.at_end.append(self._loaders.clear)  # data workers end with the run, not when Python collects them
        self._epoch = self._step = 0
        self._voice = WarnOnce()
        self._weights: dict[tuple[int, int], torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._pass())

    def epochs(self, count: int) -> Iterator[Epoch]:
        """Epochs from where this shard stands up to `count` in all; a resumed one goes on at its next step."""
        note_if_trained(self._epoch, count)
        self._engine.expect(count * self._cut.steps, self._epoch * self._cut.steps + self._step)
        while self._epoch < count:
            number = self._engine.epoch = self._epoch
            yield Epoch(number, self.steps, self.steps_left)
            if self._epoch == number:  # the loop over its steps was left early
                self._epoch, self._step = number + 1, 0

    def __iter__(self) -> Iterator[Any]:
        """Everything once, in the order of the dataset, in batches of this rank; nothing padded counts."""
        whole = self._pass()
        setting = self._setting(self._engine.epoch)
        # A sharded model needs equally many calls on every rank, not equal shapes: only a batch without any sample is
        # filled, and with one row.
        requests = (BatchRequest(0, np.arange(*whole.read_range(k)), setting) for k in range(len(whole)))
        number = self._account.begin_evaluation(self._epoch, self._step) if self._account else 0
        for k, data in enumerate(self._loader("evaluation").read(requests)):
            part = whole.batch(k)
            samples = SampleIds(self._name, self._engine.epoch, list(range(*whole.read_range(k))), part.real)
            with self._engine.padding.handed_out(rows=0 if part.real else 1), evaluation_batch(samples):
                yield data
            if self._account:
                self._account.record_evaluation(number, k, part.start, part.real)
        if self._account:
            self._account.end_evaluation(number)

    def state_dict(self) -> dict[str, int]:
        """Where training stands, the same on every rank: valid on any world size and any number of workers."""
        return {
            "epoch": self._epoch,
            "step": self._step,
            "seed": self._source.order.seed,
            "n": self._cut.n,
            "global_batch": self._cut.global_batch,
            "shuffle": self._source.order.shuffle,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Stand where `state` was taken: the next step holds exactly the next samples."""
        shuffle = self._source.order.shuffle
        state = {"shuffle": shuffle, **state}  # an earlier samestep saved positions that do not tell it
        for name, here, remedy in (
            ("n", self._cut.n, "give the same dataset, or begin anew in another folder"),
            ("global_batch", self._cut.global_batch, f"pass Run(global_batch={state.get('global_batch')})"),
            ("seed", self._source.order.seed, f"pass Run(seed={state.get('seed')})"),
            ("shuffle", shuffle, f"pass run.shard(shuffle={state.get('shuffle')})"),
        ):
            if state.get(name) != here:
                raise StateError(
                    f"the saved position has {name}={state.get(name)} and this shard has {name}={here}: the samples "
                    f"already seen would not be the same; {remedy}"
                )
        self._epoch, self._step = state["epoch"], state["step"]
        self._engine.epoch = under_way(self._epoch, self._step)

    def steps(self, epoch: int) -> Iterator[Step]:
        """The steps of an epoch from where this shard stands."""
        self._engine.trained.add(self)
        first = self._step
        if self._account:
            self._account.begin(epoch, first)
        stream = self._micro_batches(epoch, first)
        for index in range(first, self._cut.steps):
            start, stop = self._cut.positions(index)
            count = self._cut.shape(index)[0]
            place = StepPlace(epoch * self._cut.steps + index, index, epoch, stop - start, count, self._name)
            step = Step(place, islice(stream, count), self._engine, partial(self._count, epoch, index))
            yield from self._engine.hand_out(step)
            self._step = index + 1
            self._engine.end_step(step)
        self._epoch, self._step = epoch + 1, 0

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the global batch in one epoch, on any world size: what a learning-rate schedule wants to know."""
        return self._cut.steps

    def steps_left(self) -> int:
        """How many steps the epoch under way still has."""
        return self._cut.steps - self._step

    def _count(self, epoch: int, index: int) -> None:
        """Stand behind a step whose samples have been learnt from, and write that down."""
        self._step = index + 1
        if self._account:
            begin, end = self._cut.slice(index)
            self._account.record_training(epoch, index, begin, end - begin)

    def _micro_batches(self, epoch: int, first: int) -> Iterator[MicroBatch]:
        asked: deque[tuple[int, np.ndarray]] = deque()
        setting = self._setting(epoch)
        fewest = self._engine.fewest_rows

        def upcoming() -> Iterator[BatchRequest]:
            """What to read, in order; how it is to be weighed waits in `asked`."""
            for index in range(first, self._cut.steps):
                indices, start = self._reader.read(epoch, index), self._cut.read_range(index)[0]
                if self._cut.rank == 0 and (told := _tell_copies(self._cut, index, fewest)):
                    self._voice.warn_once(told)
                for part in self._cut.micro_batches(index):
                    chosen = _rows(indices, part, start)
                    if fewest:  # ranks need equally many backward passes, not equal shapes
                        chosen = np.resize(chosen, max(part.real, fewest))
                    asked.append((part.real, chosen))
                    yield BatchRequest(epoch, chosen, setting)

        for data in self._loader("training").read(upcoming()):
            real, indices = asked.popleft()
            weights = self._row_weights(len(indices), real)
            keys = partial(self._keys, epoch, indices)
            yield MicroBatch(data, weights, keys, indices.tolist(), full=real == len(indices))

    def _keys(self, epoch: int, indices: np.ndarray) -> torch.Tensor:
        words = sample_keys(self._source.order.seed, epoch, indices).view(np.int64)
        return torch.from_numpy(words).to(self._source.device)

    def _row_weights(self, rows: int, real: int) -> torch.Tensor:
        if (rows, real) not in self._weights:
            weights = (torch.arange(rows) < real).float()
            self._weights[rows, real] = weights.to(self._source.device)
        return self._weights[rows, real]

    def _pass(self) -> EvaluationPartition:
        rows = self._cut.micro_batch or -(-self._cut.global_batch // self._cut.world_size)
        return EvaluationPartition(
            self._cut.n, rows, self._cut.rank, self._cut.world_size, lockstep=self._engine.lockstep
        )

    def _setting(self, epoch: int) -> object:
        return NO_SETTING if self._source.settings is None else self._source.settings(epoch)

    def _loader(self, purpose: str) -> Loader:
        """One set of workers for each purpose: an evaluation in the midst of an epoch must not disturb it."""
        if purpose not in self._loaders:
            source = self._source
            self._loaders[purpose] = Loader(
                source.dataset, source.order.seed, self._cut.rank, source.collate, source.workers, source.device
            )
        return self._loaders[purpose]


@dataclass(frozen=True)
class Reading:
    """What the user asked for in run.shard."""

    shuffle: bool
    """Another order in every epoch."""
    weights: torch.Tensor | None
    """Draw with replacement by these."""
    collate: CollateFn | None
    """Makes a batch of samples."""
    workers: int | None
    """Data workers of each rank; None: chosen by the cores."""
    drop_last: bool
    """Leave out the last, smaller step of an epoch."""
    micro_batch: int | None
    """The most rows that go through the model at once."""
    settings: Settings | None
    """A value for each epoch that reaches every sample of it."""
    name: str | None
    """What the ledger calls it; None: shard-0, shard-1 and so on."""


def open_shard(terms: Terms, dataset: MapDataset, reading: Reading) -> Shard:
    """A shard under the terms of a run."""
    n = check_dataset(dataset)
    order = SampleOrder(n, terms.seed, reading.shuffle, _numbers(reading.weights))
    rows = terms.rows(reading.micro_batch)
    cut = Partition(n, terms.global_batch, terms.world.rank, terms.world.size, rows, reading.drop_last)
    check_lengths(terms.engine.exchange_counts("run.shard", n))
    workers = terms.workers_for(dataset, reading.workers)
    if cut.dropped:
        terms.say(f"drop_last: {cut.dropped} of {n} samples are left out of every epoch")
    weighted = reading.weights is not None
    description = ShardDescription(n, terms.seed, reading.shuffle, terms.global_batch, weighted, reading.drop_last)
    source = Source(dataset, order, reading.collate, workers, reading.settings, terms.device)
    account = terms.account(reading.name, "shard", description)
    terms.engine.shards += 1
    return Shard(source, cut, terms.engine, account, reading.name or f"shard-{terms.engine.shards - 1}")


def _numbers(weights: torch.Tensor | None) -> np.ndarray | None:
    if weights is None:
        return None
    if not isinstance(weights, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  # what scripts pass is not typed
        raise DataError(
            f"weights are a {type(weights).__name__} and must be a tensor with one number for each sample: "
            "pass weights=torch.as_tensor(...)"
        )
    return weights.detach().double().cpu().numpy()


def check_lengths(lengths: list[int]) -> None:
    """Raise where ranks see datasets of different lengths: their steps would not hold the same samples."""
    if len(set(lengths)) > 1:
        told = ", ".join(f"{length} on rank {rank}" for rank, length in enumerate(lengths[:8]))
        raise DataError(
            f"the dataset has not the same length on all ranks: {told}; every rank must be given the whole of the same "
            "data, and run.shard takes this rank's part of it"
        )


def check_dataset(dataset: object) -> int:
    """The length of a map-style dataset, or what is wrong with it."""
    if not hasattr(dataset, "__len__"):
        raise DataError(
            f"{type(dataset).__name__} has no length, so its samples cannot be numbered: use run.stream(...) for an "
            "iterable dataset, "
            "or give it a __len__"
        )
    if not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{type(dataset).__name__} has no __getitem__: run.shard needs a map-style dataset; use run.stream(...)"
        )
    length = len(dataset)  # pyright: ignore[reportArgumentType]  # it has __len__, as was just seen
    if length == 0:
        raise DataError(f"{type(dataset).__name__} is empty: there is nothing to shard; check the path it reads from")
    return length


def _tell_copies(cut: Partition, index: int, fewest: int) -> str | None:
    """What to say of a step in which some rank has fewer samples than BatchNorm can compute with."""
    start, stop = cut.positions(index)
    count = cut.shape(index)[0]
    if (stop - start) // cut.world_size // count >= fewest:
        return None
    return (
        f"step {index} of each epoch has {stop - start} sample(s) for {cut.world_size} rank(s) in {count} "
        f"micro-batch(es) each, and BatchNorm needs {fewest} at a time: copies fill in, which weigh nothing in the "
        "loss but enter the statistics of BatchNorm; another global_batch or micro_batch, or "
        "run.shard(drop_last=True), avoids it"
    )


def _rows(indices: np.ndarray, part: plan_batch.MicroBatchRows, start: int) -> np.ndarray:
    """The dataset indices of a micro-batch's rows; `indices` are those of the positions from `start` on."""
    real = indices[part.start - start : part.stop - start]
    return (
        real
        if not part.padding
        else np.concatenate([real, np.repeat(indices[part.padding_position - start], part.padding)])
    )
