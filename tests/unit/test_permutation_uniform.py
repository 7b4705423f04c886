"""The sample order passes statistical tests of randomness; seeds are fixed, so the tests are deterministic."""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from samestep.data.permutation import TABLE_LIMIT, FeistelPermutation, SampleOrder, key64

pytestmark = pytest.mark.slow

MIN_P = 1e-4
Permutations = npt.NDArray[np.int64]


@cache
def tables(n: int, keys: int) -> Permutations:
    """Return one epoch per row, half of them from consecutive seeds, half from consecutive epochs."""
    seeds = [SampleOrder(n, seed, shuffle=True).indices(0, 0, n) for seed in range(keys // 2)]
    one = SampleOrder(n, seed=-1, shuffle=True)
    return np.stack(seeds + [one.indices(epoch, 0, n) for epoch in range(keys - keys // 2)])


@cache
def networks(n: int, keys: int) -> Permutations:
    """Return one Feistel network per row, even for n for which SampleOrder would use a table."""
    positions = np.arange(n)
    return np.stack([FeistelPermutation(n, key64(1, seed, 0)).at(positions) for seed in range(keys)])


both_kinds = pytest.mark.parametrize(
    ("make", "n", "keys"), [(tables, 20, 10_000), (networks, 20, 5_000), (networks, 37, 5_000)]
)
Make = Callable[[int, int], Permutations]


def test_all_120_orders_of_five_elements_are_equally_frequent() -> None:
    codes = tables(5, 30_000) @ 5 ** np.arange(5)
    counts = np.unique(codes, return_counts=True)[1]
    assert counts.size == math.factorial(5)
    assert stats.chisquare(counts).pvalue > MIN_P


def test_both_orders_of_two_elements_are_equally_frequent() -> None:
    assert stats.binomtest(int(tables(2, 10_000)[:, 0].sum()), 10_000).pvalue > MIN_P


@both_kinds
def test_each_element_is_equally_likely_at_each_position(make: Make, n: int, keys: int) -> None:
    orders = make(n, keys)
    counts = np.stack([np.bincount(orders[:, position], minlength=n) for position in range(n)])
    # Rows and columns have fixed sums, so there are (n-1)**2 degrees of freedom.
    statistic = ((counts - keys / n) ** 2 / (keys / n)).sum()
    assert stats.chi2.sf(statistic, (n - 1) ** 2) > MIN_P
    assert stats.chi2.cdf(statistic, (n - 1) ** 2) > MIN_P  # too even would not be random either


@both_kinds
@pytest.mark.parametrize("positions", [(0, 1), (0, -1), (3, 11)])
def test_each_pair_is_equally_likely_at_two_positions(
    make: Make, n: int, keys: int, positions: tuple[int, int]
) -> None:
    orders = make(n, keys)
    pairs = np.bincount(orders[:, positions[0]] * n + orders[:, positions[1]], minlength=n * n)
    different = ~np.eye(n, dtype=bool).ravel()
    assert pairs[~different].sum() == 0
    assert stats.chisquare(pairs[different]).pvalue > MIN_P


@both_kinds
def test_differences_of_neighbors_are_uniform(make: Make, n: int, keys: int) -> None:
    distances = np.diff(make(n, keys), axis=1) % n
    counts = np.bincount(distances.ravel(), minlength=n)
    assert counts[0] == 0
    assert stats.chisquare(counts[1:]).pvalue > MIN_P


@both_kinds
def test_the_number_of_fixed_points_is_that_of_random_permutations(make: Make, n: int, keys: int) -> None:
    fixed = (make(n, keys) == np.arange(n)).sum(axis=1)
    counts = np.bincount(np.minimum(fixed, 5), minlength=6)  # 0: derangements
    likely = [math.exp(-1) / math.factorial(k) for k in range(5)]
    assert stats.chisquare(counts, keys * np.array([*likely, 1 - sum(likely)])).pvalue > MIN_P


def test_even_and_odd_permutations_are_equally_frequent() -> None:
    orders = tables(20, 10_000)[:4000]
    odd = sum((20 - cycles(order)) % 2 for order in orders.tolist())
    assert stats.binomtest(odd, len(orders)).pvalue > MIN_P


def cycles(order: list[int]) -> int:
    """Count the cycles of a permutation, which with n give its parity."""
    seen, number = set[int](), 0
    for start in range(len(order)):
        number += start not in seen
        while start not in seen:
            seen.add(start)
            start = order[start]
    return number


@pytest.fixture(
    scope="module",
    params=[TABLE_LIMIT, TABLE_LIMIT + 1, TABLE_LIMIT + 12_345, 1 << 21],
    ids=["array", "n+1", "n+12345", "2n"],
)
def epoch(request: pytest.FixtureRequest) -> Permutations:
    return SampleOrder(request.param, seed=9, shuffle=True).indices(1, 0, request.param)


def test_positions_and_indices_are_uniform_in_coarse_bins(epoch: Permutations) -> None:
    n, bins = epoch.size, 64
    counts = np.histogram2d(np.arange(n), epoch, bins=bins, range=[[0, n], [0, n]])[0]
    statistic = ((counts - n / bins**2) ** 2 / (n / bins**2)).sum()
    assert stats.chi2.sf(statistic, (bins - 1) ** 2) > MIN_P
    assert stats.chi2.cdf(statistic, (bins - 1) ** 2) > MIN_P


@pytest.mark.parametrize("distance", [1, 2, 3, 16, 1023, 1024, 1025, 2048, 65536])
def test_indices_at_a_distance_are_not_correlated(epoch: Permutations, distance: int) -> None:
    assert stats.pearsonr(epoch[:-distance], epoch[distance:]).pvalue > MIN_P


@pytest.mark.parametrize("distance", [1, 1024, 4096])
def test_differences_of_indices_at_a_distance_are_uniform(epoch: Permutations, distance: int) -> None:
    steps = (epoch[distance:] - epoch[:-distance]) % epoch.size
    counts = np.histogram(steps, bins=1000, range=(0, epoch.size))[0]
    assert stats.chisquare(counts).pvalue > MIN_P


@pytest.mark.parametrize("modulus", [2, 3, 16, 1024])
def test_low_bits_of_neighboring_indices_are_independent(epoch: Permutations, modulus: int) -> None:
    low = epoch % modulus if modulus < 64 else epoch % modulus // (modulus // 16)
    kinds = int(low.max()) + 1
    counts = np.bincount(low[:-1] * kinds + low[1:], minlength=kinds**2).reshape(kinds, kinds)
    assert stats.chi2_contingency(counts).pvalue > MIN_P


@pytest.mark.parametrize("n", [TABLE_LIMIT + 1, 10**9, 1 << 40, (1 << 62) - 1])
def test_the_first_indices_of_many_seeds_and_epochs_are_uniform(n: int) -> None:
    firsts = np.stack(
        [SampleOrder(n, seed, shuffle=True).indices(epoch, 0, 4) for seed in range(60) for epoch in range(50)]
    )
    assert all(stats.kstest(firsts[:, position] / n, "uniform").pvalue > MIN_P for position in range(4))
    assert all(stats.pearsonr(firsts[:, 0], firsts[:, position]).pvalue > MIN_P for position in range(1, 4))
    by_epoch = firsts.reshape(60, 50, 4)[:, :, 0].astype(float)
    assert stats.pearsonr(by_epoch[:, :-1].ravel(), by_epoch[:, 1:].ravel()).pvalue > MIN_P
    assert stats.pearsonr(by_epoch[:-1].ravel(), by_epoch[1:].ravel()).pvalue > MIN_P


def test_two_epochs_share_as_many_positions_as_random_permutations() -> None:
    order = SampleOrder(TABLE_LIMIT + 1, seed=0, shuffle=True)
    epochs = [order.indices(number, 0, order.n) for number in range(4)]
    shared = sum(int((epochs[a] == epochs[b]).sum()) for a in range(4) for b in range(a))
    assert stats.poisson.cdf(shared, 6) > MIN_P
    assert stats.poisson.sf(shared - 1, 6) > MIN_P
