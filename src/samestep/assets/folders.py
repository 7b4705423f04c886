"""A path that should be the folder of a Hugging Face model, looked at before anything else tries to read it."""

from pathlib import Path
from typing import Final

from samestep.errors import DataError

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
