"""Weights, texts and images that recipes bring along or take by path, so that they run without a download."""

from importlib import import_module
from typing import TYPE_CHECKING

from samestep.assets.folders import model_folder
from samestep.assets.minilm import minilm
from samestep.assets.shakespeare import sentences
from samestep.assets.smollm2 import smollm2
from samestep.assets.texts import read_texts

# Imported when first asked for: they need torch.
_HOMES = {
    "captioned_images": "samestep.assets.captioned",
    "scene": "samestep.assets.scenes",
    "tokenized": "samestep.assets.tokens",
    "write_scenes": "samestep.assets.scenes",
}

if TYPE_CHECKING:
    from samestep.assets.captioned import captioned_images
    from samestep.assets.scenes import scene, write_scenes
    from samestep.assets.tokens import tokenized

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
