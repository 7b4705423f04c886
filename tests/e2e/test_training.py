"""Complete trainings with the real launcher: the same results, and reports of failures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from samestep import read_metrics
from tests.launch.launched import start

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.slow


def test_the_digits_recipe_learns_the_same_on_one_rank_and_on_two(tmp_path):
    recipe = [str(ROOT / "recipes" / "digits.py"), "--epochs", "3"]
    subprocess.run([sys.executable, *recipe, "--out", "one"], cwd=tmp_path, check=True, timeout=250)
    launch = [sys.executable, "-m", "samestep", "run", "--nproc-per-node", "2", "--folder", "two"]
    subprocess.run([*launch, *recipe, "--out", "two"], cwd=tmp_path, check=True, timeout=250)
    one, two = (torch.load(tmp_path / name / "weights.pt", weights_only=True) for name in ("one", "two"))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-6
    records = [read_metrics(tmp_path / name / "metrics.jsonl", by_step=True) for name in ("one", "two")]
    for a, b in zip(*records, strict=True):
        assert a["step"] == b["step"]
        assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-6)
        assert a["train/learning_rate"] == b["train/learning_rate"] == 1e-3
    accuracy = [record["epoch/accuracy"] for record in records[1] if "epoch/accuracy" in record]
    assert len(accuracy) == 3
    # seeds 0 to 4 of `python -m tests.recipes.seed_spread digits`: 0.913 0.906 0.899 0.896 0.896; chance is 0.1
    assert accuracy[-1] > 0.85
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert (summary["status"], summary["world_size"], summary["steps"], summary["samples"]) == ("finished", 2, 36, 4500)


def test_an_exception_in_once_ends_the_job_with_its_traceback_last(tmp_path):
    ended = start(
        tmp_path,
        """
        from samestep import Run

        def fetch():
            raise ConnectionError("the mirror is down")

        with Run(global_batch=4) as run:
            run.once(fetch)
        """,
        "--nproc-per-node", "2", "--folder", "launched", "train.py",
    ).finish(90)  # fmt: skip
    assert ended.code == 1
    assert ended.left == []
    tail = ended.err.strip().splitlines()[-25:]
    assert any(line.startswith("ConnectionError: the mirror is down") for line in tail)
    assert "raised on rank 0 in run.once(fetch), for every rank:" in ended.err


def test_a_rank_killed_in_training_ends_the_job_and_is_reported(tmp_path):
    ended = start(
        tmp_path,
        """
        import os, signal, torch
        from samestep import Run

        with Run(global_batch=4) as run:
            model = run.wrap(torch.nn.Linear(1, 1))
            data = torch.utils.data.TensorDataset(torch.ones(64, 1))
            for epoch in run.shard(data).epochs(1):
                for step in epoch:
                    if run.rank == 1 and step.number == 3:
                        os.kill(os.getpid(), signal.SIGKILL)
                    for (x,) in step:
                        step.mean(model(x)[:, 0]).backward()
        """,
        "--nproc-per-node", "2", "--folder", "launched", "train.py",
    ).finish(90)  # fmt: skip
    assert ended.code == 137
    assert ended.left == []
    assert "rank 1" in ended.err
    assert "SIGKILL" in ended.err
    assert "out-of-memory" in ended.err
