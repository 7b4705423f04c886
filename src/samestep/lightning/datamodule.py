"""Wraps a user's LightningDataModule so that its DataLoaders are read exactly; everything else of it is unchanged."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from samestep.data.partition import Partition
from samestep.data.permutation import SampleOrder
from samestep.errors import DataError, StepError
from samestep.lightning.loaders import (
    BatchRandomness,
    EpochSettings,
    EvalLoader,
    LoaderSpec,
    PredictLoader,
    TrainLoader,
    read_spec,
)
from samestep.lightning.trainer_ranks import list_callbacks
from samestep.messages import WarnOnce

LoaderHooks = Mapping[str, Callable[[], object]]
_LOADER_HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
_FORWARDED = (
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "teardown", "on_exception",
    "state_dict", "load_state_dict",
)  # fmt: skip


def find_hooks(source: object) -> LoaderHooks:
    """Return the DataLoader hooks that `source` defines; raise `DataError` if it is not of a class of Lightning."""
    if isinstance(source, LightningDataModule | LightningModule):
        return {name: getattr(source, name) for name in _LOADER_HOOKS if is_overridden(name, source)}
    kind = type(source)
    if any(base.__module__.startswith("pytorch_lightning.") for base in kind.__mro__):
        raise DataError(
            f"{kind.__name__} is a class of the package pytorch_lightning, which is not the package lightning: import "
            "LightningDataModule, LightningModule and Trainer from lightning.pytorch"
        )
    raise DataError(
        f"SameStep.datamodule got a {kind.__name__}: pass a LightningDataModule, or a LightningModule with a "
        "train_dataloader; for DataLoaders, use same.dataloaders(train=DataLoader(dataset, batch_size=32, "
        "shuffle=True))"
    )


class ExactDataModule(LightningDataModule):
    """What `SameStep.datamodule` returns: replaces the loaders that `hooks` return, forwards the rest to `wrapped`."""

    def __init__(
        self, hooks: LoaderHooks, wrapped: LightningDataModule | None, loaders: "ExactLoaders", same_step: Callback
    ) -> None:
        super().__init__()
        self._hooks, self._wrapped, self._loaders, self._same_step = hooks, wrapped, loaders, same_step
        # Lightning checks whether a hook is overridden. As an attribute it is, if and only if the user has one.
        for name in hooks:
            setattr(self, name, partial(self._load, name))
        if wrapped is not None:
            self.prepare_data_per_node = wrapped.prepare_data_per_node
            self._log_hyperparams = wrapped._log_hyperparams  # pyright: ignore[reportPrivateUsage]  # of Lightning
            for name in _FORWARDED:
                setattr(self, name, getattr(wrapped, name))

    def __getattr__(self, name: str) -> object:
        """Return an attribute of the user's datamodule, which modules read through `trainer.datamodule`."""
        wrapped = self.__dict__.get("_wrapped")
        if wrapped is None:
            raise AttributeError(f"this datamodule of SameStep has no attribute {name!r}: it wraps DataLoaders only")
        return getattr(wrapped, name)

    def prepare_data(self) -> None:
        """Call that of the user's datamodule."""
        if self._wrapped is not None:
            self._wrapped.trainer = self.trainer
            self._wrapped.prepare_data()

    def setup(self, stage: str) -> None:
        """Call that of the user's datamodule."""
        if self._wrapped is not None:
            self._wrapped.trainer = self.trainer
            self._wrapped.setup(stage)

    def _load(self, hook: str) -> object:
        """Return the exact loader for what the user's `hook` returns, or several in an evaluation."""
        trainer = self.trainer
        if trainer is None:
            raise DataError(
                "this datamodule of SameStep has no Trainer yet: pass it to trainer.fit, validate, test or predict"
            )
        if not any(callback is self._same_step for callback in list_callbacks(trainer)):
            raise DataError(
                "the data comes from a SameStep that is not a callback of the Trainer: pass "
                "Trainer(callbacks=[same, ...]) with the same SameStep"
            )
        given = self._hooks[hook]()
        if hook == "train_dataloader":
            return self._loaders.make_train(trainer, given)
        if isinstance(given, list | tuple):
            return self._loaders.make_evaluation(trainer, given, hook)
        return self._loaders.make_evaluation(trainer, [given], hook)[0]


