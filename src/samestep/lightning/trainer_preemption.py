"""Preemption in a Trainer: a signal or a time limit ends all ranks at a step boundary after a save, as in a Run.

Lightning's own handler of SIGTERM runs a collective wherever the signal arrives, saves nothing and exits with code 0.
SameStep replaces it while a training runs. A script that has its own handlers keeps them, and so does Lightning's
requeueing on SLURM (SLURMEnvironment(auto_requeue=True), if srun starts the ranks).
"""

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from samestep.environment.world import deadline
from samestep.errors import PREEMPTED, STOPPED, StateError
from samestep.launch.signal_handler import keep_exit_code
from samestep.lightning.trainer_ranks import gather, once, wait_for_gloo
from samestep.training.preemption import CAUSES, TIME_LIMIT, WARNING, SignalRecorder, StoppedEarly, TimeLimit

_SYNC_SECONDS = 1.0
_MAX_STEPS_BETWEEN_SYNCS = 20  # if steps become slow, ranks agree at the latest after this many of them
_STATE_PER_WEIGHT, _BYTES_PER_SECOND = 3, 100e6  # to estimate the time of a save: weights and two moments of Adam


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
