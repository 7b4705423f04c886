"""Nested inputs and outputs of a teacher: move them between devices, keep their top-k logits, flatten and rebuild them.

A tree that is sent to a server or written to a cache is flattened into a JSON spec and a list of tensors. Rebuilding
never imports a module and never runs code of a class that the spec names.
"""

import json
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from functools import lru_cache
from inspect import getattr_static
from types import MemberDescriptorType, SimpleNamespace
from typing import Any, Final

import torch

from samestep.errors import TeacherError
from samestep.nn.losses_and_metrics import TopK, top_k

TreeSpec = list[Any]
"""The structure of a tree as JSON: [kind, contents] for each node."""

_PLAIN: Final = (str, bool, int, float, type(None))
_SAFE_NEW: Final = (object.__new__, dict.__new__, OrderedDict.__new__)
_TORCH_RESULTS: Final = "torch.return_types"


class Outputs(dict[str, object]):
    """Outputs by name, attribute and position; replaces a mapping class that cannot be rebuilt.

    >>> Outputs(logits=1).logits, Outputs(logits=1)[0]
    (1, 1)
    """

    def __getitem__(self, key: Any) -> object:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]

    def __getattr__(self, name: str) -> object:
        if name not in self:
            raise AttributeError(f"the teacher's outputs have no {name!r}, only {sorted(self)}")
        return self[name]


def to_device(tree: Any, device: torch.device) -> Any:
    """Return `tree` with every tensor on `device`; containers keep their class, other objects are passed through.

    If everything is on `device` already, the result is `tree` itself.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        # A non-blocking copy to the host could be read before it has finished.
        return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")

    return _map_tensors(tree, move)


def keep_top_k(outputs: Any, k: int | None, temperature: float) -> object:
    """Return `outputs` with only the `k` largest logits: of a tensor, or of the item or attribute `logits`."""
    if k is None or isinstance(outputs, TopK):  # a server has done it already
        return outputs
    if isinstance(outputs, torch.Tensor):
        return top_k(outputs, k, temperature)
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(logits, TopK):
        return outputs
    if not isinstance(logits, torch.Tensor):
        raise TeacherError(
            f"top_k={k} needs logits, but the teacher returns a {type(outputs).__name__}: let its module return a "
            "tensor of logits, or a mapping or object with 'logits', or leave out top_k="
        )
    largest = top_k(logits, k, temperature)
    if isinstance(outputs, Mapping):
        return _with_items(outputs, {**outputs, "logits": largest})
    if isinstance(outputs, tuple):
        return outputs._replace(logits=largest)  # pyright: ignore[reportAttributeAccessIssue]  # a named tuple
    return _with_fields(outputs, {"logits": largest})


def flatten(tree: object, what: str) -> tuple[TreeSpec, list[torch.Tensor]]:
    """Return the spec of `tree` and its tensors in order; `what` names the tree in an error."""
    tensors: list[torch.Tensor] = []
    return _spec(tree, what, tensors), tensors


def unflatten(spec: TreeSpec, tensors: Iterator[torch.Tensor]) -> object:
    """Rebuild the tree of `spec` around `tensors`, with its original classes if they can be found."""
    kind, contents = spec
    return _BUILDERS[kind](contents, tensors)


def encode_parts(spec: TreeSpec, tensors: list[torch.Tensor]) -> tuple[bytes, list[memoryview]]:
    """Return a JSON header with spec, dtypes and shapes, and the bytes of each tensor.

    The bytes are not copied if a tensor is contiguous and on the CPU.
    """
    signatures = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors]
    flat = [tensor.detach().cpu().contiguous().reshape(-1) for tensor in tensors]
    return json.dumps({"form": spec, "tensors": signatures}).encode(), [
        tensor.view(torch.uint8).numpy().data for tensor in flat
    ]


def tensor_from_bytes(data: torch.Tensor, dtype: str, shape: list[int]) -> torch.Tensor:
    """Return the tensor whose bytes are `data`."""
    return data.view(getattr(torch, dtype)).reshape(shape)


def _map_tensors(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, list | tuple):
        mapped = [_map_tensors(value, function) for value in tree]
        if _identical(mapped, tree):
            return tree
        return type(tree)(*mapped) if hasattr(tree, "_fields") else type(tree)(mapped)
    if isinstance(tree, Mapping):
        items: dict[Any, Any] = dict(tree.items())
    elif is_dataclass(tree) and not isinstance(tree, type):
        items = {each.name: getattr(tree, each.name) for each in fields(tree)}
    else:
        return tree
    mapped_items = {name: _map_tensors(value, function) for name, value in items.items()}
    if _identical(list(mapped_items.values()), list(items.values())):
        return tree
    return _with_items(tree, mapped_items) if isinstance(tree, Mapping) else _with_fields(tree, mapped_items)


def _identical(values: Sequence[object], others: Sequence[object]) -> bool:
    return all(value is other for value, other in zip(values, others, strict=True))


def _with_items(tree: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return a mapping of the same class with these values, without calling its constructor.

    An attribute that mirrors an item is replaced with it. An immutable mapping is built by its class.
    """
    kind: Any = type(tree)
    if kind is dict or not isinstance(tree, MutableMapping):
        return kind(values)
    made: Any = copy(tree)
    attributes: dict[Any, object] = getattr(made, "__dict__", {})
    for key, value in values.items():
        if key in attributes and attributes[key] is tree[key]:
            attributes[key] = value
        made[key] = value
    return made


