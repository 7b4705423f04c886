"""What a placement of a teacher needs of the run around it, and what it gives back."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

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
