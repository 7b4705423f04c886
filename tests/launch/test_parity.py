"""`samestep parity`: a script on one rank and on two, in float64, without touching the script's own folders."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.cli.main import main
from samestep.cli.parity_command import compare
from samestep.errors import LaunchError
from tests.launch.launched import LAUNCHERS

SCRIPT = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from samestep import Run

generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(50, 6, generator=generator), torch.randint(0, 3, (50,), generator=generator))
with Run(global_batch=8, seed=0, folder="mine", precision="fp32") as run:
    model = run.wrap(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if run.is_main:
        torch.save(model.state_dict(), run.folder / "weights.pt")
    train = run.shard(data, shuffle=True)
    checkpoint = run.checkpoint("out", model=model, optimizer=optimizer, train=train)
    for epoch in train.epochs(100):
        for step in epoch:
            for inputs, labels in step:
                losses = cross_entropy(model(inputs), labels, reduction="none")
                step.mean(losses).backward()
            optimizer.step()
            optimizer.zero_grad()
        checkpoint.save()
"""


@pytest.mark.slow
def test_a_script_that_does_not_depend_on_the_ranks_is_the_same_in_float64(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    command = [sys.executable, "-m", "samestep", "parity", "--steps", "9", "train.py"]
    environment = {**clean, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[:2] == ["ranks  steps  largest difference from 1 rank(s)", "    1      9"]
    assert float(lines[2].split()[2]) < 1e-12
    assert lines[3] == "the same: every logged value agrees within 1e-09 in fp64"
    assert "precision: fp64 (by SAMESTEP_PRECISION)" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]  # neither logs nor checkpoints of the script


def test_a_script_that_fails_is_reported_with_the_likely_folder(monkeypatch, capsys):
    start, false = subprocess.Popen, ["false"]
    monkeypatch.setattr("samestep.cli.parity_command.subprocess.Popen", lambda *args, **options: start(false))
    assert main(["parity", __file__]) == 2
    assert capsys.readouterr().err.endswith(
        "the script ended with exit code 1 on 1 rank(s): its report is above; if a folder is missing, write files "
        "below run.folder, since parity replaces the folder that the script passes to Run\n"
    )


def test_the_first_step_that_differs_is_named(monkeypatch, capsys):
    losses = {1: [3.0, 2.0, 1.0], 2: [3.0, 2.0, 1.0], 3: [3.0, 2.5, 0.0]}
    monkeypatch.setattr(
        "samestep.cli.parity_command._run",
        lambda count, *_: [record(step, loss=loss) for step, loss in enumerate(losses[count])],
    )
    assert main(["parity", "--ranks", "1,2,3", __file__]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ranks  steps  largest difference from 1 rank(s)",
        "    1      3",
        "    2      3  0.0e+00 (loss, step 0)",
        "    3      3  3.3e-01 (loss, step 2)",
        "different from step 1 on: loss is 2.0 on 1 rank(s) and 2.5 on 3; 'If a script differs' in docs/parity.md "
        "lists the causes and what to write instead",
    ]


def test_the_section_that_the_message_names_exists():
    page = Path(__file__).parents[2] / "docs" / "parity.md"
    assert "## If a script differs\n" in page.read_text()


def record(step, **values):
    return {"step": step, "time": 1.0 + step, "train/samples_per_s": 7.0 * step, **values}


def test_values_are_compared_relative_to_the_largest_of_their_metric():
    one = [record(0, loss=100.0), record(1, loss=1e-3)]
    other = [record(0, loss=100.0), record(1, loss=2e-3)]
    assert [(each.relative, each.metric, each.step) for each in compare(one, other)] == [
        (0.0, "loss", 0),
        (pytest.approx(1e-5), "loss", 1),
    ]


def test_a_value_that_is_missing_or_not_finite_in_one_run_differs():
    one = [record(0, loss=1.0), record(1, loss=math.nan), record(2, loss=math.nan)]
    other = [record(0), record(1, loss=math.nan), record(2, loss=1.0)]
    assert [each.relative for each in compare(one, other)] == [math.inf, 0.0, math.inf]


@pytest.mark.parametrize("diverged", [math.nan, math.inf])
def test_a_value_that_is_not_finite_hides_no_difference(diverged):
    one = [record(0, loss=diverged), record(1, loss=1.0), record(2, loss=1.0)]
    other = [record(0, loss=diverged), record(1, loss=3.0), record(2, loss=diverged)]
    assert [each.relative for each in compare(one, other)] == [0.0, 2.0, math.inf]


def test_a_value_that_the_first_run_lacks_differs():
    one = [record(0, loss=1.0), record(1, loss=1.0)]
    other = [record(0, loss=1.0, accuracy=0.5), record(1, loss=1.0)]
    assert [(each.metric, each.relative) for each in compare(one, other)] == [
        ("loss", 0.0),
        ("accuracy", math.inf),
        ("loss", 0.0),
    ]


def test_runs_of_different_lengths_and_runs_without_metrics_raise():
    with pytest.raises(LaunchError, match="the runs logged different steps, 1 and 2 records: the script must take"):
        compare([record(0, loss=1.0)], [record(0, loss=1.0), record(1, loss=1.0)])
    for empty in ([record(0)], []):
        with pytest.raises(
            LaunchError, match=r"logged no metric: it must train inside `with Run.*step\.mean.*Lightning"
        ):
            compare(empty, empty)


@pytest.mark.parametrize("counts", ["1", "1,1", "two,1", "0,2", ""])
def test_the_numbers_of_ranks_must_be_different(counts, capsys):
    assert main(["parity", "--ranks", counts, __file__]) == 2
    assert f"samestep: --ranks={counts} must be at least two different numbers" in capsys.readouterr().err
