"""What the ranks of a Trainer do together: start, exchange values, reduce those of `self.log`, and end when preempted.

Lightning owns the process group, which on GPUs is NCCL only: small objects are exchanged pickled by torch.

Lightning keeps for each name of `self.log` a sum over rows and a count of rows on each rank. Between ranks it averages
both, and the counts are integers: 3 and 2 become 2. samestep adds sums and counts and sets the final value, so that
every sample has the same weight. The accumulators are private to Lightning: only this module uses them.

A signal or a time limit ends all ranks at a step boundary after a save, as in a Run. Lightning's own handler of SIGTERM
runs a collective wherever the signal arrives, saves nothing and exits with code 0. SameStep replaces it while a
training runs. A script that has its own handlers keeps them, and so does Lightning's requeueing on SLURM
(SLURMEnvironment(auto_requeue=True), if srun starts the ranks).
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypedDict, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from samestep.distributed.once import run_and_pickle, unpickle_outcome
from samestep.environment.world import World, deadline, read_environ, read_world
from samestep.errors import PREEMPTED, STOPPED, StateError, WorldError
from samestep.launch.signal_handler import keep_exit_code
from samestep.torch_private import wait_until_released
from samestep.training.preemption import CAUSES, TIME_LIMIT, WARNING, SignalRecorder, StoppedEarly, TimeLimit

T = TypeVar("T")
_REDUCTIONS = {"is_sum_reduction": sum, "is_max_reduction": max, "is_min_reduction": min}
_SYNC_SECONDS = 1.0
_MAX_STEPS_BETWEEN_SYNCS = 20  # if steps become slow, ranks agree at the latest after this many of them
_STATE_PER_WEIGHT, _BYTES_PER_SECOND = 3, 100e6  # to estimate the time of a save: weights and two moments of Adam


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


def reduce_epoch_metrics(trainer: Trainer) -> None:
    """Set the values of this epoch over all ranks, for everything logged as a number; all ranks must call it."""
    if trainer.world_size == 1:
        return
    metrics = dict(_accumulators(trainer))
    own = {
        key: (float(metric.value), int(metric.cumulated_batch_size) if metric.meta.is_mean_reduction else 1)
        for key, metric in metrics.items()
    }
    parts = gather(trainer, own)
    for key, metric in metrics.items():
        values, counts = zip(*(part[key] for part in parts if key in part), strict=True)
        if metric.meta.is_mean_reduction:
            value = sum(values) / sum(counts) if sum(counts) else float("nan")
        else:
            value = next(reduce for flag, reduce in _REDUCTIONS.items() if getattr(metric.meta, flag))(values)
        metric._computed = torch.tensor(value, dtype=metric.value.dtype, device=metric.value.device)


def epoch_values(trainer: Trainer) -> dict[str, float]:
    """Return what the current loop has logged for the epoch, numbers and torchmetrics, under Lightning's names.

    Values of a single step are left out: they are those of one rank.
    """
    values, logged = dict[str, float](), trainer.callback_metrics
    for _, metric in _results(trainer):
        if metric.meta.on_epoch and not metric.has_reset:
            name = metric.meta.forked_name(on_step=False)
            if metric.meta.add_dataloader_idx and metric.meta.dataloader_idx is not None:
                name += f"/dataloader_idx_{metric.meta.dataloader_idx}"
            if name in logged:
                values[name] = float(logged[name])
    return values


def copy_logged_values(trainer: Trainer) -> Callable[[], None]:
    """Copy what was logged before a padding batch; return a function that removes what the batch logs."""
    names = ("value", "cumulated_batch_size")
    before = {
        key: {name: getattr(metric, name).clone() for name in names[: 1 + metric.meta.is_mean_reduction]}
        for key, metric in _accumulators(trainer)
    }

    def _restore() -> None:
        for key, metric in _accumulators(trainer):
            if key in before:
                metric.__dict__.update(before[key])
            else:
                metric.value = metric._defaults["value"].clone().to(metric.value.device)
                if metric.meta.is_mean_reduction:
                    metric.cumulated_batch_size = torch.zeros_like(metric.cumulated_batch_size)
            metric._computed = None

    return _restore


def _results(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    results: Any = trainer._results  # pyright: ignore[reportPrivateUsage]  # see the module's docstring
    yield from (results or {}).items()


def _accumulators(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Yield the accumulators of the current loop that hold a number of the epoch."""
    for key, metric in _results(trainer):
        if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset and not metric.meta.sync.rank_zero_only:
            yield key, metric


class TrainerSignals(SignalRecorder):
    """Records signals in place of Lightning's handlers.

    Installed before Lightning's, so that Lightning restores this one after an exception, when no hook runs any more.
    """

    def __init__(self) -> None:
        super().__init__()
        self._exiting = False

    def take_over(self) -> None:
        """Replace the handlers that Lightning has installed since."""
        if threading.current_thread() is threading.main_thread():
            for number in self._before:
                signal.signal(number, self._record)

    def remove(self, exiting: bool) -> None:
        """Restore the handlers from before; a process that is exiting ignores the signals instead."""
        super().remove(exiting)
        self._exiting = exiting

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self._before:
            super()._record(number, frame)
        elif not self._exiting:  # restored by Lightning after an exception
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


