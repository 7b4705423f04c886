"""Images with captions: those of a file, or the handwritten digits that ship with scikit-learn."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from samestep.errors import DataError

_NAMES: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_PHRASES: Final = ("the digit {}", "a handwritten {}", "{}")
_LAYOUT: Final = (
    "an .npz file with images (n, side, side) of whole grey levels from 0, labels (n,) and captions (n,) of text"
)


class Captioned(NamedTuple):
    """Images of grey levels, their classes, and what is said of each."""

    images: Tensor
    """Whole grey levels from 0, int64 of shape (n, height, width)."""
    labels: Tensor
    """The class of each, int64 of shape (n,)."""
    captions: list[str]
    """A sentence for each."""


def captioned_images(path: str | Path | None) -> Captioned:
    """What an .npz file holds, or 1,797 digits of 8x8 pixels and 17 levels, called "the digit seven" and the like."""
    if path is None:
        return _digits()
    images, labels, captions = _arrays(path)
    if images.ndim != 3 or labels.shape != captions.shape or len(images) != len(labels) or not images.size:
        shapes = f"images {images.shape}, labels {labels.shape} and captions {captions.shape}"
        raise DataError(f"{path} holds {shapes}: expected is {_LAYOUT}")
    if wrong := [name for name, each in (("images", images), ("labels", labels)) if not _counts(each)]:
        raise DataError(f"{path} holds {wrong[0]} that are no whole numbers from 0: expected is {_LAYOUT}")
    return Captioned(torch.tensor(images).long(), torch.tensor(labels).long(), [str(text) for text in captions])


def _arrays(path: str | Path) -> list[Any]:
    try:
        with np.load(path) if Path(path).suffix == ".npz" else nullcontext[Any]({}) as file:
            missing = [name for name in Captioned._fields if name not in file]
            found = [file[name] for name in Captioned._fields if name in file]
    except (OSError, ValueError, BadZipFile) as error:
        raise DataError(f"{path} cannot be read ({error}): expected is {_LAYOUT}") from error
    if missing:
        raise DataError(f"{path} holds no {', '.join(missing)}: expected is {_LAYOUT}")
    return found


def _counts(values: Any) -> bool:
    """Whether these are whole numbers from 0: greys from 0 to 1, cut to whole ones, would all be black."""
    return values.dtype.kind in "biuf" and bool(((values >= 0) & (values == np.floor(values))).all())


def _digits() -> Captioned:
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    captions = [_PHRASES[at % len(_PHRASES)].format(_NAMES[label]) for at, label in enumerate(data.target)]
    return Captioned(torch.tensor(data.images).long(), torch.tensor(data.target), captions)
