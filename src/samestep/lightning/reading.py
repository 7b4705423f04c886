"""What a user's DataLoader asks for, and what of it can be kept exactly."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from samestep.data.loader import Collate, MapDataset
from samestep.errors import DataError

_REPLACED = "SameStep gives every epoch its own order on any number of ranks"


@dataclass(frozen=True)
class Reading:
    """A DataLoader as SameStep reads it."""

    dataset: MapDataset
    """The user's dataset."""
    n: int
    """Its length."""
    collate: Collate
    """Makes a batch of samples."""
    workers: int
    """Data workers of each rank."""
    shuffle: bool
    """Whether the loader shuffles."""
    weights: npt.NDArray[np.float64] | None
    """Draw with replacement by these."""
    rows: int
    """The loader's own number of rows in a batch: kept in evaluation, replaced in training."""
    drop_tail: bool
    """Whether the loader leaves out the last, smaller batch."""


def understand(loader: object, hook: str, warn: Callable[[str], None]) -> Reading:
    """What `loader`, returned by `hook`, asks for; refuse what no order over all ranks can stand for."""
    if not isinstance(loader, DataLoader):
        raise DataError(
            f"{hook}() gave a {type(loader).__name__}: SameStep reads one torch DataLoader (in evaluation also a list "
            "of them); give it the DataLoader itself"
        )
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            f"the dataset of {hook}() has no length, so its samples cannot be numbered: give it __len__ and "
            "__getitem__, or train with samestep.Run and run.stream"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise DataError(
            f"the DataLoader of {hook}() makes its batches by a batch_sampler of its own: pass batch_size= and "
            f"shuffle= instead; {_REPLACED}"
        )
    _tell_skipped(loader, hook, warn)
    n = len(dataset)  # pyright: ignore[reportArgumentType]  # it has __len__, as was just seen
    if n == 0:
        raise DataError(f"the dataset of {hook}() is empty: there is nothing to read; check the path it reads from")
    shuffle, weights = _sampling(loader.sampler, n, hook)
    return Reading(
        dataset,  # pyright: ignore[reportArgumentType]  # it is no IterableDataset
        n,
        loader.collate_fn,
        loader.num_workers,
        shuffle,
        weights,
        loader.batch_size,
        loader.drop_last,
    )


def _sampling(sampler: object, n: int, hook: str) -> tuple[bool, npt.NDArray[np.float64] | None]:
    if isinstance(sampler, SequentialSampler):
        return False, None
    if isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == n:
        return True, None
    if isinstance(sampler, WeightedRandomSampler) and sampler.replacement and sampler.num_samples == n:
        return True, sampler.weights.double().numpy()
    raise DataError(
        f"the DataLoader of {hook}() has a {type(sampler).__name__} of its own: use shuffle=True, or a "
        f"WeightedRandomSampler with replacement over as many samples as the dataset has ({n}); {_REPLACED}"
    )


def _tell_skipped(loader: "DataLoader[object]", hook: str, warn: Callable[[str], None]) -> None:
    wishes = {
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "timeout": loader.timeout,
    }
    if skipped := [name for name, value in wishes.items() if value]:
        warn(
            f"{', '.join(skipped)} of the DataLoader of {hook}() is not used: SameStep reads with workers of its own, "
            "in which each sample has its own luck (samestep.sample_rng)"
        )
