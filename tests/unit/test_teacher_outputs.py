"""Outputs that are sent or cached keep their classes, and rebuilding them never runs code of a named class."""

import json
import sys
import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch

from samestep.errors import TeacherError
from samestep.nn import TopK
from samestep.teacher.outputs import (
    Outputs,
    build_dataclass,
    build_mapping,
    build_named_tuple,
    find_class,
    flatten,
    keep_top_k,
    to_device,
    unflatten,
)

ONE = torch.arange(3.0)


@dataclass
class Record:
    logits: object
    loss: object = None


@dataclass(frozen=True, slots=True)
class Slotted:
    logits: object
    count: int = field(default=3, init=False)


class Plain:
    """A base without slots, so that instances of a subclass have a dictionary and slots."""


@dataclass(slots=True)
class SlottedBelow(Plain):
    logits: object
    loss: object = None


class Named(NamedTuple):
    logits: object
    hidden: object


class Mapped(dict):
    """A mapping that mirrors its items as attributes."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__.update(items)


@dataclass
class Summed:
    """A dataclass that computes a field from another."""

    logits: object
    total: object = field(init=False)

    def __post_init__(self):
        self.total = self.logits.sum()


class PlainObject:
    """A plain object."""

    def __init__(self, logits, loss):
        self.logits, self.loss = logits, loss


def sent_and_received(tree):
    """Flatten a tree, pass its spec through JSON, and rebuild it."""
    spec, tensors = flatten(tree, "the teacher's output")
    return unflatten(json.loads(json.dumps(spec)), iter(tensors))


def same_tree(found, tree):
    """Whether two trees are equal, with tensors compared by identity."""
    if isinstance(tree, dict):
        return list(found) == list(tree) and all(same_tree(found[key], tree[key]) for key in tree)
    if isinstance(tree, tuple | list):
        return len(found) == len(tree) and all(map(same_tree, found, tree))
    return found is tree or (not isinstance(tree, torch.Tensor) and found == tree)


@pytest.mark.parametrize(
    "tree",
    [
        ONE,
        {"logits": ONE, "hidden": (ONE, [ONE, None, 2.5, "text"])},
        {0: ONE, 1: {"deep": ONE}},
        (ONE, ONE),
        Named(ONE, (ONE, Named(ONE, 1))),
        OrderedDict(logits=ONE, hidden=Named(ONE, ONE)),
        Mapped(logits=ONE, loss=None),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_containers_keep_their_class(tree):
    assert type(found := sent_and_received(tree)) is type(tree)
    assert same_tree(found, tree)


def test_a_mapping_keeps_its_attributes():
    found = sent_and_received(Mapped(logits=ONE, loss=None))
    assert found.logits is ONE
    assert found.loss is None


def test_dataclasses_can_be_frozen_or_have_slots():
    assert sent_and_received(Record(ONE)) == Record(ONE)
    found = sent_and_received(Slotted(ONE))
    assert type(found) is Slotted
    assert (found.logits is ONE, found.count) == (True, 3)


def test_named_results_of_torch_keep_their_class():
    found = sent_and_received(torch.max(torch.eye(2), dim=0))
    assert type(found) is torch.return_types.max
    assert torch.equal(found.indices, torch.arange(2))


def test_a_default_dict_loses_its_default_factory():
    found = sent_and_received(defaultdict(list, logits=ONE))
    assert type(found) is defaultdict
    assert (dict(found), found.default_factory) == ({"logits": ONE}, None)


def local_classes():
    @dataclass
    class Here:
        logits: object

    class There(UserDict):
        pass

    pair = namedtuple("pair", "logits hidden")
    return Here(ONE), There(logits=ONE), pair(ONE, 1)


def test_a_class_that_cannot_be_found_is_replaced_by_a_similar_one():
    record, mapping, pair = map(sent_and_received, local_classes())
    assert record.logits is ONE
    assert mapping["logits"] is mapping.logits is mapping[0] is ONE
    logits, hidden = pair
    assert logits is pair.logits is pair[0] is ONE
    assert hidden == pair.hidden == 1
    assert sent_and_received(mapping).logits is ONE


def test_an_unknown_output_names_the_known_ones():
    with pytest.raises(AttributeError, match=r"the teacher's outputs have no 'scores', only \['logits'\]"):
        Outputs(logits=1).scores  # noqa: B018
    with pytest.raises(KeyError):
        Outputs(logits=1)["scores"]


def test_finding_a_class_imports_nothing():
    assert "this" not in sys.modules
    assert find_class("this:Zen") is None
    assert "this" not in sys.modules


class Lazy(types.ModuleType):
    """A module that imports on demand, as transformers does."""

    def __getattr__(self, name):
        raise AssertionError(f"code of the module was run for {name}")


@dataclass
class RunsCodeInNew:
    """Raises if its own code creates it."""

    logits: object

    def __init__(self, logits):
        self.__dict__["logits"] = logits

    def __new__(cls, *args):
        if not args:
            raise AssertionError("__new__ of the class was run")
        return super().__new__(cls)


@dataclass
class Checked:
    logits: object

    def __post_init__(self):
        raise AssertionError("the constructor was run")

    def __setattr__(self, name, value):
        raise AssertionError("its own setter was run")


class CheckedDict(OrderedDict):
    def __init__(self):
        raise AssertionError("the constructor was run")

    def __setitem__(self, key, value):
        raise AssertionError("its own setter was run")


@dataclass
class RunsCodeInDel:
    logits: object

    def __del__(self):
        raise AssertionError("__del__ was run")


class Descriptor:
    """A descriptor whose code must never run."""

    def __get__(self, instance, owner=None):
        if instance is None:
            raise AttributeError  # so that a dataclass sees no default
        raise AssertionError("__get__ was run")

    def __set__(self, instance, value):
        raise AssertionError("__set__ was run")


@dataclass
class WithDescriptor:
    logits: object = Descriptor()

    def __getattribute__(self, name):
        raise AssertionError(f"__getattribute__({name}) was run")


class PrivateSlot:
    __slots__ = ("_logits",)


@dataclass
class PropertyForSlot(PrivateSlot):
    """A field whose property uses a slot of another name."""

    __slots__ = ()
    logits: object

    @property
    def logits(self):
        raise AssertionError("the property was run")

    @logits.setter
    def logits(self, value):
        raise AssertionError("the property was set")


HERE = __name__


def test_code_of_a_named_class_is_never_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "lazily", Lazy("lazily"))
    assert find_class("lazily:Outputs") is None
    for name in ("RunsCodeInNew", "RunsCodeInDel"):
        assert type(build_dataclass(f"{HERE}:{name}", {"logits": ONE})) is types.SimpleNamespace
    found = build_dataclass(f"{HERE}:Checked", {"logits": ONE})
    assert (type(found), found.logits) == (Checked, ONE)
    mapping = build_mapping(f"{HERE}:CheckedDict", {"logits": ONE}, [], {})
    assert (type(mapping), dict(mapping)) == (CheckedDict, {"logits": ONE})


def test_slots_and_instance_dictionaries_are_filled_without_running_code():
    found = sent_and_received(SlottedBelow(ONE, 2))
    assert (type(found), found.logits, found.loss) == (SlottedBelow, ONE, 2)
    watched = build_dataclass(f"{HERE}:WithDescriptor", {"logits": ONE})
    assert object.__getattribute__(watched, "__dict__") == {"logits": ONE}
    assert build_dataclass(f"{HERE}:PropertyForSlot", {"logits": ONE}) == types.SimpleNamespace(logits=ONE)


@pytest.mark.parametrize(
    "name", ["subprocess:Popen", "builtins:eval", "os:system", "torch:Tensor", "collections:deque", "nowhere:No", ":"]
)
def test_a_name_that_is_not_an_output_class_is_never_used(name):
    assert type(build_dataclass(name, {"args": 1})) is types.SimpleNamespace
    assert type(build_mapping(name, {"args": 1}, [], {})) is Outputs
    assert build_named_tuple(name, {"args": 1}).args == 1


def test_a_class_with_other_fields_is_not_used():
    assert type(build_dataclass(f"{HERE}:Record", {"logits": ONE, "more": 1})) is types.SimpleNamespace
    found = build_named_tuple(f"{HERE}:Named", {"logits": ONE})
    assert type(found) is not Named
    assert found.logits is ONE


def test_an_object_that_cannot_be_sent_or_cached_is_named():
    with pytest.raises(TeacherError, match=r"the teacher's output\['deep'\]\[1\] is a object, which samestep can"):
        flatten({"deep": (1, object())}, "the teacher's output")
    with pytest.raises(TeacherError, match=r"output\['logits'\] is a set, which samestep can neither send nor cache"):
        flatten(Record({1}), "the teacher's output")


def scores():
    return torch.arange(10.0).reshape(2, 5)


def defaults(**items):
    return defaultdict(list, items)


@pytest.mark.parametrize("make", [dict, OrderedDict, Outputs, Record, Mapped, defaults, PlainObject])
def test_top_k_replaces_only_the_logits(make):
    given = make(logits=scores(), loss=ONE)
    found = keep_top_k(given, 2, 1.0)
    assert type(found) is type(given)
    logits, loss = (found.logits, found.loss) if make in (Record, PlainObject) else (found["logits"], found["loss"])
    assert isinstance(logits, TopK)
    assert loss is ONE
    assert keep_top_k(found, 2, 1.0) is found, "the work of a server is not repeated"


def test_top_k_does_not_recompute_fields_of_a_dataclass():
    given = Summed(scores())
    found = keep_top_k(given, 2, 1.0)
    assert isinstance(found.logits, TopK)
    assert found.total is given.total


@pytest.mark.parametrize(
    "tree",
    [
        Mapped(logits=ONE),
        defaults(logits=ONE),
        UserDict(logits=ONE),
        types.MappingProxyType({"logits": ONE}),
        Record(ONE),
        Slotted(ONE),
        Summed(ONE),
        Named(ONE, [ONE]),
        [ONE, (ONE, None)],
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_moving_a_tree_keeps_its_classes_and_does_nothing_if_it_is_there(tree):
    assert to_device(tree, ONE.device) is tree
    found = to_device(tree, torch.device("meta"))  # instead of another device
    assert type(found) is type(tree)
    logits = found[0] if isinstance(tree, list) else found["logits"] if hasattr(tree, "keys") else found.logits
    assert logits.is_meta
    assert getattr(found, "logits", logits) is logits
    assert not getattr(tree, "logits", ONE).is_meta


def test_top_k_works_on_a_named_tuple():
    found = keep_top_k(Named(scores(), ONE), 2, 1.0)
    assert type(found) is Named
    assert isinstance(found.logits, TopK)


@pytest.mark.parametrize("given", [(scores(),), Mapped(loss=ONE), Record(None)])
def test_top_k_needs_logits(given):
    kind = type(given).__name__
    with pytest.raises(TeacherError, match=f"top_k=2 needs logits, but the teacher returns a {kind}: let its module"):
        keep_top_k(given, 2, 1.0)
