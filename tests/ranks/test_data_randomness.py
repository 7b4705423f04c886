"""Random numbers that a dataset draws from global generators belong to the sample, on any ranks and workers."""

import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from samestep import Run
from samestep.errors import SampleError
from samestep.messages import SamestepWarning

N = 22


class Augmented(Dataset):
    """Item i is i and what a crop, a flip and a color jitter draw: torch, Python and numpy, as torchvision and others.

    Samples below `from_sample` draw nothing.
    """

    def __init__(self, from_sample=0):
        self.from_sample = from_sample

    def __len__(self):
        return N

    def __getitem__(self, index):
        if index < self.from_sample:
            return torch.tensor([float(index), 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
        crop, flip = float(torch.rand(1)), random.random()
        jitter = np.random.randn() if flip < 0.5 else np.random.rand()
        return torch.tensor([float(index), crop, flip, jitter, random.gauss(0, 1)], dtype=torch.float64)


class AtOnce(Augmented):
    """Reads many samples at once, as Hugging Face datasets do."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class OnlyAtOnce(Dataset):
    def __len__(self):
        return N

    def __getitems__(self, indices):
        return [torch.tensor([float(index), random.random()]) for index in indices]


def train(dataset, micro_batch=None, workers=0, epochs=2, collate_fn=None):
    """{(step, index): row} of every sample that this rank counted, and what the script itself drew meanwhile."""
    with Run(global_batch=6, seed=3) as run:
        shard = run.shard(dataset, shuffle=True, micro_batch=micro_batch, num_workers=workers, collate_fn=collate_fn)
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
        seen, own = {}, []
        for epoch in shard.epochs(epochs):
            for step in epoch:
                own.append((random.gauss(0, 1), np.random.randn(), float(torch.randn(1))))
                for batch in step:
                    rows = zip(batch.tolist(), step.weights.tolist(), strict=True)
                    seen |= {(step.number, row[0]): row for row, weight in rows if weight}
        own.append((random.random(), np.random.randn(), float(torch.rand(1))))
    return seen, own


def merged(parts):
    rows = {}
    for seen, _ in parts:
        rows |= seen
    return rows


@pytest.mark.parametrize(("size", "micro_batch", "workers"), [(2, None, 0), (2, 2, 2), (3, 2, 1)])
def test_an_augmentation_is_the_same_on_any_ranks_and_workers(ranks, size, micro_batch, workers):
    alone = merged(ranks(1, train, Augmented()))
    assert len({row[1] for row in alone.values()}) == len({row[2] for row in alone.values()}) == 2 * N
    assert merged(ranks(size, train, Augmented(), micro_batch, workers)) == alone


@pytest.mark.parametrize("dataset", [Augmented(from_sample=20), AtOnce()])
def test_a_dataset_that_draws_late_or_for_many_samples_at_once_is_keyed_too(ranks, dataset):
    alone = merged(ranks(1, train, type(dataset)(dataset.from_sample)))
    drawn = {key: row for key, row in alone.items() if row[0] >= dataset.from_sample}
    assert drawn == {
        key: row for key, row in merged(ranks(1, train, Augmented())).items() if row[0] >= dataset.from_sample
    }
    assert merged(ranks(2, train, dataset, 2, 1)) == alone


class Fails(Augmented):
    """Draws for few samples, and one of those fails."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        if index == N - 1:
            raise ValueError(f"drew {float(torch.rand(1)):.6f}")
        return row


def read_failing(workers):
    with Run(global_batch=6, seed=3) as run:
        shard = run.shard(Fails(from_sample=20), micro_batch=3, num_workers=workers)
        try:
            for _ in shard:
                pass
        except SampleError as error:
            return str(error)


def test_a_late_draw_before_an_error_is_keyed_and_the_error_names_the_sample(ranks):
    (alone,) = ranks(1, read_failing, 0)
    assert alone.startswith("sample 21 could not be read on rank 0, in the training process: ValueError: drew 0.")
    (in_worker,) = ranks(1, read_failing, 2)
    assert alone.split("ValueError")[1] in in_worker  # the same number
    assert "sample 21 could not be read on rank 0, worker" in in_worker


def draw_without_data():
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    own = [(random.gauss(0, 1), np.random.randn(), float(torch.randn(1))) for _ in range(8)]
    return [*own, (random.random(), np.random.randn(), float(torch.rand(1)))]


@pytest.mark.parametrize("dataset", [Augmented(), Augmented(from_sample=20), TensorDataset(torch.rand(N, 1))])
def test_the_generators_of_the_script_are_untouched(ranks, dataset):
    if isinstance(dataset, TensorDataset):
        ((_, own),) = ranks(1, train, dataset.tensors[0])
    else:
        ((_, own),) = ranks(1, train, dataset)
    assert own == draw_without_data()


def noisy_collate(samples):
    batch = default_collate(samples)
    return batch + torch.rand(len(batch), 1) + random.random() + np.random.rand()


def collated(micro_batch, workers):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen, own = train(torch.zeros(N, 1), micro_batch, workers, collate_fn=noisy_collate)
    return sorted(seen.values()), own, [str(each.message) for each in caught if each.category is SamestepWarning]


def test_a_collate_fn_that_draws_is_repeatable_and_samestep_warns_that_it_depends_on_the_layout(ranks):
    ((first, own, warned),) = ranks(1, collated, 2, 0)
    ((second, _, warned_of_worker),) = ranks(1, collated, 2, 1)
    assert first == second
    assert len({row[0] for row in first}) > N
    assert own == draw_without_data()
    assert warned == warned_of_worker
    assert len(warned) == 1
    assert warned[0].startswith("collate_fn draws random numbers for the rows of a micro-batch, so they depend on")


def read_only_at_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(OnlyAtOnce())
    return [str(each.message) for each in caught if each.category is SamestepWarning]


def test_random_numbers_for_many_samples_at_once_are_a_warning_if_samples_cannot_be_read_one_by_one(ranks):
    ((warned,),) = ranks(1, read_only_at_once)
    assert warned.startswith("OnlyAtOnce.__getitems__ draws random numbers for many samples at once, so they depend on")
    assert "implement __getitem__" in warned


class Shuffled(IterableDataset):
    """Shuffles with a buffer and draws in every record, from global generators."""

    def __iter__(self):
        numbers = list(range(N))
        random.shuffle(numbers)
        for number in numbers:
            yield float(number), float(torch.rand(1)), np.random.rand()


def augment(record):
    drawn = [random.random(), np.random.randn(), float(torch.randn(1)), *GLOBAL(0.0)]
    return torch.tensor([*record, *drawn], dtype=torch.float64)


def train_stream(workers=0):
    with Run(global_batch=6, seed=3) as run:
        stream = run.stream(Shuffled(), decode=augment, num_workers=workers, micro_batch=2)
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
        seen, own = {}, []
        for epoch in stream.epochs(2):
            for step in epoch:
                own.append((random.gauss(0, 1), np.random.randn(), float(torch.randn(1))))
                for batch in step:
                    rows = zip(batch.tolist(), step.weights.tolist(), strict=True)
                    seen |= {(step.number, row[0]): row for row, weight in rows if weight}
        own.append((random.random(), np.random.randn(), float(torch.rand(1))))
        evaluated = [row for batch in stream for row in batch.tolist()]
    return seen, own, evaluated


@pytest.mark.slow
@pytest.mark.parametrize(("size", "workers"), [(2, 0), (2, 2), (3, 1)])
def test_a_stream_draws_the_same_on_any_ranks_and_workers(ranks, size, workers):
    ((alone, own, evaluated),) = ranks(1, train_stream)
    assert own == draw_without_data()
    parts = ranks(size, train_stream, workers)
    assert merged((seen, None) for seen, *_ in parts) == alone
    assert {step: sorted(key[1] for key in alone if key[0] // 4 == step) for step in (0, 1)} == {
        0: sorted(map(float, range(N))),
        1: sorted(map(float, range(N))),
    }
    rows = [row for *_, rows in parts for row in rows]
    assert sorted(rows) == sorted(evaluated)
    assert [row[0] for row in evaluated] != sorted(row[0] for row in evaluated)


def evaluate(dataset, workers):
    with Run(global_batch=6, seed=3) as run:
        shard = run.shard(dataset, num_workers=workers)
        return [row for _ in range(2) for batch in shard for row in batch.tolist()]


def test_every_evaluation_draws_the_same(ranks):
    (alone,) = ranks(1, evaluate, Augmented(), 0)
    assert alone[:N] == alone[N:]
    parts = ranks(2, evaluate, Augmented(), 1)
    assert sorted(row for rows in parts for row in rows) == sorted(alone)


class OwnGenerator:
    """A transform with generators of its own, as those of albumentations 2."""

    def __init__(self):
        self.set_random_seed(None)

    def set_random_seed(self, seed):
        self.rng, self.python = np.random.default_rng(seed), random.Random(seed)

    def __call__(self, value):
        return value, self.rng.random(), self.python.random()


class Composed:
    def __init__(self, *transforms):
        self.transforms = list(transforms)


class Transformed(Dataset):
    def __init__(self):
        self.transform = Composed(OwnGenerator(), OwnGenerator())

    def __len__(self):
        return N

    def __getitem__(self, index):
        first, second = (transform(float(index)) for transform in self.transform.transforms)
        return torch.tensor([*first, *second[1:]], dtype=torch.float64)


GLOBAL = OwnGenerator()


def use_global(value):
    return GLOBAL(value)


def use_default():
    def use(value, *, transform=GLOBAL):
        return transform(value)

    return use


def use_enclosing():
    def use(value):
        return transform(value) if value >= 0 else unknown

    transform = OwnGenerator()
    if transform is None:
        unknown = 0  # so that it has no value
    return use


FORMS = {
    "bound method": lambda: OwnGenerator().__call__,
    "partial": lambda: partial(OwnGenerator()),
    "function with a global variable": lambda: use_global,
    "function in a function": use_enclosing,
    "default": use_default,
}


class CallsFunction(Dataset):
    def __init__(self, form):
        self.transform = FORMS[form]()

    def __len__(self):
        return N

    def __getitem__(self, index):
        return torch.tensor(self.transform(float(index)), dtype=torch.float64)


class UsesGlobal(CallsFunction):
    def __getitem__(self, index):
        return torch.tensor(GLOBAL(float(index)), dtype=torch.float64)


def train_form(form):
    return train(UsesGlobal("partial") if form == "__getitem__ with a global variable" else CallsFunction(form))


@pytest.mark.slow
@pytest.mark.parametrize("form", [*FORMS, "__getitem__ with a global variable"])
def test_transforms_that_a_function_of_the_dataset_uses_are_found(ranks, form):
    alone = merged(ranks(1, train_form, form))
    assert len({row[1] for row in alone.values()}) == 2 * N
    assert merged(ranks(2, train_form, form)) == alone


def test_transforms_with_generators_of_their_own_are_seeded_by_sample(ranks):
    alone = merged(ranks(1, train, Transformed()))
    assert len({number for row in alone.values() for number in row[1:]}) == 4 * 2 * N
    assert merged(ranks(2, train, Subset(Transformed(), range(N)), 2, 1)) == alone
