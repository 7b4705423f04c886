"""The callback that keeps a Trainer to the laws: exact data, the exact gradient, exact values of an epoch."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from samestep.data.sample_rng import set_micro_batch
from samestep.errors import DataError, StepError
from samestep.lightning.datamodule import Cutter, ExactData, Wish, check_source, hooks_for, hooks_of
from samestep.lightning.epoch_metrics import Forgotten, bring_together
from samestep.lightning.gradients import Gradients, Late, Unused, check_search, check_wish, fill, refuse
from samestep.lightning.loaders import Part, Settings
from samestep.lightning.trainer_ranks import check_layout, gathered, settle


def follow(module: LightningModule, hook: str, after: Callable[..., None]) -> Callable[[], None]:
    """Call `after` with the arguments of `hook` when the module's own is done; what is returned undoes it.

    A callback's hooks come before the module's, so a callback alone never sees what the module logs in its own. Only
    this one object is changed, not its class.
    """
    own, kept = getattr(module, hook), vars(module).get(hook)

    @wraps(own)  # Lightning reads the signature, and whether the hook is overridden
    def _both(*args: object) -> object:
        value = own(*args)
        after(*args)
        return value

    def _undo() -> None:
        if kept is None:
            delattr(module, hook)
        else:
            setattr(module, hook, kept)

    setattr(module, hook, _both)
    return _undo


_KEPT_LOSSES = 10_000


class SameStep(Callback):
    """Makes what a Trainer learns independent of its number of ranks; put it first among the callbacks.

    `global_batch` is the samples of an optimizer step over all ranks; the DataLoader's batch_size and the Trainer's
    accumulate_grad_batches no longer change what is learnt. Of the module it expects that training_step returns a mean
    over the rows of its batch, as losses do by default.

    ```python
    same = SameStep(global_batch=256, seed=0)
    trainer = Trainer(max_epochs=10, callbacks=[same])
    trainer.fit(module, datamodule=same.data(datamodule))
    ```
    """

    def __init__(
        self,
        *,
        global_batch: int,
        seed: int = 0,
        micro_batch: int | None = None,
        drop_last: bool = False,
        settings: Settings | None = None,
        unused: Unused = "error",
    ) -> None:
        check_wish(unused)
        self.unused = unused
        self._cutter = Cutter(Wish(global_batch, seed, micro_batch, drop_last, settings))
        self._losses: dict[int, Tensor | float] = {}
        self._gradients: Gradients | None = None
        self._forgotten: Forgotten | None = None
        self._late: Late | None = None
        self._weighing: RemovableHandle | None = None
        self._undo: list[Callable[[], None]] = []

    def data(self, source: LightningDataModule | LightningModule) -> LightningDataModule:
        """The data of `source`, which has train_dataloader and so on, cut exactly: pass it as `datamodule=`."""
        check_source(source)
        whole = source if isinstance(source, LightningDataModule) else None  # a module's hooks Lightning calls itself
        return ExactData(hooks_of(source), whole, self._cutter, self)

    def loaders(
        self,
        *,
        train: "DataLoader[Any] | None" = None,
        val: "DataLoader[Any] | list[DataLoader[Any]] | None" = None,
        test: "DataLoader[Any] | list[DataLoader[Any]] | None" = None,
    ) -> LightningDataModule:
        """Like `data`, for DataLoaders that belong to no module."""
        return ExactData(hooks_for(train, val, test), None, self._cutter, self)

    @property
    def part(self) -> Part:
        """What the batch under way is of its step."""
        train = self._cutter.train
        part = train.current if train is not None else None
        if part is None:
            raise StepError(
                "there is no training batch under way: ask for it in training_step, or in a hook of a batch"
            )
        return part

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch, on any number of ranks, once training has begun."""
        if self._cutter.train is None:
            raise StepError(
                "the training data is not read yet: ask for steps_per_epoch from on_train_start on, or ask the Trainer "
                "for estimated_stepping_batches"
            )
        return self._cutter.train.steps

    def take_losses(self, trainer: Trainer) -> dict[int, float]:
        """The mean loss over the global batch of each step since the last call, by step; all ranks must call it."""
        mine = {step: float(loss) for step, loss in self._losses.items()}
        self._losses.clear()
        parts = gathered(trainer, mine)
        return {step: sum(part.get(step, 0.0) for part in parts) for step in mine}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what would learn something else, before any data is read."""
        check_layout(trainer)
        if stage == "fit":
            self._cutter.check_module(trainer, pl_module)
        for hook in ("on_validation_batch_end", "on_test_batch_end"):
            self._undo.append(follow(pl_module, hook, partial(_after_evaluation_batch, trainer)))

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on from this checkpoint must have alike; where it stands is in the loader's."""
        return {} if self._cutter.train is None else dict(self._cutter.train.identity)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it until the training data is there to be compared, before the first step."""
        self._cutter.saved = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See that the data is exact, and watch for parameters that are not used, or not by DDP."""
        if self._cutter.train is None or trainer.train_dataloader is not self._cutter.train:
            raise DataError(
                "SameStep is among the callbacks and the training data is not its own: pass "
                "trainer.fit(module, datamodule=same.data(datamodule)), or same.loaders(train=..., val=...)"
            )
        self._losses.clear()
        if isinstance(trainer.strategy, DDPStrategy) and trainer.world_size > 1:
            self._late = Late(pl_module)
        # Sharded parameters receive their gradients otherwise, and manual optimization leaves some out on purpose.
        watched = isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy)
        if self.unused != "leave" and pl_module.automatic_optimization and watched:
            check_search(trainer.model)
            self._gradients = Gradients(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Tell modules such as ConditioningDropout which samples they see."""
        set_micro_batch(self.part.make_keys)
        if batch_idx == 0 and self._gradients is not None:
            self._gradients.watch()  # an epoch's begin is when callbacks unfreeze
        if not self.part.real:
            self._forgotten = Forgotten(trainer)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Weigh this batch's mean by its share of the step, in place of one part in (ranks x batches)."""
        batches = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        factor = self.part.share() * trainer.world_size * batches
        if factor != 1.0:
            self._weighing = loss.register_hook(partial(torch.mul, factor))
        if self._gradients is not None:
            self._gradients.begin()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look after parameters that this backward pass did not reach, and those of which DDP does not know."""
        if self._weighing is not None:
            self._weighing.remove()  # manual optimization may send the same loss through again
            self._weighing = None
        missing = self._gradients.missing() if self._gradients is not None else {}
        if missing and self.unused == "error":
            refuse(missing, self.part.number, trainer.global_rank)
        if missing:
            fill(missing)
        if self._late is not None:
            self._late.average(trainer.optimizers)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: object, batch_idx: int
    ) -> None:
        """Keep this batch's part of the step's loss; forget what a copy has logged."""
        part, loss = self.part, outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            batches = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            share = loss.detach().double() * (part.share() * batches) if part.real else 0.0
            self._losses[part.number] = self._losses.get(part.number, 0.0) + share
            if len(self._losses) > _KEPT_LOSSES:  # nobody takes them
                self._losses.pop(next(iter(self._losses)))
        if self._forgotten is not None:
            self._forgotten.put_back()
            self._forgotten = None
        set_micro_batch(None)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring together what training has logged for the epoch."""
        bring_together(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the process end cleanly, if training was its last act."""
        settle(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Lightning calls no teardown then."""
        self._let_go()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End the data workers, and leave the module as it was."""
        self._let_go()

    def _let_go(self) -> None:
        self._cutter.close()
        if self._gradients is not None:
            self._gradients.remove()
        self._gradients = self._late = self._forgotten = None
        while self._undo:
            self._undo.pop()()
        set_micro_batch(None)


def _after_evaluation_batch(
    trainer: Trainer, outputs: object, batch: object, batch_idx: int, dataloader_idx: int = 0
) -> None:
    """Bring together what an evaluation has logged, before Lightning reads it after the last batch."""
    if trainer.sanity_checking:
        batches = trainer.num_sanity_val_batches
    else:
        batches = trainer.num_test_batches if trainer.testing else trainer.num_val_batches
    if batch_idx == batches[dataloader_idx] - 1:
        bring_together(trainer)
