"""Tensors of a checkpoint in host memory: the size of the memory, its reuse, and the plan that later saves reuse."""

import gc
import random
from mmap import PAGESIZE
from unittest import mock

import pytest
import torch

from samestep.checkpoint import tensor_storage
from samestep.checkpoint.parts import get_rng_state, set_rng_state
from samestep.checkpoint.tensor_storage import HostMemory, HostStaging, divide_reads


@pytest.fixture
def pins(monkeypatch):
    """What was pinned and unpinned, in order, as (action, address, bytes); nothing is pinned without a GPU."""
    actions = []
    monkeypatch.setattr(
        tensor_storage, "pin", lambda memory: actions.append(("pin", memory.data_ptr(), memory.nbytes)) or True
    )
    monkeypatch.setattr(
        tensor_storage, "unpin", lambda memory: actions.append(("unpin", memory.data_ptr(), memory.nbytes))
    )
    return actions


def tensors():
    """Five tensors, whose sizes are just above powers of two."""
    return {f"t{size}": torch.randn(size) for size in (1025, 4097, 65537, 3)} | {
        "bytes": torch.ones(7, dtype=torch.bool)
    }


def test_pinned_memory_has_the_size_of_the_tensors_in_pages_and_not_powers_of_two(pins):
    given = tensors()
    memory = HostMemory(pinned=True)
    views = memory.views(given)
    needed = sum(tensor.nbytes for tensor in given.values())
    assert needed <= memory._memory.nbytes < needed + len(given) * 64 + PAGESIZE
    assert memory._memory.nbytes % PAGESIZE == 0
    (pinned,) = pins
    assert pinned[2] == memory._memory.nbytes
    assert pinned[1] % PAGESIZE == 0
    for name, tensor in given.items():
        assert (views[name].shape, views[name].dtype, views[name].is_contiguous()) == (tensor.shape, tensor.dtype, True)
        assert pinned[1] <= views[name].data_ptr() < views[name].data_ptr() + tensor.nbytes <= pinned[1] + pinned[2]
        views[name].copy_(tensor)
    assert all(torch.equal(views[name], tensor) for name, tensor in given.items())  # they do not overlap


def test_memory_is_kept_for_tensors_of_the_same_size_and_unpinned_before_it_is_freed(pins):
    memory = HostMemory(pinned=True)
    first = memory.views(tensors())
    again = memory.views(tensors())
    assert {name: view.data_ptr() for name, view in first.items()} == {n: view.data_ptr() for n, view in again.items()}
    assert [action for action, *_ in pins] == ["pin"]
    memory.views({"larger": torch.empty(10**6)})
    assert [action for action, *_ in pins] == ["pin", "unpin", "pin"]
    assert pins[1][1:] == pins[0][1:]
    del memory
    gc.collect()
    assert [action for action, *_ in pins] == ["pin", "unpin", "pin", "unpin"]
    assert pins[3][1:] == pins[2][1:]


def test_no_tensors_need_no_memory(pins):
    memory = HostMemory(pinned=True)
    assert memory.views({}) == {}
    assert memory.views({"empty": torch.empty(0, 3)})["empty"].shape == (0, 3)
    assert (memory._memory.nbytes, pins) == (0, [])


def test_memory_that_the_driver_does_not_pin_is_used_and_not_unpinned(pins, monkeypatch):
    monkeypatch.setattr(tensor_storage, "pin", lambda memory: False)
    memory = HostMemory(pinned=True)
    views = memory.views(tensors())
    views["t3"].fill_(1)
    memory.views({})
    assert pins == []


def values(staging):
    """What would be written, by name."""
    return {entry.name: entry.load().clone() for entry in staging.entries}


def test_a_second_checkpoint_of_the_same_layout_has_new_values_and_needs_no_plan():
    staging, first, second = HostStaging(0), tensors(), tensors()
    with mock.patch.object(tensor_storage.dcp, "save", wraps=tensor_storage.dcp.save) as save:
        staging.stage(first, single_process=True)
        index = staging.index
        assert staging.has_plan(second)
        staging.stage_again(second)
    assert save.call_count == 1
    assert staging.index == index
    assert all(torch.equal(value, second[name]) for name, value in values(staging).items())


@pytest.mark.parametrize("change", ["shape", "dtype", "name", "one more", "one less", "order"])
def test_another_layout_needs_another_plan(change):
    staging, given = HostStaging(0), tensors()
    assert not staging.has_plan(given)
    staging.stage(given, single_process=True)
    other = dict(given)
    match change:
        case "shape":
            other["t3"] = torch.zeros(1, 3)
        case "dtype":
            other["t3"] = torch.zeros(3, dtype=torch.float16)
        case "name":
            other = {name.upper(): tensor for name, tensor in given.items()}
        case "one more":
            other["more"] = torch.zeros(1)
        case "one less":
            del other["t3"]
        case _:
            other = dict(reversed(given.items()))
    assert not staging.has_plan(other)
    staging.stage(other, single_process=True)
    assert staging.index.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in values(staging).items())


def test_a_failed_plan_is_not_used_again():
    staging, given = HostStaging(0), tensors()
    staging.stage(given, single_process=True)
    failing = mock.patch.object(tensor_storage.dcp, "save", side_effect=RuntimeError("lost"))
    with failing, pytest.raises(RuntimeError, match="lost"):
        staging.stage(given, single_process=True)
    assert not staging.has_plan(given)


def test_the_state_of_the_generators_has_a_fixed_size_and_is_restored():
    device, sizes = torch.device("cpu"), set()
    for seed in range(30):
        random.seed(seed)
        random.gauss(0, 1)
        state = get_rng_state(device)
        sizes.add(len(state))
        expected = random.random()
        random.seed(99)
        set_rng_state(state, device)
        assert random.random() == expected
    assert len(sizes) == 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_reads_are_divided_by_bytes_and_every_tensor_has_one_reader(world_size):
    sizes = {f"t{number}": (number * 7919) % 1000 for number in range(100)}
    readers = divide_reads(sizes, world_size)
    assert readers.keys() == sizes.keys()
    loads = [sum(sizes[name] for name, rank in readers.items() if rank == reader) for reader in range(world_size)]
    assert sum(loads) == sum(sizes.values())
    assert max(loads) - min(loads) <= max(sizes.values())
    assert readers == divide_reads(dict(reversed(sizes.items())), world_size)  # the same on every rank
