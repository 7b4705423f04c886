"""Images and the places people looked at, out of pysaliency's files, as one HDF5 file with a row a sample."""

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

_ENDINGS: Final = (".jpg", ".jpeg", ".png")
_HELD_OUT: Final = 10  # of a folder without a split, every so-manieth image
_IMAGE_LAYOUT: Final = (
    "a folder of classes (CLASS/*.jpg or *.png, every tenth for validation; or train/CLASS and val/CLASS, as in "
    "ImageNet), or one with MNIST's idx files (train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-...)"
)


class ImageFiles:
    """Images in files, read when asked for: bytes of shape (3, height, width)."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = np.array([str(path) for path in paths])  # data workers share an array, and would copy a list

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        with require_pillow().open(self.paths[index]) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


@dataclass(frozen=True)
class LabelledImages:
    """Images and what they show."""

    images: Tensor | ImageFiles
    """By index bytes of shape (channels, height, width)."""
    labels: Tensor
    """The class of each, from 0; int64."""

    def __len__(self) -> int:
        return len(self.labels)


def read_images(folder: str | Path) -> tuple[LabelledImages, LabelledImages]:
    """What to learn from and what to be judged by; files are only listed here, idx files are read whole.

    Classes are numbered in the order of their names, the same for both parts.
    """
    place = Path(folder)
    if (place / "train-images-idx3-ubyte.gz").is_file():
        return _idx(place, "train"), _idx(place, "t10k")
    files, classes, held = _listed(place)
    numbers = {name: number for number, name in enumerate(sorted(set(classes)))}
    if len(numbers) < 2 or len(set(held)) < 2:
        problem = "has no images of several classes" if place.is_dir() else "is no folder"
        raise DataError(f"{place} {problem}: expected is {_LAYOUT}")
    labels, judged = torch.tensor([numbers[name] for name in classes]), torch.tensor(held)
    return _part(files, labels, ~judged), _part(files, labels, judged)


def _listed(place: Path) -> tuple[list[Path], list[str], list[bool]]:
    """Files of images in a folder of classes, the class of each, and whether it is for validation."""
    found = [path for path in sorted(place.rglob("*")) if path.suffix.lower() in _ENDINGS]
    split = int((place / "train").is_dir())  # then the class is the second folder of a path, not the first
    files = [path for path in found if len(path.relative_to(place).parts) > split + 1]
    classes = [path.relative_to(place).parts[split] for path in files]
    held = [path.is_relative_to(place / "val") if split else at % _HELD_OUT == 9 for at, path in enumerate(files)]
    return files, classes, held


def _part(files: list[Path], labels: Tensor, chosen: Tensor) -> LabelledImages:
    return LabelledImages(ImageFiles([files[at] for at in chosen.nonzero()[:, 0].tolist()]), labels[chosen])


def cut_square(image: Tensor, size: int, part: float = 1.0, place: tuple[float, float] = (0.5, 0.5)) -> Tensor:
    """A square of an image (channels, height, width), brought to `size` pixels a side with bilinear antialiasing.

    Its side is `part` of the shorter side of the image; `place` says where between the edges, down and across. Draw
    both from `sample_numpy_rng()`, and each sample has its own crop on any number of ranks.

    >>> cut_square(torch.arange(12.0).view(1, 2, 6), size=2).tolist()
    [[[2.0, 3.0], [8.0, 9.0]]]
    """
    if size < 1 or not 0 < part <= 1:
        raise DataError(
            f"cut_square got size={size} and part={part}: give pixels from 1 up, and a part above 0, up to 1"
        )
    side = max(1, round(part * min(image.shape[-2:])))
    top, left = (round(share * (length - side)) for share, length in zip(place, image.shape[-2:], strict=True))
    square = image[None, :, top : top + side, left : left + side]
    return interpolate(square, (size, size), mode="bilinear", antialias=True)[0]


def _idx(folder: Path, kind: str) -> LabelledImages:
    images, labels = (_array(folder / f"{kind}-{what}-ubyte.gz") for what in ("images-idx3", "labels-idx1"))
    return LabelledImages(images[:, None], labels.long())


def _array(path: Path) -> Tensor:
    """An idx file: four bytes whose last is the number of dimensions, each of these in four bytes, then bytes."""
    if not path.is_file():
        raise DataError(f"{path} is missing: expected is {_LAYOUT}")
    try:
        plain = bytearray(gzip.decompress(path.read_bytes()))
        head = 4 + 4 * plain[3]
        sides = [int.from_bytes(plain[at : at + 4], "big") for at in range(4, head, 4)]
        return torch.frombuffer(plain, dtype=torch.uint8)[head:].view(sides)
    except (OSError, EOFError, IndexError, ValueError, RuntimeError) as error:
        raise DataError(f"{path} is no whole idx file ({error}): copy or download it anew") from error


def require_pillow() -> Any:
    """Pillow's Image, which comes with an extra."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("image files need Pillow, which is not installed: pip install 'samestep[recipes]'") from error
    return Image


