"""The classes of a teacher's outputs: known by name where they are sent or kept, made again without their own code.

What was sent or kept may come from anybody who can write there. So a name is looked up among what this process has
imported already, and a class is made again only where its instances can be filled without calling anything of its own:
no constructor, no property, nothing at its end. Where that cannot be, something that acts alike stands for it.
"""

import sys
from collections import OrderedDict, namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from inspect import getattr_static
from types import MemberDescriptorType, SimpleNamespace
from typing import Any, Final

_OWN_NEW: Final = (object.__new__, dict.__new__, OrderedDict.__new__)
_STRUCTURES: Final = "torch.return_types"


class Outputs(dict[str, object]):
    """Outputs by name, as attributes and by number too: stands for a mapping class that cannot be made again.

    >>> Outputs(logits=1).logits, Outputs(logits=1)[0]
    (1, 1)
    """

    def __getitem__(self, key: Any) -> object:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]

    def __getattr__(self, name: str) -> object:
        if name not in self:
            raise AttributeError(f"the teacher's outputs have no {name!r}, only {sorted(self)}")
        return self[name]


def name_of(kind: type) -> str:
    """What a class is called, for `find_class`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def find_class(name: str) -> type | None:
    """A class by its name, if it is imported already; nothing is imported, and nothing of a module is run."""
    module, _, path = name.partition(":")
    found: object = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # getattr would let a lazy module import
    if isinstance(found, type) and name_of(found) == name and not hasattr(found, "__del__"):
        return found
    return None


def is_structure(kind: type) -> bool:
    """Whether it is one of torch's own named results, such as that of torch.max."""
    return kind.__module__ == _STRUCTURES and issubclass(kind, tuple)


def split_mapping(tree: Mapping[str, object]) -> tuple[list[str], dict[str, object]]:
    """Keys of a mapping that are its attributes too, and what else a dataclass among mappings has (what is None)."""
    has: dict[str, object] = getattr(tree, "__dict__", {})
    twice = [key for key, value in tree.items() if key in has and has[key] is value]
    names = [field.name for field in fields(tree)] if is_dataclass(tree) else []
    return twice, {name: has[name] for name in names if name not in tree and name in has}


def make_mapping(name: str, items: Mapping[str, object], twice: Sequence[str], rest: Mapping[str, object]) -> object:
    """A mapping of this class with these items, those of `twice` and `rest` as attributes."""
    kind = find_class(name)
    if kind is None or not issubclass(kind, dict) or kind.__new__ not in _OWN_NEW:
        made: dict[Any, Any] = Outputs()
    else:
        made = kind.__new__(kind)
    fill: Any = OrderedDict.__setitem__ if isinstance(made, OrderedDict) else dict.__setitem__  # not the class's own
    for key, value in items.items():
        fill(made, key, value)
    if hasattr(made, "__dict__"):
        vars(made).update({**{key: items[key] for key in twice}, **rest})
    return made


def make_named_tuple(name: str, items: Mapping[str, object]) -> object:
    """A named tuple of this class, or of one that has the same names."""
    kind = find_class(name)
    if kind is None or not issubclass(kind, tuple) or getattr(kind, "_fields", ()) != tuple(items):
        kind = _alike(tuple(items))
    return tuple.__new__(kind, tuple(items.values()))


def make_structure(name: str, values: Sequence[object]) -> object:
    """One of torch's named results, or a plain tuple."""
    kind = find_class(name)
    whole = tuple(values)
    known = kind is not None and is_structure(kind) and getattr(kind, "n_sequence_fields", -1) == len(whole)
    return kind(whole) if known and kind is not None else whole  # torch's own code


def make_record(name: str, items: Mapping[str, object]) -> object:
    """An instance of this dataclass with these fields, or something that has them."""
    kind = find_class(name)
    if kind is None or not is_dataclass(kind) or kind.__new__ not in _OWN_NEW:
        return SimpleNamespace(**items)
    if {field.name for field in fields(kind)} != set(items):
        return SimpleNamespace(**items)
    made = object.__new__(kind)
    return made if _fill(made, items) else SimpleNamespace(**items)


def _fill(made: object, items: Mapping[str, object]) -> bool:
    """Give an instance its fields, in slots or in its dictionary; whether that can be without running any code of its.

    It cannot where a property stands for a slot of another name.
    """
    has = _attributes(made)
    for key, value in items.items():
        if isinstance(getattr_static(type(made), key, None), MemberDescriptorType):
            object.__setattr__(made, key, value)  # into its slot, though it be frozen
        elif has is None:
            return False
        else:
            has[key] = value
    return True


def _attributes(made: object) -> dict[str, object] | None:
    """The dictionary of an instance, if it has one, not by its class's own way to look things up."""
    try:
        return object.__getattribute__(made, "__dict__")
    except AttributeError:
        return None


@lru_cache(maxsize=64)
def _alike(names: tuple[str, ...]) -> type[tuple[Any, ...]]:
    return namedtuple("Outputs", names, rename=True)  # pyright: ignore[reportUntypedNamedTuple]  # names are known late
