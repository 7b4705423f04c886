"""A collate_fn must return one row per sample in the order of the samples; what cannot be compared is accepted."""

import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from samestep.data.loader import KeyedCollate
from samestep.errors import DataError

ORDER = r"collate_fn returns the rows of \d+ samples in another order than it got them.*keep the order.*enforce_sorted"
Pair = namedtuple("Pair", "tokens label")


def texts(count=5):
    """Texts of different lengths, with a binary label."""
    return [(torch.arange(10 * i, 10 * i + (3 * i) % 5 + 1), i % 2) for i in range(count)]


def collate(function, samples, batches=1):
    keyed = KeyedCollate(function, seed=0, rank=0)
    for first in range(batches):
        keyed(list(samples), 0, first)
    return keyed(list(samples), 0, 0)


def padded(samples):
    return pad_sequence([x for x, _ in samples], batch_first=True), torch.tensor([y for _, y in samples])


def by_length(samples):
    return sorted(samples, key=lambda sample: -len(sample[0]))


def sort_in_place(samples):
    samples.sort(key=lambda sample: len(sample[0]))
    return padded(samples)


def packed(samples):
    return torch.cat([x for x, _ in samples]), torch.tensor([len(x) for x, _ in samples])


SORTING = [
    lambda samples: padded(by_length(samples)),
    lambda samples: dict(zip("xy", padded(by_length(samples)), strict=True)),
    lambda samples: Pair(*padded(by_length(samples))),
    lambda samples: tuple(zip(*by_length(samples), strict=True)),
    lambda samples: [x for x, _ in by_length(samples)],
    lambda samples: pad_sequence([x for x, _ in by_length(samples)]),
    lambda samples: packed(by_length(samples)),
    sort_in_place,
]


@pytest.mark.parametrize("function", SORTING)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_collate_fn_that_changes_the_order_raises(function, count):
    samples = [(torch.arange(3), 0), (torch.arange(5), 1)] if count == 2 else texts(count)
    with pytest.raises(DataError, match=ORDER):
        collate(function, samples)


def test_a_collate_fn_that_moves_rows_raises():
    with pytest.raises(DataError, match=ORDER):
        collate(lambda samples: padded(samples[1:] + samples[:1]), texts())


def test_samples_of_equal_length_are_told_from_sorted_ones_in_a_later_batch():
    keyed = KeyedCollate(SORTING[0], seed=0, rank=0)
    keyed([(torch.zeros(2), 0), (torch.ones(2), 1)], 0, 0)
    with pytest.raises(DataError, match=ORDER):
        keyed(texts(), 0, 2)


class Batch:
    """A batch class of the user."""

    def __init__(self, samples):
        self.x = padded(by_length(samples))[0]

    def to(self, device):
        return self


def with_negatives(samples):
    x, y = padded(samples)
    return x, x.roll(1, 0), y, y.flip(0)


def mixed(samples):
    x, y = padded(samples)
    weights, order = torch.rand(len(x), 1), torch.randperm(len(x))
    return x * weights + x[order] * (1 - weights), y * weights[:, 0], weights


def noisy(samples):
    x, y = padded(samples)
    return x + torch.rand(len(x), 1) + random.random() + np.random.rand(), y


def change_samples(samples):
    for sample in samples:
        sample["x"] += 1
        sample["y"] = sample.pop("x") * 2
    return default_collate(samples)


KEEPING = [
    padded,
    packed,
    with_negatives,
    mixed,
    noisy,
    Batch,
    lambda samples: pad_sequence([x for x, _ in samples]),
    lambda samples: (*padded(samples), torch.arange(len(samples)), torch.tril(torch.ones(len(samples), len(samples)))),
    lambda samples: (torch.arange(len(samples)), torch.eye(len(samples))),
    lambda samples: torch.stack([x.double().mean() for x, _ in samples]).sum() * torch.arange(len(samples)),
    lambda samples: torch.bincount(padded(samples)[1], minlength=len(samples)),
    lambda samples: {"x": [x for x, _ in samples], "name": [str(y) for _, y in samples]},
    lambda samples: tuple(zip(*samples, strict=True)),
    lambda samples: [x[:, None, None].expand(-1, 3, 4).transpose(0, 1) for x, _ in samples],
    lambda samples: torch.stack([x.sum().float() for x, _ in samples]).to(torch.bfloat16),
    lambda samples: torch.stack([x.sum() for x, _ in samples]).to_sparse(),
    lambda samples: torch.zeros(len(samples), 0),
]


@pytest.mark.parametrize("function", KEEPING)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 6])
def test_a_collate_fn_that_keeps_the_order_is_accepted(function, count):
    collate(function, texts(count))


@pytest.mark.parametrize("images", ["aaa", "aba", "abc", "aabb"])
def test_images_in_a_list_are_not_taken_for_rows(images):
    pictures = {name: torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(ord(name))) for name in images}
    collate(lambda samples: (list(samples), torch.zeros(len(samples))), [pictures[name] for name in images])


def test_equal_samples_are_accepted():
    collate(SORTING[0], 4 * texts(1))


def test_samples_are_changed_only_once():
    samples = [{"x": torch.full((2,), float(i))} for i in range(3)]
    given = [sample["x"] for sample in samples]
    collated = KeyedCollate(change_samples, seed=0, rank=0)(samples, 0, 0)
    assert collated["y"].tolist() == [[2.0, 2.0], [4.0, 4.0], [6.0, 6.0]]
    assert [x.tolist() for x in given] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def test_a_collate_fn_is_called_a_second_time_only_once():
    calls = []

    def count(samples):
        calls.append(len(samples))
        return padded(samples)

    collate(count, texts(), batches=3)
    assert calls == [5] * 5


def without_missing(samples):
    return default_collate([sample for sample in samples if sample is not None])


@pytest.mark.parametrize("samples", [[torch.zeros(3), None], [None, (torch.zeros(3), 1), (torch.ones(3), 0)]])
def test_a_collate_fn_that_leaves_out_samples_raises(samples):
    with pytest.raises(
        DataError,
        match=rf"collate_fn returns {len(samples) - 1} rows for {len(samples)} samples.*return one row per sample",
    ):
        collate(without_missing, samples)


PACKING = [
    lambda samples: torch.cat([x for x, _ in samples])[None],
    lambda samples: torch.cat([x for x, _ in samples])[:4].view(2, 2),
    lambda samples: torch.tensor(1.0),
    lambda samples: 3,
]


@pytest.mark.parametrize("function", PACKING)
def test_packed_batches_may_have_fewer_rows_than_samples(function):
    collate(function, texts(), batches=2)
