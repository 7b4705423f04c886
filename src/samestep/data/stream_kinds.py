"""What a stream can do besides being read from its beginning, and what is no stream at all."""

import inspect
from collections.abc import Iterable
from typing import Protocol, TypeGuard, runtime_checkable

from torch.utils.data import Dataset

from samestep.errors import DataError


@runtime_checkable
class Seekable(Protocol):
    """A stream that can begin anywhere."""

    def seek(self, position: int) -> object:
        """Make the next `__iter__` begin at element number `position`."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A stream that can tell where it stands, as those of torchdata and Hugging Face do."""

    def state_dict(self) -> object:
        """Where the stream stands: after the last element it gave."""
        ...

    def load_state_dict(self, state: object) -> object:
        """Make the next `__iter__` continue there."""
        ...


class Sharded(Protocol):
    """A stream in parts, each of which can be read without the others."""

    num_shards: int

    def shard(self, index: int) -> Iterable[object]:
        """Part number `index`, from its beginning."""
        ...


def is_sharded(dataset: object) -> TypeGuard[Sharded]:
    """Whether a dataset has `num_shards` and a `shard(i)`; a `shard` that wants more arguments is another thing."""
    shard = getattr(dataset, "shard", None)
    if not hasattr(dataset, "num_shards") or not callable(shard):
        return False
    try:
        inspect.signature(shard).bind(0)
    except TypeError:
        return False
    return True


def check_stream(dataset: object) -> None:
    """Complain of what cannot be read as a stream, and say what to use for it."""
    name = type(dataset).__name__
    if _has_items(dataset) and hasattr(dataset, "__len__"):
        raise DataError(f"{name} has a length and items, so it is no stream: use run.shard")
    if hasattr(dataset, "__next__"):
        raise DataError(
            f"{name} is an iterator, which can be read only once and not by workers: give an IterableDataset whose "
            "__iter__ makes a new one"
        )
    if not hasattr(dataset, "__iter__"):
        raise DataError(f"{name} has no __iter__, so it is no stream: give a torch.utils.data.IterableDataset")
    if is_sharded(dataset) and dataset.num_shards < 1:
        raise DataError(f"{name}.num_shards is {dataset.num_shards} and must be at least 1")


def _has_items(dataset: object) -> bool:
    # torch gives every Dataset, iterable ones too, a __getitem__ that only raises.
    return getattr(type(dataset), "__getitem__", Dataset.__getitem__) is not Dataset.__getitem__
