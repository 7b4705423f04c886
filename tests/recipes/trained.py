"""Small trainings of recipes: their options, how to run them on warm ranks, and what they left behind."""

import json
import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from samestep import read_metrics
from samestep.assets import smollm2
from samestep.loggers.run_files import WAIT_PREFIX

TIMEOUT = 280.0  # seconds; an idle machine needs about 20
TIMINGS = {"time", "train/samples_per_s", "student/speedup", "untrained/speedup"}
VOCABULARY = 4096  # of 49,152 tokens: most of the cost of a truncated model is the width of its logits
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")

# The trainings whose results tests check, as name -> (recipe, options). A `Path` that names a number of layers is
# replaced by the folder of SmolLM2 with that many layers. `python -m tests.recipes.seed_spread NAME` repeats one of
# them with several seeds.
SMALL_RUNS: dict[str, tuple[str, dict[str, object]]] = {
    "digits": ("digits", {"epochs": 3}),
    "contrastive": ("contrastive", {"epochs": 12}),
    "cfg_diffusion": ("cfg_diffusion", {"epochs": 6, "width": 48, "layers": 2, "samples": 5, "passes": 8}),
    "progressive_images": ("progressive_images", {"epochs": 4, "size": 16, "global_batch": 128}),
    "fashion": ("progressive_images", {"data": FASHION_MNIST, "epochs": 4, "size": 16, "every": 40}),
    "saliency": ("saliency", {"epochs": 2, "entropy": 0.01}),
    "lightning_images": ("lightning_images", {}),
    "distill_features": ("distill", {"count": 640, "held_out": 101, "length": 16}),
    "distill_logits": (
        "distill",
        {"mode": "logits", "teacher": Path("2"), "layers": 1, "count": 96, "held_out": 21, "length": 12},
    ),
    "distill_top_k": (
        "distill",
        {"mode": "logits", "teacher": Path("1"), "top_k": 20, "teacher_dtype": "bfloat16", "width": 64, "layers": 1,
         "gradient_checkpointing": True, "count": 96, "held_out": 21, "length": 12},
    ),
    "finetune": ("finetune", {"model": Path("2"), "count": 128, "held_out": 21, "length": 12, "dropout": 0.2}),
    "latent_adapter_truncated": (
        "latent_adapter",
        {"models": [Path("1"), Path("2")], "count": 160, "held_out": 12, "length": 10},
    ),
    "latent_adapter": (
        "latent_adapter",
        {"models": [Path("30")], "latents": 8, "count": 128, "held_out": 24, "length": 12},
    ),
}  # fmt: skip


def small_run(name: str, models: dict[int, Path] | None = None) -> tuple[str, dict[str, object]]:
    """The recipe and the options of a small run, with the folders of its models."""
    recipe, options = SMALL_RUNS[name]

    def folder(value: object) -> object:
        if isinstance(value, list):
            return [folder(each) for each in value]
        return (models or {})[int(value.name)] if isinstance(value, Path) and value.name.isdigit() else value

    return recipe, {key: folder(value) for key, value in options.items()}


def train(name: str, folder: Path, options: dict[str, object]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Run a recipe's main on a warm rank; return its weights and the last value of each metric that it logged.

    Without how long ranks waited for others, which one rank alone does not log.
    """
    import_module(f"recipes.{name}").main(out=folder, **options)
    last: dict[str, float] = {}
    for record in read_metrics(folder / "metrics.jsonl", by_step=True):
        last |= {name: value for name, value in record.items() if not name.startswith(WAIT_PREFIX)}
    weights, adapter = folder / "weights.pt", folder / "adapter" / "adapter_model.safetensors"
    return torch.load(weights, weights_only=True) if weights.exists() else load_file(adapter), last


def train_on_one_and_two(ranks, run: tuple[str, dict[str, object]], folder: Path, **second_options: object):
    """Train on one rank, then on two; return the largest difference between the weights and the metrics of both runs.

    `second_options` are added for the second run, which may use what the first has written.
    """
    recipe, options = run
    ((one, metrics_one),) = ranks(1, train, recipe, folder / "one", options, timeout=TIMEOUT)
    (two, metrics_two), *_ = ranks(2, train, recipe, folder / "two", options | second_options, timeout=TIMEOUT)
    assert one.keys() == two.keys()
    return max(float((one[key] - two[key]).abs().max()) for key in one), metrics_one, metrics_two


def assert_same_metrics(one: dict[str, float], two: dict[str, float], rel: float = 1e-6) -> None:
    """Compare everything that two runs have logged, except timings."""
    assert one.keys() - TIMINGS == two.keys() - TIMINGS
    for name in one.keys() - TIMINGS:
        assert two[name] == pytest.approx(one[name], rel=rel, abs=1e-5), name


def truncated_models(cache: Path) -> dict[int, Path]:
    """SmolLM2 by number of layers: the full model, and the first 1 and 2 layers with a smaller vocabulary.

    The truncated ones keep real weights and are fast to compute, but they are not useful language models.
    """
    small = {layers: with_smaller_vocabulary(smollm2(layers), cache / f"vocabulary-{layers}") for layers in (1, 2)}
    return {30: smollm2(), **small}


def with_smaller_vocabulary(folder: Path, target: Path) -> Path:
    """Copy a model with its most frequent tokens only, which have the lowest numbers in byte-pair encoding."""
    if target.is_dir():
        return target
    shutil.copytree(folder, target)
    state = load_file(folder / "model.safetensors")
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"][:VOCABULARY].clone()
    save_file(state, target / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"vocab_size": VOCABULARY}))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model = tokenizer["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < VOCABULARY}
    merges = (pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"])
    model["merges"] = [pair for pair in merges if "".join(pair) in model["vocab"]]
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    return target
