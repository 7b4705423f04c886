"""`HDF5Dataset`: samples from an HDF5 file that every process opens for itself.

An HDF5 file that is open when a process forks is open in both, with one shared file position: workers may then read
each other's rows. Here no handle is pickled, none survives a fork, and each process opens the file when it first reads.
"""

import math
import operator
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, final
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import Dataset

from samestep.errors import DataError

CACHE_BYTES: Final = 32 << 20
"""Decompressed chunks that each process caches per key; one row of chunks is cached even if it is larger."""

_KEYS_SHOWN: Final = 20
_INTEGERS: Final = frozenset(f"{sign}int{bits}" for sign in ("u", "") for bits in (8, 16, 32, 64))
_TENSOR_TYPES: Final = _INTEGERS | {"bool", "float16", "float32", "float64", "complex64", "complex128"}


@final
class HDF5Dataset(Dataset[tuple[object, ...]]):
    """Row i of several datasets of one HDF5 file, as a tuple in the order of `keys`.

    Numbers are returned as tensors with their own memory, strings as str, anything else as numpy returns it. The file
    is opened read-only and without a lock, so it may be on read-only storage, but no process may be writing to it.

    Rows are read in ascending order with a cache of decompressed chunks, so neither a batch nor an epoch in order
    decompresses a chunk twice. A shuffled epoch over large compressed chunks still decompresses one for nearly every
    row: write such files with few rows per chunk. The cache uses up to `CACHE_BYTES` per key and process, or one row of
    chunks if that is more.

    To augment samples, wrap it in a dataset whose `__getitem__` reads from it. It cannot be subclassed, since batches
    are read by `__getitems__` and would bypass the `__getitem__` of a subclass.

    >>> dataset = HDF5Dataset("faces.h5", keys=["images", "labels/age"])  # doctest: +SKIP
    >>> image, age = dataset[0]  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str], keys: Sequence[str]) -> None:
        if isinstance(keys, str):
            raise DataError(f"keys={keys!r} is one string and must be a list of names: write keys=[{keys!r}]")
        if not keys:
            raise DataError(f"keys is empty: name at least one dataset of {path}")
        # Absolute, since a data worker may run in another folder.
        self._path, self._keys = Path(path).absolute(), tuple(keys)
        self._file: Any = None
        self._columns: tuple[Any, ...] = ()
        # Errors are raised here, on the user's line, and not later in a worker.
        self._version = _file_version(self._path)
        file, _, self._length = _open(self._path, self._keys)
        file.close()

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
        """Return the samples of these indices in their order; consecutive rows are read at once."""
        checked = [self._check_index(index) for index in indices]
        rows = np.unique(checked)
        parts = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
        runs = [(int(part[0]), int(part[-1]) + 1) for part in parts if part.size]
        self._check_unchanged()
        self._ensure_open()
        columns = [self._read_rows(column, runs) for column in range(len(self._keys))]
        # Each sample gets its own memory: a view would keep all rows read with it, and send them to the parent.
        return [tuple(_convert(column[index]) for column in columns) for index in checked]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_file": None, "_columns": ()}

    def __repr__(self) -> str:
        return f"HDF5Dataset({str(self._path)!r}, keys={list(self._keys)!r})"

    def close(self) -> None:
        """Close the file in this process; the next read opens it again."""
        file, self._file, self._columns = self._file, None, ()
        if file is not None:
            file.close()

    def _check_index(self, index: int) -> int:
        index = operator.index(index)
        if not 0 <= index < self._length:
            raise DataError(f"index {index} is out of range: {self._path} has samples 0 to {self._length - 1}")
        return index

    def _check_unchanged(self) -> None:
        """Raise if the file was changed or replaced: HDF5 would return other rows, or zeros after a truncation."""
        if (now := _file_version(self._path)) != self._version:
            before, after = (f"{version[1]} bytes" if version else "no file" for version in (self._version, now))
            raise DataError(
                f"{self._path} was changed or replaced during the run ({before} at its start, {after} now): start the "
                "run again with the complete file, and do not write to it while a run reads it"
            )

    def _read_rows(self, column: int, runs: list[tuple[int, int]]) -> dict[int, Any]:
        rows = dict[int, Any]()
        for start, stop in runs:
            try:
                block = self._columns[column][start:stop]
            except (OSError, RuntimeError) as error:
                raise DataError(
                    f"rows {start} to {stop - 1} of {self._keys[column]!r} in {self._path} cannot be read: {error}; "
                    "the file is corrupt or was changed: write or copy it again"
                ) from error
            rows.update(zip(range(start, stop), block, strict=True))
        return rows

    def _ensure_open(self) -> None:
        if self._file is not None:
            return
        file, columns, _ = _open(self._path, self._keys)
        self._file, self._columns = file, columns
        _open_datasets.add(self)


# A fork affects the whole process, so this set does too. Closing on first use in the child would not be enough: while
# another dataset of the same file is open there, HDF5 returns its inherited handle again.
_open_datasets: WeakSet[HDF5Dataset] = WeakSet()


def _close_inherited() -> None:
    for dataset in list(_open_datasets):
        dataset.close()
    _open_datasets.clear()


os.register_at_fork(after_in_child=_close_inherited)


def _file_version(path: Path) -> tuple[int, int, int] | None:
    """What changes with the content of a file: its inode, size and time of modification; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _open(path: Path, keys: tuple[str, ...]) -> tuple[Any, tuple[Any, ...], int]:
    """Return the open file, for each key an h5py dataset or a view of it that decodes strings, and their length."""
    h5py = require_h5py()
    file = _open_file(h5py, path)
    try:
        columns = tuple(_open_column(h5py, file, path, key) for key in keys)
        lengths = {key: len(column) for key, column in zip(keys, columns, strict=True)}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{key!r} has {length}" for key, length in lengths.items())
            raise DataError(f"the datasets of {path} differ in length: {listed}; each must have one row per sample")
        return file, columns, lengths[keys[0]]
    except BaseException:
        file.close()
        raise


