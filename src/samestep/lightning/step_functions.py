"""Functions for the steps of a LightningModule: a masked mean over the step, and random numbers of the samples."""

from collections.abc import Callable, Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from samestep.data import sample_rng
from samestep.errors import StepError
from samestep.lightning.same_step import SameStep, find_same_step
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
    same_step, batches = _find(module, "mean"), module.trainer.accumulate_grad_batches
    if batches > 1:
        raise StepError(
            f"a masked mean needs one batch per step, and this step has {batches}: the count is known only after the "
            "last one; leave SameStep(micro_batch=...) and accumulate_grad_batches out, or use more ranks"
        )
    info = same_step.batch_info
    count = sum(gather(module.trainer, own_count if info.real else 0.0))
    if count == 0:
        raise StepError(
            f"the masks of step {info.step} select nothing on any rank, so a mean does not exist: check how the mask "
            "is made, or remove such samples from the dataset"
        )
    # SameStep weights the returned value by this batch's share of the samples; replace it by its share of the count.
    return total / (count * info.share()) if info.real else total * 0


def normal(module: LightningModule, *shape: int) -> Tensor:
    """Return standard normal numbers of shape (rows, *shape) for the current batch, with the dtype of the module.

    They are keyed by (seed, epoch, sample), so they do not depend on the number of ranks; each call returns new ones.
    Call it in training_step, validation_step, test_step or predict_step. torch.randn(rows, ...) is keyed in the same
    way; `normal` does not depend on what else the step draws.

    ```python
    def training_step(self, batch):
        z = normal(self, 16)  # one latent vector per sample
    ```
    """
    return _draw(module, "normal", sample_rng.normal, shape)


def random(module: LightningModule, *shape: int) -> Tensor:
    """Return uniform numbers in [0, 1) of shape (rows, *shape) for the current batch, keyed like those of `normal`."""
    return _draw(module, "random", sample_rng.uniform, shape)


def _draw(
    module: LightningModule, name: str, function: Callable[[Tensor, Sequence[int], int], Tensor], shape: tuple[int, ...]
) -> Tensor:
    draw = _find(module, name).randomness.next_draw()
    if draw is None:
        raise StepError(
            f"samestep.lightning.{name} was called outside a batch of SameStep: call it in training_step, "
            "validation_step, test_step or predict_step, with data from same.datamodule(...) or same.dataloaders(...)"
        )
    keys, salt = draw
    return function(keys, shape, salt).to(module.dtype)


def _find(module: LightningModule, name: str) -> SameStep:
    same_step = find_same_step(module.trainer)
    if same_step is None:
        raise StepError(
            f"samestep.lightning.{name} was called in a Trainer without SameStep: pass Trainer(callbacks=[same, ...])"
        )
    return same_step
