"""`trainer.predict` returns the predictions of all samples on every rank, in the order of the dataset.

Each rank predicts whole batches of the user's DataLoader, so that the list of predictions is that of one rank, whatever
a predict_step returns. Callbacks that write predictions see only those of their rank.
"""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.overrides.distributed import (
    _IndexBatchSamplerWrapper,  # pyright: ignore[reportPrivateUsage]  # the only way to pass indices to its writers
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from samestep.data.partition import split_evenly
from samestep.lightning.batch_randomness import BatchRandomness
from samestep.lightning.loaders import EpochSettings, EvalLoader, LoaderSpec
from samestep.lightning.trainer_ranks import gather
from samestep.messages import warn

_BATCHES_PER_EXCHANGE = 16  # on GPUs the exchanged bytes are on the device for a moment


class PredictLoader(EvalLoader):
    """What a Trainer iterates over in `trainer.predict`.

    A rank has whole batches of the user's DataLoader, one more or less than others. Fewer batches than ranks are split,
    and with a sharded model, for which all ranks must run the same number of batches, the batches are smaller too.
    """

    def __init__(
        self,
        trainer: Trainer,
        spec: LoaderSpec,
        seed: int,
        epoch_settings: EpochSettings | None,
        randomness: BatchRandomness,
    ) -> None:
        limit, rows = trainer.limit_predict_batches, spec.given.batch_size or 1
        n = min(spec.n, limit * rows) if isinstance(limit, int) else spec.n
        super().__init__(trainer, spec, seed, epoch_settings, randomness, n)
        batches = -(-n // rows)
        self._rows: int | None = None
        if batches >= trainer.world_size and isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy):
            self._rows, (self._first, end) = rows, split_evenly(batches, trainer.world_size, trainer.global_rank)
            self._batches, self._n = end - self._first, n
        self.batch_sampler = _IndexBatchSamplerWrapper(_Ranges(self))  # pyright: ignore[reportArgumentType]

    def batch_range(self, k: int) -> tuple[int, int]:
        """Return the samples of batch k of this rank."""
        if self._rows is None:
            return super().batch_range(k)
        start = (self._first + k) * self._rows
        return start, min(start + self._rows, self._n)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the samples of each batch of this rank; Lightning's writers read their indices from the sampler."""
        for indices in self.batch_sampler:
            yield indices[0], indices[-1] + 1


class _Ranges:
    """The batches of a loader as lists of indices, which Lightning's sampler records."""

    def __init__(self, loader: PredictLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[int]]:
        return (list(range(*self._loader.batch_range(k))) for k in range(len(self)))


def gather_predictions(trainer: Trainer) -> None:
    """Replace the predictions that the Trainer returns by those of all ranks; all ranks must call it."""
    loop = trainer.predict_loop
    if trainer.world_size == 1 or not loop.return_predictions:
        return
    loaders = trainer.predict_dataloaders
    if not all(isinstance(loader, PredictLoader) for loader in (loaders if isinstance(loaders, list) else [loaders])):
        if trainer.is_global_zero:
            warn(
                "trainer.predict got data that does not come from SameStep, so each of the "
                f"{trainer.world_size} ranks returns the predictions of its own samples only: pass "
                "trainer.predict(module, datamodule=same.dataloaders(predict=...)), or same.datamodule(...) of a "
                "datamodule with a predict_dataloader"
            )
        return
    for own in [loop.predictions] if loop.num_dataloaders == 1 else loop.predictions:
        own[:] = _gather_batches(trainer, own)


def _gather_batches(trainer: Trainer, own: list[Any]) -> list[Any]:
    """Return the batches of all ranks; ranks have contiguous parts of the dataset."""
    by_rank: list[list[Any]] = [[] for _ in range(trainer.world_size)]
    for start in range(0, max(gather(trainer, len(own))), _BATCHES_PER_EXCHANGE):
        parts = gather(trainer, own[start : start + _BATCHES_PER_EXCHANGE])
        for batches, part in zip(by_rank, parts, strict=True):
            batches += part
    return [batch for batches in by_rank for batch in batches]
