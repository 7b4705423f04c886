"""Datasets that read from files: rows of an HDF5 file, labeled images, images with fixations from files of pysaliency.

An HDF5 file that is open when a process forks is open in both, with one shared file position: workers may then read
each other's rows. Here no handle is pickled, none survives a fork, and each process opens the file when it first reads.
"""

import gzip
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
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from samestep.errors import DataError

# HDF5 files

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
            before, after = (f"{version[0]} bytes" if version else "no file" for version in (self._version, now))
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


def _file_version(path: Path) -> tuple[int, int] | None:
    """What changes with the content of a file: its size and time of modification; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns  # not the inode, which some network file systems change


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


# Images

_IMAGE_SUFFIXES: Final = (".jpg", ".jpeg", ".png")
_VALIDATE_EVERY: Final = 10  # in a folder without a split, every tenth image is for validation
_IMAGE_LAYOUT: Final = (
    "a folder of classes (CLASS/*.jpg or *.png, every tenth for validation; or train/CLASS and val/CLASS, as in "
    "ImageNet), or one with MNIST's idx files (train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-...)"
)
_PYSALIENCY_LAYOUT: Final = (
    "a folder with the files of pysaliency: stimuli.hdf5 (datasets 0, 1, 2, ... of (height, width, 3) bytes; or "
    "`filenames`, relative to it) and fixations.hdf5 (train_xs, train_ys: one scanpath per row; train_ns: the image; "
    "or a group `scanpaths` with xs, ys, n and length)"
)

_Floats = npt.NDArray[np.float64]


class ImageFiles:
    """Image files that are read on access, as bytes of shape (3, height, width)."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = np.array([str(path) for path in paths])  # data workers share an array, and would copy a list

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        with _require_pillow().open(self.paths[index]) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


@dataclass(frozen=True)
class LabeledImages:
    """Images and their classes."""

    images: Tensor | ImageFiles
    """Each is bytes of shape (channels, height, width)."""
    labels: Tensor
    """The class of each image, starting at 0; int64."""

    def __len__(self) -> int:
        return len(self.labels)


def read_images(folder: str | Path) -> tuple[LabeledImages, LabeledImages]:
    """Return the training and validation images in `folder`. Image files are only listed, idx files are read.

    Classes are numbered in the order of their names, the same for both parts.
    """
    folder = Path(folder)
    if (folder / "train-images-idx3-ubyte.gz").is_file():
        return _read_idx(folder, "train"), _read_idx(folder, "t10k")
    files, classes, validation = _list_files(folder)
    class_numbers = {name: number for number, name in enumerate(sorted(set(classes)))}
    if len(class_numbers) < 2 or len(validation.unique()) < 2:
        problem = "has no images of several classes" if folder.is_dir() else "is not a folder"
        raise DataError(f"{folder} {problem}: expected {_IMAGE_LAYOUT}")
    labels = torch.tensor([class_numbers[name] for name in classes])
    return _select(files, labels, ~validation), _select(files, labels, validation)


def _list_files(folder: Path) -> tuple[list[Path], list[str], Tensor]:
    """Return the image files in a folder of classes, the class of each, and whether it is for validation."""
    found = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in _IMAGE_SUFFIXES]
    split = int((folder / "train").is_dir())  # then the class is the second part of a path, not the first
    files = [path for path in found if len(path.relative_to(folder).parts) > split + 1]
    classes = [path.relative_to(folder).parts[split] for path in files]
    if split:
        return files, classes, torch.tensor([path.is_relative_to(folder / "val") for path in files], dtype=torch.bool)
    return files, classes, torch.arange(len(files)) % _VALIDATE_EVERY == _VALIDATE_EVERY - 1


def _select(files: list[Path], labels: Tensor, chosen: Tensor) -> LabeledImages:
    return LabeledImages(ImageFiles([files[at] for at in chosen.nonzero()[:, 0].tolist()]), labels[chosen])


def _read_idx(folder: Path, part: str) -> LabeledImages:
    images, labels = (_read_idx_file(folder / f"{part}-{name}-ubyte.gz") for name in ("images-idx3", "labels-idx1"))
    return LabeledImages(images[:, None], labels.long())


def _read_idx_file(path: Path) -> Tensor:
    """Read an idx file: 3 bytes, the number of dimensions in 1 byte, the size of each in 4 bytes, then the data."""
    if not path.is_file():
        raise DataError(f"{path} is missing: expected {_IMAGE_LAYOUT}")
    try:
        data = bytearray(gzip.decompress(path.read_bytes()))
        header = 4 + 4 * data[3]
        shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, header, 4)]
        return torch.frombuffer(data, dtype=torch.uint8)[header:].view(shape)
    except (OSError, EOFError, IndexError, ValueError, RuntimeError) as error:
        raise DataError(f"{path} is not a complete idx file ({error}): copy or download it again") from error


