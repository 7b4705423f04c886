"""The parts of a checkpoint: the state of models, optimizers and other objects, and of the random number generators.

Parameters are saved under their names in your module, without the prefixes of wrappers, and optimizer state under the
names of its parameters instead of their positions. So the state fits any world size and strategy. With
`trainable_only`, the frozen tensors of a model are left out, and their checksums are saved instead.

State is encoded as JSON and named tensors, and decoded without executing code from the file. A value of a type that
JSON does not have becomes an object with a type tag: {"~": "tuple", "v": [1, 2]}. Tensors are collected under their
path in the state ("optimizer/state/model/weight/exp_avg"), so that they can be stored in chunks.
"""

import base64
import json
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer
from torch.optim.swa_utils import AveragedModel

from samestep.checkpoint.tensor_storage import DTYPE_NAMES, Index
from samestep.errors import CheckpointError, SamestepError
from samestep.parallel.fsdp import full_tensor
from samestep.parallel.submodules import frozen_tensor_names
from samestep.torch_private import count_changes

Tensors = dict[str, torch.Tensor]
GetTensor = Callable[[str], torch.Tensor]
_Encode = Callable[[Any, str, Tensors], object]
_Decode = Callable[[Any, GetTensor], object]
_MAX_DIFFERENCES: Final = 5  # in an error message
_DEVICE_OPTIONS: Final = ("foreach", "fused", "capturable")
"""Optimizer options about how a step is computed on a device; they are not restored."""
_TAG: Final = "~"
_RNG_PREFIX: Final = "rng"
_RNG_BYTES: Final = 4096  # the stored state has a multiple of this size
_CHECKSUM_BLOCK: Final = 1 << 18  # integers at a time, which fit into the cache of a CPU


