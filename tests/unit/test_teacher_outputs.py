"""Outputs that were sent or kept: of the model's own class again, and never made by code that somebody else names."""

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
    compressed,
    find_class,
    make_mapping,
    make_named_tuple,
    make_record,
    put_together,
    take_apart,
)
from samestep.teacher.transfer import carry

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
    """A base without slots, so that instances have a dictionary beside the slots of a class below."""


@dataclass(slots=True)
class SlottedBelow(Plain):
    logits: object
    loss: object = None


class Named(NamedTuple):
    logits: object
    hidden: object


class Mapped(dict):
    """A mapping of the user's, with attributes for its items."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__.update(items)


@dataclass
class Summed:
    """A record that computes a field of its own from another."""

    logits: object
    total: object = field(init=False)

    def __post_init__(self):
        self.total = self.logits.sum()


class Held:
    """No container that anything is known of."""

    def __init__(self, logits, loss):
        self.logits, self.loss = logits, loss


def sent(tree):
    """What arrives where `tree` was sent to: its form goes through JSON."""
    form, tensors = take_apart(tree, "the teacher's output")
    return put_together(json.loads(json.dumps(form)), iter(tensors))


def same(found, tree):
    """Whether two trees are alike, tensors by their identity."""
    if isinstance(tree, dict):
        return list(found) == list(tree) and all(same(found[key], tree[key]) for key in tree)
    if isinstance(tree, tuple | list):
        return len(found) == len(tree) and all(map(same, found, tree))
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
def test_containers_come_back_of_their_own_class(tree):
    assert type(found := sent(tree)) is type(tree)
    assert same(found, tree)


def test_attributes_come_back_with_a_mapping():
    found = sent(Mapped(logits=ONE, loss=None))
    assert found.logits is ONE
    assert found.loss is None


def test_dataclasses_come_back_though_frozen_or_without_a_dict():
    assert sent(Record(ONE)) == Record(ONE)
    found = sent(Slotted(ONE))
    assert type(found) is Slotted
    assert (found.logits is ONE, found.count) == (True, 3)


def test_torchs_own_named_results_come_back():
    found = sent(torch.max(torch.eye(2), dim=0))
    assert type(found) is torch.return_types.max
    assert torch.equal(found.indices, torch.arange(2))


def test_a_default_dict_comes_back_without_what_makes_its_defaults():
    found = sent(defaultdict(list, logits=ONE))
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


def test_a_class_that_cannot_be_found_again_is_stood_for_by_something_alike():
    record, mapping, pair = map(sent, local_classes())
    assert record.logits is ONE
    assert mapping["logits"] is mapping.logits is mapping[0] is ONE
    logits, hidden = pair
    assert logits is pair.logits is pair[0] is ONE
    assert hidden == pair.hidden == 1
    assert sent(mapping).logits is ONE


def test_outputs_tell_what_they_have():
    with pytest.raises(AttributeError, match=r"the teacher's outputs have no 'scores', only \['logits'\]"):
        Outputs(logits=1).scores  # noqa: B018
    with pytest.raises(KeyError):
        Outputs(logits=1)["scores"]


def test_nothing_is_imported_for_a_name():
    assert "this" not in sys.modules
    assert find_class("this:Zen") is None
    assert "this" not in sys.modules


class Lazy(types.ModuleType):
    """A module that imports on demand, as transformers does."""

    def __getattr__(self, name):
        raise AssertionError(f"code of the module was run for {name}")


@dataclass
class Trap:
    """Whatever of it is run is noticed."""

    logits: object

    def __init__(self, logits):
        self.__dict__["logits"] = logits

    def __new__(cls, *args):
        if not args:
            raise AssertionError("the class made it")
        return super().__new__(cls)


@dataclass
class Checked:
    logits: object

    def __post_init__(self):
        raise AssertionError("the constructor was run")

    def __setattr__(self, name, value):
        raise AssertionError("its own way to set was run")


class CheckedDict(OrderedDict):
    def __init__(self):
        raise AssertionError("the constructor was run")

    def __setitem__(self, key, value):
        raise AssertionError("its own way to set was run")


@dataclass
class Dying:
    logits: object

    def __del__(self):
        raise AssertionError("it was run at its end")


class Watching:
    """A descriptor of the user's, whose code is never run."""

    def __get__(self, instance, owner=None):
        if instance is None:
            raise AttributeError  # so that a dataclass sees no default
        raise AssertionError("it was asked")

    def __set__(self, instance, value):
        raise AssertionError("it was set")


