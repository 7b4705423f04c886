"""The keyed permutation that needs no memory: a bijection for every n, equal to its definition."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.data.permutation import MAX_SAMPLES, FeistelPermutation, keyed_word

BLOCK, ROUNDS = FeistelPermutation.BLOCK, FeistelPermutation.ROUNDS
LOW32 = (1 << 32) - 1


def by_definition(n: int, key: int, position: int) -> int:
    """The network in Python integers, from the text of its module."""
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


def test_every_n_up_to_three_thousand_is_a_bijection() -> None:
    for n in range(1, 3001):
        assert np.array_equal(np.sort(FeistelPermutation(n, key=n * 7919).at(np.arange(n))), np.arange(n)), n


@pytest.mark.parametrize("n", [(1 << 20) + 1, (1 << 21) - 1, 1 << 21, (1 << 22) + 1])
def test_whole_networks_beyond_a_million_are_bijections(n: int) -> None:
    seen = np.zeros(n, dtype=bool)
    seen[FeistelPermutation(n, key=3).at(np.arange(n))] = True
    assert seen.all()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, MAX_SAMPLES), st.integers(0, (1 << 64) - 1), st.data())
def test_it_equals_its_definition_for_any_n_and_key(n: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    elements = FeistelPermutation(n, key).at(np.array(positions, dtype=np.int64))
    assert elements.tolist() == [by_definition(n, key, position) for position in positions]


@settings(max_examples=60, deadline=None)
@given(st.integers(1 << 20, MAX_SAMPLES), st.integers(0, (1 << 64) - 1), st.data())
def test_positions_of_a_large_n_never_meet(n: int, key: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n - 5000))
    stride = data.draw(st.integers(1, (n - start - 1) // 4999))
    elements = FeistelPermutation(n, key).at(start + stride * np.arange(5000))
    assert np.unique(elements).size == 5000
    assert elements.min() >= 0
    assert elements.max() < n


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_blocks_join_without_a_seam(count: int) -> None:
    network = FeistelPermutation(10**9, key=11)
    positions = np.arange(count) + 123
    halves = np.concatenate([network.at(positions[: count // 3]), network.at(positions[count // 3 :])])
    assert np.array_equal(network.at(positions), halves)


def test_threads_that_share_a_network_do_not_disturb_each_other() -> None:
    network = FeistelPermutation(10**9, key=12)
    expected = [network.at(np.arange(BLOCK) + BLOCK * number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: network.at(np.arange(BLOCK) + BLOCK * (number % 8)), range(64)))
    assert all(np.array_equal(array, expected[number % 8]) for number, array in enumerate(found))
