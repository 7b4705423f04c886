"""Runs whose folder is on a disk that fills up: what continues, what raises, what is lost."""

import os
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Run, read_metrics
from samestep import disk as disk_module
from samestep.checkpoint.checkpoint_folder import find_newest_valid
from samestep.data.audit import audit
from samestep.errors import LogError
from tests.small_disk import SmallDisk, small_disk

STEPS = 30


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", 512) as disk:
        yield disk


def train(disk: SmallDisk, full, saves=(), ledger=True, steps=STEPS):
    """Train while the disk is full between two steps, save after other steps; return this rank's warnings."""
    retry, disk_module.RETRY_SECONDS = disk_module.RETRY_SECONDS, 0.0
    with warnings.catch_warnings(record=True) as caught:
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
                            run.once((disk.fill, disk.make_space)[full.index(step.number)])
                        # more than fits into the pages that the files already have
                        run.log({f"many/{number}": 1.0 for number in range(30)}, now=True)
                        if step.number in saves:
                            checkpoint.save()
                checkpoint.wait()
        finally:
            disk_module.RETRY_SECONDS = retry
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("size", [1, 2])
def test_a_disk_that_is_full_for_a_while_loses_no_record(ranks, disk, size):
    warned = ranks(size, train, disk, (5, 20), (25,))
    out = disk.path / "out"
    named = {text.split(" cannot be written: the disk is full: free some space; ")[0] for text in warned[0]}
    assert str(out / "metrics.jsonl") in named
    assert str(out / "log.txt") in named
    assert [record["step"] for record in read_metrics(out / "metrics.jsonl", by_step=True)] == list(range(STEPS))
    assert "metrics.jsonl can be written again; no record is missing" in (out / "log.txt").read_text()
    assert audit(out).exactly_once
    assert find_newest_valid(out)[1].step == 26


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_on_a_full_disk_raises_on_all_ranks_and_the_previous_one_stays(ranks, disk, size):
    errors = ranks.errors(size, train, disk, (5,), (2, 6), False)
    remedy = "free some space, or keep fewer with keep=; the checkpoints already published are unchanged"
    assert all("samestep.errors.CheckpointError: " in text and remedy in text for text in errors)
    assert all("Error: rank 0: " in text for text in errors) or size == 1
    disk.make_space()
    assert find_newest_valid(disk.path / "out")[1].step == 3


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_no_position_is_saved_before_its_ledger_is_on_the_disk(ranks, disk, size):
    errors = ranks.errors(size, train, disk, (5,), (2, 290), True, 300)
    assert all("the disk is full: free some space, or run with ledger=False" in text for text in errors)
    disk.make_space()
    assert find_newest_valid(disk.path / "out")[1].step == 3


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_fails_if_a_ledger_is_incomplete(ranks, disk, size):
    errors = ranks.errors(size, train, disk, (5,), (), True, 300)
    error = "rank-00000.bin cannot be written: the disk is full: free some space, or run with ledger=False"
    assert error in errors[0]
    assert all("the disk is full: free some space, or run with ledger=False" in text for text in errors)


@pytest.mark.parametrize("size", [1, 2])
def test_a_read_only_disk_only_costs_the_logs_until_a_checkpoint_is_saved(ranks, disk, size):
    disk.freeze(True)
    warned = ranks(size, train, disk, (), (), False)
    assert any("log.txt lacks" in text and "the disk is read-only: choose another folder" in text for text in warned[0])
    errors = ranks.errors(size, train, disk, (), (3,), False)
    assert all(
        "failed: the disk is read-only: choose another folder; the checkpoints already" in text for text in errors
    )


def start(folder):
    with Run(global_batch=4, folder=folder):
        return "started"


@pytest.mark.parametrize("size", [1, 2])
def test_a_folder_that_cannot_be_created_is_rejected_at_the_start_on_every_rank(ranks, tmp_path, size):
    (tmp_path / "taken").write_text("")
    for error in ranks.errors(size, start, tmp_path / "taken" / "run"):
        assert f"taken/run cannot be created: {tmp_path / 'taken'} is a file; pass another folder" in error


def test_a_folder_without_write_permission_is_rejected_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root can write everywhere
    with pytest.raises(LogError, match=r"the run folder .*new/run cannot be created: .* is not writable; pass another"):
        start(tmp_path / "new" / "run")