def _with_fields(tree: Any, values: Mapping[str, object]) -> Any:
    """Return a copy of an object with these attributes, also of a frozen one, without calling its constructor."""
    made = copy(tree)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _spec(tree: object, what: str, tensors: list[torch.Tensor]) -> TreeSpec:
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return ["tensor", None]
    if isinstance(tree, TopK):
        tensors.extend(tree[:3])
        return ["top_k", tree.temperature]
    if isinstance(tree, _PLAIN):
        return ["value", tree]
    if isinstance(tree, Mapping) and type(tree) is not dict:
        return _mapping_spec(tree, what, tensors)
    kind, class_name, children = _children(tree, what)
    contents = [[key, _spec(value, f"{what}[{key!r}]", tensors)] for key, value in children]
    return [kind, contents if class_name is None else [class_name, contents]]


def _mapping_spec(tree: Mapping[Any, object], what: str, tensors: list[torch.Tensor]) -> TreeSpec:
    """Also store which items are mirrored by attributes, and the fields of a dataclass that are not items (None)."""
    attributes: dict[str, object] = getattr(tree, "__dict__", {})
    mirrored = [key for key, value in tree.items() if key in attributes and attributes[key] is value]
    names = [field.name for field in fields(tree)] if is_dataclass(tree) else []
    others = {name: attributes[name] for name in names if name not in tree and name in attributes}
    items, rest = (_spec(part, what, tensors)[1] for part in (dict(tree), others))
    return ["mapping", [_class_name(type(tree)), items, mirrored, rest]]


def _children(tree: Any, what: str) -> tuple[str, str | None, list[tuple[str | int, object]]]:
    """Return the kind of a container, the name of its class if it matters, and its children by name or position."""
    kind, class_name = type(tree), _class_name(type(tree))
    if isinstance(tree, dict) and all(isinstance(key, str | int) for key in tree):
        return "dict", None, list(tree.items())
    if isinstance(tree, list):
        return "list", None, list(enumerate(tree))
    if isinstance(tree, tuple):
        if hasattr(kind, "_fields"):
            return "named", class_name, list(zip(tree._fields, tree, strict=True))  # pyright: ignore[reportAttributeAccessIssue]
        return (
            ("structure", class_name, list(enumerate(tree)))
            if _is_torch_result(kind)
            else ("tuple", None, list(enumerate(tree)))
        )
    if is_dataclass(kind):
        return "record", class_name, [(field.name, getattr(tree, field.name)) for field in fields(kind)]
    raise TeacherError(
        f"{what} is a {kind.__name__}, which samestep can neither send nor cache: use tensors, numbers and text, in "
        "tuples, lists, mappings and dataclasses (use_cache=False leaves out a key-value cache)"
    )


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_torch_result(kind: type) -> bool:
    """Whether it is a named result of torch, such as that of torch.max."""
    return kind.__module__ == _TORCH_RESULTS and issubclass(kind, tuple)


def find_class(name: str) -> type | None:
    """Return the class "module:qualname" if its module is imported already; imports and runs nothing."""
    module, _, path = name.partition(":")
    found: object = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # getattr(found, part) could make a lazy module import
    if isinstance(found, type) and _class_name(found) == name and not hasattr(found, "__del__"):
        return found
    return None