def crop_square(image: Tensor, size: int, scale: float = 1.0, position: tuple[float, float] = (0.5, 0.5)) -> Tensor:
    """Crop a square from an image (channels, height, width) and resize it to size x size, bilinear with antialiasing.

    The side of the crop is `scale` times the shorter side of the image. `position` is where it lies between the edges,
    (top to bottom, left to right), each from 0 to 1. Draw both from `sample_numpy_rng()`, and each sample has the same
    crop on any number of ranks.

    >>> crop_square(torch.arange(12.0).view(1, 2, 6), size=2).tolist()
    [[[2.0, 3.0], [8.0, 9.0]]]
    """
    if size < 1 or not 0 < scale <= 1:
        raise DataError(
            f"crop_square got size={size} and scale={scale}: size must be at least 1 pixel, scale above 0 and at most 1"
        )
    side = max(1, round(scale * min(image.shape[-2:])))
    top, left = (round(share * (length - side)) for share, length in zip(position, image.shape[-2:], strict=True))
    square = image[None, :, top : top + side, left : left + side]
    return interpolate(square, (size, size), mode="bilinear", antialias=True)[0]


def _require_pillow() -> Any:
    """Return Pillow's Image module, which an extra installs."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("image files need Pillow, which is not installed: pip install 'samestep[recipes]'") from error
    return Image


def convert_pysaliency(folder: str | Path, target: str | Path, width: int, height: int) -> None:
    """Write images and fixations at one size to `target`, for `HDF5Dataset(target, keys=["images", "fixations"])`.

    `images` are bytes (n, 3, height, width). `fixations` are integers (n, most, 2), the row and column of a pixel,
    filled with -1 for images with fewer fixations. Fixations outside of their image are left out. Call it on one rank,
    as in `run.once(convert_pysaliency, ...)`; all ranks and workers then read the file.
    """
    folder, h5py = Path(folder), require_h5py()
    for name in ("stimuli.hdf5", "fixations.hdf5"):
        if not (folder / name).is_file():
            raise DataError(f"{folder} has no {name}: expected {_PYSALIENCY_LAYOUT}")
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(folder / "stimuli.hdf5", "r") as stimuli, h5py.File(target, "w") as out:
        names = stimuli["filenames"].asstr()[:] if "filenames" in stimuli else None
        count = len(stimuli) if names is None else len(names)
        xs, ys, image_numbers = _read_scanpaths(h5py, folder / "fixations.hdf5")
        most = max((int(np.isfinite(xs[image_numbers == number]).sum()) for number in range(count)), default=0)
        images = out.create_dataset("images", (count, 3, height, width), np.uint8, chunks=(1, 3, height, width))
        fixations = out.create_dataset("fixations", (count, most, 2), np.int32, fillvalue=-1)
        for number in range(count):
            image = _read_stimulus(folder, stimuli, number, None if names is None else str(names[number]))
            images[number] = np.asarray(image.convert("RGB").resize((width, height))).transpose(2, 0, 1)
            own = image_numbers == number
            x, y = xs[own] * width / image.width, ys[own] * height / image.height
            inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)  # False for NaN, after the end of a scanpath
            if not inside.any():
                raise DataError(f"image {number} of {folder} has no fixation inside of it: remove it from both files")
            fixations[number, : inside.sum()] = np.stack([y[inside], x[inside]], axis=1)


def _read_scanpaths(h5py: Any, path: Path) -> tuple[_Floats, _Floats, npt.NDArray[np.int64]]:
    """Return the columns and rows of fixations, one scanpath per row with NaN after its end, and the image of each."""
    with h5py.File(path, "r") as file:
        newer = "scanpaths" in file
        names = ("xs", "ys", "n") if newer else ("train_xs", "train_ys", "train_ns")
        group = file["scanpaths"] if newer else file
        if missing := [name for name in names if name not in group]:
            raise DataError(f"{path} has no {', '.join(missing)}: expected {_PYSALIENCY_LAYOUT}")
        xs, ys, image_numbers = (group[name][:] for name in names)
        if newer:  # values after the end of a scanpath are arbitrary
            xs = np.where(np.arange(xs.shape[1]) < group["length"][:][:, None], xs, np.nan)
    return xs.astype(np.float64), ys.astype(np.float64), image_numbers.astype(np.int64)


def _read_stimulus(folder: Path, stimuli: Any, number: int, name: str | None) -> Any:
    pillow = _require_pillow()
    if name is not None:
        if not (folder / name).is_file():
            raise DataError(f"{folder / name} is missing, but stimuli.hdf5 lists it: expected {_PYSALIENCY_LAYOUT}")
        return pillow.open(folder / name)
    if str(number) not in stimuli:
        raise DataError(f"{folder / 'stimuli.hdf5'} has no {number}: expected {_PYSALIENCY_LAYOUT}")
    return pillow.fromarray(stimuli[str(number)][:])
