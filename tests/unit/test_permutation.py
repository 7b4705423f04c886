"""The sample order is stable, has random access, and is exact after every change of world size."""

import pickle
import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.data.partition import EvaluationPartition, Partition
from samestep.data.permutation import (
    MAX_SAMPLES,
    TABLE_LIMIT,
    FeistelPermutation,
    OrderReader,
    SampleOrder,
    keyed_word,
)
from samestep.errors import DataError

LARGE = 10**9
LOW32 = (1 << 32) - 1
BLOCK, ROUNDS = FeistelPermutation.BLOCK, FeistelPermutation.ROUNDS


def test_orders_have_golden_values() -> None:
    """A failure means that a seed gives another order than before: saved positions would refer to other samples."""
    assert SampleOrder(10, seed=0, shuffle=True).indices(0, 0, 10).tolist() == [9, 2, 6, 7, 3, 1, 4, 5, 0, 8]
    assert SampleOrder(10, seed=0, shuffle=True).indices(1, 0, 10).tolist() == [3, 6, 2, 8, 9, 0, 5, 1, 7, 4]
    assert SampleOrder(10, seed=1, shuffle=True).indices(0, 0, 10).tolist() == [6, 4, 8, 1, 9, 5, 7, 3, 0, 2]
    million = SampleOrder(1_000_000, seed=0, shuffle=True)
    assert million.indices(0, 0, 5).tolist() == [433726, 671177, 512015, 386667, 223169]
    large = SampleOrder(LARGE, seed=7, shuffle=True)
    assert large.indices(3, 900_000_000, 900_000_003).tolist() == [207359189, 48799391, 116418994]
    assert SampleOrder(1 << 62, seed=0, shuffle=True).indices(0, 0, 2).tolist() == [
        3705432271561439743,
        4078321738543786934,
    ]
    weighted = SampleOrder(1000, seed=0, weights=np.arange(1000.0))
    assert weighted.indices(2, 0, 5).tolist() == [141, 274, 126, 267, 695]


def test_without_shuffle_the_order_is_that_of_the_dataset() -> None:
    order = SampleOrder(LARGE, seed=3)
    assert order.indices(4, 999_999_997, LARGE).tolist() == [999_999_997, 999_999_998, 999_999_999]
    assert order.at(4, np.array([5, 2])).tolist() == [5, 2]


@pytest.mark.parametrize("n", [1, 2, 1000, TABLE_LIMIT, TABLE_LIMIT + 1, 3_000_001])
def test_a_shuffled_epoch_has_every_index_once(n: int) -> None:
    indices = SampleOrder(n, seed=5, shuffle=True).indices(2, 0, n)
    assert indices.dtype == np.int64
    assert np.array_equal(np.sort(indices), np.arange(n))


@pytest.mark.slow
@pytest.mark.parametrize("n", [1000, TABLE_LIMIT, TABLE_LIMIT + 1, LARGE])
def test_seeds_and_epochs_have_different_orders(n: int) -> None:
    orders = [
        SampleOrder(n, seed, shuffle=True).indices(epoch, 0, 100).tolist()
        for seed in (0, 1, -1, 1 << 40)
        for epoch in range(4)
    ]
    assert len({tuple(order) for order in orders}) == 16


def test_the_global_state_of_numpy_is_neither_used_nor_changed() -> None:
    np.random.seed(1)  # the global state, on purpose
    before = np.random.get_state()[1].tolist()
    first = SampleOrder(1000, seed=0, shuffle=True).indices(0, 0, 1000)
    assert np.random.get_state()[1].tolist() == before
    np.random.seed(2)
    assert np.array_equal(SampleOrder(1000, seed=0, shuffle=True).indices(0, 0, 1000), first)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 1 << 62), st.integers(), st.integers(0, 1000), st.data())
def test_any_slice_equals_that_part_of_the_epoch(n: int, seed: int, epoch: int, data: st.DataObject) -> None:
    order = SampleOrder(n if n > TABLE_LIMIT else n % 3000 + 1, seed, shuffle=True)
    start = data.draw(st.integers(0, order.n))
    stop = data.draw(st.integers(start, min(order.n, start + 300)))
    part = order.indices(epoch, start, stop)
    assert part.tolist() == [order.indices(epoch, k, k + 1).item() for k in range(start, stop)][: stop - start]
    assert np.unique(part).size == stop - start
    assert np.all((part >= 0) & (part < order.n))


