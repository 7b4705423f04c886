"""Image datasets: labeled images from folders or idx files, and images with fixations from files of pysaliency."""

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from samestep.data.hdf5 import require_h5py
from samestep.errors import DataError

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
