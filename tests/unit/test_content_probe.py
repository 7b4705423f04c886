"""A probe tells samples apart, ignores rounding, and never fails."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from samestep.data.content_probe import make_probe, probe_indices


@dataclass
class Item:
    image: object
    label: int


class Opaque:
    __array_interface__ = "broken"


Pair = namedtuple("Pair", "image label")
IMAGE = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(0))

DIFFERENT = [
    (1, 2),
    (1, True),
    (1, "1"),
    ("a", b"a"),
    (0.5, 0.25),
    (0.5, -0.5),
    (None, 0),
    ([1, 2], [2, 1]),
    ([1, [2]], [1, 2]),
    ({"a": 1}, {"a": 2}),
    ({"a": 1}, {"b": 1}),
    ({1, 2}, {1, 3}),
    (torch.arange(5), torch.arange(5).flip(0)),
    (torch.zeros(2, 3), torch.zeros(3, 2)),
    (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
    (IMAGE, IMAGE.flip(0)),
    (IMAGE, 2 * IMAGE),
    (IMAGE * 1e-6, IMAGE.flip(1) * 1e-6),
    (IMAGE, IMAGE + 1),
    ((IMAGE, 3), (IMAGE, 4)),
    (Item(IMAGE, 1), Item(IMAGE, 2)),
    (Pair(IMAGE, 0.0), Pair(IMAGE, 1.0)),
    (np.array(["a", "b"]), np.array(["a", "c"])),
    (np.array([{"a": 1}], dtype=object), np.array([{"a": 2}], dtype=object)),
    (torch.tensor([1 + 2j]), torch.tensor([2 + 1j])),
    (torch.tensor([float("nan"), 1.0]), torch.tensor([0.0, 1.0])),
    (IMAGE.bfloat16(), IMAGE.flip(2).bfloat16()),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_samples_have_different_probes(one, other):
    assert make_probe(0, 0, one).equals(make_probe(0, 0, one))
    assert make_probe(0, 0, other).equals(make_probe(0, 0, other))
    assert not make_probe(0, 0, one).equals(make_probe(0, 0, other))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rounding_does_not_change_a_probe(dtype):
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        shape = (3, 40, 40) if seed % 2 else (seed % 3 + 1,)
        values, noise = torch.randn(2, *shape, dtype=torch.float64, generator=generator)
        other = values * (1 + torch.finfo(dtype).eps * noise.clamp(-0.5, 0.5))
        assert make_probe(0, 0, (values.to(dtype), seed)).equals(make_probe(0, 0, (other.to(dtype), seed)))


def test_random_data_of_two_seeds_always_differs():
    probes = [make_probe(0, 0, torch.randn(20, generator=torch.Generator().manual_seed(seed))) for seed in range(60)]
    pairs = [(a, b) for i, a in enumerate(probes) for b in probes[:i]]
    assert sum(a.equals(b) for a, b in pairs) <= 1  # 3e-5 each; a comparison looks at several samples


def test_classes_that_samestep_does_not_know_count_by_name_and_never_fail():
    assert make_probe(0, 0, object()).equals(make_probe(0, 0, object()))
    assert make_probe(0, 0, (1, Opaque())).preview.startswith("1, ")
    assert make_probe(0, 0, torch.zeros(2, 2).to_sparse()).equals(make_probe(0, 0, torch.zeros(2, 2).to_sparse()))
    assert make_probe(0, 0, torch.zeros(0)).equals(make_probe(0, 0, torch.zeros(0)))
    assert make_probe(0, 0, OrderedDict(a=1)).equals(make_probe(0, 0, {"a": 1}))
    assert len(make_probe(0, 0, list(range(10**6))).preview) <= 60


@pytest.mark.parametrize("n", [1, 2, 3, 7, 10**6, 2**40])
def test_compared_samples_are_few_distinct_and_the_same_for_every_run(n):
    indices = probe_indices(n, seed=3)
    assert indices == probe_indices(n, seed=3)
    assert {0, n - 1} <= set(indices) <= set(range(min(n, 100))) | {i for i in indices if 0 <= i < n}
    assert len(set(indices)) == len(indices) <= 6