class Stateful(Protocol):
    """An object with a state: a model, an optimizer, a scheduler, a shard."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state: Any, /) -> object:
        """Restore what `state_dict` returned."""
        ...


class Parts:
    """The objects that run.checkpoint received, by name; `unwrap` returns the user's module of a wrapped model."""

    def __init__(
        self,
        given: Mapping[str, Stateful],
        unwrap: Callable[[nn.Module], nn.Module],
        trainable_only: bool = False,
    ) -> None:
        for name, part in given.items():
            missing = [
                method for method in ("state_dict", "load_state_dict") if not callable(getattr(part, method, None))
            ]
            if missing:
                raise CheckpointError(
                    f"run.checkpoint({name}=...) got a {type(part).__name__} without {' and '.join(missing)}: pass an "
                    "object that has both methods"
                )
        self.objects = {name: unwrap(part) if isinstance(part, nn.Module) else part for name, part in given.items()}
        self.models = {name: part for name, part in self.objects.items() if isinstance(part, nn.Module)}
        """The models among them, as your modules: those that train, and others, such as the average of one."""
        self.frozen = {name: FrozenTensors(name, model) for name, model in self.models.items() if trainable_only}
        """By model, the tensors that are left out."""
        self._left_out: list[tuple[FrozenTensor, torch.Tensor]] = []  # by the checkpoint that is being loaded

    @property
    def kinds(self) -> dict[str, str]:
        """Whether each part is a model, an optimizer or other state."""
        return {name: _kind(part) for name, part in self.objects.items()}

    def may_contain(self, data: object) -> bool:
        """Whether the position in a shard or stream is saved: as a part, or possibly within an object of the user."""
        return any(part is data or _is_user_object(part) for part in self.objects.values())

    def state(self) -> tuple[dict[str, object], Tensors]:
        """Return the state of every part as JSON values, and its tensors, which share memory with the parts."""
        tensors: Tensors = {}
        values = {name: encode(self._state_of(name), name, tensors) for name in self.objects}
        return values, tensors

    def prepare_load(self, values: Mapping[str, object], index: Index) -> tuple[Tensors, Callable[[], None]]:
        """Check that a checkpoint fits; return the tensors to fill, and a function to call when they are filled.

        The parameters of models are filled in place, with sharding as it is now. Other tensors are newly allocated.
        """
        if missing := [name for name in self.objects if name not in values]:
            raise CheckpointError(
                f"the checkpoint has no {' and no '.join(missing)}, only {', '.join(values)}: leave "
                f"{'it' if len(missing) == 1 else 'them'} out of run.checkpoint, or start in another folder"
            )
        targets: Tensors = {}
        self._left_out = []
        # models first: if the model differs, its error message is the helpful one
        names = sorted(self.objects, key=lambda name: name not in self.models)
        states = {name: self._allocate(name, values[name], index, targets) for name in names}

        def load() -> None:
            for name in self.objects:
                self._load(name, states[name])

        return targets, load

    def frozen_differences(self) -> list[str]:
        """Return how frozen tensors differ from those that the checkpoint of `prepare_load` left out.

        Like `describe_frozen` it is a collective if a frozen tensor is sharded.
        """
        return [each for entry, tensor in self._left_out for each in frozen_difference(entry, tensor)]

    def describe_frozen(self) -> None:
        """Compute the checksums of the tensors that checkpoints will leave out, unless that is done."""
        for frozen in self.frozen.values():
            frozen.describe()

    def _state_of(self, name: str) -> dict[str, object]:
        part = self.objects[name]
        if isinstance(part, Optimizer):
            return _optimizer_state(part, _parameter_names(part, name, self._parameters()))
        if isinstance(part, nn.Module):
            left_out = self.frozen[name].describe() if name in self.frozen else {}
            return {**model_state(part), **left_out}
        return dict(part.state_dict())

    def _allocate(self, name: str, value: Any, index: Index, targets: Tensors) -> object:
        """Add a tensor to `targets` for each tensor of this part, and return its state with them."""
        part = self.objects[name]
        current: Tensors = {}
        if isinstance(part, nn.Module):
            encode(model_state(part), name, current)
            left_out = frozen_tensors(value)
            shapes = {each: index[each].shape for each in tensor_names(value)}
            _check_same_parameters(name, current, shapes | {each: entry.shape for each, entry in left_out.items()})
            self._left_out += [(entry, current[each]) for each, entry in left_out.items()]
            targets.update({each: tensor for each, tensor in current.items() if each not in left_out})
            return decode(value, current.__getitem__)
        encode(self._state_of(name), name, current)
        templates: Mapping[str, torch.Tensor | None] = current
        if isinstance(part, Optimizer):  # before its first step it has no state: use the layout of the parameters
            parameters, prefix = self._parameters(), f"{name}/state/"
            in_state = [tensor for tensor in tensor_names(value) if tensor.startswith(prefix)]
            templates = {tensor: _owner(tensor.removeprefix(prefix), parameters) for tensor in in_state}
        for tensor in tensor_names(value):
            stored, template = index[tensor], templates.get(tensor)
            if template is not None and tuple(template.shape) == stored.shape:  # same device and sharding
                targets[tensor] = torch.empty_like(template.detach(), dtype=stored.dtype)
            else:
                targets[tensor] = torch.empty(stored.shape, dtype=stored.dtype)
        return decode(value, targets.__getitem__)

    def _load(self, name: str, state: Any) -> None:
        part = self.objects[name]
        if isinstance(part, Optimizer):
            _load_optimizer_state(part, name, _parameter_names(part, name, self._parameters()), state)
            return
        if isinstance(part, nn.Module):
            unwrapped = unwrapped_names(part)
            keys = {unwrapped(key): key for key in part.state_dict()}
            state = {keys.get(key, key): value for key, value in state.items()}
        part.load_state_dict(state)
        if name in self.frozen:
            self.frozen[name].forget()

    def _parameters(self) -> Tensors:
        """The parameters of all models, as `part/name`."""
        return {
            f"{name}/{unwrapped(key)}": parameter
            for name, model in self.models.items()
            for unwrapped in [unwrapped_names(model)]
            for key, parameter in model.named_parameters()
        }