def test_epochs_can_be_read_in_any_order() -> None:
    order = SampleOrder(500, seed=1, shuffle=True)
    first = [order.indices(epoch, 0, 500) for epoch in range(5)]
    again = [order.indices(epoch, 0, 500) for epoch in (4, 0, 3, 1, 2)]
    assert all(np.array_equal(first[epoch], array) for epoch, array in zip((4, 0, 3, 1, 2), again, strict=True))


def test_a_caller_may_change_the_indices_it_got() -> None:
    order = SampleOrder(50, seed=1, shuffle=True)
    order.indices(0, 0, 50)[:] = 0
    reader = OrderReader(order, lambda _: (0, 50), steps=1)
    reader.read(0, 0)[:] = 0
    assert sorted(reader.read(0, 0).tolist()) == list(range(50))


def test_memory_does_not_grow_with_the_dataset() -> None:
    def peak(n: int) -> int:
        tracemalloc.start()
        order = SampleOrder(n, seed=0, shuffle=True)
        reader = OrderReader(order, lambda step: (step * 256, step * 256 + 256), steps=n // 256)
        for step in (0, n // 512, n // 300):
            reader.read(1, step)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    peak(2 * TABLE_LIMIT)
    assert peak(1 << 61) <= 1.2 * peak(2 * TABLE_LIMIT) < 8e6


def test_an_order_is_pickled_without_its_arrays() -> None:
    order = SampleOrder(TABLE_LIMIT, seed=4, shuffle=True)
    first = order.indices(0, 0, 100)
    pickled = pickle.dumps(order)
    assert len(pickled) < 500
    assert np.array_equal(pickle.loads(pickled).indices(0, 0, 100), first)


# Sampling weights


def test_samples_are_drawn_in_proportion_to_their_weights() -> None:
    from scipy.stats import chisquare

    weights = np.array([0.0, 1.0, 2.0, 0.0, 3.0, 4.0, 0.0] * 100)
    counts = sum(
        np.bincount(SampleOrder(700, seed, weights=weights).indices(0, 0, 700), minlength=700) for seed in range(200)
    ).reshape(100, 7)
    assert counts[:, [0, 3, 6]].sum() == 0
    by_weight = counts.sum(axis=0)[[1, 2, 4, 5]]
    assert chisquare(by_weight, by_weight.sum() * np.array([0.1, 0.2, 0.3, 0.4])).pvalue > 1e-4


def test_a_weighted_order_has_random_access_and_is_keyed_by_epoch() -> None:
    order = SampleOrder(1000, seed=1, weights=np.arange(1.0, 1001.0))
    whole = order.indices(3, 0, 1000)
    assert order.indices(3, 417, 420).tolist() == whole[417:420].tolist()
    assert not np.array_equal(whole, order.indices(4, 0, 1000))
    assert np.array_equal(whole, pickle.loads(pickle.dumps(order)).indices(3, 0, 1000))


def test_a_later_change_of_the_weights_array_has_no_effect() -> None:
    weights = np.ones(100)
    order = SampleOrder(100, seed=1, weights=weights)
    before = order.indices(0, 0, 100)
    weights[:50] = 0
    assert np.array_equal(order.indices(0, 0, 100), before)
    assert np.array_equal(pickle.loads(pickle.dumps(order)).indices(0, 0, 100), before)


def test_with_the_smallest_float_weight_only_that_sample_is_drawn() -> None:
    order = SampleOrder(1000, seed=0, weights=np.array([0.0, 5e-324] + [0.0] * 998))
    assert set(order.indices(0, 0, 1000).tolist()) == {1}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            [1.0, -2.0, 1.0],
            "1 of 3 sampling_weights are negative, nan or infinite, first sampling_weights[1] = -2.0: every weight",
        ),
        (
            [np.nan, 1.0, np.inf],
            "2 of 3 sampling_weights are negative, nan or infinite, first sampling_weights[0] = nan",
        ),
        (
            [0.0, 0.0, 0.0],
            "all 3 sampling_weights are 0, so no sample can be drawn: give at least one sample a weight",
        ),
        ([1.0, 1.0], "sampling_weights have shape (2,) and the dataset has 3 samples: pass one weight per sample"),
        ([[1.0, 1.0, 1.0]], "sampling_weights have shape (1, 3) and the dataset has 3 samples"),
        (
            ["a", "b", "c"],
            "sampling_weights are not numbers (could not",
        ),
        ([1e308, 1e308, 1.0], "the sum of the 3 sampling_weights overflows float64: divide them by 1e+308"),
    ],
)
def test_invalid_weights_are_an_error(weights, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        SampleOrder(3, seed=0, weights=weights)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: SampleOrder(0, 0),
            "the dataset is empty: it has 0 samples and needs at least 1; check what it reads from",
        ),
        (lambda: SampleOrder(-3, 0), "the dataset is empty: it has -3 samples"),
        (
            lambda: SampleOrder((1 << 62) + 1, 0),
            f"the dataset reports {(1 << 62) + 1} samples, and samestep supports at most {1 << 62}: check its __len__",
        ),
        (
            lambda: SampleOrder(10, 0).indices(0, 5, 11),
            "positions 5 to 11 are not in an epoch, which has positions 0 to 10",
        ),
        (lambda: SampleOrder(10, 0).indices(0, 5, 4), "positions 5 to 4 are not in an epoch"),
        (lambda: SampleOrder(10, 0).indices(0, -1, 4), "positions -1 to 4 are not in an epoch"),
        (lambda: SampleOrder(10, 0).indices(-1, 0, 4), "epoch -1 does not exist: epochs are counted from 0"),
        (lambda: SampleOrder(10, 0, shuffle=True).indices(-2, 0, 4), "epoch -2 does not exist"),
    ],
)
def test_invalid_sizes_positions_and_epochs_are_an_error(make, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        make()


# Reading step by step


def read_steps(order: SampleOrder, epoch: int, partitions: list[Partition], steps: range) -> list[list[int]]:
    """Return the global batches of some steps, joined from what every rank reads."""
    readers = [OrderReader(order, partition.read_range, partition.steps) for partition in partitions]
    batches: list[list[int]] = []
    for step in steps:
        batches.append([])
        for partition, reader in zip(partitions, readers, strict=True):
            first, indices = partition.read_range(step)[0], reader.read(epoch, step)
            for rows in partition.micro_batches(step):
                batches[-1] += indices[rows.start - first : rows.stop - first].tolist()
    return batches


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 3000),
    large=st.booleans(),
    global_batch=st.integers(1, 400),
    sizes=st.tuples(st.integers(1, 64), st.integers(1, 64)),
    micro=st.none() | st.integers(1, 20),
    data=st.data(),
)
def test_a_resume_on_another_world_size_continues_at_exactly_the_next_sample(
    n: int, large: bool, global_batch: int, sizes: tuple[int, int], micro: int | None, data: st.DataObject
) -> None:
    order = SampleOrder(LARGE + n if large else n, seed=n, shuffle=True)

    def partitions(size: int) -> list[Partition]:
        return [Partition(order.n, global_batch, rank, size, micro) for rank in range(size)]

    last = partitions(1)[0].steps
    first = max(0, last - 12)
    turn = data.draw(st.integers(first, last))
    before = read_steps(order, 3, partitions(sizes[0]), range(first, turn))
    after = read_steps(order, 3, partitions(sizes[1]), range(turn, last))
    counted = [index for batch in before + after for index in batch]
    assert counted == order.indices(3, first * global_batch, order.n).tolist()
    assert before + after == read_steps(order, 3, partitions(1), range(first, last))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), max_size=30), st.booleans())
