"""Digests of inputs: a row's own, whatever shares its batch, and another for any other input."""

import pytest
import torch

from samestep.teacher.output_cache import row_digests

X = torch.randint(0, 5, (6, 7), generator=torch.Generator().manual_seed(0))


def digests(*args, **kwargs):
    return row_digests(args, kwargs, len(X))


def test_a_row_has_its_digest_wherever_it_stands():
    order = torch.tensor([5, 4, 3, 2, 1, 0])
    assert torch.equal(digests(X[order]), digests(X)[order])
    assert torch.equal(row_digests((X[2:3],), {}, 1), digests(X)[2:3])


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32, torch.bfloat16, torch.float64])
def test_one_element_changes_the_digest_of_its_row_alone(dtype):
    other = X.clone()
    other[2, 3] += 1
    changed = (digests(X.to(dtype)) != digests(other.to(dtype))).all(dim=1)
    assert changed.tolist() == [False, False, True, False, False, False]


def test_elements_in_another_order_have_another_digest():
    assert (digests(X + torch.arange(7)) != digests((X + torch.arange(7)).flip(1))).any(dim=1).all()


def test_the_same_bytes_of_another_dtype_shape_or_name_have_another_digest():
    seen = [
        digests(X),
        digests(X.view(torch.float64)),
        digests(X[:, :, None]),
        digests(tokens=X),
        digests(X, X),
        digests([X]),
    ]
    assert len({tuple(found.flatten().tolist()) for found in seen}) == len(seen)


def test_what_belongs_to_no_row_counts_for_each():
    mask = torch.ones(3, 3)
    seen = [digests(X), digests(X, 1), digests(X, 2), digests(X, mask), digests(X, 0 * mask)]
    for row in range(len(X)):
        assert len({tuple(found[row].tolist()) for found in seen}) == len(seen)


def test_many_rows_share_no_digest():
    many = torch.arange(50_000)[:, None].expand(-1, 3).contiguous()
    found = row_digests((many,), {}, len(many))
    assert all(len(found[:, half].unique()) == len(many) for half in range(2))
