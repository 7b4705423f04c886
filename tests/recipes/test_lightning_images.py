"""The recipe lightning_images: a Trainer learns the same in one process and on two ranks of `samestep recipe run`."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from samestep import read_metrics
from tests.lightning.trained import closing, max_difference


def train_alone(folder: Path) -> None:
    """Run the recipe's main on a warm rank."""
    closing(import_module("recipes.lightning_images").main, folder)


@pytest.mark.slow
def test_a_trainer_learns_the_same_on_one_rank_and_on_two_of_the_launcher(ranks, tmp_path):
    ranks(1, train_alone, tmp_path / "one", timeout=250)
    command = [sys.executable, "-m", "samestep", "recipe", "run", "--nproc-per-node", "2", "--folder", "launched"]
    command += ["lightning_images", "--out", "two"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stderr
    one, two = (torch.load(tmp_path / name / "weights.pt", weights_only=True) for name in ("one", "two"))
    assert max_difference(one, two) < 1e-6
    records = [read_metrics(tmp_path / name / "metrics.jsonl", by_step=True) for name in ("one", "two")]
    for a, b in zip(*records, strict=True):
        for name in a.keys() - {"time"}:
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), name
    # seeds 0 to 4 of `python -m tests.recipes.seed_spread lightning_images`: 0.939 0.929 0.933 0.919 0.929
    assert records[1][-1]["val/accuracy"] > 0.85
    assert (tmp_path / "launched" / "logs").is_dir()