def test_a_reader_can_read_any_step_at_any_time(requested: list[tuple[int, int]], large: bool) -> None:
    order = SampleOrder(TABLE_LIMIT + 7 if large else 1000, seed=2, shuffle=True)
    partition = Partition(order.n, global_batch=-(-order.n // 41), rank=1, world_size=3)
    reader = OrderReader(order, partition.read_range, partition.steps)
    for epoch, step in requested:
        step %= partition.steps
        assert np.array_equal(reader.read(epoch, step), order.indices(epoch, *partition.read_range(step)))


def test_a_reader_reads_an_evaluation() -> None:
    partitions = [EvaluationPartition(n=1003, rows=64, rank=rank, world_size=3, lockstep=True) for rank in range(3)]
    readers = [OrderReader(SampleOrder(1003, seed=0), one.read_range, len(one)) for one in partitions]
    read = [
        i for one, reader in zip(partitions, readers, strict=True) for k in range(len(one)) for i in reader.read(0, k)
    ]
    assert read == list(range(1003))


def test_a_reader_computes_only_the_positions_of_its_rank() -> None:
    sizes: list[int] = []

    class CountingOrder(SampleOrder):
        def at(self, epoch, positions):
            sizes.append(positions.size)
            return super().at(epoch, positions)

    order = CountingOrder(LARGE, seed=0, shuffle=True)
    partition = Partition(LARGE, global_batch=256 * 64, rank=63, world_size=64)
    reader = OrderReader(order, partition.read_range, partition.steps)
    for step in range(1000):
        reader.read(0, step)
    assert len(sizes) < 10
    assert sum(sizes) < 1.2 * 256 * 1000


def test_a_step_beyond_the_epoch_is_an_error() -> None:
    partition = Partition(10, global_batch=4, rank=0, world_size=1)
    reader = OrderReader(SampleOrder(10, seed=0), partition.read_range, partition.steps)
    reader.read(0, 2)
    with pytest.raises(DataError, match="step 3 is not in an epoch of 3 steps"):
        reader.read(0, 3)
    assert reader.read(0, 2).tolist() == [8, 9]


# The Feistel network


def by_definition(n: int, key: int, position: int) -> int:
    """Compute the Feistel network with Python integers."""
    bits = max(1, n.bit_length() // 2)
    high = -(-n // 2**bits)
    while True:
        upper, lower = divmod(position, 2**bits)
        for number in range(ROUNDS):
            first, second = keyed_word(key, 2 * number), keyed_word(key, 2 * number + 1)
            word = (upper if number % 2 == 0 else lower) + (first >> 32)
            word = word * (second >> 32 | 1) & LOW32
            word = (word ^ word >> 15) * (second & LOW32 | 1) & LOW32
            if number % 2 == 0:
                lower ^= word >> (32 - bits)
            else:
                upper = (upper + (word * high >> 32)) % high
        position = upper << bits | lower
        if position < n:
            return position


def test_a_feistel_network_is_a_bijection_for_every_n_up_to_three_thousand() -> None:
    for n in range(1, 3001):
        assert np.array_equal(np.sort(FeistelPermutation(n, key=n * 7919).at(np.arange(n))), np.arange(n)), n


@pytest.mark.parametrize("n", [(1 << 20) + 1, (1 << 21) - 1, 1 << 21, (1 << 22) + 1])
def test_feistel_networks_above_a_million_are_bijections(n: int) -> None:
    seen = np.zeros(n, dtype=bool)
    seen[FeistelPermutation(n, key=3).at(np.arange(n))] = True
    assert seen.all()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, MAX_SAMPLES), st.integers(0, (1 << 64) - 1), st.data())
def test_a_feistel_network_equals_its_definition_for_any_n_and_key(n: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    elements = FeistelPermutation(n, key).at(np.array(positions, dtype=np.int64))
    assert elements.tolist() == [by_definition(n, key, position) for position in positions]


@settings(max_examples=60, deadline=None)
@given(st.integers(1 << 20, MAX_SAMPLES), st.integers(0, (1 << 64) - 1), st.data())
def test_elements_of_a_large_feistel_network_are_distinct(n: int, key: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n - 5000))
    stride = data.draw(st.integers(1, (n - start - 1) // 4999))
    elements = FeistelPermutation(n, key).at(start + stride * np.arange(5000))
    assert np.unique(elements).size == 5000
    assert elements.min() >= 0
    assert elements.max() < n


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_feistel_blocks_equal_one_block(count: int) -> None:
    network = FeistelPermutation(10**9, key=11)
    positions = np.arange(count) + 123
    halves = np.concatenate([network.at(positions[: count // 3]), network.at(positions[count // 3 :])])
    assert np.array_equal(network.at(positions), halves)


def test_threads_can_share_a_feistel_network() -> None:
    network = FeistelPermutation(10**9, key=12)
    expected = [network.at(np.arange(BLOCK) + BLOCK * number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: network.at(np.arange(BLOCK) + BLOCK * (number % 8)), range(64)))
    assert all(np.array_equal(array, expected[number % 8]) for number, array in enumerate(found))