def require_h5py() -> ModuleType:
    """Return the package h5py, which an extra installs."""
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
        problem = str(error)
        if "locking flag" in problem:
            # HDF5 requires one locking mode for all handles of a process, and here the user's own handle came first.
            return h5py.File(path, "r")
        if path.is_dir():
            problem = "it is a folder: name the file in it"
        elif "truncated" in problem:
            problem = f"it is truncated ({error}): copy or write it again"
        elif "signature not found" in problem:
            size = path.stat().st_size
            problem = f"it is not an HDF5 file ({size} bytes without the HDF5 signature): name another file"
        raise DataError(f"{path} cannot be opened: {problem}") from error


def _open_column(h5py: ModuleType, file: Any, path: Path, key: str) -> Any:
    table = file.get(key)
    if table is None:
        raise DataError(f"{path} has no dataset {key!r}: it has {_list_datasets(h5py, file)}")
    if not isinstance(table, h5py.Dataset):
        inside = _list_datasets(h5py, table)
        raise DataError(f"{key!r} in {path} is a group, not a dataset: name one of the datasets in it, {inside}")
    if not table.shape:
        raise DataError(f"{key!r} in {path} is a scalar: name a dataset with one row per sample")
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    access.set_chunk_cache(*_cache_settings(table.shape, table.chunks, table.dtype.itemsize))
    name, is_text = table.name, h5py.check_string_dtype(table.dtype) is not None
    del table  # while it is open, HDF5 would return the same dataset with the default cache again
    table = h5py.Dataset(h5py.h5d.open(file.id, name.encode(), access))
    return table.asstr() if is_text else table


def _cache_settings(shape: tuple[int, ...], chunks: tuple[int, ...] | None, itemsize: int) -> tuple[int, int, float]:
    """Return slots, bytes and eviction policy (0.0: least recently used) of a cache that holds all chunks of a row."""
    if chunks is None:
        return 1, 0, 0.0
    chunk = max(1, math.prod(chunks) * itemsize)
    chunks_per_row = math.prod(-(-length // step) for length, step in zip(shape[1:], chunks[1:], strict=True))
    size = max(CACHE_BYTES, chunk * chunks_per_row)
    return 10 * (size // chunk) + 1, size, 0.0


def _list_datasets(h5py: ModuleType, group: Any) -> str:
    paths: list[str] = []
    group.visit(paths.append)
    names = [group[path].name.lstrip("/") for path in paths if isinstance(group[path], h5py.Dataset)]
    if not names:
        return "none"
    more = len(names) - _KEYS_SHOWN
    return ", ".join(repr(name) for name in names[:_KEYS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _convert(value: object) -> object:
    array = np.asarray(value)
    if array.dtype.name not in _TENSOR_TYPES:
        return value
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), copy=True))
