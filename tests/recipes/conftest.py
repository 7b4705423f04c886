"""Recipes of tests write their folders beside the test's other files, not into the repository."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from samestep.assets import smollm2

WORDS = 4096  # of 49,152: what a cut costs is the width of its logits


@pytest.fixture(scope="session")
def smollm2_by_layers(model_cache) -> dict[int, Path]:
    """SmolLM2, and cuts of it with real weights but fewer words: quick to compute with, and no longer good models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(model_cache))
        cuts = {layers: with_fewer_words(smollm2(layers), model_cache / f"words-{layers}") for layers in (1, 2)}
        return {30: smollm2(), **cuts}


def with_fewer_words(folder: Path, target: Path) -> Path:
    """The same model with the commonest words alone: byte pairs are numbered in the order in which they were found."""
    shutil.copytree(folder, target)
    state = load_file(folder / "model.safetensors")
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"][:WORDS].clone()
    save_file(state, target / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"vocab_size": WORDS}))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model = tokenizer["model"]
    model["vocab"] = {word: number for word, number in model["vocab"].items() if number < WORDS}
    pairs = (pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"])
    model["merges"] = [pair for pair in pairs if "".join(pair) in model["vocab"]]
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    return target


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
