"""State of any shape as JSON and named tensors, and back without running a line of anybody's code.

What JSON has no word for becomes an object with the key "~": {"~": "tuple", "v": [1, 2]}. Tensors stand beside it under
the path at which they were found, so that sharded ones can be written and read in parts.
"""

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, Final

import numpy as np
import torch

from samestep.checkpoint.tensor_storage import NAMES
from samestep.errors import CheckpointError

_TAG: Final = "~"
Lookup = Callable[[str], torch.Tensor]
"""Gives the tensor that stands under a name."""
Encode = Callable[[Any, str, MutableMapping[str, torch.Tensor]], object]
Decode = Callable[[Any, Lookup], object]


def encode(value: object, path: str, tensors: MutableMapping[str, torch.Tensor]) -> object:
    """What json.dumps takes, with every tensor of `value` put into `tensors` under its path.

    >>> found = {}
    >>> encode({"lr": 0.1, "shape": (2, 3), "w": torch.zeros(2)}, "state", found)
    {'lr': 0.1, 'shape': {'~': 'tuple', 'v': [2, 3]}, 'w': {'~': 'tensor', 'v': 'state/w'}}
    >>> list(found)
    ['state/w']
    """
    if value is None or type(value) in (str, bool, int):
        return value
    if isinstance(value, torch.Tensor):
        return {_TAG: "tensor", "v": _keep(value.detach(), path, tensors)}
    for kind, (name, there, _) in _KINDS.items():
        if type(value) is kind:
            told = there(value, path, tensors)
            return told if name is None else {_TAG: name, "v": told}
    if isinstance(value, np.generic):
        return {_TAG: "numpy", "v": [value.dtype.str, encode(value.item(), path, tensors)]}
    raise CheckpointError(
        f"{path} is {_article(type(value))}, which a checkpoint cannot hold without running code when it is read: let "
        "state_dict() give numbers, text, lists, tuples, dicts, arrays and tensors only"
    )


def decode(value: object, lookup: Lookup) -> object:
    """What `encode` was given, its tensors as `lookup` gives them."""
    if isinstance(value, list):
        return [decode(item, lookup) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item, lookup) for key, item in value.items()}
    name = value[_TAG]
    if name == "tensor":
        return lookup(str(value["v"]))
    if name == "numpy":
        return np.dtype(value["v"][0]).type(decode(value["v"][1], lookup))
    if name not in _BACK:
        raise CheckpointError(f"the state holds a {name!r}, which this samestep does not know: update samestep")
    return _BACK[name](value["v"], lookup)


def tensor_names(value: object) -> list[str]:
    """The names of all tensors that an encoded value refers to."""
    if isinstance(value, list):
        return [name for item in value for name in tensor_names(item)]
    if not isinstance(value, dict):
        return []
    if value.get(_TAG) in ("tensor", "array"):
        return [str(value["v"])]
    return [name for item in value.values() for name in tensor_names(item)]


def _keep(tensor: torch.Tensor, path: str, tensors: MutableMapping[str, torch.Tensor]) -> str:
    if tensor.layout != torch.strided or tensor.dtype not in NAMES or tensor.device.type == "meta":
        raise CheckpointError(
            f"{path} is a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}, which a checkpoint cannot "
            f"hold: make it dense and one of {', '.join(str(dtype).removeprefix('torch.') for dtype in NAMES)}"
        )
    while path in tensors:  # "a/b" in one dict and "b" in the dict "a" meet here
        path += "'"
    tensors[path] = tensor
    return path


def _article(kind: type) -> str:
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"a value of {name}"


def _number(value: float, path: str, tensors: MutableMapping[str, torch.Tensor]) -> object:
    del path, tensors
    return value if math.isfinite(value) else {_TAG: "float", "v": repr(value)}


def _items(value: Iterable[object], path: str, tensors: MutableMapping[str, torch.Tensor]) -> list[object]:
    return [encode(item, f"{path}/{at}", tensors) for at, item in enumerate(value)]


def _members(value: Iterable[object], path: str, tensors: MutableMapping[str, torch.Tensor]) -> list[object]:
    return _items(sorted(value, key=repr), path, tensors)  # a set has no order of its own


def _pairs(value: dict[object, object], path: str, tensors: MutableMapping[str, torch.Tensor]) -> list[object]:
    return [
        [encode(key, f"{path} (a key)", tensors), encode(item, f"{path}/{key}", tensors)] for key, item in value.items()
    ]


def _dictionary(value: dict[Any, object], path: str, tensors: MutableMapping[str, torch.Tensor]) -> object:
    if all(type(key) is str for key in value) and _TAG not in value:
        return {key: encode(item, f"{path}/{key}", tensors) for key, item in value.items()}
    return {_TAG: "dict", "v": _pairs(value, path, tensors)}


def _array(value: "np.ndarray[Any, Any]", path: str, tensors: MutableMapping[str, torch.Tensor]) -> str:
    try:
        held = torch.from_numpy(np.array(value, order="C"))
    except TypeError as error:
        raise CheckpointError(
            f"{path} is an array of {value.dtype}, which a checkpoint cannot hold: {error}"
        ) from error
    return _keep(held, path, tensors)


def _text(value: object, path: str, tensors: MutableMapping[str, torch.Tensor]) -> str:
    del path, tensors
    return str(value)


def _bytes(value: bytes, path: str, tensors: MutableMapping[str, torch.Tensor]) -> str:
    del path, tensors
    return base64.b64encode(value).decode()


def _back_to_pairs(value: list[list[object]], lookup: Lookup) -> dict[object, object]:
    return {decode(key, lookup): decode(item, lookup) for key, item in value}


def _back_to_dtype(value: str, lookup: Lookup) -> torch.dtype:
    del lookup
    found = getattr(torch, value.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"the state holds the dtype {value}, which this torch does not know: update torch")
    return found


def _many(value: list[object], lookup: Lookup) -> list[object]:
    return [decode(item, lookup) for item in value]


_KINDS: Final[dict[type, tuple[str | None, Encode, Decode]]] = {
    float: (None, _number, lambda v, _: float(v)),
    list: (None, _items, _many),
    dict: (None, _dictionary, _back_to_pairs),
    tuple: ("tuple", _items, lambda v, find: tuple(_many(v, find))),
    set: ("set", _members, lambda v, find: set(_many(v, find))),
    frozenset: ("frozenset", _members, lambda v, find: frozenset(_many(v, find))),
    OrderedDict: ("OrderedDict", _pairs, lambda v, find: OrderedDict(_back_to_pairs(v, find))),
    Counter: ("Counter", _pairs, lambda v, find: Counter(_back_to_pairs(v, find))),
    bytes: ("bytes", _bytes, lambda v, _: base64.b64decode(v)),
    complex: ("complex", _text, lambda v, _: complex(v)),
    np.ndarray: ("array", _array, lambda v, find: find(str(v)).numpy()),
    torch.dtype: ("dtype", _text, _back_to_dtype),
    torch.device: ("device", _text, lambda v, _: torch.device(v)),
    torch.Size: ("Size", _items, lambda v, _: torch.Size(v)),
}
"""For each exact type: its tag (none where JSON has it), how it is written, how it is read."""

_BACK: Final[dict[str, Decode]] = {
    **{name: back for name, _, back in _KINDS.values() if name is not None},
    "float": lambda v, _: float(v),
    "dict": _back_to_pairs,
}
