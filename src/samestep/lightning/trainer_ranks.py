"""What the ranks of a Trainer tell each other: everybody's value, or what one of them did for all.

Lightning owns the process group here, and on GPUs it is one of NCCL alone: what travels is small and pickled by torch.
"""

import pickle
import traceback
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy

from samestep.environment.world import World, read_environ, read_world
from samestep.errors import OnceFailed, WorldError
from samestep.torch_private import wait_until_released


class Layout(TypedDict):
    """Arguments of a Trainer that say where it runs."""

    devices: int | str
    """Ranks on each node."""
    num_nodes: int
    """Nodes."""
    strategy: str | Strategy
    """How ranks share the work."""


def layout() -> Layout:
    """`Trainer(**layout())`: as many ranks as `samestep run`, torchrun or srun has started; else what Lightning finds.

    Lightning refuses to start where its own count differs from the launcher's, so a script would have to be told
    twice. Another strategy: `Trainer(**{**layout(), "strategy": "fsdp"})`.
    """
    world = _launched()
    if world.size == 1:
        return Layout(devices="auto" if world.launcher == "none" else 1, num_nodes=1, strategy="auto")
    # Variables set by hand as torchrun sets them are not recognised by Lightning, which would take them for its own
    # and delete some when a training ends.
    environ = TorchElasticEnvironment() if world.launcher == "torchrun" else None
    strategy = DDPStrategy(cluster_environment=environ)
    return Layout(devices=world.local_size, num_nodes=world.nodes, strategy=strategy)


def check_layout(trainer: Trainer) -> None:
    """Refuse a Trainer that does not know of the ranks a launcher has started: each of them would train alone."""
    world = _launched()
    if world.size != trainer.world_size and world.launcher != "none":
        raise WorldError(
            f"{world.size} rank(s) were started and the Trainer has a world of {trainer.world_size}, so that each rank "
            "would train for itself: pass Trainer(..., **layout()), with `from samestep.lightning import layout`"
        )


def _launched() -> World:
    """The world that a launcher made. Processes that Lightning starts by itself know no RANK: it counts them alone."""
    found = read_environ()
    if "RANK" not in found and {"LOCAL_RANK", "WORLD_SIZE"} & found.keys() and "SLURM_PROCID" not in found:
        return World()
    return read_world()


class StopTogether(Callback):
    """Stops every rank where one has set `trainer.should_stop`: a rank that stops alone leaves the others waiting.

    It asks after every batch and every validation. Lightning's EarlyStopping agrees by itself, on a number that is the
    same everywhere with SameStep; this is for what one rank sees alone: a deadline, a signal, a loss that is no number.
    Set the flag in training_step or in a callback that stands before this one.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: object, batch_idx: int
    ) -> None:
        """Agree after a batch."""
        _agree(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Agree after a validation."""
        _agree(trainer)


def _agree(trainer: Trainer) -> None:
    trainer.should_stop = trainer.strategy.reduce_boolean_decision(trainer.should_stop, all=False)


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
