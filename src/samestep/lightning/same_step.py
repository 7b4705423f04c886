"""`SameStep`, the callback that gives a Trainer exact data, gradients, randomness and metrics.

In the steps of a LightningModule, `mean` is a masked mean over the step, and `normal` and `random` are random numbers
of its samples.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from numbers import Integral
from typing import Any, get_args

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from samestep.data import sample_rng
from samestep.errors import DataError, StepError, WrapError
from samestep.lightning import gradients
from samestep.lightning.datamodule import ExactDataModule, ExactLoaders, find_hooks
from samestep.lightning.gradients import GradientWatch, ManualGradients, UnusedParameters
from samestep.lightning.loaders import BatchInfo, BatchRandomness, EpochSettings, gather_predictions
from samestep.lightning.trainer_ranks import (
    TrainerPreemption,
    check_world_size,
    copy_logged_values,
    gather,
    list_callbacks,
    reduce_epoch_metrics,
    wait_for_gloo,
)
from samestep.messages import warn
from samestep.parallel.batchnorm import unsynced_batchnorm_names

_MAX_LOSSES = 10_000


class SameStep(Callback):
    """Makes the training result independent of the number of ranks. Put it first in the list of callbacks.

    `global_batch` is the number of samples in an optimizer step over all ranks. The batch_size of the DataLoader and
    accumulate_grad_batches of the Trainer no longer change the result. `training_step` must return a mean over the rows
    of its batch, as losses do by default. `batch_dim=1` says that the module has the batch in dimension 1,
    which matters for random numbers if the sequence is as long as the batch.

    ```python
    same = SameStep(global_batch=256, seed=0)
    trainer = Trainer(max_epochs=10, callbacks=[same])
    trainer.fit(module, datamodule=same.datamodule(datamodule))
    ```
    """

    def __init__(
        self,
        *,
        global_batch: int,
        seed: int = 0,
        micro_batch: int | None = None,
        drop_last: bool = False,
        epoch_settings: EpochSettings | None = None,
        unused_parameters: UnusedParameters = "error",
        batch_dim: int | None = None,
    ) -> None:
        if unused_parameters not in get_args(UnusedParameters):
            raise WrapError(
                f"unused_parameters={unused_parameters!r} is not an option of SameStep: use one of "
                f"{', '.join(map(repr, get_args(UnusedParameters)))}"
            )
        if not isinstance(global_batch, Integral):  # pyright: ignore[reportUnnecessaryIsInstance]  # scripts are not type-checked
            raise DataError(f"global_batch is {global_batch!r} and must be an integer: pass SameStep(global_batch=256)")
        self.global_batch, self.seed, self.unused_parameters = int(global_batch), seed, unused_parameters
        self.randomness = BatchRandomness(seed, batch_dim)
        self._loaders = ExactLoaders(global_batch, seed, micro_batch, drop_last, epoch_settings, self.randomness)
        self._losses: dict[int, Tensor | float] = {}
        self._watch: GradientWatch | None = None
        self._manual: ManualGradients | None = None
        self._remove_logged: Callable[[], None] | None = None
        self._ddp_parameters: set[nn.Parameter] | None = None
        self._scale_hook: RemovableHandle | None = None
        self._restore_hooks: list[Callable[[], None]] = []
        self._preemption = TrainerPreemption()

    def datamodule(self, source: LightningDataModule | LightningModule) -> LightningDataModule:
        """Return the data of `source`, partitioned exactly; pass it to the Trainer as `datamodule=`.

        `source` is a LightningDataModule, or a LightningModule with its own train_dataloader.
        """
        hooks = find_hooks(source)
        # Lightning itself calls the other hooks of a LightningModule.
        wrapped = source if isinstance(source, LightningDataModule) else None
        return ExactDataModule(hooks, wrapped, self._loaders, self)

    def dataloaders(
        self,
        *,
        train: "DataLoader[Any] | None" = None,
        val: "DataLoader[Any] | list[DataLoader[Any]] | None" = None,
        test: "DataLoader[Any] | list[DataLoader[Any]] | None" = None,
        predict: "DataLoader[Any] | list[DataLoader[Any]] | None" = None,
    ) -> LightningDataModule:
        """Return the data of these DataLoaders, partitioned exactly; pass it to the Trainer as `datamodule=`."""
        given = {"train": train, "val": val, "test": test, "predict": predict}
        hooks = {f"{name}_dataloader": partial(_identity, each) for name, each in given.items() if each is not None}
        return ExactDataModule(hooks, None, self._loaders, self)

    @property
    def batch_info(self) -> BatchInfo:
        """The step and weight of the current training batch."""
        train = self._loaders.train
        if train is None or train.current is None:
            raise StepError("batch_info is not set outside a training batch: use it in training_step or a batch hook")
        return train.current

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch, the same on any number of ranks; available once training has begun."""
        if self._loaders.train is None:
            raise StepError(
                "steps_per_epoch is not known before the training data is read: use it from on_train_start on, or use "
                "trainer.estimated_stepping_batches"
            )
        return self._loaders.train.steps

    def pop_losses(self, trainer: Trainer) -> dict[int, float]:
        """Return the mean loss over the global batch of each step since the last call; all ranks must call it."""
        own = {step: float(loss) for step, loss in self._losses.items()}
        self._losses.clear()
        parts = gather(trainer, own)
        return {step: sum(part.get(step, 0.0) for part in parts) for step in own}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the Trainer and the module before any data is read."""
        check_world_size(trainer)
        if stage == "fit":
            self._loaders.check_module(trainer, pl_module)
        self._preemption.install(trainer, pl_module, stage)
        for hook in ("on_validation_batch_end", "on_test_batch_end"):
            self._restore_hooks.append(_run_after(pl_module, hook, partial(_after_evaluation_batch, trainer)))
        for hook in ("on_validation_batch_end", "on_test_batch_end", "on_predict_batch_end"):
            self._restore_hooks.append(_run_after(pl_module, hook, self._end_evaluation_batch))
        gathering = partial(gather_predictions, trainer)  # after the callbacks, which write those of their rank
        self._restore_hooks.append(_run_after(pl_module, "on_predict_epoch_end", gathering))

    def state_dict(self) -> dict[str, Any]:
        """Return what must be the same in a resumed run; the position is in the state of the loader."""
        return {} if self._loaders.train is None else dict(self._loaders.train.identity)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the training data is read, and compare it then."""
        self._loaders.saved_identity = state_dict

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace Lightning's signal handlers."""
        self._preemption.take_over()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the training data is exact, and start to watch for parameters without gradients."""
        if self._loaders.train is None or trainer.train_dataloader is not self._loaders.train:
            raise DataError(
                "SameStep is a callback of the Trainer, but the training data does not come from it: pass "
                "trainer.fit(module, datamodule=same.datamodule(datamodule)), or same.dataloaders(train=..., val=...)"
            )
        self._preemption.take_over()
        self._preemption.check_resumed(trainer)
        _warn_of_unsynced_batchnorm(trainer, pl_module)
        self._losses.clear()
        # Sharded parameters get their gradients differently.
        watchable = isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy)
        if not pl_module.automatic_optimization:
            self._manual = ManualGradients(trainer, pl_module) if watchable else None
            return
        if isinstance(trainer.strategy, DDPStrategy) and trainer.world_size > 1:
            self._ddp_parameters = {parameter for parameter in pl_module.parameters() if parameter.requires_grad}
        if self.unused_parameters != "ignore" and watchable:
            gradients.check_strategy(trainer.model)
            self._watch = GradientWatch(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """End here after a signal; prepare for the backward pass of this batch."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._preemption.on_step_start(trainer, self.batch_info.step)
        if self._manual is not None:
            self._manual.on_batch_start()
        if batch_idx == 0 and self._watch is not None:
            self._watch.update()  # callbacks unfreeze parameters at the beginning of an epoch
        if not self.batch_info.real:
            self._remove_logged = copy_logged_values(trainer)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Scale the gradient by the batch's share of the step, instead of by 1 / (ranks x batches)."""
        batches = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        factor = self.batch_info.share() * trainer.world_size * batches
        if factor != 1.0:
            self._scale_hook = loss.register_hook(partial(torch.mul, factor))
        if self._watch is not None:
            self._watch.used.clear()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle unused parameters and parameters that DDP does not know."""
        if self._scale_hook is not None:
            self._scale_hook.remove()  # manual optimization may use the same loss again
            self._scale_hook = None
        if self._manual is not None:
            self._manual.average()
        unused = self._watch.unused() if self._watch is not None else {}
        if unused and self.unused_parameters == "error":
            gradients.raise_unused(unused, self.batch_info.step, trainer.global_rank)
        if unused:  # a backward pass, so that DDP's hooks see the zeros
            zeros = [torch.zeros_like(parameter) for parameter in unused.values()]
            torch.autograd.backward(list(unused.values()), zeros)
        if self._ddp_parameters is not None:
            gradients.average_unfrozen(self._ddp_parameters, trainer.optimizers)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Check that the gradients of manual optimization are averaged."""
        if self._manual is not None:
            self._manual.check(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: object, batch_idx: int
    ) -> None:
        """Add the batch to the loss of its step; remove what a padding batch has logged."""
        info, loss = self.batch_info, outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            batches = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            share = loss.detach().double() * (info.share() * batches) if info.real else 0.0
            self._losses[info.step] = self._losses.get(info.step, 0.0) + share
            if len(self._losses) > _MAX_LOSSES:  # no callback reads them
                self._losses.pop(next(iter(self._losses)))
        if self._manual is not None:
            self._manual.on_batch_end()
        if self._remove_logged is not None:
            self._remove_logged()
            self._remove_logged = None
        self.randomness.end()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reduce the metrics of the epoch over all ranks."""
        reduce_epoch_metrics(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the checkpoint of a preempted training, which is finished now."""
        self._preemption.finish(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the process exit cleanly if the script ends here."""
        wait_for_gloo(trainer)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the process exit cleanly if the script ends here."""
        wait_for_gloo(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Clean up: Lightning does not call teardown after an exception."""
        self._preemption.remove(exception)
        self.randomness.close(exception)
        self._clean_up()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End the data workers and restore the hooks of the module and the signal handlers."""
        self._preemption.remove()
        self._clean_up()

    def _end_evaluation_batch(self, *_: object) -> None:
        self.randomness.end()

    def _clean_up(self) -> None:
        self._loaders.close()
        for watch in (self._watch, self._manual):
            if watch is not None:
                watch.remove()
        self._watch = self._manual = self._ddp_parameters = self._remove_logged = None
        while self._restore_hooks:
            self._restore_hooks.pop()()
        self.randomness.close()


def find_same_step(trainer: Trainer) -> SameStep | None:
    """Return the SameStep among the callbacks of a Trainer."""
    return next((callback for callback in list_callbacks(trainer) if isinstance(callback, SameStep)), None)


def _identity(loader: object) -> object:
    return loader


def _warn_of_unsynced_batchnorm(trainer: Trainer, module: LightningModule) -> None:
    """Warn as `run.wrap` does; Trainer(sync_batchnorm=True) has replaced the layers by now."""
    names = unsynced_batchnorm_names(module) if trainer.world_size > 1 and trainer.is_global_zero else []
    if names:
        warn(
            f"{len(names)} BatchNorm layer(s), {names[0]!r} first, see only the rows of their own rank, so results "
            "depend on the number of ranks: pass Trainer(sync_batchnorm=True), which needs GPUs, or use GroupNorm; "
            "evaluation and checkpoints have the running statistics of rank 0"
        )


def _run_after(module: LightningModule, hook: str, function: Callable[..., None]) -> Callable[[], None]:
    """Call `function` after the module's own `hook`, with the same arguments; return a function that undoes it.

    The hooks of a callback run before those of the module, so a callback alone never sees what the module logs in them.
    Only this object is changed, not its class.
    """
    original, instance_attribute = getattr(module, hook), vars(module).get(hook)

    @wraps(original)  # Lightning inspects the signature, and whether the hook is overridden
    def _both(*args: object) -> object:
        value = original(*args)
        function(*args)
        return value

    def _restore() -> None:
        if instance_attribute is None:
            delattr(module, hook)
        else:
            setattr(module, hook, instance_attribute)

    setattr(module, hook, _both)
    return _restore


def _after_evaluation_batch(
    trainer: Trainer, outputs: object, batch: object, batch_idx: int, dataloader_idx: int = 0
) -> None:
    """Reduce the metrics of an evaluation after its last batch, before Lightning reads them."""
    if trainer.sanity_checking:
        batches = trainer.num_sanity_val_batches
    else:
        batches = trainer.num_test_batches if trainer.testing else trainer.num_val_batches
    if batch_idx == batches[dataloader_idx] - 1:
        reduce_epoch_metrics(trainer)


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
    same_step, batches = _require_same_step(module, "mean"), module.trainer.accumulate_grad_batches
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
    draw = _require_same_step(module, name).randomness.next_draw()
    if draw is None:
        raise StepError(
            f"samestep.lightning.{name} was called outside a batch of SameStep: call it in training_step, "
            "validation_step, test_step or predict_step, with data from same.datamodule(...) or same.dataloaders(...)"
        )
    keys, salt = draw
    return function(keys, shape, salt).to(module.dtype)


def _require_same_step(module: LightningModule, name: str) -> SameStep:
    same_step = find_same_step(module.trainer)
    if same_step is None:
        raise StepError(
            f"samestep.lightning.{name} was called in a Trainer without SameStep: pass Trainer(callbacks=[same, ...])"
        )
    return same_step