def describe_state_error(error: Exception) -> str:
    """Return the message of an error of samestep, or the type and message of any other exception in state_dict()."""
    return str(error) if isinstance(error, SamestepError) else f"state_dict() failed: {type(error).__name__}: {error}"


def _kind(part: Stateful) -> str:
    if isinstance(part, nn.Module):
        return "model"
    return "optimizer" if isinstance(part, Optimizer) else "state"


def _is_user_object(part: Stateful) -> bool:
    return _kind(part) == "state" and type(part).__module__.partition(".")[0] not in ("torch", "samestep")


# Models


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model under the names of your module, without the prefixes of wrappers."""
    unwrapped = unwrapped_names(model)
    return {unwrapped(key): value for key, value in model.state_dict().items()}


def unwrapped_names(module: nn.Module) -> Callable[[str], str]:
    """Return a function that removes the prefixes of DDP and torch.compile inside the module from a name."""
    wrappers = [(f"{path}." if path else "", _wrapper_prefix(child)) for path, child in module.named_modules()]
    # innermost first
    prefixes = [(path, f"{path}{prefix}.") for path, prefix in reversed(wrappers) if prefix is not None]

    def unwrapped(name: str) -> str:
        for path, wrapped_path in prefixes:
            if name.startswith(wrapped_path):
                name = path + name.removeprefix(wrapped_path)
        return name

    return unwrapped


def _wrapper_prefix(module: nn.Module) -> str | None:
    """The attribute in which a wrapper stores its module; None if the module is not a wrapper."""
    if isinstance(module, DistributedDataParallel):
        return "module"
    return "_orig_mod" if hasattr(module, "_orig_mod") else None  # importing torch.compile's class takes seconds


def _check_same_parameters(part: str, current: Tensors, saved: Mapping[str, tuple[int, ...]]) -> None:
    """Raise if names or shapes differ; `saved` are the shapes in the checkpoint."""
    differences: list[str] = []
    for name in sorted(current.keys() | saved.keys()):
        short = name.removeprefix(f"{part}/")
        if name not in saved:
            differences.append(f"{short} is only in the model")
        elif name not in current:
            differences.append(f"{short} is only in the checkpoint")
        elif (shape := saved[name]) != tuple(current[name].shape):
            differences.append(f"{short} is {shape} in the checkpoint and {tuple(current[name].shape)} in the model")
    if differences:
        more = f" and {len(differences) - _MAX_DIFFERENCES} more" if len(differences) > _MAX_DIFFERENCES else ""
        raise CheckpointError(
            f"the checkpoint was saved with a different {part}: {'; '.join(differences[:_MAX_DIFFERENCES])}{more}; "
            "pass another folder to run.checkpoint, or build the model as it was"
        )


# Frozen tensors of models


@dataclass(frozen=True)
class FrozenTensor:
    """A tensor that a checkpoint leaves out, and what the same tensor of a later run must have in common with it."""

    name: str  # as "model/embedding.weight"
    dtype: str
    shape: tuple[int, ...]
    checksum: str


class FrozenTensors:
    """The frozen tensors of a model: frozen parameters, and buffers of submodules without a trainable parameter.

    Moving averages, whose updates write all tensors, and models that are frozen as a whole are saved in full.
    """

    def __init__(self, part: str, model: nn.Module) -> None:
        self._part, self._model = part, model
        self._names = [] if isinstance(model, AveragedModel) else frozen_tensor_names(model)
        self._described: dict[str, FrozenTensor] = {}
        self._changes: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._names)

    def forget(self) -> None:
        """Compute the checksums again for the next checkpoint, since the model was loaded."""
        self._described = {}

    def describe(self) -> dict[str, FrozenTensor]:
        """Return each frozen tensor by its name in your module; raises if one has changed since the last call."""
        model = self._model
        named = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        changes = {name: (id(named[name]), count_changes(named[name])) for name in self._names}
        if not self._described:
            unwrapped = unwrapped_names(model)
            self._described = {
                unwrapped(name): _describe_frozen(f"{self._part}/{unwrapped(name)}", named[name])
                for name in self._names
            }
        elif changed := [name for name in self._names if changes[name] != self._changes[name]]:
            raise CheckpointError(
                f"{self._part} has {len(changed)} frozen tensor(s) that were changed after run.checkpoint, and "
                f"checkpoints with trainable_only=True do not contain them: {', '.join(changed[:_MAX_DIFFERENCES])}; "
                "leave out trainable_only, or do not change frozen tensors"
            )
        self._changes = changes
        return self._described


def _describe_frozen(name: str, tensor: torch.Tensor) -> FrozenTensor:
    return FrozenTensor(name, str(tensor.dtype), tuple(tensor.shape), tensor_checksum(tensor))


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Return a checksum of the values in their order, the same on every device; of a sharded tensor a collective.

    >>> tensor_checksum(torch.tensor([1.0, 2.0])) == tensor_checksum(torch.tensor([2.0, 1.0]))
    False
    """
    full = full_tensor(tensor).detach()
    words = full.contiguous().view(-1).view(torch.uint8)
    words = words.view(torch.int32) if words.numel() % 4 == 0 else words
    total = torch.zeros((), dtype=torch.int64, device=full.device)
    weights = torch.arange(1, 2 * _CHECKSUM_BLOCK, 2, dtype=torch.int64, device=full.device)
    for at, block in enumerate(words.split(_CHECKSUM_BLOCK)):
        values = block.to(torch.int64)  # products and sums wrap around
        total += 2 * at * _CHECKSUM_BLOCK * values.sum() + values.mul_(weights[: len(block)]).sum()
    return f"{int(total) % (1 << 64):016x}"


