"""A user's data as a LightningDataModule whose loaders are exact; everything else of it stays as it is."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from samestep.errors import DataError
from samestep.lightning.cutter import Cutter
from samestep.lightning.eval_loader import EvalLoader
from samestep.lightning.train_loader import TrainLoader

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
