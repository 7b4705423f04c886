"""The ranks of a Trainer: their number from the launcher, and what they exchange.

Lightning owns the process group, which on GPUs is NCCL only: small objects are exchanged pickled by torch.
"""

from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy

from samestep.distributed.once import run_and_pickle, unpickle_outcome
from samestep.environment.world import World, read_environ, read_world
from samestep.errors import WorldError
from samestep.torch_private import wait_until_released

T = TypeVar("T")


class LauncherArgs(TypedDict):
    """Arguments of a Trainer that depend on the launcher."""

    devices: int | str
    """Ranks per node."""
    num_nodes: int
    strategy: str | Strategy


def launcher_args() -> LauncherArgs:
    """Return `devices`, `num_nodes` and `strategy` for `Trainer(**launcher_args())`.

    They match the ranks that `samestep run`, torchrun or srun has started; without a launcher Lightning chooses.
    Lightning does not start if its own count differs from the launcher's. For another strategy write
    `Trainer(**{**launcher_args(), "strategy": "fsdp"})`.
    """
    world = _launched_world()
    if world.size == 1:
        return LauncherArgs(devices="auto" if world.launcher == "none" else 1, num_nodes=1, strategy="auto")
    # If the variables of torchrun are set by hand, Lightning does not recognize them: it would treat them as its own
    # and delete some when a training ends.
    environment = TorchElasticEnvironment() if world.launcher == "torchrun" else None
    strategy = DDPStrategy(cluster_environment=environment)
    return LauncherArgs(devices=world.local_size, num_nodes=world.nodes, strategy=strategy)


def check_world_size(trainer: Trainer) -> None:
    """Raise `WorldError` if the Trainer does not know the ranks of the launcher: each rank would train alone."""
    world = _launched_world()
    if world.size != trainer.world_size and world.launcher != "none":
        raise WorldError(
            f"{world.size} rank(s) were started and the Trainer has a world size of {trainer.world_size}, so each rank "
            "would train alone: pass Trainer(..., **launcher_args()), with `from samestep.lightning import "
            "launcher_args`"
        )


def _launched_world() -> World:
    """Return the world of the launcher. Processes that Lightning itself starts have no RANK: it counts them alone."""
    environ = read_environ()
    if "RANK" not in environ and {"LOCAL_RANK", "WORLD_SIZE"} & environ.keys() and "SLURM_PROCID" not in environ:
        return World()
    return read_world()


class StopAllRanks(Callback):
    """Stops all ranks if one has set `trainer.should_stop`; a rank that stops alone would leave the others waiting.

    It checks after every batch and every validation. Lightning's EarlyStopping does not need it, since with SameStep
    its metric is the same on every rank. Use it for what one rank decides alone: a deadline, a signal, a loss that is
    NaN. Set the flag in training_step, or in a callback before this one.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: object, batch_idx: int
    ) -> None:
        """Check after a batch."""
        self._sync(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check after a validation."""
        self._sync(trainer)

    def _sync(self, trainer: Trainer) -> None:
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(trainer.should_stop, all=False)


def list_callbacks(trainer: Trainer) -> list[Callback]:
    """Return the callbacks of a Trainer, which its constructor sets."""
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]


def gather(trainer: Trainer, value: T) -> list[T]:
    """Return the values of all ranks, in rank order; all ranks must call it."""
    if trainer.world_size == 1:
        return [value]
    parts: list[T | None] = [None] * trainer.world_size
    dist.all_gather_object(parts, value)
    return [part for part in parts if part is not None]


def once(owner: Trainer | LightningModule, function: Callable[..., T], *args: object) -> T:
    """Run `function(*args)` on rank 0; every rank returns its result or raises its exception.

    Use it instead of `@rank_zero_only` with a barrier, after which the other ranks have neither the result nor the
    exception. All ranks must call it, in any hook that all of them run; they wait in a collective meanwhile.

    ```python
    class Net(LightningModule):
        def on_fit_start(self):
            self.vocabulary = once(self, read_vocabulary, "vocabulary.txt")
    ```
    """
    trainer = owner.trainer if isinstance(owner, LightningModule) else owner
    outcome = run_and_pickle(0, function, *args) if trainer.is_global_zero else None
    outcome = trainer.strategy.broadcast(outcome)
    wait_for_gloo(trainer)
    assert outcome is not None
    return unpickle_outcome(f"once({getattr(function, '__name__', type(function).__name__)})", outcome)


def wait_for_gloo(trainer: Trainer) -> None:
    """Wait until gloo's thread has released the tensors that it sent, in case the script ends here.

    The thread needs the interpreter for that, and aborts the process (exit code 134) while Python shuts down.
    """
    if trainer.world_size > 1 and dist.get_backend() == "gloo":
        tensor = torch.zeros(1)
        dist.all_reduce(tensor)
        wait_until_released(tensor)
