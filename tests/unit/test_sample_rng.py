"""Randomness inside a sample: its own, the same everywhere, and refused elsewhere."""

import pickle
import re
import threading
import timeit

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from samestep.data.sample_rng import (
    NO_SETTING,
    SampleContext,
    epoch_setting,
    generator_seed,
    micro_batch_keys,
    sample_numpy_rng,
    sample_rng,
    set_micro_batch,
)
from samestep.errors import DataError


def drawn(seed: int, epoch: int, index: int) -> tuple[float, ...]:
    with SampleContext(seed, epoch, index):
        return (*torch.rand(2, generator=sample_rng(), dtype=torch.float64).tolist(), *sample_numpy_rng().random(2))


class Augmented(Dataset[torch.Tensor]):
    """Reads each sample under its own luck, as a shard's worker does."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        with SampleContext(seed=5, epoch=2, index=index):
            return torch.tensor([torch.rand((), generator=sample_rng()).item(), sample_numpy_rng().random()])


def test_numbers_are_those_of_every_earlier_version() -> None:
    """A failure means that a seed gives other augmentations than before, by our doing, torch's or numpy's."""
    assert generator_seed(0, 0, 3) == 1481500743628287461
    with SampleContext(seed=0, epoch=0, index=3):
        assert torch.randint(0, 1000, (3,), generator=sample_rng()).tolist() == [513, 466, 581]
        assert sample_numpy_rng().bit_generator.random_raw(2).tolist() == [2739050662776599771, 2421580546961351517]


def test_a_sample_draws_the_same_numbers_whenever_it_is_read() -> None:
    assert drawn(0, 1, 2) == drawn(0, 1, 2)


def test_samples_epochs_and_seeds_draw_numbers_of_their_own() -> None:
    rows = [drawn(seed, epoch, index) for seed in range(3) for epoch in range(4) for index in range(50)]
    assert len({number for row in rows for number in row}) == 4 * 600


def test_further_calls_in_one_sample_continue_its_generators() -> None:
    with SampleContext(seed=0, epoch=0, index=0):
        parts = [torch.rand(1, generator=sample_rng()).item() for _ in range(3)]
        numpy_parts = [sample_numpy_rng().random() for _ in range(3)]
    with SampleContext(seed=0, epoch=0, index=0):
        assert torch.rand(3, generator=sample_rng()).tolist() == parts
        assert sample_numpy_rng().random(3).tolist() == numpy_parts
    assert len({*parts, *numpy_parts}) == 6


def test_torch_and_numpy_generators_do_not_disturb_each_other() -> None:
    with SampleContext(seed=0, epoch=0, index=9):
        alone = torch.rand(2, generator=sample_rng()).tolist()
    with SampleContext(seed=0, epoch=0, index=9):
        sample_numpy_rng().random(100)
        assert torch.rand(2, generator=sample_rng()).tolist() == alone


def test_global_generators_neither_matter_nor_change() -> None:
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].tolist()
    drawn(0, 0, 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert np.random.get_state()[1].tolist() == numpy_state


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_change_nothing(workers: int) -> None:
    read = torch.cat(list(DataLoader(Augmented(), batch_size=5, num_workers=workers)))
    assert torch.equal(read, torch.stack([Augmented()[index] for index in range(12)]))


def test_no_two_samples_of_an_epoch_share_a_torch_generator() -> None:
    """Of its seed torch uses 32 bits only, so a mere hash would make pairs equal: 4.7 expected among 200,000."""
    same = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7 + (1 << 40))
    assert torch.rand(1, generator=same[0]).item() == torch.rand(1, generator=same[1]).item()
    assert len({generator_seed(3, 1, index) & 0xFFFFFFFF for index in range(200_000)}) == 200_000


def test_the_first_numbers_of_many_samples_are_uniform_and_uncorrelated() -> None:
    from scipy import stats

    rows = np.array([drawn(1, 0, index) for index in range(3000)])
    assert all(stats.kstest(column, "uniform").pvalue > 1e-4 for column in rows.T)
    assert all(stats.pearsonr(column[:-1], column[1:]).pvalue > 1e-4 for column in rows.T)
    assert stats.pearsonr(rows[:, 0], rows[:, 2]).pvalue > 1e-4


def test_blocks_nest_and_the_outer_one_comes_back() -> None:
    with SampleContext(seed=0, epoch=0, index=0, setting="outer"):
        first = torch.rand(1, generator=sample_rng()).item()
        with SampleContext(seed=0, epoch=0, index=0, setting="inner"):
            assert torch.rand(1, generator=sample_rng()).item() == first
            assert epoch_setting() == "inner"
        assert torch.rand(1, generator=sample_rng()).item() != first
        assert epoch_setting() == "outer"


def test_an_exception_in_a_sample_closes_its_block() -> None:
    with pytest.raises(ValueError, match="broken"), SampleContext(seed=0, epoch=0, index=0):
        raise ValueError("broken")
    with pytest.raises(DataError, match="outside a sample"):
        sample_rng()


def test_the_setting_of_the_epoch_is_there_even_where_it_is_none() -> None:
    with SampleContext(0, 0, 0, setting=224):
        assert epoch_setting() == 224
    with SampleContext(0, 0, 0, setting=None):
        assert epoch_setting() is None


def test_a_sample_read_without_settings_says_how_to_give_them() -> None:
    absent = pickle.loads(pickle.dumps(NO_SETTING))  # as it reaches a worker
    message = "this dataset is read without epoch settings: pass run.shard(dataset, epoch_settings=...), a function"
    with SampleContext(0, 0, 0, absent), pytest.raises(DataError, match=re.escape(message)):
        epoch_setting()


@pytest.mark.parametrize(
    ("ask", "name"),
    [(sample_rng, "sample_rng()"), (sample_numpy_rng, "sample_numpy_rng()"), (epoch_setting, "epoch_setting()")],
)
def test_outside_a_sample_each_says_where_it_works_and_how_to_test_with_it(ask, name: str) -> None:
    message = (
        f"{name} was called outside a sample: it works inside a dataset's __getitem__ while run.shard(...) reads it, "
        "in the thread that called __getitem__; in a test, write: with samestep.data.sample_rng.SampleContext("
        "seed=0, epoch=0, index=3): dataset[3]"
    )
    with pytest.raises(DataError, match=re.escape(message)):
        ask()


@pytest.mark.parametrize(("ask", "name"), [(sample_rng, "sample_rng()"), (sample_numpy_rng, "sample_numpy_rng()")])
def test_where_many_samples_are_read_at_once_there_is_a_setting_and_no_one_generator(ask, name: str) -> None:
    message = (
        f"{name} was called in a dataset's __getitems__, which reads many samples, but a generator belongs to one "
        "sample: call it in __getitem__"
    )
    with SampleContext(0, 0, None, setting=96):
        assert epoch_setting() == 96
        with pytest.raises(DataError, match=re.escape(message)):
            ask()


def test_a_block_costs_less_than_two_microseconds_where_no_generator_is_asked_for() -> None:
    def read() -> None:
        with SampleContext(0, 0, 3, None):
            pass

    assert min(timeit.repeat(read, number=2000, repeat=20)) / 2000 < 2e-6


def test_the_keys_of_the_micro_batch_are_there_until_taken_away() -> None:
    assert micro_batch_keys() is None
    keys = torch.arange(3)
    set_micro_batch(keys)
    try:
        assert micro_batch_keys() is keys
    finally:
        set_micro_batch(None)
    assert micro_batch_keys() is None


def test_threads_without_a_context_see_the_keys_of_the_micro_batch() -> None:
    """Autograd's threads recompute checkpointed layers on CUDA, and must find what the forward pass found."""
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
