"""The mean over what counts on all ranks, where rows count for different amounts: tokens of texts of unequal length."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from samestep.errors import StepError
from samestep.lightning.same_step import SameStep
from samestep.lightning.trainer_ranks import gathered


def mean(module: LightningModule, losses: Tensor, mask: Tensor | None = None) -> Tensor:
    """What training_step returns for the mean over all samples of a step, or over what `mask` lets count of them.

    Without a mask it is `losses.mean()`. With one the count is taken over all ranks, in one small collective; a step
    must then be one batch on each rank. In evaluation it is the mean over this batch: give
    `self.log(..., batch_size=int(mask.sum()))`, and the epoch's value is exact.

    ```python
    def training_step(self, batch):
        losses = cross_entropy(self(batch.tokens), batch.targets, reduction="none")
        return mean(self, losses, mask=batch.mask)
    ```
    """
    if losses.dim() == 0:
        raise StepError(
            "samestep.lightning.mean got one number and needs one loss for each row: use reduction='none' (a mean that "
            "is taken already is right as it is, unless rows count for different amounts)"
        )
    if mask is None:
        return losses.mean()
    if mask.shape != losses.shape:
        raise StepError(
            f"the mask has shape {tuple(mask.shape)} and the losses {tuple(losses.shape)}: they must be alike"
        )
    # a masked loss may be inf or nan, and nan times zero is nan: put zero there instead
    total = torch.where(mask != 0, losses * mask, torch.zeros_like(losses)).sum()
    mine = float(mask.sum(dtype=torch.float64))
    trainer = module.trainer
    if not trainer.training:
        return total / mine if mine else total
    same = _same_step(trainer)
    part = same.part
    if trainer.accumulate_grad_batches > 1:
        raise StepError(
            f"a masked mean over {trainer.accumulate_grad_batches} batches of a step has a count that is known at its "
            "end only: leave SameStep(micro_batch=...) and accumulate_grad_batches out, or use more ranks"
        )
    count = sum(gathered(trainer, mine if part.real else 0.0))
    if count == 0:
        raise StepError(
            f"the masks of step {part.number} leave nothing that counts on any rank: the mean of nothing is no number; "
            "check how the mask is made, or leave such samples out of the dataset"
        )
    # SameStep weighs what is returned by this batch's share of the samples: here its share of the count is meant.
    return total / (count * part.share()) if part.real else total * 0


def _same_step(trainer: Trainer) -> SameStep:
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]  # set by its constructor
        if isinstance(callback, SameStep):
            return callback
    raise StepError(
        "samestep.lightning.mean was called in a Trainer without SameStep: pass Trainer(callbacks=[same, ...])"
    )
