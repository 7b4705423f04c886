"""Stopping as a decision of all ranks."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


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
