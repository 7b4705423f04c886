"""State as JSON and tensors: every supported value is restored with its type, others are rejected with their path."""

import json
import math
from collections import Counter, OrderedDict, deque
from enum import IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.checkpoint.parts import decode, encode, tensor_names
from samestep.errors import CheckpointError

torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process imports dynamo, which sets an environment variable


def round_trip(value):
    tensors = {}
    text = json.dumps(encode(value, "part", tensors), allow_nan=False)
    return decode(json.loads(text), tensors.__getitem__)


plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False)
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
keys = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.sampled_from(["~", "v", "a"]), inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.sets(st.integers(), max_size=4)
        | st.frozensets(st.text(), max_size=4)
    ),
    max_leaves=12,
)


def same(one, other):
    """Whether values and types are equal at every level: 1, 1.0 and True differ."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return [*map(repr, one)] == [*map(repr, other)] and all(map(same, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@given(values)
def test_nested_values_are_restored_with_their_types(value):
    assert same(round_trip(value), value)


def test_nan_and_infinity_are_restored():
    back = round_trip({"a": math.inf, "b": -math.inf, "c": math.nan})
    assert back["a"] == math.inf
    assert back["b"] == -math.inf
    assert math.isnan(back["c"])


def test_types_of_torch_and_numpy_are_restored():
    state = {
        "milestones": Counter({10: 2, 30: 1}),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        "scalar": np.float32(0.5),
        "array": np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2],
        "tensors": [torch.arange(3), (torch.ones((), dtype=torch.bfloat16),)],
    }
    back = round_trip(state)
    assert back["milestones"] == state["milestones"]
    assert back["milestones"].total() == 3
    assert (back["dtype"], back["device"], back["size"]) == (torch.bfloat16, torch.device("cpu"), torch.Size([2, 3]))
    assert back["scalar"] == 0.5
    assert back["scalar"].dtype == np.float32
    assert np.array_equal(back["array"], state["array"])
    assert torch.equal(back["tensors"][0], torch.arange(3))
    assert back["tensors"][1][0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)],
            milestones=[3],
        ),
    ],
)
def test_the_schedulers_of_torch_can_be_saved(make):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = make(optimizer)
    optimizer.step()
    state = scheduler.state_dict()
    scheduler.load_state_dict(round_trip(state))
    assert scheduler.state_dict() == state


def test_tensors_are_named_by_their_path():
    tensors = {}
    encoded = encode({"a": {"b": torch.zeros(1)}, "a/b": torch.ones(1), "c": [torch.zeros(1)]}, "ema", tensors)
    assert list(tensors) == ["ema/a/b", "ema/a/b'", "ema/c/0"]
    assert tensor_names(encoded) == list(tensors)


class Level(IntEnum):
    HIGH = 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (lambda: 1, "ema/inner/1 is a value of function, which a checkpoint cannot store without executing code"),
        (deque([1]), "ema/inner/1 is a value of collections.deque"),
        (Level.HIGH, r"ema/inner/1 is a value of tests.unit.test_state_encoding.Level"),
        (torch.zeros(2, dtype=torch.complex128), "ema/inner/1 is a tensor of torch.complex128"),
        (torch.zeros(2).to_sparse(), "torch.sparse_coo, on cpu, which a checkpoint cannot store: make it dense"),
        (torch.zeros(2, device="meta"), "on meta, which a checkpoint cannot store"),
        (np.array(["a"]), "ema/inner/1 is an array of <U1, which a checkpoint cannot store"),
    ],
)
def test_an_unsupported_value_is_rejected_with_its_path(value, text):
    with pytest.raises(CheckpointError, match=text):
        encode({"inner": [0, value]}, "ema", {})


def test_values_of_a_newer_version_are_rejected():
    with pytest.raises(
        CheckpointError, match="the state has a value of type 'deque', which this version of samestep does not know"
    ):
        decode({"~": "deque", "v": []}, {}.__getitem__)
    with pytest.raises(CheckpointError, match=r"the dtype torch.float3, which this version of torch does not know"):
        decode({"~": "dtype", "v": "torch.float3"}, {}.__getitem__)
    with pytest.raises(CheckpointError, match=r"the dtype torch.load, which"):
        decode({"~": "dtype", "v": "torch.load"}, {}.__getitem__)
