"""Models, texts and images for the recipes, from installed packages or from your paths; nothing is downloaded."""

from samestep.assets.example_data import captioned_images, read_texts, scene, sentences, tokenize, write_scenes
from samestep.assets.pretrained import minilm, model_folder, smollm2

__all__ = [
    "captioned_images",
    "minilm",
    "model_folder",
    "read_texts",
    "scene",
    "sentences",
    "smollm2",
    "tokenize",
    "write_scenes",
]