@dataclass
class Watched:
    logits: object = Watching()

    def __getattribute__(self, name):
        raise AssertionError(f"its own way to look {name} up was run")


class Slots:
    __slots__ = ("_logits",)


@dataclass
class Standing(Slots):
    """A field that stands for a slot of another name."""

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
    for name in ("Trap", "Dying"):
        assert type(make_record(f"{HERE}:{name}", {"logits": ONE})) is types.SimpleNamespace
    found = make_record(f"{HERE}:Checked", {"logits": ONE})
    assert (type(found), found.logits) == (Checked, ONE)
    mapping = make_mapping(f"{HERE}:CheckedDict", {"logits": ONE}, [], {})
    assert (type(mapping), dict(mapping)) == (CheckedDict, {"logits": ONE})


def test_slots_beside_a_dictionary_are_filled_and_nothing_else_is_run():
    found = sent(SlottedBelow(ONE, 2))
    assert (type(found), found.logits, found.loss) == (SlottedBelow, ONE, 2)
    watched = make_record(f"{HERE}:Watched", {"logits": ONE})
    assert object.__getattribute__(watched, "__dict__") == {"logits": ONE}
    assert make_record(f"{HERE}:Standing", {"logits": ONE}) == types.SimpleNamespace(logits=ONE)


@pytest.mark.parametrize(
    "name", ["subprocess:Popen", "builtins:eval", "os:system", "torch:Tensor", "collections:deque", "nowhere:No", ":"]
)
def test_a_name_of_something_else_makes_nothing_of_it(name):
    assert type(make_record(name, {"args": 1})) is types.SimpleNamespace
    assert type(make_mapping(name, {"args": 1}, [], {})) is Outputs
    assert make_named_tuple(name, {"args": 1}).args == 1


def test_fields_that_are_not_the_classs_are_not_forced_on_it():
    assert type(make_record(f"{HERE}:Record", {"logits": ONE, "more": 1})) is types.SimpleNamespace
    found = make_named_tuple(f"{HERE}:Named", {"logits": ONE})
    assert type(found) is not Named
    assert found.logits is ONE


def test_what_can_be_neither_sent_nor_kept_is_named():
    with pytest.raises(TeacherError, match=r"the teacher's output\['deep'\]\[1\] is a object, which can be neither"):
        take_apart({"deep": (1, object())}, "the teacher's output")
    with pytest.raises(TeacherError, match=r"output\['logits'\] is a set, which can be neither sent nor kept: tensors"):
        take_apart(Record({1}), "the teacher's output")


def scores():
    return torch.arange(10.0).reshape(2, 5)


def defaults(**items):
    return defaultdict(list, items)


@pytest.mark.parametrize("make", [dict, OrderedDict, Outputs, Record, Mapped, defaults, Held])
def test_logits_by_name_are_compressed_and_the_rest_stays(make):
    given = make(logits=scores(), loss=ONE)
    found = compressed(given, 2, 1.0)
    assert type(found) is type(given)
    logits, loss = (found.logits, found.loss) if make in (Record, Held) else (found["logits"], found["loss"])
    assert isinstance(logits, TopK)
    assert loss is ONE
    assert compressed(found, 2, 1.0) is found, "what a server did is not done again"


def test_what_a_record_has_computed_is_not_computed_from_few_logits():
    given = Summed(scores())
    found = compressed(given, 2, 1.0)
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
def test_what_moves_keeps_its_class_and_what_is_there_already_is_the_same(tree):
    assert carry(tree, ONE.device) is tree
    found = carry(tree, torch.device("meta"))  # stands for another device
    assert type(found) is type(tree)
    logits = found[0] if isinstance(tree, list) else found["logits"] if hasattr(tree, "keys") else found.logits
    assert logits.is_meta
    assert getattr(found, "logits", logits) is logits
    assert not getattr(tree, "logits", ONE).is_meta


def test_logits_of_a_named_tuple_are_compressed():
    found = compressed(Named(scores(), ONE), 2, 1.0)
    assert type(found) is Named
    assert isinstance(found.logits, TopK)


@pytest.mark.parametrize("given", [(scores(),), Mapped(loss=ONE), Record(None)])
def test_top_k_needs_logits(given):
    kind = type(given).__name__
    with pytest.raises(TeacherError, match=f"top_k=2 needs logits, and the teacher gives a {kind}: let its module"):
        compressed(given, 2, 1.0)
