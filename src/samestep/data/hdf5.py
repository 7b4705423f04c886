"""Samples out of an HDF5 file, which every process opens for itself.

An HDF5 file that is open when a process forks is open in both, with one file position between them: workers may then
read each other's rows. Here no handle is pickled, none outlives a fork, and each process opens the file when it first
reads from it.
"""

import math
import operator
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, final
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import Dataset

from samestep.errors import DataError

CACHE_BYTES: Final = 32 << 20
"""Decompressed chunks that each process keeps of each key; one row of chunks is kept even where it is larger."""

_KEYS_SHOWN: Final = 20
_INTEGERS: Final = frozenset(f"{sign}int{bits}" for sign in ("u", "") for bits in (8, 16, 32, 64))
_TENSOR_TYPES: Final = _INTEGERS | {"bool", "float16", "float32", "float64", "complex64", "complex128"}


@dataclass(frozen=True)
class _Handle:
    """The file as one process has it open."""

    file: Any
    columns: tuple[Any, ...]
    """What is sliced, in the order of the keys: h5py datasets, and views that decode where they hold strings."""


@final
class HDF5Dataset(Dataset[tuple[object, ...]]):
    """Row i of several datasets of one HDF5 file, as a tuple in the order of `keys`.

    Numbers come as tensors with memory of their own, strings as str, anything else as numpy gives it. The file is
    opened read-only and without a lock, so read-only storage will do; a file that is still being written will not.

    Rows are read in ascending order with a cache of decompressed chunks, so neither a batch nor a pass in order
    decompresses a chunk twice. A shuffled epoch over large compressed chunks still decompresses one for nearly every
    row: write such files with chunks of few rows. The cache takes up to `CACHE_BYTES` a key and process, or one row of
    chunks where that is more.

    To augment, wrap it in a dataset whose `__getitem__` reads from it; it cannot be subclassed, since batches are read
    by `__getitems__`, past any `__getitem__` that a subclass would bring.

    >>> dataset = HDF5Dataset("faces.h5", keys=["images", "labels/age"])  # doctest: +SKIP
    >>> image, age = dataset[0]  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str], keys: Sequence[str]) -> None:
        if isinstance(keys, str):
            raise DataError(f"keys={keys!r} is one string and should be a list of names: write keys=[{keys!r}]")
        if not keys:
            raise DataError(f"keys is empty: name at least one dataset of {path}")
        # A worker may run in another folder than the one in which the path was meant.
        self._path, self._keys = Path(path).absolute(), tuple(keys)
        self._handle: _Handle | None = None
        # Mistakes come to light here, in the process and on the line of the user, not in a worker later.
        handle = _open(self._path, self._keys)
        self._length = _common_length(handle.file, self._path, self._keys)
        handle.file.close()

    def __init_subclass__(cls) -> None:
        raise DataError(
            f"{cls.__name__} subclasses HDF5Dataset: write a Dataset that holds one and reads from it instead"
        )

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[tuple[object, ...]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> tuple[object, ...]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[object, ...]]:
        """The samples of these indices in their order, read in ascending order, consecutive rows at once."""
        wanted = [self._checked(index) for index in indices]
        runs = _runs(sorted(set(wanted)))
        columns = [self._rows(place, runs) for place in range(len(self._keys))]
        # Each sample gets memory of its own: a view would keep and send to the parent all rows read with it.
        return [tuple(_sample_value(column[index]) for column in columns) for index in wanted]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_handle": None}

    def __repr__(self) -> str:
        return f"HDF5Dataset({str(self._path)!r}, keys={list(self._keys)!r})"

    def close(self) -> None:
        """Close the file in this process; reading opens it again."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.file.close()

    def _checked(self, index: int) -> int:
        index = operator.index(index)
        if not 0 <= index < self._length:
            raise DataError(f"index {index} is out of range: {self._path} has samples 0 to {self._length - 1}")
        return index

    def _rows(self, place: int, runs: list[tuple[int, int]]) -> dict[int, Any]:
        column, rows = self._opened().columns[place], {}
        for start, stop in runs:
            try:
                block = column[start:stop]
            except (OSError, RuntimeError) as error:
                raise DataError(
                    f"rows {start} to {stop - 1} of {self._keys[place]!r} in {self._path} cannot be read: {error}; "
                    "the file is damaged or was changed: write or copy it anew"
                ) from error
            rows.update(zip(range(start, stop), block, strict=True))
        return rows

    def _opened(self) -> _Handle:
        if self._handle is None:
            handle = _open(self._path, self._keys)
            length = _common_length(handle.file, self._path, self._keys)
            if length != self._length:
                handle.file.close()
                raise DataError(f"{self._path} had {self._length} samples and now has {length}: start again with it")
            self._handle = handle
            _open_here.add(self)
        return self._handle


