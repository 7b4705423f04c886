"""Any state dict as JSON and named tensors, and back without executing code from the file.

A value of a type that JSON does not have becomes an object with a type tag: {"~": "tuple", "v": [1, 2]}. Tensors are
collected under their path in the state ("optimizer/state/model/weight/exp_avg"), so that they can be stored in chunks.
"""

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, Final

import numpy as np
import torch

from samestep.checkpoint.tensor_storage import DTYPE_NAMES
from samestep.errors import CheckpointError

_TAG: Final = "~"
Tensors = MutableMapping[str, torch.Tensor]
GetTensor = Callable[[str], torch.Tensor]
_Encode = Callable[[Any, str, Tensors], object]
_Decode = Callable[[Any, GetTensor], object]


def encode(value: object, path: str, tensors: Tensors) -> object:
    """Return `value` as json.dumps accepts it, and add every tensor in it to `tensors` under its path.

    >>> tensors = {}
    >>> encode({"lr": 0.1, "shape": (2, 3), "w": torch.zeros(2)}, "state", tensors)
    {'lr': 0.1, 'shape': {'~': 'tuple', 'v': [2, 3]}, 'w': {'~': 'tensor', 'v': 'state/w'}}
    >>> list(tensors)
    ['state/w']
    """
    if value is None or type(value) in (str, bool, int):
        return value
    if isinstance(value, torch.Tensor):
        return {_TAG: "tensor", "v": _add_tensor(value.detach(), path, tensors)}
    for exact_type, (tag, encode_value, _) in _TYPES.items():
        if type(value) is exact_type:
            encoded = encode_value(value, path, tensors)
            return encoded if tag is None else {_TAG: tag, "v": encoded}
    if isinstance(value, np.generic):
        return {_TAG: "numpy", "v": [value.dtype.str, encode(value.item(), path, tensors)]}
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    raise CheckpointError(
        f"{path} is a value of {name}, which a checkpoint cannot store without executing code when it is read: return "
        "only numbers, strings, lists, tuples, dicts, arrays and tensors from state_dict()"
    )


def decode(value: object, get_tensor: GetTensor) -> object:
    """Return what `encode` was given, with the tensors that `get_tensor` returns for their names."""
    if isinstance(value, list):
        return [decode(item, get_tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item, get_tensor) for key, item in value.items()}
    tag = value[_TAG]
    if tag == "tensor":
        return get_tensor(str(value["v"]))
    if tag == "numpy":
        return np.dtype(value["v"][0]).type(decode(value["v"][1], get_tensor))
    if tag not in _DECODERS:
        raise CheckpointError(
            f"the state has a value of type {tag!r}, which this version of samestep does not know: update samestep"
        )
    return _DECODERS[tag](value["v"], get_tensor)


def tensor_names(value: object) -> list[str]:
    """Return the names of all tensors in an encoded value."""
    if isinstance(value, list):
        return [name for item in value for name in tensor_names(item)]
    if not isinstance(value, dict):
        return []
    if value.get(_TAG) in ("tensor", "array"):
        return [str(value["v"])]
    return [name for item in value.values() for name in tensor_names(item)]


def _add_tensor(tensor: torch.Tensor, path: str, tensors: Tensors) -> str:
    if tensor.layout != torch.strided or tensor.dtype not in DTYPE_NAMES or tensor.device.type == "meta":
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
        raise CheckpointError(
            f"{path} is a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}, which a checkpoint cannot "
            f"store: make it dense and of dtype {supported}"
        )
    while path in tensors:  # the key "a/b" and the key "b" of the dict "a" have the same path
        path += "'"
    tensors[path] = tensor
    return path


def _encode_items(value: Iterable[object], path: str, tensors: Tensors) -> list[object]:
    return [encode(item, f"{path}/{at}", tensors) for at, item in enumerate(value)]


def _encode_set(value: Iterable[object], path: str, tensors: Tensors) -> list[object]:
    return _encode_items(sorted(value, key=repr), path, tensors)


def _encode_pairs(value: dict[object, object], path: str, tensors: Tensors) -> list[object]:
    return [
        [encode(key, f"{path} (a key)", tensors), encode(item, f"{path}/{key}", tensors)] for key, item in value.items()
    ]


def _encode_dict(value: dict[Any, object], path: str, tensors: Tensors) -> object:
    if all(type(key) is str for key in value) and _TAG not in value:
        return {key: encode(item, f"{path}/{key}", tensors) for key, item in value.items()}
    return {_TAG: "dict", "v": _encode_pairs(value, path, tensors)}


def _encode_array(value: "np.ndarray[Any, Any]", path: str, tensors: Tensors) -> str:
    try:
        tensor = torch.from_numpy(np.array(value, order="C"))
    except TypeError as error:
        raise CheckpointError(
            f"{path} is an array of {value.dtype}, which a checkpoint cannot store: {error}"
        ) from error
    return _add_tensor(tensor, path, tensors)


def _decode_pairs(value: list[list[object]], get_tensor: GetTensor) -> dict[object, object]:
    return {decode(key, get_tensor): decode(item, get_tensor) for key, item in value}


def _decode_items(value: list[object], get_tensor: GetTensor) -> list[object]:
    return [decode(item, get_tensor) for item in value]


def _decode_dtype(value: str, get_tensor: GetTensor) -> torch.dtype:
    del get_tensor
    dtype = getattr(torch, value.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"the state has the dtype {value}, which this version of torch does not know: update torch"
        )
    return dtype


_TYPES: Final[dict[type, tuple[str | None, _Encode, _Decode]]] = {
    float: (
        None,
        lambda v, _path, _tensors: v if math.isfinite(v) else {_TAG: "float", "v": repr(v)},
        lambda v, _: float(v),
    ),
    list: (None, _encode_items, _decode_items),
    dict: (None, _encode_dict, _decode_pairs),
    tuple: ("tuple", _encode_items, lambda v, get: tuple(_decode_items(v, get))),
    set: ("set", _encode_set, lambda v, get: set(_decode_items(v, get))),
    frozenset: (
        "frozenset",
        _encode_set,
        lambda v, get: frozenset(_decode_items(v, get)),
    ),
    OrderedDict: ("OrderedDict", _encode_pairs, lambda v, get: OrderedDict(_decode_pairs(v, get))),
    Counter: ("Counter", _encode_pairs, lambda v, get: Counter(_decode_pairs(v, get))),
    bytes: ("bytes", lambda v, _path, _tensors: base64.b64encode(v).decode(), lambda v, _: base64.b64decode(v)),
    complex: ("complex", lambda v, _path, _tensors: str(v), lambda v, _: complex(v)),
    np.ndarray: ("array", _encode_array, lambda v, get: get(str(v)).numpy()),
    torch.dtype: ("dtype", lambda v, _path, _tensors: str(v), _decode_dtype),
    torch.device: ("device", lambda v, _path, _tensors: str(v), lambda v, _: torch.device(v)),
    torch.Size: ("Size", _encode_items, lambda v, _: torch.Size(v)),
}
"""For each exact type: its tag (None if JSON has the type), its encoder and its decoder."""

_DECODERS: Final[dict[str, _Decode]] = {
    **{tag: decode_value for tag, _, decode_value in _TYPES.values() if tag is not None},
    "float": lambda v, _: float(v),
    "dict": _decode_pairs,
}
