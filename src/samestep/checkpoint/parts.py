"""The parts of a checkpoint: models, optimizers and whatever else tells its state, taken apart and put back."""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from samestep.checkpoint.state_encoding import decode, encode, tensor_names
from samestep.checkpoint.tensor_storage import Index
from samestep.errors import CheckpointError, SamestepError


class Stateful(Protocol):
    """Anything that can tell its state and take it back: a model, an optimizer, a scheduler, a shard."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state."""
        ...

    def load_state_dict(self, state: Any, /) -> object:  # each takes what its own state_dict gave
        """Take the state back."""
        ...


_OF_THE_MACHINE: Final = ("foreach", "fused", "capturable")
"""How steps are computed, not what: these stay as they are here."""
_SHOWN_PARAMETERS: Final = 4


def names_of(optimizer: Optimizer, part: str, parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """A name for each parameter of the optimizer, in its own order; `parameters` are those of all models, by name."""
    known: dict[int, str] = {}
    for name, parameter in parameters.items():
        known.setdefault(id(parameter), name)
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strange = [tuple(parameter.shape) for parameter in members if id(parameter) not in known]
    if strange:
        raise CheckpointError(
            f"{part} holds {len(strange)} parameter(s) of no model that run.checkpoint was given (shapes "
            f"{', '.join(map(str, strange[:_SHOWN]))}): give their model too, as in run.checkpoint(folder, model=model, "
            f"{part}={part})"
        )
    return [known[id(parameter)] for parameter in members]


def named_state(optimizer: Optimizer, names: list[str]) -> dict[str, object]:
    """What optimizer.state_dict() tells, with names for numbers; an optimizer without state stays without."""
    packed = optimizer.state_dict()
    state = {names[at]: entries for at, entries in packed["state"].items()}
    groups = [{**group, "params": [names[at] for at in group["params"]]} for group in packed["param_groups"]]
    return {"kind": type(optimizer).__name__, "state": state, "groups": groups}


def load_named(optimizer: Optimizer, part: str, names: list[str], saved: Mapping[str, Any]) -> None:
    """Give an optimizer what `named_state` told; its parameters may stand in another order."""
    _check_kind(part, type(optimizer).__name__, saved.get("kind"))
    number = {name: at for at, name in enumerate(names)}
    here = optimizer.state_dict()["param_groups"]
    _check_groups(part, [[names[at] for at in group["params"]] for group in here], saved["groups"])
    groups: list[dict[str, object]] = []
    for mine, theirs in zip(here, saved["groups"], strict=True):
        kept = {key: mine[key] for key in ("params", *_OF_THE_MACHINE) if key in mine}
        groups.append({**theirs, **kept})
    state = {number[name]: entries for name, entries in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def owner(path: str, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The parameter whose state stands under a path, however deep in it; None where there is no such parameter.

    >>> owner("model/weight/old_dirs/0", {"model/weight": torch.ones(2)})
    tensor([1., 1.])
    """
    while path and path not in parameters:
        path = path.rpartition("/")[0]
    return parameters.get(path)


def like(pattern: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Room for a value that belongs to a tensor: where it has its shape also on its device and sharded as it is."""
    if pattern is not None and tuple(pattern.shape) == shape:
        return torch.empty_like(pattern.detach(), dtype=dtype)
    return torch.empty(shape, dtype=dtype)


def _check_kind(part: str, here: str, there: object) -> None:
    if there not in (here, None):  # which an earlier samestep did not write down
        raise CheckpointError(
            f"{part} is {here} here and was {there} when it was saved: what one of them keeps means nothing to the "
            "other; build it as it was, or begin in another folder, from the weights that `samestep checkpoint export` "
            "gives"
        )


def _check_groups(part: str, here: list[list[str]], saved: list[dict[str, Any]]) -> None:
    there: list[list[str]] = [group["params"] for group in saved]
    if list(map(sorted, here)) == list(map(sorted, there)):
        return
    differ = sorted(set(chain(*here)) ^ set(chain(*there)))[:_SHOWN_PARAMETERS]
    names = f", first {', '.join(differ)}" if differ else ""
    raise CheckpointError(
        f"{part} groups its parameters otherwise than when it was saved: {list(map(len, there))} parameters in its "
        f"groups there, {list(map(len, here))} here{names}; build it as it was, or begin in another folder"
    )


PREFIX = "luck"


def name_of(rank: int) -> str:
    """Under which name a rank's state is saved."""
    return f"{PREFIX}/rank-{rank:05}"


def take(device: torch.device) -> torch.Tensor:
    """All generators of this process as bytes: Python's, numpy's and torch's."""
    state: dict[str, object] = {
        "python": random.getstate(),
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    text = json.dumps(encode(state, PREFIX, {})).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def give_back(saved: torch.Tensor, device: torch.device) -> None:
    """Let all generators go on from where they were."""
    state = decode(json.loads(saved.numpy().tobytes()), _no_tensor)
    assert isinstance(state, dict)
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_words(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_words(state["cuda"]), device)


def _numpy_state() -> tuple[object, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)
    return (kind, keys.tobytes(), *rest)


def _words(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _no_tensor(name: str) -> torch.Tensor:
    raise KeyError(name)


Tensors = dict[str, torch.Tensor]
_SHOWN: Final = 5


@dataclass(frozen=True)
class Taken:
    """The state of all parts at one moment: values as JSON, tensors as they live."""

    values: dict[str, object]
    tensors: Tensors


class Parts:
    """What run.checkpoint was given, by name."""

    def __init__(self, given: Mapping[str, Stateful], inner: Callable[[nn.Module], nn.Module]) -> None:
        self._given = {name: inner(part) if isinstance(part, nn.Module) else part for name, part in given.items()}
        for name, part in given.items():
            missing = [m for m in ("state_dict", "load_state_dict") if not callable(getattr(part, m, None))]
            if missing:
                raise CheckpointError(
                    f"run.checkpoint({name}=...) got a {type(part).__name__}, which has no {' and no '.join(missing)}: "
                    "give something whose state can be told and taken back"
                )
        self._modules = {name: part for name, part in self._given.items() if isinstance(part, nn.Module)}

    @property
    def kinds(self) -> dict[str, str]:
        """What each part is."""
        return {name: _kind(part) for name, part in self._given.items()}

    def may_hold(self, source: object) -> bool:
        """Whether the position in some data is saved: by itself, or by an object of the user's, who alone knows."""
        return any(part is source or _is_of_the_user(part) for part in self._given.values())

    def take(self) -> Taken:
        """The state of every part; tensors are the living ones, to be copied before training goes on."""
        taken = Taken({}, {})
        for name, part in self._given.items():
            taken.values[name] = encode(self._state(name, part), name, taken.tensors)
        return taken

    def prepare(self, values: Mapping[str, object], index: Index) -> tuple[Tensors, Callable[[], None]]:
        """Room for the tensors of a checkpoint that fits these parts, and what puts all back once it is filled."""
        self._check_names(values)
        room: Tensors = {}
        models_first = sorted(
            self._given, key=lambda name: name not in self._modules
        )  # another model explains the rest
        states = {name: self._make_room(name, values[name], index, room) for name in models_first}
        return room, lambda: self._put_back(states)

    def _state(self, name: str, part: Stateful) -> dict[str, object]:
        if isinstance(part, Optimizer):
            return named_state(part, names_of(part, name, self._parameters()))
        if isinstance(part, nn.Module):
            plain = _plain(part)
            return {plain(path): value for path, value in part.state_dict().items()}
        return dict(part.state_dict())

    def _put_back(self, states: dict[str, object]) -> None:
        for name, part in self._given.items():
            self._load(name, part, states[name])

    def _load(self, name: str, part: Stateful, state: Any) -> None:
        if isinstance(part, Optimizer):
            load_named(part, name, names_of(part, name, self._parameters()), state)
            return
        if isinstance(part, nn.Module):
            plain = _plain(part)
            here = {plain(path): path for path in part.state_dict()}
            state = {here.get(path, path): value for path, value in state.items()}
        part.load_state_dict(state)

    def _make_room(self, name: str, value: Any, index: Index, room: Tensors) -> object:
        part = self._given[name]
        living = Taken({}, {})
        encode(self._state(name, part), name, living.tensors)
        if isinstance(part, nn.Module):
            _check_shapes(name, living.tensors, set(tensor_names(value)), index)
            room.update(living.tensors)
            return decode(value, living.tensors.__getitem__)
        patterns = living.tensors
        if isinstance(part, Optimizer):  # one that has made no step has no state, but its parameters tell the layout
            parameters, start = self._parameters(), f"{name}/state/"
            state = [tensor for tensor in tensor_names(value) if tensor.startswith(start)]
            patterns = {t: of for t in state if (of := owner(t.removeprefix(start), parameters)) is not None}
        for tensor in tensor_names(value):
            whole = index[tensor]
            room[tensor] = like(patterns.get(tensor), whole.shape, whole.dtype)
        return decode(value, room.__getitem__)

    def _parameters(self) -> Tensors:
        return {
            f"{name}/{plain(path)}": parameter
            for name, module in self._modules.items()
            for plain in [_plain(module)]
            for path, parameter in module.named_parameters()
        }

    def _check_names(self, values: Mapping[str, object]) -> None:
        missing = [name for name in self._given if name not in values]
        if missing:
            raise CheckpointError(
                f"the checkpoint holds no {' and no '.join(missing)}, only {', '.join(values)}: leave "
                f"{'it' if len(missing) == 1 else 'them'} out of run.checkpoint, or begin in another folder"
            )


def _plain(module: nn.Module) -> Callable[[str], str]:
    """Names in a module without those of wrappers inside, such as that of an average of a wrapped model.

    One rank has none of them, and a checkpoint is to fit any number of ranks.
    """
    paths = [(f"{path}." if path else "", _held_as(each)) for path, each in module.named_modules()]
    hops = [(path, f"{path}{held}.") for path, held in reversed(paths) if held is not None]

    def plain(name: str) -> str:
        """The name as it would be without them; the innermost goes first."""
        for path, hop in hops:
            if name.startswith(hop):
                name = path + name.removeprefix(hop)
        return name

    return plain


def _held_as(module: nn.Module) -> str | None:
    """Under which name a wrapper holds what it stands around; None for any other module."""
    if isinstance(module, DistributedDataParallel):
        return "module"
    return "_orig_mod" if hasattr(module, "_orig_mod") else None  # torch.compile's, whose class takes seconds to load


def explain_state(error: Exception) -> str:
    """Why a state cannot be saved: our own words as they are, those of anybody else with their kind."""
    return (
        str(error) if isinstance(error, SamestepError) else f"the state cannot be told: {type(error).__name__}: {error}"
    )


def _is_of_the_user(part: Stateful) -> bool:
    return _kind(part) == "state" and type(part).__module__.partition(".")[0] not in ("torch", "samestep")


def _kind(part: Stateful) -> str:
    if isinstance(part, nn.Module):
        return "model"
    return "optimizer" if isinstance(part, Optimizer) else "state"


def _check_shapes(part: str, here: Tensors, there: set[str], index: Index) -> None:
    """Raise where a model is not the one that was saved: the first names that differ say why."""
    told: list[str] = []
    for name in sorted(here.keys() | there):
        short = name.removeprefix(f"{part}/")
        if name not in there:
            told.append(f"{short} is here only")
        elif name not in here:
            told.append(f"{short} is there only")
        elif (saved := index[name].shape) != tuple(here[name].shape):
            told.append(f"{short} is {saved} there and {tuple(here[name].shape)} here")
    if told:
        more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
        raise CheckpointError(
            f"the checkpoint belongs to another run, for {part} is another model: {'; '.join(told[:_SHOWN])}{more}; "
            "give run.checkpoint another folder, or build the model as it was"
        )
