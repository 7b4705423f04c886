"""A user's data as a LightningDataModule whose loaders are exact; everything else of it stays as it is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from samestep.data.partition import Partition
from samestep.data.permutation import SampleOrder
from samestep.errors import DataError, StepError
from samestep.lightning.loaders import EvalLoader, Reading, Settings, TrainLoader, understand
from samestep.messages import WarnOnce


@dataclass(frozen=True)
class Wish:
    """What the user asked for in SameStep."""

    global_batch: int
    """Samples in an optimizer step, over all ranks."""
    seed: int
    """Where the order and the luck of samples come from."""
    micro_batch: int | None
    """The most rows that go through the model at once."""
    drop_last: bool
    """Leave out the last, smaller step of an epoch."""
    settings: Settings | None
    """A value for each epoch that reaches every sample of it."""


class Cutter:
    """Makes the loaders of one SameStep, and ends their workers."""

    def __init__(self, wish: Wish) -> None:
        self._wish = wish
        self.train: TrainLoader | None = None
        self.saved: Mapping[str, int] = {}
        """Of which run the checkpoint is that a Trainer resumes from; empty where it begins anew."""
        self._loaders: dict[str, list[TrainLoader | EvalLoader]] = {}
        self._voice = WarnOnce()

    def check_module(self, trainer: Trainer, module: LightningModule) -> None:
        """Refuse micro-batches where the module steps by itself: it would step once for each of them."""
        wish, mine = self._wish, -(-self._wish.global_batch // trainer.world_size)
        if not module.automatic_optimization and wish.micro_batch is not None and mine > wish.micro_batch:
            raise StepError(
                f"{type(module).__name__} has manual optimization and steps once for each batch, and SameStep("
                f"micro_batch={wish.micro_batch}) cuts the {mine} sample(s) of a rank in a step into "
                f"{-(-mine // wish.micro_batch)} batches: leave micro_batch out, or let Lightning step "
                "(automatic_optimization = True)"
            )

    def train_loader(self, trainer: Trainer, loader: object) -> TrainLoader:
        """The loader of training; the Trainer is told how many batches a step has."""
        wish, reading = self._wish, understand(loader, "train_dataloader", self._voice.warn_once)
        overfit = float(getattr(trainer, "overfit_batches", 0)) > 0  # the same few steps in every epoch
        weights = None if overfit else reading.weights
        order = SampleOrder(reading.n, wish.seed, reading.shuffle and not overfit, weights)
        cut = self._cut(trainer, reading)
        self._tell_copies(cut)
        trainer.accumulate_grad_batches = cut.shape(0)[0]
        self.train = TrainLoader(trainer, reading, order, cut, wish.settings)
        if self.saved:
            self.train.check(self.saved)
            self.saved = {}
        self._replace("train_dataloader", [self.train])
        return self.train

    def eval_loaders(self, trainer: Trainer, loaders: Sequence[object], hook: str) -> list[EvalLoader]:
        """The loaders of an evaluation."""
        made: list[EvalLoader] = []
        for loader in loaders:
            reading = understand(loader, hook, self._voice.warn_once)
            if reading.weights is not None:
                self._voice.warn_once(
                    f"the WeightedRandomSampler of {hook}() is not used: an evaluation reads every sample once; weigh "
                    "classes in the metric instead"
                )
            made.append(EvalLoader(trainer, reading, self._wish.seed, self._wish.settings))
        self._replace(hook, made)
        return made

    def close(self) -> None:
        """End the data workers."""
        for hook in list(self._loaders):
            self._replace(hook, [])

    def _replace(self, hook: str, made: Sequence[TrainLoader | EvalLoader]) -> None:
        """Lightning may ask for loaders anew at every epoch: the workers of those before have nothing more to do."""
        for loader in self._loaders.get(hook, []):
            loader.close()
        self._loaders[hook] = list(made)

    def _cut(self, trainer: Trainer, reading: Reading) -> Partition:
        """The Trainer's accumulation is a wish for smaller batches; like micro_batch it does not change the step."""
        wish, accumulated, size = self._wish, trainer.accumulate_grad_batches, trainer.world_size
        mine = -(-wish.global_batch // size)
        rows = wish.micro_batch if accumulated == 1 or wish.micro_batch is not None else -(-mine // accumulated)
        drop = wish.drop_last or reading.drop_last
        cut = Partition(reading.n, wish.global_batch, trainer.global_rank, size, rows, drop)
        if wish.micro_batch is not None and accumulated not in (1, cut.shape(0)[0]):
            raise DataError(
                f"SameStep(micro_batch={wish.micro_batch}) cuts a step into {cut.shape(0)[0]} batch(es) a rank and the "
                f"Trainer has accumulate_grad_batches={accumulated}: leave one of them out"
            )
        return cut

    def _tell_copies(self, cut: Partition) -> None:
        """A copy weighs nothing in the loss, and is left out of `self.log`; nobody can take it out of a torchmetric."""
        last = cut.steps - 1
        start, stop = cut.positions(last)
        batches = cut.world_size * cut.shape(last)[0]
        if stop - start < batches and cut.rank == 0:
            self._voice.warn_once(
                f"the last step of each epoch has {stop - start} sample(s) for {batches} batch(es) on {cut.world_size} "
                "rank(s): copies fill in, which weigh nothing in the loss and in self.log, but count in a torchmetric "
                "that training_step updates; another global_batch, or SameStep(drop_last=True), avoids it"
            )


Hooks = Mapping[str, Callable[[], object]]
_LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class ExactData(LightningDataModule):
    """What `SameStep.data(...)` gives to `trainer.fit`: the loaders that `hooks` make, cut exactly.

    `whole` is the user's datamodule, whose other hooks go on as they are.
    """

    def __init__(self, hooks: Hooks, whole: LightningDataModule | None, cutter: Cutter, owner: Callback) -> None:
        super().__init__()
        self._hooks, self._whole, self._cutter, self._owner = hooks, whole, cutter, owner
        made = {
            "train_dataloader": self._train,
            "val_dataloader": self._val,
            "test_dataloader": self._test,
            "predict_dataloader": self._predict,
        }
        # Lightning asks whether a hook is overridden: as an attribute it is so exactly where the user has one.
        for name in hooks:
            setattr(self, name, made[name])
        if whole is not None:
            self.prepare_data_per_node = whole.prepare_data_per_node
            self._log_hyperparams = whole._log_hyperparams  # pyright: ignore[reportPrivateUsage]  # save_hyperparameters sets it
            for name in _TRANSFER:
                setattr(self, name, getattr(whole, name))

    def __getattr__(self, name: str) -> object:
        """What else the user's has: modules ask `trainer.datamodule` for its classes, and Lightning for its hparams."""
        whole = self.__dict__.get("_whole")
        if whole is None:
            raise AttributeError(
                f"the data of SameStep has no attribute {name!r}, and comes from no LightningDataModule"
            )
        return getattr(whole, name)

    def prepare_data(self) -> None:
        """The user's own."""
        if self._whole is not None:
            self._whole.trainer = self.trainer
            self._whole.prepare_data()

    def setup(self, stage: str) -> None:
        """The user's own."""
        if self._whole is not None:
            self._whole.trainer = self.trainer
            self._whole.setup(stage)

    def teardown(self, stage: str) -> None:
        """The user's own."""
        if self._whole is not None:
            self._whole.teardown(stage)

    def on_exception(self, exception: BaseException) -> None:
        """The user's own."""
        if self._whole is not None:
            self._whole.on_exception(exception)

    def state_dict(self) -> dict[str, Any]:
        """The user's own; where training stands is in the loader's."""
        return self._whole.state_dict() if self._whole is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The user's own."""
        if self._whole is not None:
            self._whole.load_state_dict(state_dict)

    def _train(self) -> TrainLoader:
        return self._cutter.train_loader(self._checked(), self._hooks["train_dataloader"]())

    def _val(self) -> EvalLoader | list[EvalLoader]:
        return self._evaluation("val_dataloader")

    def _test(self) -> EvalLoader | list[EvalLoader]:
        return self._evaluation("test_dataloader")

    def _predict(self) -> object:
        """The user's own: Lightning's sampler for predictions repeats nothing."""
        return self._hooks["predict_dataloader"]()

    def _evaluation(self, hook: str) -> EvalLoader | list[EvalLoader]:
        given, trainer = self._hooks[hook](), self._checked()
        if isinstance(given, list | tuple):
            return self._cutter.eval_loaders(trainer, given, hook)
        return self._cutter.eval_loaders(trainer, [given], hook)[0]

    def _checked(self) -> Trainer:
        trainer = self.trainer
        if trainer is None:
            raise DataError("the data of SameStep belongs to no Trainer yet: hand it to trainer.fit, validate or test")
        if not any(callback is self._owner for callback in trainer.callbacks):  # pyright: ignore[reportAttributeAccessIssue]  # set by its constructor
            raise DataError(
                "the data is SameStep's and the Trainer does not have it: pass Trainer(callbacks=[same, ...]), the "
                "SameStep that made the data"
            )
        return trainer


def check_source(source: object) -> None:
    """Refuse what has no loaders to be cut."""
    if isinstance(source, LightningDataModule | LightningModule):
        return
    kind = type(source)
    if any(base.__module__.startswith("pytorch_lightning.") for base in kind.__mro__):
        raise DataError(
            f"{kind.__name__} is of the package pytorch_lightning, whose classes are others: import "
            "LightningDataModule, LightningModule and Trainer from lightning.pytorch"
        )
    raise DataError(
        f"SameStep.data got a {kind.__name__} and takes a LightningDataModule, or a LightningModule that has a "
        "train_dataloader: for DataLoaders write same.loaders(train=DataLoader(dataset, batch_size=32, shuffle=True))"
    )


def hooks_of(source: LightningDataModule | LightningModule) -> Hooks:
    """The loaders that `source` defines."""
    return {name: getattr(source, name) for name in _LOADERS if is_overridden(name, source)}


def hooks_for(train: object, val: object, test: object) -> Hooks:
    """Loaders that were given one by one; those that are None are not defined."""
    given = {"train_dataloader": train, "val_dataloader": val, "test_dataloader": test}
    return {name: partial(_itself, loader) for name, loader in given.items() if loader is not None}


def _itself(loader: object) -> object:
    return loader
