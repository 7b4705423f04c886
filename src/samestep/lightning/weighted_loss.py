"""`mean`: the mean over all selected elements on all ranks, for losses whose rows have different weights."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from samestep.errors import StepError
from samestep.lightning.loaders import BatchInfo
from samestep.lightning.same_step import find_same_step
from samestep.lightning.trainer_ranks import gather


def mean(module: LightningModule, losses: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the value of training_step for the mean over all samples of a step, or over what `mask` selects of them.

    Without a mask it is `losses.mean()`. With a mask the count is summed over all ranks, in one small collective, and a
    step must be one batch on each rank. In evaluation it is the mean over this batch: call
    `self.log(..., batch_size=int(mask.sum()))`, and the value of the epoch is exact.

    ```python
    def training_step(self, batch):
        losses = cross_entropy(self(batch.tokens), batch.targets, reduction="none")
        return mean(self, losses, mask=batch.mask)
    ```
    """
    if losses.dim() == 0:
        raise StepError(
            "samestep.lightning.mean got a single number and needs one loss per row: use reduction='none' (or return "
            "the mean without it, if all rows have the same weight)"
        )
    if mask is None:
        return losses.mean()
    if mask.shape != losses.shape:
        raise StepError(f"the mask has shape {tuple(mask.shape)}, and the losses have shape {tuple(losses.shape)}")
    # A masked loss may be inf or nan, and nan times zero is nan: replace it by zero.
    total = torch.where(mask != 0, losses * mask, torch.zeros_like(losses)).sum()
    own_count = float(mask.sum(dtype=torch.float64))
    if not module.trainer.training:
        return total / own_count if own_count else total
    info = _single_batch(module.trainer)
    count = sum(gather(module.trainer, own_count if info.real else 0.0))
    if count == 0:
        raise StepError(
            f"the masks of step {info.step} select nothing on any rank, so a mean does not exist: check how the mask "
            "is made, or remove such samples from the dataset"
        )
    # SameStep weights the returned value by this batch's share of the samples; replace it by its share of the count.
    return total / (count * info.share()) if info.real else total * 0


def _single_batch(trainer: Trainer) -> BatchInfo:
    """Return the only batch of the current step."""
    same_step = find_same_step(trainer)
    if same_step is None:
        raise StepError(
            "samestep.lightning.mean was called in a Trainer without SameStep: pass Trainer(callbacks=[same, ...])"
        )
    if trainer.accumulate_grad_batches > 1:
        raise StepError(
            f"a masked mean needs one batch per step, and this step has {trainer.accumulate_grad_batches}: the count "
            "is known only after the last one; leave SameStep(micro_batch=...) and accumulate_grad_batches out, or use "
            "more ranks"
        )
    return same_step.batch_info