# A fork concerns the whole process, so what is open is known for the whole process. Closing on first use in the child
# would not do: while another dataset of the same file is open there, HDF5 hands out its inherited handle again.
_open_here: WeakSet[HDF5Dataset] = WeakSet()


def _close_inherited() -> None:
    for dataset in list(_open_here):
        dataset.close()
    _open_here.clear()


os.register_at_fork(after_in_child=_close_inherited)


def _open(path: Path, keys: tuple[str, ...]) -> _Handle:
    h5py = require_h5py()
    file = _open_file(h5py, path)
    try:
        return _Handle(file, tuple(_open_column(h5py, file, path, key) for key in keys))
    except BaseException:
        file.close()
        raise


def require_h5py() -> ModuleType:
    """The package h5py, which comes with an extra."""
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise DataError("HDF5 files need h5py, which is not installed: pip install 'samestep[hdf5]'") from error
    return h5py


def _open_file(h5py: ModuleType, path: Path) -> Any:
    try:
        return h5py.File(path, "r", locking=False)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist: check the path, and that this node has it") from error
    except OSError as error:
        if "locking flag" in str(error):
            # HDF5 wants one way of locking for all handles of a process, and here the user's own handle came first.
            return h5py.File(path, "r")
        raise DataError(f"{path} cannot be opened: {_why(path, error)}") from error


def _why(path: Path, error: OSError) -> str:
    if path.is_dir():
        return "it is a folder: name the file in it"
    if "truncated" in str(error):
        return f"it is truncated, its end is missing ({error}): copy or write it anew"
    if "signature not found" in str(error):
        return f"it is not an HDF5 file ({path.stat().st_size} bytes without the HDF5 signature): name another file"
    return str(error)


def _open_column(h5py: ModuleType, file: Any, path: Path, key: str) -> Any:
    table = file.get(key)
    if table is None:
        raise DataError(f"{path} has no dataset {key!r}: it has {_listed(h5py, file)}")
    if not isinstance(table, h5py.Dataset):
        raise DataError(f"{key!r} in {path} is a group, not a dataset: name one of those in it, {_listed(h5py, table)}")
    if not table.shape:
        raise DataError(f"{key!r} in {path} is one value without rows: name a dataset with one row a sample")
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    access.set_chunk_cache(*_cache(table.shape, table.chunks, table.dtype.itemsize))
    name, is_text = table.name, h5py.check_string_dtype(table.dtype) is not None
    del table  # while it is open, HDF5 would hand out the same dataset with the default cache again
    table = h5py.Dataset(h5py.h5d.open(file.id, name.encode(), access))
    return table.asstr() if is_text else table


def _cache(shape: tuple[int, ...], chunks: tuple[int, ...] | None, itemsize: int) -> tuple[int, int, float]:
    """Slots, bytes and eviction (0.0: the least recently used) of a cache that holds all chunks of one row."""
    if chunks is None:
        return 1, 0, 0.0
    chunk = max(1, math.prod(chunks) * itemsize)
    across = math.prod(-(-length // step) for length, step in zip(shape[1:], chunks[1:], strict=True))
    size = max(CACHE_BYTES, chunk * across)
    return 10 * (size // chunk) + 1, size, 0.0


def _common_length(file: Any, path: Path, keys: tuple[str, ...]) -> int:
    lengths = {key: int(file[key].shape[0]) for key in keys}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{key!r} has {length}" for key, length in lengths.items())
        raise DataError(f"the datasets of {path} disagree in length: {told}; each must have one row for each sample")
    return lengths[keys[0]]


def _listed(h5py: ModuleType, group: Any) -> str:
    everything: list[str] = []
    group.visit(everything.append)
    names = [group[name].name.lstrip("/") for name in everything if isinstance(group[name], h5py.Dataset)]
    if not names:
        return "none"
    more = len(names) - _KEYS_SHOWN
    return ", ".join(repr(name) for name in names[:_KEYS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _runs(indices: list[int]) -> list[tuple[int, int]]:
    """Ascending indices as (start, stop) of consecutive ones."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs


def _sample_value(value: object) -> object:
    array = np.asarray(value)
    if array.dtype.name not in _TENSOR_TYPES:
        return value
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), copy=True))
