"""Files for people and machines: metrics.jsonl, log.txt and summary.json, written by the first rank."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from samestep.lightning.epoch_metrics import epoch_values
from samestep.lightning.same_step import SameStep
from samestep.lightning.trainer_ranks import once
from samestep.loggers.jsonl import JsonlLogger
from samestep.loggers.loggers import METRICS_FILE, SUMMARY_FILE, TEXT_FILE, write_summary
from samestep.loggers.text_log import TextLog

_STRANGE = re.compile(r"[^\w./-]", re.ASCII)


class Logs(Callback):
    """Writes loss and learning rate of every step, and what `self.log` gave for each epoch, into `folder`.

    With SameStep before it among the callbacks `train/loss` is the mean over the global batch; ranks tell each other
    once in `log_every_n_steps` steps of the Trainer, and at the end of an epoch. Characters that the file cannot have
    in a name become "_". What a module logs in its own on_train_epoch_end comes too late for the files; Lightning's
    loggers have it. A run into an existing folder continues its files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._sinks: tuple[JsonlLogger, TextLog] | None = None
        self._rates: dict[int, dict[str, float]] = {}
        self._last: int | None = None
        self._known: dict[str, float] = {}
        self._began = time.monotonic()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the files; where the first rank cannot, every rank hears why."""
        self._began, self._last = time.monotonic(), None
        once(trainer, self._open)
        if self._sinks is not None:
            trained = sum(p.numel() for p in pl_module.parameters() if p.requires_grad)
            name = type(pl_module).__name__
            self._sinks[1].print(f"{name}: {trained:,} parameters train on {trainer.world_size} rank(s)")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Keep the learning rate that this step is about to use."""
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        names = [f"/{at}" for at in range(len(rates))] if len(rates) > 1 else [""]
        which = next((at for at, one in enumerate(trainer.optimizers) if one is optimizer), 0)
        other = f"/optimizer{which}" if which else ""
        self._last = _number(trainer)
        kept = self._rates.setdefault(self._last, {})
        kept.update({f"train/learning_rate{other}{name}": rate for name, rate in zip(names, rates, strict=True)})

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: object, batch_idx: int
    ) -> None:
        """Write the steps of the last while, once in a while."""
        every: int = getattr(trainer, "log_every_n_steps", 50)  # set by its constructor, with 50 as default
        if len(self._rates) >= every > 0:
            self._write_steps(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the last steps of the epoch, and what was logged for it."""
        self._write_steps(trainer)
        self._write_epoch(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what a validation gave."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._write_epoch(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write how it ended."""
        self._close(trainer, "finished")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write that it failed; nothing is asked of other ranks, which may be gone."""
        self._close(trainer, "failed")

    def _open(self) -> None:
        self._sinks = JsonlLogger(self.folder / METRICS_FILE), TextLog(self.folder / TEXT_FILE)

    def _write_steps(self, trainer: Trainer) -> None:
        rates, self._rates = self._rates, {}
        losses = next((one.take_losses(trainer) for one in _callbacks(trainer) if isinstance(one, SameStep)), {})
        if self._sinks is None:
            return
        metrics, text = self._sinks
        records = {step: dict(rates.get(step, {})) for step in sorted(rates.keys() | losses.keys())}
        for step, record in records.items():
            if step in losses:
                record["train/loss"] = losses[step]
            metrics.write(step, record)
        if records:
            text.write(*list(records.items())[-1])

    def _write_epoch(self, trainer: Trainer) -> None:
        values = {_STRANGE.sub("_", name): value for name, value in epoch_values(trainer).items()}
        self._known.update(values)
        if values and self._sinks is not None:
            for sink in self._sinks:
                sink.write(self._last or 0, values)

    def _close(self, trainer: Trainer, status: str) -> None:
        if self._sinks is None:
            return
        sinks, self._sinks = self._sinks, None
        summary: Mapping[str, object] = {
            "status": status,
            "steps": trainer.global_step if self._last is None else self._last + 1,
            "epochs": trainer.current_epoch,
            "world_size": trainer.world_size,
            "seconds": round(time.monotonic() - self._began, 1),
            "metrics": self._known,
        }
        for sink in sinks:
            sink.close({name: value for name, value in summary.items() if name != "metrics"})
        write_summary(self.folder / SUMMARY_FILE, summary)


def _callbacks(trainer: Trainer) -> list[Callback]:
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]  # set by its constructor


def _number(trainer: Trainer) -> int:
    """The step under way: SameStep's count where it is there, else Lightning's."""
    for one in _callbacks(trainer):
        if isinstance(one, SameStep):
            return one.part.number
    return trainer.global_step
