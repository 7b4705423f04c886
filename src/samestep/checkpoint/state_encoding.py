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


def encode(value: Any, path: str, tensors: Tensors) -> object:
    """Return `value` as json.dumps accepts it, and add every tensor in it to `tensors` under its path.

    >>> tensors = {}
    >>> encode({"lr": 0.1, "shape": (2, 3), "w": torch.zeros(2)}, "state", tensors)
    {'lr': 0.1, 'shape': {'~': 'tuple', 'v': [2, 3]}, 'w': {'~': 'tensor', 'v': 'state/w'}}
    >>> list(tensors)
    ['state/w']
    """
    kind = type(value)
    if value is None or kind in (str, bool, int) or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return _encode_items(value, path, tensors)
    if kind is dict and all(type(key) is str for key in value) and _TAG not in value:
        return {key: encode(item, f"{path}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return {_TAG: "tensor", "v": _add_tensor(value.detach(), path, tensors)}
    if kind in _TYPES:
        tag, encode_value, _ = _TYPES[kind]
        return {_TAG: tag, "v": encode_value(value, path, tensors)}
    if isinstance(value, np.generic):
        return {_TAG: "numpy", "v": [value.dtype.str, encode(value.item(), path, tensors)]}
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    raise CheckpointError(
        f"{path} is a value of {name}, which a checkpoint cannot store without executing code when it is read: return "
        "only numbers, strings, lists, tuples, dicts, arrays and tensors from state_dict()"
    )


def decode(value: object, get_tensor: GetTensor) -> Any:
    """Return what `encode` was given, with the tensors that `get_tensor` returns for their names."""
    if isinstance(value, list):
        return [decode(item, get_tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item, get_tensor) for key, item in value.items()}
    if (tag := value[_TAG]) not in _DECODERS:
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


def _decode_dtype(value: str, get_tensor: GetTensor) -> torch.dtype:
    del get_tensor
    dtype = getattr(torch, value.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"the state has the dtype {value}, which this version of torch does not know: update torch"
        )
    return dtype


def _to_text(value: object, path: str, tensors: Tensors) -> str:
    del path, tensors
    return str(value)


_TYPES: Final[dict[type, tuple[str, _Encode, _Decode]]] = {
    float: ("float", _to_text, lambda v, _: float(v)),  # NaN and infinity
    dict: ("dict", _encode_pairs, _decode_pairs),  # with keys that are not strings
    tuple: ("tuple", _encode_items, lambda v, get: tuple(decode(v, get))),
    set: ("set", _encode_set, lambda v, get: set(decode(v, get))),
    frozenset: ("frozenset", _encode_set, lambda v, get: frozenset(decode(v, get))),
    OrderedDict: ("OrderedDict", _encode_pairs, lambda v, get: OrderedDict(_decode_pairs(v, get))),
    Counter: ("Counter", _encode_pairs, lambda v, get: Counter(_decode_pairs(v, get))),
    bytes: ("bytes", lambda v, _path, _tensors: base64.b64encode(v).decode(), lambda v, _: base64.b64decode(v)),
    complex: ("complex", _to_text, lambda v, _: complex(v)),
    np.ndarray: ("array", _encode_array, lambda v, get: get(str(v)).numpy()),
    torch.dtype: ("dtype", _to_text, _decode_dtype),
    torch.device: ("device", _to_text, lambda v, _: torch.device(v)),
    torch.Size: ("Size", _encode_items, lambda v, _: torch.Size(v)),
}
"""For each exact type that JSON does not have: its tag, its encoder and its decoder."""

_DECODERS: Final[dict[str, _Decode]] = {
    **{tag: decode_value for tag, _, decode_value in _TYPES.values()},
    "tensor": lambda v, get: get(str(v)),
    "numpy": lambda v, get: np.dtype(v[0]).type(decode(v[1], get)),
}
