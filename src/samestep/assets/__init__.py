"""Weights, texts and images that recipes bring along or take by path, so that they run without a download."""

from importlib import import_module
from typing import TYPE_CHECKING

from samestep.assets.example_data import read_texts, sentences
from samestep.assets.pretrained import minilm, model_folder, smollm2

# Imported when first asked for: they need torch.
_HOMES = {
    "captioned_images": "samestep.assets.example_data",
    "scene": "samestep.assets.example_data",
    "tokenized": "samestep.assets.example_data",
    "write_scenes": "samestep.assets.example_data",
}

if TYPE_CHECKING:
    from samestep.assets.example_data import captioned_images, scene, tokenized, write_scenes

__all__ = [
    "captioned_images",
    "minilm",
    "model_folder",
    "read_texts",
    "scene",
    "sentences",
    "smollm2",
    "tokenized",
    "write_scenes",
]


def __getattr__(name: str) -> object:
    """Import a public name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module 'samestep.assets' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
