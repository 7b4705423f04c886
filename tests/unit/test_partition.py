"""The partition of steps over ranks has every sample exactly once and the same global batches on any world size."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from samestep.data.partition import EvaluationPartition, MicroBatchRows, Partition, split_evenly, steps_per_epoch
from samestep.errors import DataError

samples = st.integers(1, 2_000)
batches = st.integers(1, 300)
worlds = st.integers(1, 64)
micro = st.none() | st.integers(1, 40)


def positions_of(step: int, size: int, n: int, global_batch: int, micro_batch: int | None) -> list[int]:
    """Return the positions that all ranks count in a step, in the order of ranks and micro-batches."""
    partitions = [Partition(n, global_batch, rank, size, micro_batch) for rank in range(size)]
    return [
        p for partition in partitions for rows in partition.micro_batches(step) for p in range(rows.start, rows.stop)
    ]


@given(st.integers(0, 10_000), st.integers(1, 200))
def test_even_parts_cover_everything_and_differ_by_at_most_one(n: int, parts: int) -> None:
    ranges = [split_evenly(n, parts, k) for k in range(parts)]
    sizes = [stop - start for start, stop in ranges]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == n
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@settings(max_examples=80, deadline=None)
@given(samples, batches, worlds, micro)
def test_every_sample_counts_exactly_once_in_an_epoch(
    n: int, global_batch: int, size: int, micro_batch: int | None
) -> None:
    steps = steps_per_epoch(n, global_batch, drop_last=False)
    counted = [p for step in range(steps) for p in positions_of(step, size, n, global_batch, micro_batch)]
    assert counted == list(range(n))


@settings(max_examples=80, deadline=None)
@given(samples, batches, micro, st.lists(worlds, min_size=1, max_size=6), st.data())
def test_world_size_and_micro_batch_may_change_at_any_step(
    n: int, global_batch: int, micro_batch: int | None, sizes: list[int], data: st.DataObject
) -> None:
    steps = steps_per_epoch(n, global_batch, drop_last=False)
    turns = sorted(data.draw(st.lists(st.integers(0, steps), min_size=len(sizes) - 1, max_size=len(sizes) - 1)))
    bounds = [0, *turns, steps]
    counted: list[list[int]] = []
    for size, first, last in zip(sizes, bounds, bounds[1:], strict=False):
        rows = data.draw(micro)
        counted += [positions_of(step, size, n, global_batch, rows) for step in range(first, last)]
    assert counted == [positions_of(step, 1, n, global_batch, micro_batch) for step in range(steps)]


@settings(max_examples=150, deadline=None)
@given(samples, batches, worlds, micro, st.data())
def test_all_ranks_have_the_same_number_of_micro_batches_of_the_same_shape(
    n: int, global_batch: int, size: int, micro_batch: int | None, data: st.DataObject
) -> None:
    step = data.draw(st.integers(0, steps_per_epoch(n, global_batch, drop_last=False) - 1))
    partitions = [Partition(n, global_batch, rank, size, micro_batch) for rank in range(size)]
    shapes = {tuple(rows.rows for rows in partition.micro_batches(step)) for partition in partitions}
    count, rows = partitions[0].shape(step)
    largest = max(stop - start for start, stop in (partition.slice(step) for partition in partitions))
    assert shapes == {(rows,) * count}
    assert rows <= (micro_batch or largest)
    assert count == (1 if micro_batch is None else -(-largest // micro_batch))
    assert (rows - 1) * count < largest  # fewer rows would not be enough


@settings(max_examples=150, deadline=None)
@given(samples, batches, worlds, micro, st.data())
def test_padding_repeats_a_sample_that_the_rank_reads_in_any_case(
    n: int, global_batch: int, size: int, micro_batch: int | None, data: st.DataObject
) -> None:
    partition = Partition(n, global_batch, data.draw(st.integers(0, size - 1)), size, micro_batch)
    step = data.draw(st.integers(0, partition.steps - 1))
    first, last = partition.read_range(step)
    start, stop = partition.slice(step)
    assert last > first
    assert (first, last) == (start, stop) or (start == stop and first == partition.positions(step)[0])
    for rows in partition.micro_batches(step):
        assert first <= rows.padding_position < last
        assert rows.padding >= 0
        assert rows.real == 0 or first <= rows.start < rows.stop <= last


def test_with_more_ranks_than_samples_some_ranks_have_only_padding() -> None:
    partitions = [Partition(n=3, global_batch=8, rank=rank, world_size=5, micro_batch=None) for rank in range(5)]
    assert [partition.micro_batches(0) for partition in partitions] == [
        [MicroBatchRows(0, 1, padding=0, padding_position=0)],
        [MicroBatchRows(1, 2, padding=0, padding_position=1)],
        [MicroBatchRows(2, 3, padding=0, padding_position=2)],
        [MicroBatchRows(3, 3, padding=1, padding_position=0)],
        [MicroBatchRows(3, 3, padding=1, padding_position=0)],
    ]


def test_a_rank_with_the_smaller_slice_pads_with_a_sample_of_its_slice() -> None:
    partition = Partition(n=5, global_batch=5, rank=1, world_size=2, micro_batch=1)
    assert partition.micro_batches(0) == [
        MicroBatchRows(3, 4, 0, 3),
        MicroBatchRows(4, 5, 0, 4),
        MicroBatchRows(5, 5, 1, 3),
    ]


def test_the_last_step_may_be_smaller() -> None:
    partition = Partition(n=10, global_batch=4, rank=0, world_size=1)
    assert (partition.steps, partition.dropped) == (3, 0)
    assert [partition.positions(step) for step in range(3)] == [(0, 4), (4, 8), (8, 10)]


def test_drop_last_leaves_out_the_smaller_last_step() -> None:
    partition = Partition(n=10, global_batch=4, rank=0, world_size=1, drop_last=True)
    assert (partition.steps, partition.dropped) == (2, 2)
    with pytest.raises(DataError, match=r"step 2 is not in an epoch of 2 steps: steps are 0 to 1"):
        partition.positions(2)


def test_drop_last_drops_nothing_if_the_global_batch_divides_the_dataset() -> None:
    partition = Partition(n=8, global_batch=4, rank=0, world_size=1, drop_last=True)
    assert (partition.steps, partition.dropped) == (2, 0)


def test_ten_samples_on_four_ranks_count_ten_and_not_twelve_as_in_distributed_sampler() -> None:
    slices = [range(*Partition(n=10, global_batch=10, rank=rank, world_size=4).slice(0)) for rank in range(4)]
    torch_parts = [list(DistributedSampler(range(10), num_replicas=4, rank=rank, shuffle=False)) for rank in range(4)]
    assert sum(map(len, slices)) == 10
    assert sum(map(len, torch_parts)) == 12
    assert sorted(p for part in slices for p in part) == list(range(10))
    assert sorted(p for part in torch_parts for p in part) == [0, 0, 1, 1, *range(2, 10)]


@pytest.mark.parametrize("global_batch", [4096, 1_000_003, 5000])
def test_slices_of_4096_ranks_over_a_billion_samples_have_no_gap_or_overlap(global_batch: int) -> None:
    n, size = 1_000_000_000, 4096
    partitions = [Partition(n, global_batch, rank, size, micro_batch=50) for rank in range(size)]
    last = partitions[0].steps - 1
    assert last == (n - 1) // global_batch
    for step in (0, 1, last // 2, last - 1, last):
        slices = [partition.slice(step) for partition in partitions]
        start, stop = partitions[0].positions(step)
        assert (start, stop) == (step * global_batch, min((step + 1) * global_batch, n))
        assert slices[0][0] == start
        assert slices[-1][1] == stop
        assert all(left[1] == right[0] for left, right in itertools.pairwise(slices))
        micro_batches = [partition.micro_batches(step) for partition in partitions]
        assert len({(len(own), own[0].rows) for own in micro_batches}) == 1
        assert sum(rows.real for own in micro_batches for rows in own) == stop - start


@settings(max_examples=80, deadline=None)
@given(samples, st.integers(1, 50), worlds)
def test_an_evaluation_reads_every_sample_once_without_padding(n: int, rows: int, size: int) -> None:
    partitions = [EvaluationPartition(n, rows, rank, size) for rank in range(size)]
    read = [one.batch(k) for one in partitions for k in range(len(one))]
    assert [p for batch in read for p in range(batch.start, batch.stop)] == list(range(n))
    assert all(batch.padding == 0 and 1 <= batch.real <= rows for batch in read)


@settings(max_examples=80, deadline=None)
@given(samples, st.integers(1, 50), worlds)
def test_an_evaluation_in_lockstep_reads_every_sample_once_in_equal_shapes(n: int, rows: int, size: int) -> None:
    partitions = [EvaluationPartition(n, rows, rank, size, lockstep=True) for rank in range(size)]
    assert len({len(one) for one in partitions}) == 1
    read = [one.batch(k) for one in partitions for k in range(len(one))]
    assert [p for batch in read for p in range(batch.start, batch.stop)] == list(range(n))
    assert len({batch.rows for batch in read}) == 1
    assert read[0].rows <= rows
    for one in partitions:
        for k in range(len(one)):
            first, last = one.read_range(k)
            assert first <= one.batch(k).padding_position < last
            assert 0 <= first < last <= n


def test_a_rank_without_samples_has_no_evaluation_batch_unless_in_lockstep() -> None:
    assert len(EvaluationPartition(n=3, rows=2, rank=3, world_size=4)) == 0
    assert EvaluationPartition(n=3, rows=2, rank=3, world_size=4, lockstep=True).batch(0) == MicroBatchRows(
        3, 3, padding=1, padding_position=0
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Partition(0, 4, 0, 1),
            "the dataset is empty: it has 0 samples and needs at least 1; check what it reads",
        ),
        (
            lambda: Partition(5, 0, 0, 1),
            "global_batch is 0 and must be at least 1: pass, for example, global_batch=256",
        ),
        (lambda: Partition(5, -2, 0, 1), "global_batch is -2 and must be at least 1"),
        (
            lambda: Partition(5, 4, 0, 1, 0),
            "micro_batch is 0 and must be at least 1: pass micro_batch=1 or more, or leave",
        ),
        (lambda: Partition(5, 4, 4, 4), "rank 4 is not in a world of 4: ranks are 0 to 3"),
        (lambda: Partition(5, 4, -1, 4), "rank -1 is not in a world of 4"),
        (lambda: Partition(5, 4, 0, 0), "world_size is 0 and must be at least 1"),
        (
            lambda: Partition(10, 256, 0, 1, drop_last=True),
            "the dataset has 10 samples, the global batch is 256, and drop_last=True drops them all: "
            "use drop_last=False, or global_batch=10 or less",
        ),
        (lambda: Partition(10, 4, 0, 1).slice(3), "step 3 is not in an epoch of 3 steps: steps are 0 to 2"),
        (lambda: Partition(10, 4, 0, 1).positions(-1), "step -1 is not in an epoch of 3 steps"),
        (
            lambda: EvaluationPartition(10, 0, 0, 1),
            "an evaluation batch must have at least 1 row, got 0: pass micro_batch=1 or more",
        ),
        (lambda: EvaluationPartition(0, 4, 0, 1), "the dataset is empty: it has 0 samples"),
        (
            lambda: EvaluationPartition(10, 4, 1, 2).batch(2),
            "batch 2 is not in an evaluation of 2 batches on rank 1 of 2",
        ),
    ],
)
def test_invalid_sizes_ranks_and_steps_are_an_error(make, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        make()
