"""Dropout masks of an unchanged model are random: the right rate, and independent between samples, epochs and layers.

Every count in this module is binomial if the masks are as random as they should be. A test fails if a count is so far
off that chance alone would give it once in 10^12 times; the module looks at fewer than 10^5 counts.
"""

from itertools import combinations

import pytest
import torch
from scipy.stats import binom
from torch import nn

from samestep import Run

SAMPLES, EPOCHS, WIDTH = 40, 3, 2048
IMPOSSIBLE = 1e-12


class TwoDropouts(nn.Module):
    """Returns what two dropout layers make of ones, so that the masks can be seen."""

    def __init__(self, p):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.first, self.second = nn.Dropout(p), nn.Dropout(p)

    def forward(self, ones):
        return self.first(ones) * self.scale, self.second(ones) * self.scale


def dropped(p, micro_batch=None, seed=0):
    """(epoch, sample, layer) -> the values of one row that this rank has computed."""
    data = [(torch.ones(WIDTH), i) for i in range(SAMPLES)]
    rows = {}
    with Run(global_batch=15, seed=seed) as run:
        model = run.wrap(TwoDropouts(p))
        for epoch in run.shard(data, shuffle=True, micro_batch=micro_batch).epochs(EPOCHS):
            for step in epoch:
                for ones, samples in step:
                    layers = model(ones)
                    step.mean(sum(layers).mean(1)).backward()
                    for layer, values in enumerate(layers):
                        for sample, row in zip(samples.tolist(), values.detach(), strict=True):
                            rows[epoch.number, sample, layer] = row
    return rows


def drop_masks(rows):
    """One matrix for each (epoch, layer): sample -> which of its values were dropped."""
    return {
        (epoch, layer): torch.stack([rows[epoch, sample, layer] == 0 for sample in range(SAMPLES)]).double()
        for epoch in range(EPOCHS)
        for layer in range(2)
    }


def assert_plausible(counts, trials, probability):
    """Compare binomial counts with their distribution: neither the smallest nor the largest is impossible."""
    assert binom.cdf(float(counts.min()), trials, probability) > IMPOSSIBLE
    assert binom.sf(float(counts.max()) - 1, trials, probability) > IMPOSSIBLE


def assert_independent(first, second, p):
    """Count for each pair of rows of two matrices the values that both drop."""
    both = first @ second.T
    if first is second:
        both = both[~torch.eye(len(first), dtype=torch.bool)]
    assert_plausible(both, WIDTH, p * p)


@pytest.fixture(scope="module", params=[0.1, pytest.param(0.5, marks=pytest.mark.slow)])
def probability(request):
    return request.param


@pytest.fixture(scope="module")
def masks(ranks, probability, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("masks"))
        (rows,) = ranks(1, dropped, probability)
    kept = float(1 / (1 - torch.tensor(probability)))
    assert {float(value) for row in rows.values() for value in row.unique()} == {0.0, kept}
    return drop_masks(rows)


def test_the_rate_is_that_of_the_layer(masks, probability):
    everything = torch.stack(list(masks.values()))
    assert_plausible(everything.sum(), everything.numel(), probability)
    assert_plausible(everything.sum(2), WIDTH, probability)
    assert_plausible(everything.sum((0, 1)), len(masks) * SAMPLES, probability)  # the same rate at every position


def test_the_values_of_a_row_are_independent(masks, probability):
    for lag in (1, 2, 32, 512):
        pairs = torch.stack(list(masks.values())).reshape(-1, WIDTH // (2 * lag), 2, lag)  # no value is in two pairs
        both = pairs[:, :, 0] * pairs[:, :, 1]
        assert_plausible(both.sum(), both.numel(), probability**2)


def test_the_samples_are_independent(masks, probability):
    for mask in masks.values():
        assert_independent(mask, mask, probability)


def test_the_layers_and_epochs_are_independent(masks, probability):
    for first, second in combinations(masks.values(), 2):
        assert_independent(first, second, probability)


@pytest.mark.slow
def test_the_masks_are_the_same_on_any_number_of_ranks_and_micro_batches(ranks, probability):
    (one,) = ranks(1, dropped, probability)
    for size, micro_batch in ((2, None), (3, None), (1, 4), (2, 1)):
        rows = {}
        for part in ranks(size, dropped, probability, micro_batch):
            rows |= part
        assert rows.keys() == one.keys()
        assert all(torch.equal(rows[key], one[key]) for key in one)


def test_another_seed_gives_other_masks(ranks, probability, masks):
    (rows,) = ranks(1, dropped, probability, None, 1)
    for key, mask in drop_masks(rows).items():
        assert_independent(mask, masks[key], probability)


def dropped_in_two_loops(p):
    """The values of one step in each of two loops over its micro-batches."""
    loops = []
    with Run(global_batch=SAMPLES, seed=0) as run:
        model = run.wrap(TwoDropouts(p))
        for epoch in run.shard([torch.ones(WIDTH)] * SAMPLES, passes=2).epochs(1):
            for step in epoch:
                for _ in range(2):
                    for ones in step:
                        layers = model(ones)
                        step.mean(sum(layers).mean(1)).backward()
                        loops.append(layers[0].detach() == 0)
    return loops


def test_a_second_loop_over_a_step_draws_other_masks(ranks, probability):
    ((first, second),) = ranks(1, dropped_in_two_loops, probability)
    assert_independent(first.double(), second.double(), probability)


class SharedNoise(nn.Module):
    """Draws numbers that all samples of a step share, in two places."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        uniforms = torch.rand(WIDTH)
        ones = torch.bernoulli(torch.full((WIDTH,), 0.1))
        return x * self.scale, uniforms, ones


def shared_by_steps(micro_batch=None):
    """(step, draw) -> which of the numbers that the rows of a step share are small, for each micro-batch."""
    drawn = {}
    with Run(global_batch=8, seed=0) as run:
        model = run.wrap(SharedNoise())
        for epoch in run.shard(list(torch.ones(SAMPLES, 1)), micro_batch=micro_batch).epochs(EPOCHS * 2):
            for step in epoch:
                for x in step:
                    values, uniforms, ones = model(x)
                    step.mean(values.squeeze(1)).backward()
                    drawn.setdefault((step.number, 0), []).append(uniforms < 0.1)
                    drawn.setdefault((step.number, 1), []).append(ones == 1)
    return drawn


@pytest.mark.slow
def test_numbers_that_a_step_shares_are_the_same_on_all_ranks_and_independent_between_steps(ranks):
    (one,) = ranks(1, shared_by_steps)
    assert len(one) == EPOCHS * 2 * SAMPLES // 8 * 2
    for size, micro_batch in ((1, 3), (2, None), (3, 1)):
        for drawn in ranks(size, shared_by_steps, micro_batch):
            assert all(torch.equal(other, one[key][0]) for key, others in drawn.items() for other in others)
            assert drawn.keys() == one.keys()
    everything = torch.stack([drawn for (drawn,) in one.values()]).double()
    assert_plausible(everything.sum(1), WIDTH, 0.1)
    assert_plausible(everything.sum(0), len(everything), 0.1)  # the same rate at every position
    assert_independent(everything, everything, 0.1)  # between steps, and between the draws of a step
