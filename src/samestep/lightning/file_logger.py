"""`FileLogger`, a callback that writes metrics.jsonl, events.jsonl, log.txt and summary.json, like a samestep Run."""

import re
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from samestep.environment.world import read_world
from samestep.lightning.same_step import find_same_step
from samestep.lightning.trainer_ranks import epoch_values, gather, once
from samestep.loggers.loggers import METRICS_FILE, SUMMARY_FILE, TEXT_FILE, write_summary
from samestep.loggers.run_files import EventLog, JsonlLogger, TextLog
from samestep.training.preemption import StoppedEarly
from samestep.training.run_description import (
    CodeVersion,
    describe_end,
    describe_model,
    describe_process,
    device_name,
    link_launcher_folder,
)

_INVALID_CHARACTERS = re.compile(r"[^\w./-]", re.ASCII)


class FileLogger(Callback):
    """Writes the loss and learning rate of every step, and the values of `self.log` for each epoch, to `folder`.

    If SameStep comes before it in the list of callbacks, `train/loss` is the mean over the global batch; the ranks
    exchange it every `log_every_n_steps` steps of the Trainer and at the end of an epoch. Invalid characters in a name
    become "_". Values that a module logs in on_train_epoch_end come too late for the files; Lightning's loggers have
    them. Existing files are continued. `samestep report` and `samestep runs` show the folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._loggers: tuple[JsonlLogger, TextLog] | None = None
        self._events: EventLog | None = None  # open as long as the loggers are
        self._code: CodeVersion | None = None
        self._validation_began = 0.0
        self._learning_rates: dict[int, dict[str, float]] = {}
        self._last_step: int | None = None
        self._metrics: dict[str, float] = {}
        self._started = time.monotonic()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the files on rank 0; if that fails, every rank raises."""
        self._started, self._last_step = time.monotonic(), None
        once(trainer, self._open)
        ranks = gather(trainer, (socket.gethostname(), device_name(trainer.strategy.root_device)))
        if self._loggers is not None:
            self._record_start(trainer, pl_module, ranks)
            trained = sum(p.numel() for p in pl_module.parameters() if p.requires_grad)
            name = type(pl_module).__name__
            self._loggers[1].print(f"{name}: {trained:,} trainable parameters, {trainer.world_size} rank(s)")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record from which checkpoint training resumes."""
        if trainer.ckpt_path:
            self._record("restored", checkpoint=str(trainer.ckpt_path), step=trainer.global_step, corrupt=[])

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

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep when a validation began."""
        self._validation_began = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the values of a validation."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            seconds = round(time.monotonic() - self._validation_began, 3)
            self._record("evaluation", step=self._last_step or 0, epoch=trainer.current_epoch, seconds=seconds)
            self._write_epoch(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the summary."""
        self._close(trainer, "finished")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the summary, after a failure without a collective: other ranks may be gone."""
        if isinstance(exception, StoppedEarly):  # on all ranks at the same step
            self._write_steps(trainer)
            self._close(trainer, exception.status)
        else:
            self._close(trainer, "failed", exception)

    def _open(self) -> None:
        self._loggers = JsonlLogger(self.folder / METRICS_FILE), TextLog(self.folder / TEXT_FILE)
        self._events = EventLog()
        self._events.open(self.folder)
        link_launcher_folder(self.folder)

    def _record(self, event: str, **fields: object) -> None:
        if self._events is not None:
            self._events.record(event, fields)

    def _record_start(self, trainer: Trainer, module: LightningModule, ranks: Sequence[tuple[str, str]]) -> None:
        same_step = find_same_step(trainer)
        device = trainer.strategy.root_device.type
        start = describe_process(read_world()) | {
            "ranks": trainer.world_size,
            "nodes": trainer.num_nodes,
            "hosts": dict(Counter(host for host, _ in ranks)),
            "devices": dict(Counter(device for _, device in ranks)),
            "backend": ("nccl" if device == "cuda" else "gloo") if trainer.world_size > 1 else "none",
            "global_batch": same_step.global_batch if same_step is not None else None,
            "seed": same_step.seed if same_step is not None else None,
            "ledger": False,
            "choices": {"precision": str(trainer.precision)},
        }
        self._record("start", **start)
        self._code = CodeVersion(self._record)
        self._record("model", **describe_model(module, type(trainer.strategy).__name__))

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

    def _close(self, trainer: Trainer, status: str, error: BaseException | None = None) -> None:
        if self._loggers is None:
            return
        assert self._events is not None, "they are opened together"
        if self._code is not None:
            self._code.close()
        loggers, self._loggers = self._loggers, None
        summary: Mapping[str, Any] = {
            "status": status,
            "steps": trainer.global_step if self._last_step is None else self._last_step + 1,
            "epochs": trainer.current_epoch,
            "world_size": trainer.world_size,
            "seconds": round(time.monotonic() - self._started, 1),
        }
        self._record("end", **describe_end(status, int(summary["steps"]), error))
        self._events.close()
        for logger in loggers:
            logger.close(summary)
        write_summary(self.folder / SUMMARY_FILE, {**summary, "metrics": self._metrics})
