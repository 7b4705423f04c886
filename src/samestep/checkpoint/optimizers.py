"""An optimizer's state by the names of its parameters, so that it fits any world size and strategy.

torch's own get_optimizer_state_dict is not used: to fill an optimizer that has made no step yet it makes one, after
which Adam counts a step that never was.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any, Final

import torch
from torch.optim.optimizer import Optimizer

from samestep.errors import CheckpointError

_OF_THE_MACHINE: Final = ("foreach", "fused", "capturable")
"""How steps are computed, not what: these stay as they are here."""
_SHOWN: Final = 4


def names_of(optimizer: Optimizer, part: str, parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """A name for each parameter of the optimizer, in its own order; `parameters` are those of all models, by name."""
    known: dict[int, str] = {}
    for name, parameter in parameters.items():
        known.setdefault(id(parameter), name)
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strange = [tuple(parameter.shape) for parameter in members if id(parameter) not in known]
    if strange:
        raise CheckpointError(
            f"{part} holds {len(strange)} parameter(s) of no model that run.restore was given (shapes "
            f"{', '.join(map(str, strange[:_SHOWN]))}): give their model too, as in run.restore(folder, model=model, "
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
    differ = sorted(set(chain(*here)) ^ set(chain(*there)))[:_SHOWN]
    names = f", first {', '.join(differ)}" if differ else ""
    raise CheckpointError(
        f"{part} groups its parameters otherwise than when it was saved: {list(map(len, there))} parameters in its "
        f"groups there, {list(map(len, here))} here{names}; build it as it was, or begin in another folder"
    )