def frozen_tensors(value: object) -> dict[str, FrozenTensor]:
    """Return the frozen tensors in the encoded state of a model, by name."""
    entries = value.values() if isinstance(value, dict) else ()
    found = [entry["v"] for entry in entries if isinstance(entry, dict) and entry.get(_TAG) == "frozen"]
    return {name: FrozenTensor(name, dtype, tuple(shape), checksum) for name, dtype, shape, checksum in found}


def frozen_difference(entry: FrozenTensor, tensor: torch.Tensor) -> list[str]:
    """Return how a tensor differs from the one that a checkpoint left out: one text, or none."""
    short = entry.name.partition("/")[2]
    if str(tensor.dtype) != entry.dtype:
        return [f"{short} is {tensor.dtype} here and {entry.dtype} there"]
    return [] if tensor_checksum(tensor) == entry.checksum else [f"{short} has other values"]


def check_frozen(differences: list[str], remedy: str) -> None:
    """Raise if a tensor that the checkpoint left out is another one here."""
    if differences:
        more = f" and {len(differences) - _MAX_DIFFERENCES} more" if len(differences) > _MAX_DIFFERENCES else ""
        raise CheckpointError(
            "the checkpoint contains only trainable tensors, and frozen tensors differ from those that it was trained "
            f"with: {'; '.join(differences[:_MAX_DIFFERENCES])}{more}; {remedy}"
        )


# Optimizers


def _parameter_names(optimizer: Optimizer, part: str, parameters: Tensors) -> list[str]:
    """Return the name of each parameter of the optimizer, in its order; `parameters` are those of all models."""
    names: dict[int, str] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), name)
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if unknown := [str(tuple(parameter.shape)) for parameter in members if id(parameter) not in names]:
        raise CheckpointError(
            f"{part} has {len(unknown)} parameter(s) of no model that run.checkpoint received (shapes "
            f"{', '.join(unknown[:_MAX_DIFFERENCES])}): pass their model too, for example "
            f"run.checkpoint(folder, model=model, {part}={part})"
        )
    return [names[id(parameter)] for parameter in members]


