"""Runs whose own folder lies on a disk that fills up: what goes on, what is an error, what is lost."""

import os
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Run, read_metrics
from samestep.checkpoint.checkpoint_folder import newest_sound
from samestep.data.audit import audit
from samestep.errors import LogError
from samestep.loggers import jsonl as appended
from tests.small_disk import SmallDisk, small_disk

STEPS = 30


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", 512) as disk:
        yield disk


def train(disk: SmallDisk, full, saves=(), ledger=True, steps=STEPS):
    """Train with a disk that is full from one step to another, and save after others; warnings of this rank."""
    retry, appended.RETRY_SECONDS = appended.RETRY_SECONDS, 0.0
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            with Run(global_batch=2, seed=0, ledger=ledger) as run:
                model = run.wrap(nn.Linear(1, 1))
                data = run.shard(TensorDataset(torch.zeros(2 * steps, 1)), num_workers=0, shuffle=True)
                checkpoint = run.checkpoint(disk.path / "out", model=model, train=data)
                for epoch in data.epochs(1):
                    for step in epoch:
                        for (x,) in step:
                            step.mean(model(x).sum(1)).backward()
                        if step.number in full:
                            checkpoint.wait()
                            run.once((disk.fill, disk.mend)[full.index(step.number)])
                        # more than fits into what was allotted to the files before
                        run.log({f"many/{number}": 1.0 for number in range(30)}, now=True)
                        if step.number in saves:
                            checkpoint.save()
                checkpoint.wait()
        finally:
            appended.RETRY_SECONDS = retry
    return [str(each.message) for each in given]


@pytest.mark.parametrize("size", [1, 2])
def test_a_disk_that_is_full_for_a_while_costs_a_training_nothing(ranks, disk, size):
    warned = ranks(size, train, disk, (5, 20), (25,))
    out = disk.path / "out"
    named = {text.split(" cannot be written: the disk is full: make room; ")[0] for text in warned[0]}
    assert str(out / "metrics.jsonl") in named
    assert str(out / "log.txt") in named
    assert [record["step"] for record in read_metrics(out / "metrics.jsonl", by_step=True)] == list(range(STEPS))
    assert "metrics.jsonl is written again; nothing is missing in it" in (out / "log.txt").read_text()
    assert audit(out).exactly_once
    assert newest_sound(out)[1].step == 26


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_that_a_full_disk_does_not_take_is_an_error_on_all_ranks_and_the_one_before_stays(
    ranks, disk, size
):
    told = ranks.errors(size, train, disk, (5,), (2, 6), False)
    remedy = "make room, or keep fewer with keep=; the checkpoints already published are untouched"
    assert all("samestep.errors.CheckpointError: " in text and remedy in text for text in told)
    assert all("Error: rank 0: " in text for text in told) or size == 1
    disk.mend()
    assert newest_sound(disk.path / "out")[1].step == 3


@pytest.mark.parametrize("size", [1, 2])
def test_no_position_is_saved_that_the_ledger_does_not_prove(ranks, disk, size):
    told = ranks.errors(size, train, disk, (5,), (2, 290), True, 300)
    assert all("the disk is full: make room, or run with ledger=False" in text for text in told)
    disk.mend()
    assert newest_sound(disk.path / "out")[1].step == 3


@pytest.mark.parametrize("size", [1, 2])
def test_no_rank_ends_well_where_a_ledger_is_not_whole(ranks, disk, size):
    told = ranks.errors(size, train, disk, (5,), (), True, 300)
    words = "rank-00000.bin cannot be written: the disk is full: make room, or run with ledger=False"
    assert words in told[0]
    assert all("the disk is full: make room, or run with ledger=False" in text for text in told)


@pytest.mark.parametrize("size", [1, 2])
def test_a_disk_that_is_read_only_from_the_start_costs_logs_and_refuses_checkpoints(ranks, disk, size):
    disk.freeze(True)
    warned = ranks(size, train, disk, (), (), False)
    assert any("log.txt lacks" in text and "the disk is read-only: choose another folder" in text for text in warned[0])
    told = ranks.errors(size, train, disk, (), (3,), False)
    assert all("failed: the disk is read-only: choose another folder; the checkpoints already" in text for text in told)


def begin(folder):
    with Run(global_batch=4, folder=folder):
        return "begun"


@pytest.mark.parametrize("size", [1, 2])
def test_a_folder_that_cannot_be_made_is_refused_at_the_start_on_every_rank(ranks, tmp_path, size):
    (tmp_path / "taken").write_text("")
    for told in ranks.errors(size, begin, tmp_path / "taken" / "run"):
        assert f"taken/run cannot be made: {tmp_path / 'taken'} is a file; name another folder" in told


def test_a_folder_that_may_not_be_written_is_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anything
    with pytest.raises(LogError, match=r"run's folder .*new/run cannot be made: .* may not be written; name another"):
        begin(tmp_path / "new" / "run")
