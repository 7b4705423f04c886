"""What the ranks of a Trainer tell each other: everybody's value, or what one of them did for all.

Lightning owns the process group here, and on GPUs it is one of NCCL alone: what travels is small and pickled by torch.
"""

import pickle
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer

from samestep.errors import OnceFailed
from samestep.torch_private import wait_until_released

T = TypeVar("T")


def gathered(trainer: Trainer, value: T) -> list[T]:
    """The values of all ranks, in rank order; all must call it."""
    if trainer.world_size == 1:
        return [value]
    parts: list[T | None] = [None] * trainer.world_size
    dist.all_gather_object(parts, value)
    return [part for part in parts if part is not None]


def once(here: Trainer | LightningModule, function: Callable[..., T], *args: object) -> T:
    """Run `function(*args)` on the first rank; every rank gets what it returned, or raises what it raised.

    In place of `@rank_zero_only` and a barrier, behind which the other ranks know neither the value nor the error. All
    ranks must call it, from any hook that all of them reach; they wait in a collective meanwhile.

    ```python
    class Net(LightningModule):
        def on_fit_start(self):
            self.words = once(self, read_vocabulary, "words.txt")
    ```
    """
    trainer = here.trainer if isinstance(here, LightningModule) else here
    outcome = trainer.strategy.broadcast(_done(function, *args) if trainer.is_global_zero else None)
    settle(trainer)
    assert outcome is not None
    value, error, trace = outcome
    if error is None:
        return value  # pyright: ignore[reportReturnType]  # it came from `function`
    place = f"raised on rank 0 in once({getattr(function, '__name__', type(function).__name__)}), for every rank:"
    if isinstance(error, Exception):
        error.add_note(f"{place}\n{trace}")
        raise error
    raise OnceFailed(f"{place}\n{trace}")


def settle(trainer: Trainer) -> None:
    """Wait until gloo's thread has let go of what it sent: this may be the script's last act.

    The thread needs Python to let go, and where Python is ending it aborts the process (exit code 134).
    """
    if trainer.world_size > 1 and dist.get_backend() == "gloo":
        farewell = torch.zeros(1)
        dist.all_reduce(farewell)
        wait_until_released(farewell)


def _done(function: Callable[..., T], *args: object) -> tuple[T | None, object, str]:
    """(value, error, traceback); an error that cannot travel goes as its text."""
    try:
        value = function(*args)
        pickle.dumps(value)
    except Exception as error:  # noqa: BLE001  # whatever it is, it belongs to every rank
        trace = traceback.format_exc()
        try:
            travels = type(pickle.loads(pickle.dumps(error))) is type(error)
        except Exception:  # noqa: BLE001  # its own constructor, an open file inside: its text will do
            travels = False
        return None, error if travels else str(error), trace
    return value, None, ""
