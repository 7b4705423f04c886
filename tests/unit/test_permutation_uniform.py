"""Is the order random? Fixed seeds, so these pass or fail for good; p is what chance alone would give."""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from samestep.data.permutation import TABLE_LIMIT, FeistelPermutation, SampleOrder, key64

LEAST_P = 1e-4
Permutations = npt.NDArray[np.int64]


@cache
def arrays(n: int, keys: int) -> Permutations:
    """Rows of whole epochs, half of them from seeds that follow each other, half from epochs that do."""
    seeds = [SampleOrder(n, seed, shuffle=True).indices(0, 0, n) for seed in range(keys // 2)]
    one = SampleOrder(n, seed=-1, shuffle=True)
    return np.stack(seeds + [one.indices(epoch, 0, n) for epoch in range(keys - keys // 2)])


@cache
def networks(n: int, keys: int) -> Permutations:
    """Rows of whole Feistel networks, also where an SampleOrder would use an array."""
    positions = np.arange(n)
    return np.stack([FeistelPermutation(n, key64(1, seed, 0)).at(positions) for seed in range(keys)])


two_ways = pytest.mark.parametrize(
    ("make", "n", "keys"), [(arrays, 20, 10_000), (networks, 20, 5_000), (networks, 37, 5_000)]
)
Make = Callable[[int, int], Permutations]


def test_all_120_orders_of_five_elements_come_up_equally_often() -> None:
    codes = arrays(5, 30_000) @ 5 ** np.arange(5)
    counts = np.unique(codes, return_counts=True)[1]
    assert counts.size == math.factorial(5)
    assert stats.chisquare(counts).pvalue > LEAST_P


def test_both_orders_of_two_elements_come_up_equally_often() -> None:
    assert stats.binomtest(int(arrays(2, 10_000)[:, 0].sum()), 10_000).pvalue > LEAST_P


@two_ways
def test_each_element_is_as_likely_at_each_position(make: Make, n: int, keys: int) -> None:
    orders = make(n, keys)
    counts = np.stack([np.bincount(orders[:, position], minlength=n) for position in range(n)])
    # Rows and columns are both bound to add up, so (n-1)**2 counts are free.
    statistic = ((counts - keys / n) ** 2 / (keys / n)).sum()
    assert stats.chi2.sf(statistic, (n - 1) ** 2) > LEAST_P
    assert stats.chi2.cdf(statistic, (n - 1) ** 2) > LEAST_P  # too even would be no chance either


@two_ways
@pytest.mark.parametrize("places", [(0, 1), (0, -1), (3, 11)])
def test_each_pair_is_as_likely_at_two_positions(make: Make, n: int, keys: int, places: tuple[int, int]) -> None:
    orders = make(n, keys)
    pairs = np.bincount(orders[:, places[0]] * n + orders[:, places[1]], minlength=n * n)
    apart = ~np.eye(n, dtype=bool).ravel()
    assert pairs[~apart].sum() == 0
    assert stats.chisquare(pairs[apart]).pvalue > LEAST_P


@two_ways
def test_neighbours_differ_by_every_distance_equally(make: Make, n: int, keys: int) -> None:
    distances = np.diff(make(n, keys), axis=1) % n
    counts = np.bincount(distances.ravel(), minlength=n)
    assert counts[0] == 0
    assert stats.chisquare(counts[1:]).pvalue > LEAST_P


@two_ways
def test_as_many_elements_stay_in_place_as_chance_leaves(make: Make, n: int, keys: int) -> None:
    fixed = (make(n, keys) == np.arange(n)).sum(axis=1)
    counts = np.bincount(np.minimum(fixed, 5), minlength=6)  # derangements are those with none
    likely = [math.exp(-1) / math.factorial(k) for k in range(5)]
    assert stats.chisquare(counts, keys * np.array([*likely, 1 - sum(likely)])).pvalue > LEAST_P


def test_even_and_odd_permutations_come_up_equally_often() -> None:
    orders = arrays(20, 10_000)[:4000]
    odd = sum((20 - cycles(order)) % 2 for order in orders.tolist())
    assert stats.binomtest(odd, len(orders)).pvalue > LEAST_P


def cycles(order: list[int]) -> int:
    """Number of cycles of a permutation; with n it tells its parity."""
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


def test_positions_and_indices_fall_together_evenly_in_coarse_bins(epoch: Permutations) -> None:
    n, bins = epoch.size, 64
    counts = np.histogram2d(np.arange(n), epoch, bins=bins, range=[[0, n], [0, n]])[0]
    statistic = ((counts - n / bins**2) ** 2 / (n / bins**2)).sum()
    assert stats.chi2.sf(statistic, (bins - 1) ** 2) > LEAST_P
    assert stats.chi2.cdf(statistic, (bins - 1) ** 2) > LEAST_P


@pytest.mark.parametrize("distance", [1, 2, 3, 16, 1023, 1024, 1025, 2048, 65536])
def test_indices_some_positions_apart_are_not_correlated(epoch: Permutations, distance: int) -> None:
    assert stats.pearsonr(epoch[:-distance], epoch[distance:]).pvalue > LEAST_P


@pytest.mark.parametrize("distance", [1, 1024, 4096])
def test_steps_between_indices_are_of_every_length(epoch: Permutations, distance: int) -> None:
    steps = (epoch[distance:] - epoch[:-distance]) % epoch.size
    counts = np.histogram(steps, bins=1000, range=(0, epoch.size))[0]
    assert stats.chisquare(counts).pvalue > LEAST_P


@pytest.mark.parametrize("modulus", [2, 3, 16, 1024])
def test_low_parts_of_neighbouring_indices_are_independent(epoch: Permutations, modulus: int) -> None:
    low = epoch % modulus if modulus < 64 else epoch % modulus // (modulus // 16)
    kinds = int(low.max()) + 1
    counts = np.bincount(low[:-1] * kinds + low[1:], minlength=kinds**2).reshape(kinds, kinds)
    assert stats.chi2_contingency(counts).pvalue > LEAST_P


@pytest.mark.parametrize("n", [TABLE_LIMIT + 1, 10**9, 1 << 40, (1 << 62) - 1])
def test_the_first_indices_of_many_seeds_and_epochs_are_spread_evenly(n: int) -> None:
    firsts = np.stack(
        [SampleOrder(n, seed, shuffle=True).indices(epoch, 0, 4) for seed in range(60) for epoch in range(50)]
    )
    assert all(stats.kstest(firsts[:, place] / n, "uniform").pvalue > LEAST_P for place in range(4))
    assert all(stats.pearsonr(firsts[:, 0], firsts[:, place]).pvalue > LEAST_P for place in range(1, 4))
    by_epoch = firsts.reshape(60, 50, 4)[:, :, 0].astype(float)
    assert stats.pearsonr(by_epoch[:, :-1].ravel(), by_epoch[:, 1:].ravel()).pvalue > LEAST_P
    assert stats.pearsonr(by_epoch[:-1].ravel(), by_epoch[1:].ravel()).pvalue > LEAST_P


def test_two_epochs_share_no_more_positions_than_chance_gives() -> None:
    order = SampleOrder(TABLE_LIMIT + 1, seed=0, shuffle=True)
    epochs = [order.indices(number, 0, order.n) for number in range(4)]
    shared = sum(int((epochs[a] == epochs[b]).sum()) for a in range(4) for b in range(a))
    assert stats.poisson.cdf(shared, 6) > LEAST_P
    assert stats.poisson.sf(shared - 1, 6) > LEAST_P