@dataclass(eq=False)
class ExactLoaders:
    """Makes the loaders of one SameStep, and ends their data workers."""

    global_batch: int
    seed: int
    micro_batch: int | None
    drop_last: bool
    epoch_settings: EpochSettings | None
    randomness: BatchRandomness
    train: TrainLoader | None = None
    saved_identity: Mapping[str, int] = field(default_factory=dict[str, int])
    """From the checkpoint that the Trainer resumes from; empty for a new run."""
    _open: dict[str, list[TrainLoader | EvalLoader]] = field(default_factory=dict[str, list[TrainLoader | EvalLoader]])
    _warnings: WarnOnce = field(default_factory=WarnOnce)

    def check_module(self, trainer: Trainer, module: LightningModule) -> None:
        """Raise `StepError` if a step has several batches and the module would call optimizer.step() in each."""
        own = -(-self.global_batch // trainer.world_size)
        if not module.automatic_optimization and self.micro_batch is not None and own > self.micro_batch:
            raise StepError(
                f"{type(module).__name__} uses manual optimization and steps once per batch, and SameStep(micro_batch="
                f"{self.micro_batch}) splits the {own} sample(s) of a rank in a step into "
                f"{-(-own // self.micro_batch)} batches: leave micro_batch out, or use automatic optimization "
                "(automatic_optimization = True)"
            )

    def make_train(self, trainer: Trainer, loader: object) -> TrainLoader:
        """Return the training loader, and set accumulate_grad_batches of the Trainer to the batches of a step."""
        spec = read_spec(loader, "train_dataloader", self._warnings.warn_once)
        overfit = float(getattr(trainer, "overfit_batches", 0)) > 0  # the same few steps in every epoch
        order = SampleOrder(spec.n, self.seed, spec.shuffle and not overfit, None if overfit else spec.weights)
        partition = self._partition(trainer, spec)
        self._warn_about_padding(partition)
        trainer.accumulate_grad_batches = partition.shape(0)[0]
        self.train = TrainLoader(trainer, spec, order, partition, self.epoch_settings, self.randomness)
        if self.saved_identity:
            self.train.check_identity(self.saved_identity)
            self.saved_identity = {}
        self._replace("train_dataloader", [self.train])
        return self.train

    def make_evaluation(self, trainer: Trainer, loaders: Sequence[object], hook: str) -> list[EvalLoader]:
        """Return the loaders of a validation, test or prediction."""
        exact: list[EvalLoader] = []
        for loader in loaders:
            spec = read_spec(loader, hook, self._warnings.warn_once)
            if spec.weights is not None:
                self._warnings.warn_once(
                    f"the WeightedRandomSampler of {hook}() is ignored: an evaluation reads every sample once; weight "
                    "classes in the metric instead"
                )
            loader_class = PredictLoader if hook == "predict_dataloader" else EvalLoader
            exact.append(loader_class(trainer, spec, self.seed, self.epoch_settings, self.randomness))
        self._replace(hook, exact)
        return exact

    def close(self) -> None:
        """End the data workers."""
        for hook in list(self._open):
            self._replace(hook, [])

    def _replace(self, hook: str, loaders: Sequence[TrainLoader | EvalLoader]) -> None:
        """Close the previous loaders of a hook: Lightning may ask for new ones in every epoch."""
        for loader in self._open.get(hook, []):
            loader.close()
        self._open[hook] = list(loaders)

    def _partition(self, trainer: Trainer, spec: LoaderSpec) -> Partition:
        """Partition the data; like micro_batch, accumulate_grad_batches of the Trainer only splits a rank's part."""
        accumulate, world_size, micro_batch = trainer.accumulate_grad_batches, trainer.world_size, self.micro_batch
        if micro_batch is None and accumulate > 1:
            micro_batch = -(-self.global_batch // (world_size * accumulate))  # ceil(ceil(G / ranks) / batches)
        drop_last = self.drop_last or spec.given.drop_last
        partition = Partition(spec.n, self.global_batch, trainer.global_rank, world_size, micro_batch, drop_last)
        if self.micro_batch is not None and accumulate not in (1, partition.shape(0)[0]):
            raise DataError(
                f"SameStep(micro_batch={self.micro_batch}) splits a step into {partition.shape(0)[0]} batch(es) per "
                f"rank, and the Trainer has accumulate_grad_batches={accumulate}: leave one of them out"
            )
        return partition

    def _warn_about_padding(self, partition: Partition) -> None:
        last = partition.steps - 1
        start, stop = partition.positions(last)
        batches = partition.world_size * partition.shape(last)[0]
        if stop - start < batches and partition.rank == 0:
            self._warnings.warn_once(
                f"the last step of each epoch has {stop - start} sample(s) for {batches} batch(es) on "
                f"{partition.world_size} rank(s): padding batches have weight 0 in the loss and in self.log, but a "
                "torchmetric that training_step updates counts them; change global_batch, or pass "
                "SameStep(drop_last=True)"
            )
