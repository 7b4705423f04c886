"""Inputs and outputs of a teacher taken apart into plain tensors, to be sent or kept, and put together again."""

import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from inspect import getattr_static
from types import MemberDescriptorType, SimpleNamespace
from typing import Any, Final

import torch

from samestep.errors import TeacherError
from samestep.nn.distillation import TopK, top_k
from samestep.teacher.transfer import with_fields, with_items

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


Form = list[Any]
"""How a tree is built, as JSON can hold it: a word for each node, and what belongs to it."""

_PLAIN: Final = (str, bool, int, float, type(None))


def take_apart(tree: object, what: str) -> tuple[Form, list[torch.Tensor]]:
    """The form of `tree` and its tensors in order; `what` names it where something cannot be taken apart."""
    tensors: list[torch.Tensor] = []
    return _form(tree, what, tensors), tensors


def put_together(form: Form, tensors: Iterator[torch.Tensor]) -> object:
    """The tree of this form around `tensors`, of the classes it was taken apart from."""
    kind, held = form
    return _BUILDERS[kind](held, tensors)


def compressed(outputs: Any, k: int | None, temperature: float) -> object:
    """`outputs` with the `k` largest logits in the place of all: of a tensor, or of what is named "logits"."""
    if k is None or isinstance(outputs, TopK):  # a server has done it already
        return outputs
    if isinstance(outputs, torch.Tensor):
        return top_k(outputs, k, temperature)
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if not isinstance(logits, TopK | torch.Tensor):
        raise TeacherError(
            f"top_k={k} needs logits, and the teacher gives a {type(outputs).__name__}: let its module give a tensor "
            "of logits, or a mapping or object with 'logits', or leave top_k out"
        )
    return outputs if isinstance(logits, TopK) else _with_logits(outputs, top_k(logits, k, temperature))


def _with_logits(outputs: Any, few: TopK) -> object:
    """The same outputs, of the same class, with these logits."""
    if isinstance(outputs, Mapping):
        return with_items(outputs, {**outputs, "logits": few})
    if isinstance(outputs, tuple):
        return outputs._replace(logits=few)  # pyright: ignore[reportAttributeAccessIssue]  # a named one: it has logits
    return with_fields(outputs, {"logits": few})


def _form(tree: object, what: str, tensors: list[torch.Tensor]) -> Form:
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return ["tensor", None]
    if isinstance(tree, TopK):
        tensors.extend(tree[:3])
        return ["top_k", tree.temperature]
    if isinstance(tree, _PLAIN):
        return ["value", tree]
    if isinstance(tree, Mapping) and type(tree) is not dict:
        return _mapping_form(tree, what, tensors)
    kind, name, parts = _parts(tree, what)
    held = [[key, _form(value, f"{what}[{key!r}]", tensors)] for key, value in parts]
    return [kind, held if name is None else [name, held]]


def _mapping_form(tree: Mapping[Any, object], what: str, tensors: list[torch.Tensor]) -> Form:
    twice, rest = split_mapping(tree)
    parts = [_form(part, what, tensors)[1] for part in (dict(tree), rest)]
    return ["mapping", [name_of(type(tree)), parts[0], twice, parts[1]]]


def _parts(tree: Any, what: str) -> tuple[str, str | None, list[tuple[str | int, object]]]:
    """What a container is, the name of its class where that matters, and what it holds by name or number."""
    kind, name = type(tree), name_of(type(tree))
    if isinstance(tree, dict) and all(isinstance(key, str | int) for key in tree):
        return "dict", None, list(tree.items())
    if isinstance(tree, list):
        return "list", None, list(enumerate(tree))
    if isinstance(tree, tuple):
        return _tuple_parts(kind, name, tree)
    if is_dataclass(kind):
        return "record", name, [(field.name, getattr(tree, field.name)) for field in fields(kind)]
    raise TeacherError(
        f"{what} is a {kind.__name__}, which can be neither sent nor kept: tensors, numbers and text can, and tuples, "
        "lists, mappings and dataclasses of them (a cache of keys and values is left out by use_cache=False)"
    )


def _tuple_parts(kind: type, name: str, tree: Any) -> tuple[str, str | None, list[tuple[str | int, object]]]:
    if hasattr(kind, "_fields"):
        return "named", name, list(zip(tree._fields, tree, strict=True))
    return ("structure", name, list(enumerate(tree))) if is_structure(kind) else ("tuple", None, list(enumerate(tree)))


def _named(held: list[list[Any]], tensors: Iterator[torch.Tensor]) -> dict[str, object]:
    return {key: put_together(form, tensors) for key, form in held}


def _listed(held: list[list[Any]], tensors: Iterator[torch.Tensor]) -> list[object]:
    return [put_together(form, tensors) for _, form in held]


def _mapping(held: list[Any], tensors: Iterator[torch.Tensor]) -> object:
    name, items, twice, rest = held
    return make_mapping(name, _named(items, tensors), twice, _named(rest, tensors))


_BUILDERS: Final[dict[str, Callable[[Any, Iterator[torch.Tensor]], object]]] = {
    "tensor": lambda held, tensors: next(tensors),
    "top_k": lambda held, tensors: TopK(next(tensors), next(tensors), next(tensors), float(held)),
    "dict": _named,
    "mapping": _mapping,
    "named": lambda held, tensors: make_named_tuple(held[0], _named(held[1], tensors)),
    "structure": lambda held, tensors: make_structure(held[0], _listed(held[1], tensors)),
    "record": lambda held, tensors: make_record(held[0], _named(held[1], tensors)),
    "list": _listed,
    "tuple": lambda held, tensors: tuple(_listed(held, tensors)),
    "value": lambda held, tensors: held,
}


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it lies on the CPU in one piece."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def signature(tensor: torch.Tensor) -> tuple[str, list[int]]:
    """Dtype and shape, as JSON can hold them."""
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def from_bytes(data: torch.Tensor, dtype: str, shape: list[int]) -> torch.Tensor:
    """The tensor whose bytes `data` holds."""
    return data.view(getattr(torch, dtype)).reshape(shape)
