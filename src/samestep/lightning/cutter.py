"""How the data of a Trainer is cut: exact loaders out of a user's, and how many batches a step has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning.pytorch import LightningModule, Trainer

from samestep.data.order import Order
from samestep.errors import DataError, StepError
from samestep.lightning.eval_loader import EvalLoader
from samestep.lightning.reading import Reading, understand
from samestep.lightning.train_loader import Settings, TrainLoader
from samestep.log import Voice
from samestep.plan.batch import Cut


@dataclass(frozen=True)
class Wish:
    """What the user asked for in SameStep."""

    global_batch: int
    """Samples in an optimizer step, over all ranks."""
    seed: int
    """Where the order and the luck of samples come from."""
    micro_batch: int | None
    """The most rows that go through the model at once."""
    drop_tail: bool
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
        self._voice = Voice()

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
        order = Order(reading.n, wish.seed, reading.shuffle and not overfit, weights)
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

    def _cut(self, trainer: Trainer, reading: Reading) -> Cut:
        """The Trainer's accumulation is a wish for smaller batches; like micro_batch it does not change the step."""
        wish, accumulated, size = self._wish, trainer.accumulate_grad_batches, trainer.world_size
        mine = -(-wish.global_batch // size)
        rows = wish.micro_batch if accumulated == 1 or wish.micro_batch is not None else -(-mine // accumulated)
        drop = wish.drop_tail or reading.drop_tail
        cut = Cut(reading.n, wish.global_batch, trainer.global_rank, size, rows, drop)
        if wish.micro_batch is not None and accumulated not in (1, cut.shape(0)[0]):
            raise DataError(
                f"SameStep(micro_batch={wish.micro_batch}) cuts a step into {cut.shape(0)[0]} batch(es) a rank and the "
                f"Trainer has accumulate_grad_batches={accumulated}: leave one of them out"
            )
        return cut

    def _tell_copies(self, cut: Cut) -> None:
        """A copy weighs nothing in the loss, and is left out of `self.log`; nobody can take it out of a torchmetric."""
        last = cut.steps - 1
        start, stop = cut.positions(last)
        batches = cut.size * cut.shape(last)[0]
        if stop - start < batches and cut.rank == 0:
            self._voice.warn_once(
                f"the last step of each epoch has {stop - start} sample(s) for {batches} batch(es) on {cut.size} "
                "rank(s): copies fill in, which weigh nothing in the loss and in self.log, but count in a torchmetric "
                "that training_step updates; another global_batch, or SameStep(drop_tail=True), avoids it"
            )
