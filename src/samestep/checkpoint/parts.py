"""The parts of a checkpoint: models, optimizers and whatever else tells its state, taken apart and put back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from samestep.checkpoint.encode import decode, encode, tensor_names
from samestep.checkpoint.ground import Stateful
from samestep.checkpoint.index import Index
from samestep.checkpoint.optimizers import like, load_named, named_state, names_of, owner
from samestep.errors import CheckpointError, SamestepError

Tensors = dict[str, torch.Tensor]
_SHOWN: Final = 5


@dataclass(frozen=True)
class Taken:
    """The state of all parts at one moment: values as JSON, tensors as they live."""

    values: dict[str, object]
    tensors: Tensors


class Parts:
    """What run.restore was given, by name."""

    def __init__(self, given: Mapping[str, Stateful], inner: Callable[[nn.Module], nn.Module]) -> None:
        self._given = {name: inner(part) if isinstance(part, nn.Module) else part for name, part in given.items()}
        for name, part in given.items():
            missing = [m for m in ("state_dict", "load_state_dict") if not callable(getattr(part, m, None))]
            if missing:
                raise CheckpointError(
                    f"run.restore({name}=...) got a {type(part).__name__}, which has no {' and no '.join(missing)}: "
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
                f"{'it' if len(missing) == 1 else 'them'} out of run.restore, or begin in another folder"
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
            "give run.restore another folder, or build the model as it was"
        )
