"""Labelled images from a path: a folder of classes, ImageNet's two folders of them, or MNIST's idx files."""

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from samestep.errors import DataError

_ENDINGS: Final = (".jpg", ".jpeg", ".png")
_HELD_OUT: Final = 10  # of a folder without a split, every so-manieth image
_LAYOUT: Final = (
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