_LAYOUT: Final = (
    "a folder with the files of pysaliency: stimuli.hdf5 (datasets 0, 1, 2, ... of (height, width, 3) bytes; or "
    "`filenames`, relative to it) and fixations.hdf5 (train_xs, train_ys: a scanpath a row; train_ns: the image; or a "
    "group `scanpaths` with xs, ys, n and length)"
)
Floats = npt.NDArray[np.float64]


def pair_fixations(folder: str | Path, target: str | Path, width: int, height: int) -> None:
    """Write images and fixations at one size into `target`, for `HDF5Dataset(target, keys=["images", "fixations"])`.

    `images` are bytes (n, 3, height, width), `fixations` whole numbers (n, most, 2), row and column of a pixel, -1
    where an image has fewer than most. Those outside of their image are left out. Call it on one rank,
    `run.once(pair_fixations, ...)`: what every rank and worker reads from then on is the file.
    """
    place, h5py = Path(folder), require_h5py()
    for name in ("stimuli.hdf5", "fixations.hdf5"):
        if not (place / name).is_file():
            raise DataError(f"{place} has no {name}: expected is {_LAYOUT}")
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(place / "stimuli.hdf5", "r") as stimuli, h5py.File(target, "w") as out:
        names = stimuli["filenames"].asstr()[:] if "filenames" in stimuli else None
        count = len(stimuli) if names is None else len(names)
        with h5py.File(place / "fixations.hdf5", "r") as file:
            xs, ys, ns = _scanpaths(file, place / "fixations.hdf5")
        most = max((int(np.isfinite(xs[ns == number]).sum()) for number in range(count)), default=0)
        images = out.create_dataset("images", (count, 3, height, width), np.uint8, chunks=(1, 3, height, width))
        fixations = out.create_dataset("fixations", (count, most, 2), np.int32, fillvalue=-1)
        for number in range(count):
            image = _image(place, stimuli, number, None if names is None else str(names[number]))
            images[number] = np.asarray(image.convert("RGB").resize((width, height))).transpose(2, 0, 1)
            x, y = xs[ns == number] * width / image.width, ys[ns == number] * height / image.height
            inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)  # not so where a scanpath has ended: NaN
            if not inside.any():
                raise DataError(f"image {number} of {place} has no fixation inside of it: leave it out of both files")
            fixations[number, : inside.sum()] = np.stack([y[inside], x[inside]], axis=1)


def _scanpaths(file: Any, path: Path) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """Columns and rows of pixels, a scanpath a row with NaN behind its end, and the image of each."""
    newer = "scanpaths" in file
    group, wanted = (file["scanpaths"], ("xs", "ys", "n")) if newer else (file, ("train_xs", "train_ys", "train_ns"))
    if missing := [name for name in wanted if name not in group]:
        raise DataError(f"{path} lacks {', '.join(missing)}: expected is {_LAYOUT}")
    xs, ys, ns = (group[name][:] for name in wanted)
    if newer:  # what stands behind the end of a scanpath is whatever was there
        xs = np.where(np.arange(xs.shape[1]) < group["length"][:][:, None], xs, np.nan)
    return xs.astype(np.float64), ys.astype(np.float64), ns.astype(np.int64)


def _image(folder: Path, stimuli: Any, number: int, name: str | None) -> Any:
    pillow = require_pillow()
    if name is not None:
        if not (folder / name).is_file():
            raise DataError(f"{folder / name} is missing, which stimuli.hdf5 lists: expected is {_LAYOUT}")
        return pillow.open(folder / name)
    if str(number) not in stimuli:
        raise DataError(f"{folder / 'stimuli.hdf5'} lacks {number}: expected is {_LAYOUT}")
    return pillow.fromarray(stimuli[str(number)][:])
