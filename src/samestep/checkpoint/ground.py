"""What a checkpoint needs of the run it belongs to."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from samestep.ranks.link import Link
from samestep.wrap.wrapped import Wrapped


class Stateful(Protocol):
    """Anything that can tell its state and take it back: a model, an optimizer, a scheduler, a shard."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state."""
        ...

    def load_state_dict(self, state: Any, /) -> object:  # each takes what its own state_dict gave
        """Take the state back."""
        ...


class Ledger(Protocol):
    """The ledger of one shard."""

    def sync(self) -> None:
        """Hand all records to the disk."""
        ...


class Engine(Protocol):
    """What follows the steps of a run."""

    steps: int
    samples: int
    in_step: bool
    at_end: list[Callable[[], None]]

    @property
    def models(self) -> Sequence[Wrapped]:
        """What run.wrap made."""
        ...

    @property
    def accounts(self) -> Sequence[Ledger]:
        """The ledgers."""
        ...

    @property
    def trained(self) -> Iterable[object]:
        """The shards and streams that training has drawn from."""
        ...

    def flush(self, act: str) -> None:
        """Bring logged values together now."""
        ...


@dataclass(frozen=True)
class Ground:
    """A run, as far as its checkpoints see it."""

    link: Link
    """All ranks."""
    engine: Engine
    """What follows the steps."""
    device: torch.device
    """Where this rank computes."""
    riders: list[Any]
    """Who hears the pulse and is called at step boundaries and at the end; a checkpoint is one of them."""
    reseed: Callable[[int], None]
    """Lets this rank draw numbers of its own from a step on that no rank has drawn before."""
    say: Callable[[str], None]
    """Prints once."""
    once: Callable[..., Any]
    """Runs a function on the first rank and gives its value to all."""
    facts: Callable[[], dict[str, object]]
    """What the run knows of itself."""
    times_logged: Callable[[str], int]
    """How often a name was logged up to now, as the first rank knows."""
    extra: Mapping[str, Stateful]
    """State of the run itself that is saved with what the user gave."""
