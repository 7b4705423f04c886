"""What a placement of a teacher needs of the run around it, and what it gives back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict

import torch

from samestep.plan.teacher import Setting
from samestep.ranks.link import Link


@dataclass(frozen=True)
class Ground:
    """The run as a teacher sees it."""

    link: Link
    """The other ranks."""
    device: torch.device
    """Where this rank trains, and where outputs must lie."""
    folder: Path
    """Where the run's files lie, the same on every rank."""
    say: Callable[[str], None]
    """Prints once, on the first rank."""
    once: Callable[..., object]
    """Runs a function on the first rank and gives its result, or its exception, to all: `Run.once`."""
    setting: Callable[[int], Setting] | None = None
    """Tells what trains around the teacher, with so many ranks on a device; None where no placement is to be chosen."""


class Special(TypedDict, total=False):
    """What of run.teacher(...) means something to one or two placements only; Wish says what."""

    device_map: Mapping[str, str] | None
    servers: int | None
    inner: str | None
    cache: str | Path | None


@dataclass(frozen=True)
class Wish:
    """What the user asked for in run.teacher(...), beside what is to be built."""

    dtype: torch.dtype | None = None
    """What the weights are turned into; None: as the file holds them."""
    top_k: int | None = None
    """How many of the largest logits are given, and sent or kept; None: all."""
    temperature: float = 1.0
    """The temperature of the loss that top-k logits are for; without `top_k` it changes nothing."""
    example: object = None
    """A batch such as the teacher will be called with, to count its work; None: what `build` returns beside it."""
    device_map: Mapping[str, str] | None = None
    """Modules and their devices, for `custom`."""
    servers: int | None = None
    """How many ranks or processes hold the teacher, for `served`; None: one."""
    inner: str | None = None
    """What is inside: for `cached` the placement that computes what is missing, None: chosen; for `served` "rank" or
    "process", None: ranks serve."""
    cache: str | Path | None = None
    """Where outputs are kept, for `cached`; None: in the run's folder."""


class Placed(Protocol):
    """A teacher in its place: called like the module itself, on every rank for its own micro-batch."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The module's outputs for this rank's inputs, on this rank's device."""
        ...

    def describe(self) -> str:
        """One line for the log: where the weights lie and how many bytes of them on this rank."""
        ...

    def close(self) -> None:
        """Give back what is held: memory, threads, processes; called on every rank when the run ends."""
        ...


class Pending(Protocol):
    """Outputs that were asked for and may still be on their way."""

    def result(self) -> Any:
        """The outputs, on this rank's device; waits for them where they are not there yet."""
        ...
