"""Out of memory in the first steps under the launcher: half the micro-batch, the same samples, the same weights."""

import re
from pathlib import Path

import pytest
import torch

from samestep import Run
from samestep.environment.world import micro_batch_halvings
from samestep.training.lifecycle import advise, is_out_of_memory
from tests.launch.started import run_script, start
from tests.warm import Ranks

# Memory for some rows; what a GPU would say is raised by hand, for this machine has none that could be full.
SCRIPT = """
    import sys, torch
    from torch import nn
    from torch.utils.data import TensorDataset
    from samestep import Run

    global_batch, room = int(sys.argv[1]), int(sys.argv[2])
    with Run(global_batch=global_batch, seed=0, ledger=True) as run:
        model = run.wrap(nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        data = run.shard(TensorDataset(torch.arange(64.0 * 4).view(-1, 4) / 99), shuffle=True, workers=0)
        for epoch in data.epochs(2):
            for step in epoch:
                for (x,) in step:
                    if len(x) > room and run.rank == 1:
                        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
                    step.mean(model(x).square().sum(1)).backward()
                optimizer.step()
                optimizer.zero_grad()
        if run.is_main:
            torch.save([each.detach() for each in model.parameters()], "weights.pt")
"""
TWO = ["--nproc-per-node", "2", "--folder", "kept", "train.py"]


@pytest.mark.slow
def test_the_micro_batch_is_halved_until_it_fits_and_what_is_learnt_stays(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ended = start(tmp_path, SCRIPT, "--max-restarts", "1", *TWO, "16", "3").finish(110)
    assert (ended.code, ended.left) == (0, []), ended.err
    told = "samestep: out of memory in the first steps, so all ranks start anew with half the micro-batch; the global "
    assert ended.err.count(told) == 2  # 8 rows, 4 rows, 2 rows
    assert "start anew; logs so far" not in ended.err  # no rank was restarted as it was
    assert (
        "micro-batch: 2 row(s) instead of 8, since that ran out of memory; the global batch of 16 and what is learnt "
        "stay the same"
    ) in ended.out
    roomy = tmp_path / "roomy"
    roomy.mkdir()
    monkeypatch.chdir(roomy)
    ranks(2, run_script, tmp_path / "train.py", "16", "99")
    for mine, theirs in zip(torch.load(tmp_path / "weights.pt"), torch.load(roomy / "weights.pt"), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_with_one_row_it_fails_and_says_what_would_help(tmp_path: Path):
    ended = start(tmp_path, SCRIPT, *TWO, "4", "0").finish(110)
    assert ended.code == 1
    assert ended.err.count("with half the micro-batch") == 1  # 2 rows, 1 row
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB." in ended.err
    assert "out of memory with one row in a micro-batch: cut the model, run.wrap(model, 'fsdp')" in ended.err


def train_without_a_launcher(rows: int) -> None:
    with Run(global_batch=8) as run:
        for epoch in run.shard([torch.ones(1)] * 8, micro_batch=rows).epochs(1):
            for step in epoch:
                for _ in step:
                    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_without_a_launcher_the_error_says_what_to_write():
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train_without_a_launcher(4)
    assert caught.value.__notes__ == [
        "out of memory in step 1 of this process, with 4 row(s) in a micro-batch: pass run.shard(..., micro_batch=2), "
        "which learns the same; `samestep run` halves it by itself in the first steps"
    ]


def test_later_on_a_person_should_look():
    assert advise(500, 8).startswith("out of memory after 500 steps, with 8 row(s) in a micro-batch: pass run.shard")


def test_a_rank_knows_that_another_one_ran_out_of_memory():
    lost = RuntimeError("Connection closed by peer")
    assert not is_out_of_memory(lost)
    lost.add_note("seen from rank 0: rank 1 failed: OutOfMemoryError: CUDA out of memory.")
    assert is_out_of_memory(lost)
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))


def test_halvings_are_read_from_what_the_launcher_exports():
    assert (micro_batch_halvings({}), micro_batch_halvings({"SAMESTEP_MICRO_BATCH_HALVINGS": "2"})) == (0, 2)


def test_rows_are_halved_rounding_up_and_never_below_one(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("SAMESTEP_MICRO_BATCH_HALVINGS", "2")
    with Run(global_batch=10) as run:
        sizes = [len(x) for wish in (None, 5, 1) for x in run.shard([torch.ones(1)] * 10, micro_batch=wish)]
    assert sizes == [3, 3, 3, 1] + [2] * 5 + [1] * 10
    assert len(re.findall("micro-batch: ", capsys.readouterr().out)) == 3
