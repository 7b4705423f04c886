"""A stream has the same global batches on any number of ranks and workers, and can be resumed at any step."""

import contextlib
import itertools
import logging
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from samestep.data.sample_rng import sample_rng
from samestep.data.streaming import StreamPartition, StreamStep, hide_worker
from samestep.errors import DataError, SampleError, StateError

MORE_WORKERS_THAN_CORES = "ignore:This DataLoader will create:UserWarning"


class Count(IterableDataset):
    """Yields 0, 1, ... n-1, or has no end."""

    def __init__(self, n: int | None = None):
        self.n = n
        self.reads = 0

    def __iter__(self) -> Iterator[object]:
        for number in itertools.count() if self.n is None else range(self.n):
            self.reads += 1
            yield number


class Split(Count):
    """Splits itself over workers, as torch's documentation advises."""

    def __iter__(self):
        info = get_worker_info()
        return iter(range(self.n)) if info is None else iter(range(info.id, self.n, info.num_workers))


class Seeking(Count):
    """Can seek."""

    position = 0

    def seek(self, position: int) -> None:
        self.position = position

    def __iter__(self):
        self.reads = 0
        for number in range(self.position, self.n):
            self.reads += 1
            yield number


class Stateful(Count):
    """Can save its position."""

    done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]

    def __iter__(self):
        self.reads = 0
        while self.done < self.n:
            self.done += 1
            self.reads += 1
            yield self.done - 1


class Shards(IterableDataset):
    """Shards of given lengths; elements are (shard, number)."""

    def __init__(self, lengths: list[int]):
        self.lengths = lengths
        self.num_shards = len(lengths)
        self.opened = set()

    def shard(self, index: int) -> Iterator[tuple[int, int]]:
        for number in range(self.lengths[index]):
            self.opened.add(index)
            yield index, number

    def __iter__(self):
        return itertools.chain.from_iterable(self.shard(index) for index in range(self.num_shards))


def world(make, size: int, global_batch: int, workers: int = 0, **options) -> list[list[StreamStep]]:
    """Return the steps of each rank, each read from a separate dataset."""
    partitions = [StreamPartition(make(), rank, size, global_batch, **options) for rank in range(size)]
    if not workers:
        return [list(partition) for partition in partitions]
    return [list(DataLoader(partition, batch_size=None, num_workers=workers)) for partition in partitions]


def global_batches(ranks: list[list[StreamStep]]) -> list[list[object]]:
    """Return the samples of every step over all ranks, by position; the ranks must agree on the steps."""
    batches = []
    for steps in itertools.zip_longest(*ranks):
        assert len({(step.number, step.count) for step in steps}) == 1
        assert steps[0].count == sum(len(step.samples) for step in steps)
        pairs = [pair for step in steps for pair in zip(step.positions, step.samples, strict=True)]
        batches.append([sample for _, sample in sorted(pairs)])
    return batches


def chunks(n: int, size: int) -> list[list[int]]:
    return [list(range(start, min(start + size, n))) for start in range(0, n, size)]


