"""Keyed randomness: equal in every form and batch, and random by every test tried."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from samestep.data.permutation import key64, keyed_word, mix64
from samestep.data.sample_rng import normal, sample_key, sample_key_tensor, sample_keys, uniform
from samestep.errors import DataError

LEAST_P = 1e-4
KEYS = sample_key_tensor(0, 0, torch.arange(2000))


def test_numbers_are_those_of_every_earlier_version() -> None:
    """A failure means that a seed gives other noise than before: a resumed run would learn something else."""
    assert keyed_word(0, 0) == 0xE220A8397B1DCDAF  # the published first number of SplitMix64 from 0
    assert mix64(1) == 0x5692161D100B05E5
    assert key64(1, 2, 3) == 0x003F53A1FE784BBF
    assert [sample_key(0, 0, 0), sample_key(1, 2, 3)] == [0xDB6952949EC50A6E, 0xC39B8692AB53D099]
    first = uniform(KEYS[:2], (3,), salt=0) * 2**24
    assert first.tolist() == [[8798030, 7006790, 7423303], [5869998, 4792157, 1881867]]
    expected = torch.tensor([[-1.0788261, 0.3565416, 1.3201593], [-0.3067634, 1.4164149, 0.3902167]])
    torch.testing.assert_close(normal(KEYS[:2], (3,), salt=0), expected, rtol=0, atol=1e-6)


@given(st.integers(), st.integers(0, 10**6), st.lists(st.integers(0, (1 << 63) - 1), min_size=1, max_size=20))
def test_a_samples_key_is_the_same_in_python_numpy_and_torch(seed: int, epoch: int, indices: list[int]) -> None:
    plain = [sample_key(seed, epoch, index) for index in indices]
    assert sample_keys(seed, epoch, np.array(indices)).tolist() == plain
    assert [key % 2**64 for key in sample_key_tensor(seed, epoch, torch.tensor(indices)).tolist()] == plain


def test_making_keys_leaves_the_indices_alone() -> None:
    indices, array = torch.arange(5), np.arange(5)
    sample_key_tensor(0, 0, indices)
    sample_keys(0, 0, array)
    assert indices.tolist() == array.tolist() == [0, 1, 2, 3, 4]
    keys = KEYS.clone()
    normal(keys, (3,), salt=0)
    assert torch.equal(keys, KEYS)


def test_samples_epochs_and_seeds_have_keys_of_their_own() -> None:
    keys = np.concatenate([sample_keys(seed, epoch, np.arange(1000)) for seed in range(10) for epoch in range(10)])
    assert np.unique(keys).size == 100_000


def by_definition(key: int, salt: int, element: int) -> float:
    """One uniform number in Python integers."""
    start = mix64(key + key64(4, salt))
    return (keyed_word(start, element) >> 40) / 2**24


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(), st.integers(0, 30))
def test_uniform_equals_its_definition(key: int, salt: int, element: int) -> None:
    assert uniform(torch.tensor([key]), (31,), salt)[0, element].item() == by_definition(key, salt, element)


@pytest.mark.parametrize("draw", [uniform, normal])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_samples_numbers_do_not_depend_on_the_batch_around_it(draw, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = draw(KEYS, (3, 7), salt=5)
        shuffled = torch.randperm(len(KEYS), generator=torch.Generator().manual_seed(0))
        assert torch.equal(draw(KEYS[shuffled], (3, 7), salt=5), whole[shuffled])
        for first, last in ((0, 1), (1, 2), (3, 20), (17, 1000), (1990, 2000)):
            assert torch.equal(draw(KEYS[first:last], (3, 7), salt=5), whole[first:last])
        for row in range(100):
            assert torch.equal(draw(KEYS[row : row + 1], (3, 7), salt=5)[0], whole[row])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("draw", [uniform, normal])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,), (3, 1, 2)])
def test_shapes_are_rows_first_and_may_be_anything(draw, shape: tuple[int, ...]) -> None:
    assert draw(KEYS[:4], shape, salt=0).shape == (4, *shape)
    assert draw(KEYS[:0], shape, salt=0).shape == (0, *shape)
    assert draw(KEYS[:4], shape, salt=0).dtype == torch.float32


@pytest.mark.parametrize("draw", [uniform, normal])
def test_a_longer_shape_begins_with_the_shorter_one(draw) -> None:
    assert torch.equal(draw(KEYS, (9,), salt=1)[:, :4], draw(KEYS, (4,), salt=1))


@pytest.mark.parametrize("draw", [uniform, normal])
def test_torchs_global_generator_neither_matters_nor_changes(draw) -> None:
    state = torch.get_rng_state()
    first = draw(KEYS[:5], (4,), salt=2)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.random.fork_rng():
        torch.manual_seed(99)
        assert torch.equal(draw(KEYS[:5], (4,), salt=2), first)


def test_uniform_is_uniform() -> None:
    numbers = uniform(KEYS, (100,), salt=3).double().numpy()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > LEAST_P
    assert stats.chisquare(np.bincount((numbers.ravel() * 1024).astype(int), minlength=1024)).pvalue > LEAST_P
    low = (numbers.ravel() * 2**24).astype(int) % 256
    assert stats.chisquare(np.bincount(low, minlength=256)).pvalue > LEAST_P


def test_normal_is_normal() -> None:
    numbers = normal(KEYS, (101,), salt=3).double().numpy().ravel()
    count = numbers.size
    assert abs(numbers.mean()) < 4 / count**0.5
    assert abs(numbers.var() - 1) < 4 * (2 / count) ** 0.5
    assert stats.kstest(numbers, "norm").pvalue > LEAST_P
    assert stats.binomtest(int((np.abs(numbers) > 3).sum()), count, 2 * stats.norm.sf(3)).pvalue > LEAST_P
    assert np.isfinite(numbers).all()


def test_the_tail_of_normal_is_long_and_finite_at_both_ends() -> None:
    many = normal(sample_key_tensor(1, 0, torch.arange(20_000)), (250,), salt=0)
    assert torch.isfinite(many).all()
    assert 4.5 < many.abs().max() < 7.45


@pytest.mark.parametrize("draw", [uniform, normal])
def test_neighbouring_samples_elements_salts_epochs_and_seeds_are_not_correlated(draw) -> None:
    numbers = draw(KEYS, (64,), salt=7).double().numpy()
    other_salt = draw(KEYS, (64,), salt=8).double().numpy()
    other_epoch = draw(sample_key_tensor(0, 1, torch.arange(2000)), (64,), salt=7).double().numpy()
    other_seed = draw(sample_key_tensor(1, 0, torch.arange(2000)), (64,), salt=7).double().numpy()
    pairs = [
        (numbers[:-1], numbers[1:]),
        (numbers[:, :-1], numbers[:, 1:]),
        (numbers[:, :-2], numbers[:, 2:]),
        (numbers, other_salt),
        (numbers, other_epoch),
        (numbers, other_seed),
        (numbers[:-1, :-1], other_salt[1:, 1:]),
    ]
    for left, right in pairs:
        assert stats.pearsonr(left.ravel(), right.ravel()).pvalue > LEAST_P
        assert stats.pearsonr((left.ravel() - left.mean()) ** 2, (right.ravel() - right.mean()) ** 2).pvalue > LEAST_P


def test_pairs_of_elements_fill_the_square_evenly() -> None:
    numbers = uniform(KEYS, (100,), salt=11).numpy()
    for left, right in ((numbers[:, ::2], numbers[:, 1::2]), (numbers[::2], numbers[1::2])):
        counts = np.histogram2d(left.ravel(), right.ravel(), bins=32, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(counts.ravel()).pvalue > LEAST_P


def test_keys_that_follow_each_other_are_as_good_as_hashed_ones() -> None:
    numbers = uniform(torch.arange(50_000), (2,), salt=0).double().numpy()
    assert stats.kstest(numbers[:, 0], "uniform").pvalue > LEAST_P
    assert stats.pearsonr(numbers[:-1, 0], numbers[1:, 0]).pvalue > LEAST_P


def test_keys_and_indices_of_the_wrong_kind_say_what_they_are() -> None:
    with pytest.raises(
        DataError, match=r"keys are torch.int32 of shape \(3,\) and must be torch.int64 of shape \(rows,\)"
    ):
        uniform(torch.arange(3, dtype=torch.int32), (2,), salt=0)
    with pytest.raises(DataError, match=r"keys are torch.int64 of shape \(3, 1\) and must be"):
        normal(KEYS[:3, None], (2,), salt=0)
    with pytest.raises(DataError, match=r"indices are torch.float32 and must be torch.int64: use indices.long\(\)"):
        sample_key_tensor(0, 0, torch.zeros(3))
