"""`FileLogger`, a callback that writes metrics.jsonl, log.txt and summary.json, like a samestep Run."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from samestep.lightning.same_step import find_same_step
from samestep.lightning.trainer_ranks import epoch_values, once
from samestep.loggers.loggers import METRICS_FILE, SUMMARY_FILE, TEXT_FILE, write_summary
from samestep.loggers.run_files import JsonlLogger, TextLog
from samestep.training.preemption import StoppedEarly

_INVALID_CHARACTERS = re.compile(r"[^\w./-]", re.ASCII)


class FileLogger(Callback):
    """Writes the loss and learning rate of every step, and the values of `self.log` for each epoch, to `folder`.

    If SameStep comes before it in the list of callbacks, `train/loss` is the mean over the global batch; the ranks
    exchange it every `log_every_n_steps` steps of the Trainer and at the end of an epoch. Invalid characters in a name
    become "_". Values that a module logs in on_train_epoch_end come too late for the files; Lightning's loggers have
    them. Existing files are continued.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._loggers: tuple[JsonlLogger, TextLog] | None = None
        self._learning_rates: dict[int, dict[str, float]] = {}
        self._last_step: int | None = None
        self._metrics: dict[str, float] = {}
        self._started = time.monotonic()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the files on rank 0; if that fails, every rank raises."""
        self._started, self._last_step = time.monotonic(), None
        once(trainer, self._open)
        if self._loggers is not None:
            trained = sum(p.numel() for p in pl_module.parameters() if p.requires_grad)
            name = type(pl_module).__name__
            self._loggers[1].print(f"{name}: {trained:,} trainable parameters, {trainer.world_size} rank(s)")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Keep the learning rates of this step."""
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        suffixes = [f"/{group}" for group in range(len(rates))] if len(rates) > 1 else [""]
        number = next((number for number, one in enumerate(trainer.optimizers) if one is optimizer), 0)
        name = f"train/learning_rate/optimizer{number}" if number else "train/learning_rate"
        same_step = find_same_step(trainer)
        self._last_step = trainer.global_step if same_step is None else same_step.batch_info.step
        values = {f"{name}{suffix}": rate for suffix, rate in zip(suffixes, rates, strict=True)}
        self._learning_rates.setdefault(self._last_step, {}).update(values)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: object, batch_idx: int
    ) -> None:
        """Write the steps every `log_every_n_steps` steps."""
        every: int = getattr(trainer, "log_every_n_steps", 50)  # set by its constructor, with 50 as default
        if len(self._learning_rates) >= every > 0:
            self._write_steps(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the last steps of the epoch and its values."""
        self._write_steps(trainer)
        self._write_epoch(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the values of a validation."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._write_epoch(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the summary."""
        self._close(trainer, "finished")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the summary, after a failure without a collective: other ranks may be gone."""
        if isinstance(exception, StoppedEarly):  # on all ranks at the same step
            self._write_steps(trainer)
        self._close(trainer, exception.status if isinstance(exception, StoppedEarly) else "failed")

    def _open(self) -> None:
        self._loggers = JsonlLogger(self.folder / METRICS_FILE), TextLog(self.folder / TEXT_FILE)

    def _write_steps(self, trainer: Trainer) -> None:
        rates, self._learning_rates = self._learning_rates, {}
        same_step = find_same_step(trainer)
        losses = {} if same_step is None else same_step.pop_losses(trainer)
        if self._loggers is None:
            return
        metrics, text = self._loggers
        records = {step: dict(rates.get(step, {})) for step in sorted(rates.keys() | losses.keys())}
        for step, record in records.items():
            if step in losses:
                record["train/loss"] = losses[step]
            metrics.write(step, record, trainer.current_epoch)
        if records:
            text.write(*list(records.items())[-1])

    def _write_epoch(self, trainer: Trainer) -> None:
        values = {_INVALID_CHARACTERS.sub("_", name): value for name, value in epoch_values(trainer).items()}
        self._metrics.update(values)
        if values and self._loggers is not None:
            for logger in self._loggers:
                logger.write(self._last_step or 0, values, trainer.current_epoch, between_steps=True)

    def _close(self, trainer: Trainer, status: str) -> None:
        if self._loggers is None:
            return
        loggers, self._loggers = self._loggers, None
        summary: Mapping[str, object] = {
            "status": status,
            "steps": trainer.global_step if self._last_step is None else self._last_step + 1,
            "epochs": trainer.current_epoch,
            "world_size": trainer.world_size,
            "seconds": round(time.monotonic() - self._started, 1),
        }
        for logger in loggers:
            logger.close(summary)
        write_summary(self.folder / SUMMARY_FILE, {**summary, "metrics": self._metrics})
