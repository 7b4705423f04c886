"""The validation and test data of a Trainer: every sample once, equally many batches on every rank, no padding."""

from collections.abc import Iterator

import numpy as np
from lightning.pytorch import Trainer

from samestep.data.loader import Loader, Request
from samestep.data.sample_rng import Absent
from samestep.errors import DataError
from samestep.lightning.reading import Reading
from samestep.lightning.train_loader import Settings
from samestep.plan.batch import split_evenly


class EvalLoader:
    """What a Trainer iterates over in validation and test, in the order of the dataset.

    Ranks have equally many batches, so nothing that is done in a batch on all ranks (a value logged with `sync_dist`, a
    sharded model) can hang; batches differ in size instead. With one row a batch, a batch may hold two.
    """

    def __init__(self, trainer: Trainer, reading: Reading, seed: int, settings: Settings | None) -> None:
        self._trainer, self._settings = trainer, settings
        size = trainer.world_size
        if reading.n < size:
            raise DataError(
                f"an evaluation of {reading.n} sample(s) cannot be cut over {size} ranks: Lightning needs a batch on "
                f"each; give it at least {size} samples, or evaluate with {reading.n} rank(s)"
            )
        self._slice = split_evenly(reading.n, size, trainer.global_rank)
        largest = -(-reading.n // size)
        self._count = min(-(-largest // reading.rows), reading.n // size)
        device = trainer.strategy.root_device
        self._loader: Loader | None = Loader(
            reading.dataset, seed, trainer.global_rank, reading.collate, reading.workers, device
        )
        self.dataset = reading.dataset

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[object]:
        assert self._loader is not None
        yield from self._loader.read(self._requests())

    def close(self) -> None:
        """End the data workers."""
        self._loader = None

    def _requests(self) -> Iterator[Request]:
        setting = Absent.SETTING if self._settings is None else self._settings(self._epoch())
        begin, end = self._slice
        for k in range(self._count):
            start, stop = split_evenly(end - begin, self._count, k)
            yield Request(0, np.arange(begin + start, begin + stop), setting)

    def _epoch(self) -> int:
        """The epoch under way; after training, the last one."""
        epochs = self._trainer.max_epochs
        return min(self._trainer.current_epoch, epochs - 1) if epochs and epochs > 0 else self._trainer.current_epoch