def _optimizer_state(optimizer: Optimizer, names: list[str]) -> dict[str, object]:
    """Return optimizer.state_dict() with parameter names in place of positions."""
    packed = optimizer.state_dict()
    state = {names[at]: entries for at, entries in packed["state"].items()}
    groups = [{**group, "params": [names[at] for at in group["params"]]} for group in packed["param_groups"]]
    return {"class": type(optimizer).__name__, "state": state, "groups": groups}


def _load_optimizer_state(optimizer: Optimizer, part: str, names: list[str], saved: Mapping[str, Any]) -> None:
    """Load what `_optimizer_state` returned; the order of the parameters may differ."""
    if (kind := type(optimizer).__name__) != saved["class"]:
        raise CheckpointError(
            f"{part} is {kind} and the checkpoint has the state of {saved['class']}, which {kind} cannot use: create "
            "it as it was, or start in another folder from the weights that `samestep checkpoint export` writes"
        )
    positions = {name: at for at, name in enumerate(names)}
    current = optimizer.state_dict()["param_groups"]
    _check_same_groups(part, [[names[at] for at in group["params"]] for group in current], saved["groups"])
    groups: list[dict[str, object]] = []
    for group, saved_group in zip(current, saved["groups"], strict=True):
        kept = {key: group[key] for key in ("params", *_DEVICE_OPTIONS) if key in group}
        groups.append({**saved_group, **kept})
    state = {positions[name]: entries for name, entries in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _check_same_groups(part: str, current: list[list[str]], saved_groups: list[dict[str, Any]]) -> None:
    saved: list[list[str]] = [group["params"] for group in saved_groups]
    if list(map(sorted, current)) == list(map(sorted, saved)):
        return
    differences = sorted(set(chain(*current)) ^ set(chain(*saved)))[:_MAX_DIFFERENCES]
    names = f" (first differences: {', '.join(differences)})" if differences else ""
    raise CheckpointError(
        f"{part} has other parameter groups than the checkpoint: {list(map(len, saved))} parameters per group in the "
        f"checkpoint, {list(map(len, current))} here{names}; create it as it was, or start in another folder"
    )


def _owner(path: str, parameters: Tensors) -> torch.Tensor | None:
    """Return the parameter whose optimizer state contains this path, at any depth."""
    while path and path not in parameters:
        path = path.rpartition("/")[0]
    return parameters.get(path)


# Random number generators


def rng_tensor_name(rank: int) -> str:
    """Return the name under which the RNG state of a rank is stored."""
    return f"{_RNG_PREFIX}/rank-{rank:05}"


def get_rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of this process's generators (Python, NumPy, torch, CUDA) as bytes."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)
    state: dict[str, object] = {
        "python": random.getstate(),
        "numpy": (kind, keys.tobytes(), *rest),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    text = json.dumps(encode(state, _RNG_PREFIX, {})).encode()
    # Its length changes with the digits of the state. With a fixed size, the next checkpoint has the same layout.
    return _byte_tensor(text.ljust(-(-len(text) // _RNG_BYTES) * _RNG_BYTES))


def set_rng_state(saved: torch.Tensor, device: torch.device) -> None:
    """Restore what `get_rng_state` returned."""
    state = decode(json.loads(saved.numpy().tobytes()), Tensors().__getitem__)
    assert isinstance(state, dict)
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_byte_tensor(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_byte_tensor(state["cuda"]), device)


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


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
    FrozenTensor: (
        "frozen",
        lambda v, _path, _tensors: [v.name, v.dtype, list(v.shape), v.checksum],
        lambda v, get: get(v[0]),  # the tensor of the model, which already has its values
    ),
}
"""For each exact type that JSON does not have: its tag, its encoder and its decoder."""

_DECODERS: Final[dict[str, _Decode]] = {
    **{tag: decode_value for tag, _, decode_value in _TYPES.values()},
    "tensor": lambda v, get: get(str(v)),
    "numpy": lambda v, get: np.dtype(v[0]).type(decode(v[1], get)),
}