class TrainerPreemption:
    """Saves and ends a training on all ranks, once any rank has received a signal or the time limit is near."""

    def __init__(self) -> None:
        self._signals = TrainerSignals()
        self._limit: TimeLimit | None = None
        self._save_seconds = 0.0
        self._has_fixed_folder: dict[ModelCheckpoint, bool] = {}
        self._handled = self._steps = self._synced_step = self._next_sync = 0
        self._synced_at = 0.0

    def install(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Start to record signals, before Lightning installs its handlers."""
        environment = getattr(trainer.strategy, "cluster_environment", None)
        if stage != "fit" or (isinstance(environment, SLURMEnvironment) and environment.auto_requeue):
            return
        for callback in _checkpoints(trainer):
            # Lightning sets a missing dirpath in its own setup: with a logger, to a new folder in every start.
            self._has_fixed_folder.setdefault(callback, callback.dirpath is not None or not trainer.loggers)
        end = deadline()
        self._limit = None if end is None else TimeLimit(end)
        weight_bytes = sum(parameter.nbytes for parameter in module.parameters())
        self._save_seconds = _STATE_PER_WEIGHT * weight_bytes / _BYTES_PER_SECOND
        self._handled = self._steps = self._synced_step = self._next_sync = 0
        self._signals = TrainerSignals()
        self._signals.install()

    def take_over(self) -> None:
        """Replace Lightning's handlers, which it installs when all is set up."""
        self._signals.take_over()

    def check_resumed(self, trainer: Trainer) -> None:
        """Raise `StateError` if an earlier training was ended early and this one would start from the beginning."""
        if trainer.ckpt_path is None and (path := self._path(trainer)) is not None:
            once(trainer, _raise_if_exists, path)

    def finish(self, trainer: Trainer) -> None:
        """Remove the checkpoint of an earlier training that this one has finished."""
        if (path := self._path(trainer)) is not None:
            trainer.strategy.remove_checkpoint(path)

    def remove(self, exception: BaseException | None = None) -> None:
        """Restore the signal handlers; if Lightning itself exits because of SIGTERM, set the exit code that says so."""
        self._signals.remove(exiting=isinstance(exception, StoppedEarly))
        if isinstance(exception, SIGTERMException):
            exception.code = STOPPED  # otherwise 0, as after success

    def on_step_start(self, trainer: Trainer, steps: int) -> None:
        """Save and end the training after `steps` steps, if any rank has received a signal; all ranks must call it."""
        self._steps += 1
        if trainer.world_size > 1 and self._steps < self._next_sync:
            return
        received = self._signals.received
        if self._limit is not None and self._limit.check(self._save_seconds):
            received = max(received, TIME_LIMIT)
        agreed = max(self._sync(trainer, received))
        if agreed > self._handled:
            self._handled = agreed
            self._stop(trainer, agreed, steps)

    def _sync(self, trainer: Trainer, received: int) -> list[int]:
        """Exchange what the ranks have received, and agree on the step of the next exchange."""
        now, steps = time.monotonic(), self._steps - self._synced_step
        seconds = (now - self._synced_at) / steps if self._synced_step else _SYNC_SECONDS
        values, times = zip(*gather(trainer, (received, seconds)), strict=True)
        interval = int(_SYNC_SECONDS / max(*times, 1e-3))
        self._next_sync = self._steps + min(_MAX_STEPS_BETWEEN_SYNCS, max(1, interval))
        self._synced_step, self._synced_at = self._steps, now
        return list(values)

    def _stop(self, trainer: Trainer, cause: int, steps: int) -> None:
        name, path = CAUSES[cause], self._path(trainer, fixed=False)
        if path is None:
            missing = f"{name}: this Trainer has no ModelCheckpoint, so nothing is saved"
            if cause <= WARNING:
                rank_zero_info(f"{missing}; it continues")
                return
            rank_zero_info(f"{missing}; it ends at step {steps} and its training is lost")
            self._raise(trainer, StoppedEarly(STOPPED, "stopped", f"ended at step {steps} with nothing saved"))
        trainer.save_checkpoint(path)
        if self._path(trainer) is not None:
            rank_zero_info(f"{name}: saved {_relative(path)}; the training ends here, start it again to resume")
            self._raise(trainer, StoppedEarly(PREEMPTED, "preempted", f"saved step {steps}"))
        rank_zero_info(
            f"{name}: saved {_relative(path)}; the training ends here, and ckpt_path='last' will not find the file, "
            "since the logger chooses another folder in the next start: pass the path as ckpt_path, and pass "
            "ModelCheckpoint(dirpath=...)"
        )
        self._raise(trainer, StoppedEarly(STOPPED, "stopped", f"saved step {steps} in {_relative(path)}"))

    def _raise(self, trainer: Trainer, exception: StoppedEarly) -> NoReturn:
        """End this process: the launcher reads the message from torch's error file."""
        wait_for_gloo(trainer)
        get_error_handler().record_exception(exception)
        keep_exit_code()
        raise exception

    def _path(self, trainer: Trainer, fixed: bool = True) -> str | None:
        """Return the file of this training, in the folder of the first ModelCheckpoint.

        `ckpt_path="last"` finds it if the folder is the same in every start; with `fixed` return only such a path.
        """
        for callback in _checkpoints(trainer):
            if callback.dirpath is not None and (self._has_fixed_folder.get(callback) or not fixed):
                return f"{callback.dirpath}/{callback.CHECKPOINT_NAME_LAST}-preempted.ckpt"  # also of a URL
        return None


def _checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def _relative(path: str) -> str:
    return path.removeprefix(f"{Path.cwd()}/")


def _raise_if_exists(path: str) -> None:
    if get_filesystem(path).exists(path):
        raise StateError(
            f"{_relative(path)} has the state of a training that a signal or a time limit ended, and this "
            "training would start from the beginning: pass trainer.fit(..., ckpt_path='last'), or remove the file"
        )
