"""Random numbers of a sample depend on (seed, epoch, index) only, in a dataset and in a model."""

import pickle
import re
import threading
import timeit

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.utils.data import DataLoader, Dataset

from samestep.data.permutation import key64, keyed_word, mix64
from samestep.data.sample_rng import (
    NO_SETTING,
    SampleContext,
    epoch_setting,
    generator_seed,
    micro_batch_keys,
    normal,
    sample_key,
    sample_key_tensor,
    sample_keys,
    sample_numpy_rng,
    sample_rng,
    set_micro_batch,
    uniform,
)
from samestep.errors import DataError

MIN_P = 1e-4
KEYS = sample_key_tensor(0, 0, torch.arange(2000))


def draw_four(seed: int, epoch: int, index: int) -> tuple[float, ...]:
    with SampleContext(seed, epoch, index):
        return (*torch.rand(2, generator=sample_rng(), dtype=torch.float64).tolist(), *sample_numpy_rng().random(2))


class Augmented(Dataset[torch.Tensor]):
    """Reads each sample in its own context, as a data worker of a shard does."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        with SampleContext(seed=5, epoch=2, index=index):
            return torch.tensor([torch.rand((), generator=sample_rng()).item(), sample_numpy_rng().random()])


def test_generators_have_golden_numbers() -> None:
    """A failure means that samestep, torch or numpy changed, and a seed gives other augmentations than before."""
    assert generator_seed(0, 0, 3) == 1481500743628287461
    with SampleContext(seed=0, epoch=0, index=3):
        assert torch.randint(0, 1000, (3,), generator=sample_rng()).tolist() == [513, 466, 581]
        assert sample_numpy_rng().bit_generator.random_raw(2).tolist() == [2739050662776599771, 2421580546961351517]


def test_a_sample_draws_the_same_numbers_every_time_it_is_read() -> None:
    assert draw_four(0, 1, 2) == draw_four(0, 1, 2)


def test_samples_epochs_and_seeds_draw_different_numbers() -> None:
    rows = [draw_four(seed, epoch, index) for seed in range(3) for epoch in range(4) for index in range(50)]
    assert len({number for row in rows for number in row}) == 4 * 600


def test_repeated_calls_in_one_sample_continue_its_generators() -> None:
    with SampleContext(seed=0, epoch=0, index=0):
        parts = [torch.rand(1, generator=sample_rng()).item() for _ in range(3)]
        numpy_parts = [sample_numpy_rng().random() for _ in range(3)]
    with SampleContext(seed=0, epoch=0, index=0):
        assert torch.rand(3, generator=sample_rng()).tolist() == parts
        assert sample_numpy_rng().random(3).tolist() == numpy_parts
    assert len({*parts, *numpy_parts}) == 6


def test_torch_and_numpy_generators_are_independent() -> None:
    with SampleContext(seed=0, epoch=0, index=9):
        alone = torch.rand(2, generator=sample_rng()).tolist()
    with SampleContext(seed=0, epoch=0, index=9):
        sample_numpy_rng().random(100)
        assert torch.rand(2, generator=sample_rng()).tolist() == alone


def test_global_generators_are_neither_used_nor_changed() -> None:
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].tolist()
    draw_four(0, 0, 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert np.random.get_state()[1].tolist() == numpy_state


@pytest.mark.parametrize("workers", [0, 2])
def test_the_number_of_workers_does_not_change_the_numbers(workers: int) -> None:
    read = torch.cat(list(DataLoader(Augmented(), batch_size=5, num_workers=workers)))
    assert torch.equal(read, torch.stack([Augmented()[index] for index in range(12)]))


@pytest.mark.slow
def test_no_two_samples_of_an_epoch_share_a_torch_generator() -> None:
    """torch uses 32 bits of a seed, so a plain hash would make pairs equal: 4.7 expected among 200,000."""
    same = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7 + (1 << 40))
    assert torch.rand(1, generator=same[0]).item() == torch.rand(1, generator=same[1]).item()
    assert len({generator_seed(3, 1, index) & 0xFFFFFFFF for index in range(200_000)}) == 200_000


def test_the_first_numbers_of_many_samples_are_uniform_and_uncorrelated() -> None:
    rows = np.array([draw_four(1, 0, index) for index in range(3000)])
    assert all(stats.kstest(column, "uniform").pvalue > MIN_P for column in rows.T)
    assert all(stats.pearsonr(column[:-1], column[1:]).pvalue > MIN_P for column in rows.T)
    assert stats.pearsonr(rows[:, 0], rows[:, 2]).pvalue > MIN_P


def test_contexts_nest() -> None:
    with SampleContext(seed=0, epoch=0, index=0, setting="outer"):
        first = torch.rand(1, generator=sample_rng()).item()
        with SampleContext(seed=0, epoch=0, index=0, setting="inner"):
            assert torch.rand(1, generator=sample_rng()).item() == first
            assert epoch_setting() == "inner"
        assert torch.rand(1, generator=sample_rng()).item() != first
        assert epoch_setting() == "outer"


def test_an_exception_in_a_sample_closes_its_context() -> None:
    with pytest.raises(ValueError, match="broken"), SampleContext(seed=0, epoch=0, index=0):
        raise ValueError("broken")
    with pytest.raises(DataError, match="outside a sample"):
        sample_rng()


def test_the_setting_of_the_epoch_may_be_none() -> None:
    with SampleContext(0, 0, 0, setting=224):
        assert epoch_setting() == 224
    with SampleContext(0, 0, 0, setting=None):
        assert epoch_setting() is None


def test_epoch_setting_without_settings_is_an_error() -> None:
    no_setting = pickle.loads(pickle.dumps(NO_SETTING))  # as a worker receives it
    message = "this dataset is read without epoch settings: pass run.shard(dataset, epoch_settings=...), a function"
    with SampleContext(0, 0, 0, no_setting), pytest.raises(DataError, match=re.escape(message)):
        epoch_setting()


@pytest.mark.parametrize(
    ("function", "name"),
    [(sample_rng, "sample_rng()"), (sample_numpy_rng, "sample_numpy_rng()"), (epoch_setting, "epoch_setting()")],
)
def test_a_call_outside_a_sample_is_an_error(function, name: str) -> None:
    message = (
        f"{name} was called outside a sample: it works inside a dataset's __getitem__ while run.shard(...) reads it, "
        "in the thread that called __getitem__; in a test, write: with samestep.data.sample_rng.SampleContext("
        "seed=0, epoch=0, index=3): dataset[3]"
    )
    with pytest.raises(DataError, match=re.escape(message)):
        function()


@pytest.mark.parametrize(("function", "name"), [(sample_rng, "sample_rng()"), (sample_numpy_rng, "sample_numpy_rng()")])
def test_in_getitems_there_is_a_setting_but_no_generator(function, name: str) -> None:
    message = (
        f"{name} was called in a dataset's __getitems__, which reads many samples, but a generator belongs to one "
        "sample: call it in __getitem__"
    )
    with SampleContext(0, 0, None, setting=96):
        assert epoch_setting() == 96
        with pytest.raises(DataError, match=re.escape(message)):
            function()


def test_a_context_without_a_generator_costs_less_than_two_microseconds() -> None:
    def read() -> None:
        with SampleContext(0, 0, 3, None):
            pass

    assert min(timeit.repeat(read, number=2000, repeat=20)) / 2000 < 2e-6


def test_the_keys_of_the_micro_batch_are_set_until_removed() -> None:
    assert micro_batch_keys() is None
    keys = torch.arange(3)
    set_micro_batch(keys)
    try:
        assert micro_batch_keys() is keys
    finally:
        set_micro_batch(None)
    assert micro_batch_keys() is None


def test_other_threads_see_the_keys_of_the_micro_batch() -> None:
    """Autograd recomputes checkpointed layers in its own threads on CUDA, with the keys of the forward pass."""
    seen: list[torch.Tensor | None] = []
    set_micro_batch(torch.arange(3))
    try:
        thread = threading.Thread(target=lambda: seen.append(micro_batch_keys()))
        thread.start()
        thread.join()
    finally:
        set_micro_batch(None)
    assert seen[0] is not None
    assert seen[0].tolist() == [0, 1, 2]


# Keys and keyed tensors


def test_keys_and_keyed_numbers_have_golden_values() -> None:
    """A failure means that a seed gives other noise than before: a resumed run would get other weights."""
    assert keyed_word(0, 0) == 0xE220A8397B1DCDAF  # the published first number of SplitMix64 with seed 0
    assert mix64(1) == 0x5692161D100B05E5
    assert key64(1, 2, 3) == 0x003F53A1FE784BBF
    assert [sample_key(0, 0, 0), sample_key(1, 2, 3)] == [0xDB6952949EC50A6E, 0xC39B8692AB53D099]
    first = uniform(KEYS[:2], (3,), salt=0) * 2**24
    assert first.tolist() == [[8798030, 7006790, 7423303], [5869998, 4792157, 1881867]]
    expected = torch.tensor([[-1.0788261, 0.3565416, 1.3201593], [-0.3067634, 1.4164149, 0.3902167]])
    torch.testing.assert_close(normal(KEYS[:2], (3,), salt=0), expected, rtol=0, atol=1e-6)


@given(st.integers(), st.integers(0, 10**6), st.lists(st.integers(0, (1 << 63) - 1), min_size=1, max_size=20))
def test_a_sample_key_is_the_same_in_python_numpy_and_torch(seed: int, epoch: int, indices: list[int]) -> None:
    expected = [sample_key(seed, epoch, index) for index in indices]
    assert sample_keys(seed, epoch, np.array(indices)).tolist() == expected
    assert [key % 2**64 for key in sample_key_tensor(seed, epoch, torch.tensor(indices)).tolist()] == expected


def test_making_keys_does_not_change_the_indices() -> None:
    indices, array = torch.arange(5), np.arange(5)
    sample_key_tensor(0, 0, indices)
    sample_keys(0, 0, array)
    assert indices.tolist() == array.tolist() == [0, 1, 2, 3, 4]
    keys = KEYS.clone()
    normal(keys, (3,), salt=0)
    assert torch.equal(keys, KEYS)


def test_samples_epochs_and_seeds_have_different_keys() -> None:
    keys = np.concatenate([sample_keys(seed, epoch, np.arange(1000)) for seed in range(10) for epoch in range(10)])
    assert np.unique(keys).size == 100_000


def uniform_by_definition(key: int, salt: int, element: int) -> float:
    """Compute one uniform number with Python integers."""
    start = mix64(key + key64(4, salt))
    return (keyed_word(start, element) >> 40) / 2**24


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(), st.integers(0, 30))
def test_uniform_equals_its_definition(key: int, salt: int, element: int) -> None:
    assert uniform(torch.tensor([key]), (31,), salt)[0, element].item() == uniform_by_definition(key, salt, element)


@pytest.mark.parametrize("draw", [uniform, normal])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_numbers_of_a_sample_do_not_depend_on_its_batch(draw, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        full = draw(KEYS, (3, 7), salt=5)
        shuffled = torch.randperm(len(KEYS), generator=torch.Generator().manual_seed(0))
        assert torch.equal(draw(KEYS[shuffled], (3, 7), salt=5), full[shuffled])
        for first, last in ((0, 1), (1, 2), (3, 20), (17, 1000), (1990, 2000)):
            assert torch.equal(draw(KEYS[first:last], (3, 7), salt=5), full[first:last])
        for row in range(100):
            assert torch.equal(draw(KEYS[row : row + 1], (3, 7), salt=5)[0], full[row])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("draw", [uniform, normal])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,), (3, 1, 2)])
def test_shapes_begin_with_rows(draw, shape: tuple[int, ...]) -> None:
    assert draw(KEYS[:4], shape, salt=0).shape == (4, *shape)
    assert draw(KEYS[:0], shape, salt=0).shape == (0, *shape)
    assert draw(KEYS[:4], shape, salt=0).dtype == torch.float32


@pytest.mark.parametrize("draw", [uniform, normal])
def test_a_longer_shape_begins_with_the_shorter_one(draw) -> None:
    assert torch.equal(draw(KEYS, (9,), salt=1)[:, :4], draw(KEYS, (4,), salt=1))


@pytest.mark.parametrize("draw", [uniform, normal])
def test_the_global_generator_of_torch_is_neither_used_nor_changed(draw) -> None:
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
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > MIN_P
    assert stats.chisquare(np.bincount((numbers.ravel() * 1024).astype(int), minlength=1024)).pvalue > MIN_P
    low = (numbers.ravel() * 2**24).astype(int) % 256
    assert stats.chisquare(np.bincount(low, minlength=256)).pvalue > MIN_P


def test_normal_is_normal() -> None:
    numbers = normal(KEYS, (101,), salt=3).double().numpy().ravel()
    count = numbers.size
    assert abs(numbers.mean()) < 4 / count**0.5
    assert abs(numbers.var() - 1) < 4 * (2 / count) ** 0.5
    assert stats.kstest(numbers, "norm").pvalue > MIN_P
    assert stats.binomtest(int((np.abs(numbers) > 3).sum()), count, 2 * stats.norm.sf(3)).pvalue > MIN_P
    assert np.isfinite(numbers).all()


def test_normal_has_a_long_and_finite_tail() -> None:
    many = normal(sample_key_tensor(1, 0, torch.arange(20_000)), (250,), salt=0)
    assert torch.isfinite(many).all()
    assert 4.5 < many.abs().max() < 7.45


@pytest.mark.parametrize("draw", [uniform, normal])
def test_neighboring_samples_elements_salts_epochs_and_seeds_are_not_correlated(draw) -> None:
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
        assert stats.pearsonr(left.ravel(), right.ravel()).pvalue > MIN_P
        assert stats.pearsonr((left.ravel() - left.mean()) ** 2, (right.ravel() - right.mean()) ** 2).pvalue > MIN_P


def test_pairs_of_elements_fill_the_square_evenly() -> None:
    numbers = uniform(KEYS, (100,), salt=11).numpy()
    for left, right in ((numbers[:, ::2], numbers[:, 1::2]), (numbers[::2], numbers[1::2])):
        counts = np.histogram2d(left.ravel(), right.ravel(), bins=32, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(counts.ravel()).pvalue > MIN_P


def test_consecutive_keys_are_as_random_as_hashed_ones() -> None:
    numbers = uniform(torch.arange(50_000), (2,), salt=0).double().numpy()
    assert stats.kstest(numbers[:, 0], "uniform").pvalue > MIN_P
    assert stats.pearsonr(numbers[:-1, 0], numbers[1:, 0]).pvalue > MIN_P


def test_keys_and_indices_of_the_wrong_type_are_an_error() -> None:
    with pytest.raises(
        DataError, match=r"keys are torch.int32 of shape \(3,\) and must be torch.int64 of shape \(rows,\)"
    ):
        uniform(torch.arange(3, dtype=torch.int32), (2,), salt=0)
    with pytest.raises(DataError, match=r"keys are torch.int64 of shape \(3, 1\) and must be"):
        normal(KEYS[:3, None], (2,), salt=0)
    with pytest.raises(DataError, match=r"indices are torch.float32 and must be torch.int64: use indices.long\(\)"):
        sample_key_tensor(0, 0, torch.zeros(3))