def build_mapping(
    name: str, items: Mapping[str, object], mirrored: Sequence[str], rest: Mapping[str, object]
) -> object:
    """Build a mapping of this class with these items, and with `mirrored` and `rest` as attributes."""
    kind = find_class(name)
    if kind is None or not issubclass(kind, dict) or kind.__new__ not in _SAFE_NEW:
        made: dict[Any, Any] = Outputs()
    else:
        made = kind.__new__(kind)
    set_item: Any = (
        OrderedDict.__setitem__ if isinstance(made, OrderedDict) else dict.__setitem__
    )  # not the class's own
    for key, value in items.items():
        set_item(made, key, value)
    if hasattr(made, "__dict__"):
        vars(made).update({**{key: items[key] for key in mirrored}, **rest})
    return made


def build_named_tuple(name: str, items: Mapping[str, object]) -> object:
    """Build a named tuple of this class, or of a new class with the same field names."""
    kind = find_class(name)
    if kind is None or not issubclass(kind, tuple) or getattr(kind, "_fields", ()) != tuple(items):
        kind = _named_tuple_class(tuple(items))
    return tuple.__new__(kind, tuple(items.values()))


def build_dataclass(name: str, items: Mapping[str, object]) -> object:
    """Build an instance of this dataclass with these fields, or a SimpleNamespace with them."""
    kind = find_class(name)
    if kind is None or not is_dataclass(kind) or kind.__new__ not in _SAFE_NEW:
        return SimpleNamespace(**items)
    if {field.name for field in fields(kind)} != set(items):
        return SimpleNamespace(**items)
    made = object.__new__(kind)
    return made if _set_fields(made, items) else SimpleNamespace(**items)


def _build_torch_result(name: str, values: Sequence[object]) -> object:
    kind = find_class(name)
    if kind is None or not _is_torch_result(kind) or getattr(kind, "n_sequence_fields", -1) != len(values):
        return tuple(values)
    return kind(tuple(values))  # the constructor is torch's own code


@lru_cache(maxsize=64)
def _named_tuple_class(names: tuple[str, ...]) -> type[tuple[Any, ...]]:
    return namedtuple("Outputs", names, rename=True)  # pyright: ignore[reportUntypedNamedTuple]  # names are known late


def _set_fields(made: object, items: Mapping[str, object]) -> bool:
    """Set fields in slots or in the instance's dictionary; False if that would run code of the class (a property)."""
    try:
        attributes: dict[str, object] | None = object.__getattribute__(made, "__dict__")
    except AttributeError:
        attributes = None
    for key, value in items.items():
        if isinstance(getattr_static(type(made), key, None), MemberDescriptorType):
            object.__setattr__(made, key, value)  # also sets the slot of a frozen dataclass
        elif attributes is None:
            return False
        else:
            attributes[key] = value
    return True


def _build_dict(contents: list[list[Any]], tensors: Iterator[torch.Tensor]) -> dict[str, object]:
    return {key: unflatten(spec, tensors) for key, spec in contents}


def _build_list(contents: list[list[Any]], tensors: Iterator[torch.Tensor]) -> list[object]:
    return [unflatten(spec, tensors) for _, spec in contents]


def _build_mapping(contents: list[Any], tensors: Iterator[torch.Tensor]) -> object:
    name, items, mirrored, rest = contents
    return build_mapping(name, _build_dict(items, tensors), mirrored, _build_dict(rest, tensors))


_BUILDERS: Final[dict[str, Callable[[Any, Iterator[torch.Tensor]], object]]] = {
    "tensor": lambda contents, tensors: next(tensors),
    "top_k": lambda contents, tensors: TopK(next(tensors), next(tensors), next(tensors), float(contents)),
    "dict": _build_dict,
    "mapping": _build_mapping,
    "named": lambda contents, tensors: build_named_tuple(contents[0], _build_dict(contents[1], tensors)),
    "structure": lambda contents, tensors: _build_torch_result(contents[0], _build_list(contents[1], tensors)),
    "record": lambda contents, tensors: build_dataclass(contents[0], _build_dict(contents[1], tensors)),
    "list": _build_list,
    "tuple": lambda contents, tensors: tuple(_build_list(contents, tensors)),
    "value": lambda contents, tensors: contents,
}
