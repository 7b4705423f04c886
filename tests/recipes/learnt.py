"""A recipe called on warm ranks: what it learnt and what it logged."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

from samestep import read_metrics

PATIENCE = 110.0  # seconds; an idle machine needs about twenty
CLOCK = {"time", "train/samples_per_s", "student/speedup", "untrained/speedup"}


def train(name: str, folder: Path, options: dict[str, object]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Run a recipe's main; its weights, and the last value of everything that it logged. For a warm rank."""
    import_module(f"recipes.{name}").main(out=folder, **options)
    last: dict[str, float] = {}
    for record in read_metrics(folder / "metrics.jsonl", by_step=True):
        last |= record
    return torch.load(folder / "weights.pt", weights_only=True), last


def on_one_and_two(ranks, name: str, folder: Path, then: dict[str, object] | None = None, **options: object):
    """The same training twice; the metrics of both and the largest difference between their weights.

    `then` holds options of the second, which may use what the first has written.
    """
    ((one, alone),) = ranks(1, train, name, folder / "one", options, timeout=PATIENCE)
    (two, together), *_ = ranks(2, train, name, folder / "two", options | (then or {}), timeout=PATIENCE)
    assert one.keys() == two.keys()
    return max(float((one[key] - two[key]).abs().max()) for key in one), alone, together


def same_numbers(alone: dict[str, float], together: dict[str, float], rel: float = 1e-6) -> None:
    """Hold everything logged on two ranks against one, but for the clock."""
    assert alone.keys() - CLOCK == together.keys() - CLOCK
    for name in alone.keys() - CLOCK:
        assert together[name] == pytest.approx(alone[name], rel=rel, abs=1e-5), name