@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 9), st.integers(0, 10))
def test_global_batches_are_the_same_on_any_world_size_and_from_any_step(n, global_batch, size, start):
    start = min(start, -(-n // global_batch))
    ranks = world(lambda: Count(n), size, global_batch, start_step=start)
    assert global_batches(ranks) == chunks(n, global_batch)[start:]
    for steps in zip(*ranks, strict=True):
        lengths = [len(step.samples) for step in steps]
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.filterwarnings(MORE_WORKERS_THAN_CORES)
@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("n", "start"), [(23, 0), (24, 0), (3, 0), (0, 0), (23, 2), (23, 6)])
def test_the_number_of_workers_does_not_change_the_steps(n, start, workers):
    for size in (1, 2):
        alone = world(lambda: Count(n), size, 4, start_step=start)
        assert world(lambda: Count(n), size, 4, workers, start_step=start) == alone
        assert global_batches(alone) == chunks(n, 4)[start:]


def test_a_dataset_that_splits_itself_over_workers_loses_no_samples():
    ranks = world(lambda: Split(23), 2, 4, workers=2)
    assert global_batches(ranks) == chunks(23, 4)


def test_with_more_ranks_than_samples_some_ranks_have_none():
    ranks = world(lambda: Count(2), size=5, global_batch=8)
    assert [steps[0].samples for steps in ranks] == [[0], [1], [], [], []]
    assert [steps[0].count for steps in ranks] == [2] * 5


def test_drop_last_leaves_out_the_smaller_last_step():
    assert global_batches(world(lambda: Count(11), 2, 4, drop_last=True)) == chunks(8, 4)
    assert global_batches(world(lambda: Count(11), 2, 4, drop_last=True, start_step=2)) == []


def test_an_endless_stream_can_be_read_for_some_steps():
    partition = StreamPartition(Count(), rank=1, world_size=2, global_batch=6, start_step=100)
    assert [step.samples for step in itertools.islice(partition, 2)] == [[603, 604, 605], [609, 610, 611]]


def test_a_stream_that_can_seek_is_not_read_from_its_beginning(caplog):
    caplog.set_level(logging.INFO, "samestep")
    dataset = Seeking(1000)
    partition = StreamPartition(dataset, rank=0, world_size=2, global_batch=10, start_step=99)
    assert [step.samples for step in partition] == [[990, 991, 992, 993, 994]]
    assert dataset.reads == 10
    assert caplog.messages == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_stream_resumes_from_the_state_of_any_step(workers):
    steps = world(lambda: Stateful(25), 2, 4, workers)[1]
    assert [step.state for step in steps][:3] == [{"done": 4}, {"done": 8}, {"done": 12}]
    dataset = Stateful(25)
    partition = StreamPartition(dataset, rank=1, world_size=2, global_batch=4, start_step=2, start_state=steps[1].state)
    assert [step.samples for step in partition] == [step.samples for step in steps[2:]]
    assert dataset.reads == 25 - 8


def test_a_stream_that_cannot_seek_is_read_from_its_beginning_with_one_message(caplog):
    caplog.set_level(logging.INFO, "samestep")
    dataset = Count(20)
    partitions = [StreamPartition(dataset, rank, 2, 4, start_step=3) for rank in range(2)]
    assert caplog.messages == [
        "Count cannot seek: to resume at step 3 it is read from its beginning (implement seek(position), or "
        "state_dict() and load_state_dict(), to avoid that)"
    ]
    assert [step.samples for step in partitions[0]] == [[12, 13], [16, 17]]
    assert dataset.reads == 20


def test_a_stream_that_ends_before_the_resume_position_is_an_error():
    partition = StreamPartition(Count(9), rank=0, world_size=1, global_batch=4, start_step=4)
    with pytest.raises(StateError, match="the stream ends at position 9 and should resume at 16: it is not the stream"):
        list(partition)


def test_decode_gets_only_the_records_that_the_rank_keeps():
    seen = []

    def decode(record):
        seen.append(record)
        return record * 10

    assert [step.samples for step in StreamPartition(Count(7), 1, 2, 4, decode=decode)] == [[20, 30], [60]]
    assert seen == [2, 3, 6]


class Random(Count):
    """Yields a random number from the RNG of each element."""

    def __iter__(self):
        for _ in range(self.n):
            yield torch.rand((), generator=sample_rng()).item()


def random_decode(record):
    return record, torch.rand((), generator=sample_rng()).item()


@pytest.mark.parametrize(("size", "workers", "start"), [(1, 0, 0), (3, 0, 0), (2, 2, 0), (2, 0, 2)])
def test_random_numbers_are_keyed_by_position(size, workers, start):
    options = {"seed": 1, "epoch": 2, "decode": random_decode}
    alone = global_batches(world(lambda: Random(19), 1, 5, **options))
    assert global_batches(world(lambda: Random(19), size, 5, workers, start_step=start, **options)) == alone[start:]
    assert len({pair for batch in alone for pair in batch}) == 19
    other_epoch = global_batches(world(lambda: Random(19), 1, 5, seed=1, epoch=3, decode=random_decode))
    assert alone != other_epoch


class Shuffled(Count):
    """Has another order in every epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        numbers = list(range(self.n))
        random.Random(self.epoch).shuffle(numbers)
        return iter(numbers)


def test_set_epoch_is_called_in_every_worker():
    first, second = (global_batches(world(lambda: Shuffled(23), 2, 4, workers=2, epoch=epoch)) for epoch in (0, 1))
    assert first != second
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(23))


def steps_by_shards(ranks: list[list[StreamStep]]) -> list[dict[int, object]]:
    """Return the samples of every step by position; a rank may end before others."""
    steps = [dict[int, object]() for _ in range(max(map(len, ranks), default=0))]
    for rank in ranks:
        for number, step in enumerate(rank):
            assert (step.number, step.count, step.state) == (number, None, None)
            pairs = dict(zip(step.positions, step.samples, strict=True))
            assert not pairs.keys() & steps[number].keys()
            steps[number].update(pairs)
    return steps


@pytest.mark.slow
@given(st.lists(st.integers(0, 12), min_size=1, max_size=9), st.integers(1, 12), st.integers(1, 7))
def test_by_shards_every_world_size_has_the_same_global_batches(lengths, global_batch, size):
    alone = steps_by_shards(world(lambda: Shards(lengths), 1, global_batch))
    assert steps_by_shards(world(lambda: Shards(lengths), size, global_batch)) == alone
    samples = [sample for step in alone for sample in step.values()]
    assert sorted(samples) == list(Shards(lengths))
    for number, step in enumerate(alone):
        assert all(position // global_batch == number for position in step)


@pytest.mark.filterwarnings(MORE_WORKERS_THAN_CORES)
@pytest.mark.parametrize("workers", [1, 3])
def test_by_shards_the_number_of_workers_does_not_change_the_steps(workers):
    make = lambda: Shards([9, 4, 7, 0, 5])  # noqa: E731  # shorter than a def
    assert world(make, 2, 4, workers) == world(make, 2, 4)


def test_by_shards_a_rank_reads_only_the_shards_that_feed_it():
    datasets = [Shards([6, 6, 6, 6]) for _ in range(2)]
    for rank, dataset in enumerate(datasets):
        list(StreamPartition(dataset, rank, 2, 8))
    assert [dataset.opened for dataset in datasets] == [{0, 1}, {2, 3}]


def test_by_shards_a_stream_resumes_at_any_step():
    full = world(lambda: Shards([9, 4, 7]), 2, 4)
    assert world(lambda: Shards([9, 4, 7]), 2, 4, start_step=2) == [steps[2:] for steps in full]


class OtherShards(Count):
    """Has the `shard` of Hugging Face datasets, which takes two numbers and does not declare shards."""

    num_shards = 3

    def shard(self, num_shards: int, index: int) -> None:
        raise NotImplementedError


def test_a_stream_with_another_kind_of_shard_method_is_partitioned_by_position():
    assert global_batches(world(lambda: OtherShards(10), 2, 4)) == chunks(10, 4)


class Failing(Count):
    """Fails at one element."""

    def __iter__(self):
        yield from range(5)
        raise OSError("connection lost")


@pytest.mark.parametrize(("workers", "where"), [(0, "in the training process"), (2, "worker 1")])
def test_an_error_in_the_stream_reports_position_rank_and_worker(workers, where):
    steps = iter(DataLoader(StreamPartition(Failing(), 1, 2, 3), batch_size=None, num_workers=workers))
    assert next(steps).samples == [2]
    with pytest.raises(SampleError, match=f"stream failed at position 5 on rank 1, {where}: OSError: connection lost"):
        next(steps)
    # Every worker raises the error; torch ends them when everything is read.
    with contextlib.suppress(SampleError):
        next(steps, None)
    assert next(steps, None) is None


def test_an_error_in_decode_reports_the_position():
    def decode(record):
        return 1 // (record - 3)

    with pytest.raises(
        SampleError, match="decode failed at position 3 on rank 1, in the training process: ZeroDivision"
    ):
        list(StreamPartition(Count(8), 1, 2, 4, decode=decode))


class BrokenSeek(Seeking):
    """Fails to seek."""

    def seek(self, position: int) -> None:
        raise OSError("tape jam")


def test_an_error_of_seek_is_reported():
    with pytest.raises(SampleError, match=r"the stream could not start at position 8 on rank 0, .*: OSError: tape jam"):
        list(StreamPartition(BrokenSeek(9), 0, 1, 4, start_step=2))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (TensorDataset(torch.zeros(3)), "TensorDataset has a length and items, so it is not a stream: use run.shard"),
        ([1, 2, 3], "list has a length and items, so it is not a stream: use run.shard"),
        (iter([1]), "list_iterator is an iterator, which can be read only once"),
        (5, "int has no __iter__, so it is not a stream: pass a torch.utils.data.IterableDataset"),
        (Shards([]), "Shards.num_shards is 0 and must be at least 1"),
    ],
)
def test_a_dataset_that_is_not_a_stream_is_an_error(dataset, message):
    with pytest.raises(DataError, match=message):
        StreamPartition(dataset, 0, 1, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "world_size": 2, "global_batch": 4}, "rank 2 is not in a world of 2"),
        ({"rank": 0, "world_size": 1, "global_batch": 0}, "global_batch is 0 and must be at least 1"),
        ({"rank": 0, "world_size": 1, "global_batch": 4, "start_step": -1}, "step -1 does not exist"),
    ],
)
def test_an_invalid_rank_batch_or_step_is_an_error(options, message):
    with pytest.raises(DataError, match=message):
        StreamPartition(Count(3), **options)


def test_drop_last_is_an_error_for_shards():
    with pytest.raises(DataError, match="drop_last=True needs to know which step is the last"):
        StreamPartition(Shards([3, 4]), 0, 1, 4, drop_last=True)


def test_a_torch_that_stores_its_worker_info_elsewhere_is_an_error(monkeypatch):
    monkeypatch.setattr("samestep.data.streaming.get_worker_info", lambda: "still a worker")
    monkeypatch.setattr(torch_worker, "_worker_info", None)
    with (
        pytest.raises(DataError, match=r"does not let samestep read a full stream in a worker.*use num_workers=0"),
        hide_worker(),
    ):
        pass
