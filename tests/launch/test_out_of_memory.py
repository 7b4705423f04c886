"""Out of memory in the first steps: the launcher halves the micro-batch; samples and weights stay the same."""

import re
from pathlib import Path

import pytest
import torch

from samestep import Run
from samestep.environment.world import oom_retries
from samestep.training.lifecycle import is_out_of_memory, out_of_memory_advice
from tests.launch.launched import run_script, start
from tests.warm import Ranks

# Raises the error of a full GPU by hand if a micro-batch has more samples than `limit`.
SCRIPT = """
    import sys, torch
    from torch import nn
    from torch.utils.data import TensorDataset
    from samestep import Run

    global_batch, limit = int(sys.argv[1]), int(sys.argv[2])
    with Run(global_batch=global_batch, seed=0, ledger=True) as run:
        model = run.wrap(nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        data = run.shard(TensorDataset(torch.arange(64.0 * 4).view(-1, 4) / 99), shuffle=True, num_workers=0)
        for epoch in data.epochs(2):
            for step in epoch:
                for (x,) in step:
                    if len(x) > limit and run.rank == 1:
                        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
                    step.mean(model(x).square().sum(1)).backward()
                optimizer.step()
                optimizer.zero_grad()
        if run.is_main:
            torch.save([each.detach() for each in model.parameters()], "weights.pt")
"""
TWO = ["--nproc-per-node", "2", "--folder", "kept", "train.py"]


@pytest.mark.slow
def test_the_micro_batch_is_halved_until_it_fits_and_the_weights_stay_the_same(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ended = start(tmp_path, SCRIPT, "--max-restarts", "1", *TWO, "16", "3").finish(110)
    assert (ended.code, ended.left) == (0, []), ended.err
    message = "samestep: out of memory in the first steps: restarting all ranks with half the micro-batch; the global "
    assert ended.err.count(message) == 2  # 8 rows, 4 rows, 2 rows
    assert "logs so far" not in ended.err  # no restart with the same micro-batch
    assert (
        "micro-batch: 2 row(s) instead of 8, which ran out of memory; the global batch of 16 and the training result "
        "stay the same"
    ) in ended.out
    large = tmp_path / "large"
    large.mkdir()
    monkeypatch.chdir(large)
    ranks(2, run_script, tmp_path / "train.py", "16", "99")
    for mine, theirs in zip(torch.load(tmp_path / "weights.pt"), torch.load(large / "weights.pt"), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_with_one_row_it_fails_and_suggests_a_remedy(tmp_path: Path):
    ended = start(tmp_path, SCRIPT, *TWO, "4", "0").finish(110)
    assert ended.code == 1
    assert ended.err.count("with half the micro-batch") == 1  # 2 rows, 1 row
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB." in ended.err
    assert "out of memory with one row per micro-batch: shard the model with run.wrap(model, 'fsdp')" in ended.err


def train_without_a_launcher(rows: int) -> None:
    with Run(global_batch=8) as run:
        for epoch in run.shard([torch.ones(1)] * 8, micro_batch=rows).epochs(1):
            for step in epoch:
                for _ in step:
                    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_without_a_launcher_the_error_suggests_a_micro_batch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train_without_a_launcher(4)
    assert caught.value.__notes__ == [
        "out of memory in step 1 of this process with 4 row(s) per micro-batch: pass run.shard(..., micro_batch=2), "
        "which gives the same training result; `samestep run` halves it by itself in the first steps"
    ]


def test_out_of_memory_in_a_later_step_is_left_to_the_user():
    advice = out_of_memory_advice(500, 8)
    assert advice.startswith("out of memory after 500 steps with 8 row(s) per micro-batch: pass run.shard")


def test_a_rank_recognizes_that_another_rank_ran_out_of_memory():
    lost = RuntimeError("Connection closed by peer")
    assert not is_out_of_memory(lost)
    lost.add_note("seen from rank 0: rank 1 failed: OutOfMemoryError: CUDA out of memory.")
    assert is_out_of_memory(lost)
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))


def test_the_number_of_retries_is_read_from_the_variable_of_the_launcher():
    assert (oom_retries({}), oom_retries({"SAMESTEP_OOM_RETRIES": "2"})) == (0, 2)


def test_rows_are_halved_rounding_up_and_never_below_one(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("SAMESTEP_OOM_RETRIES", "2")
    with Run(global_batch=10) as run:
        sizes = [len(x) for rows in (None, 5, 1) for x in run.shard([torch.ones(1)] * 10, micro_batch=rows)]
    assert sizes == [3, 3, 3, 1] + [2] * 5 + [1] * 10
    assert len(re.findall("micro-batch: ", capsys.readouterr().out)) == 3
