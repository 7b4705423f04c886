"""Which checkpoint of a folder is the newest, which folders are rejected, and `latest` on a full disk."""

import errno
import os
import signal
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.checkpoint import checkpoint_folder
from samestep.checkpoint.checkpoint_folder import find_newest_valid, list_newest_first
from samestep.cli.main import main
from samestep.errors import CheckpointError
from samestep.training.preemption import StoppedEarly


def number_by_epoch(folder, epochs, preempt_at=None, keep_best=None):
    """Train four steps per epoch, number checkpoints by epoch, preempt after a step; return the first step."""
    try:
        with Run(global_batch=2, seed=0, folder=folder) as run:
            model = run.wrap(nn.Linear(1, 1))
            data = run.shard(TensorDataset(torch.zeros(8, 1)), num_workers=0)
            checkpoint = run.checkpoint(folder, model=model, train=data, keep=9, keep_best=keep_best)
            first_step = run._lifecycle.context.progress.steps
            for epoch in data.epochs(epochs):
                for step in epoch:
                    for (x,) in step:
                        step.mean(model(x).sum(1)).backward()
                    if step.number == preempt_at:
                        os.kill(os.getpid(), signal.SIGTERM)
                    run.log({"val/accuracy": 1.0 / (1 + step.number)}, now=True)
                checkpoint.save(step=epoch.number)
    except StoppedEarly:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return first_step


def names(folder):
    return [found.path.name for found in list_newest_first(folder)]


def test_the_checkpoint_with_more_steps_is_restored_if_one_was_numbered_on_preemption(tmp_path, monkeypatch):
    number_by_epoch(tmp_path, 2, preempt_at=2)
    assert names(tmp_path) == ["step-00000003"]
    monkeypatch.setattr(
        checkpoint_folder, "remove_folder", lambda path: None
    )  # killed before the older one was removed
    number_by_epoch(tmp_path, 1)
    assert names(tmp_path) == ["step-00000000", "step-00000003"]
    assert find_newest_valid(tmp_path)[1].history[-1].last_step == 4
    assert number_by_epoch(tmp_path, 1) == 4


def test_a_preemption_checkpoint_that_is_the_best_is_kept_but_is_not_the_newest(tmp_path):
    number_by_epoch(tmp_path, 2, preempt_at=0, keep_best="val/accuracy")  # its value is the highest
    number_by_epoch(tmp_path, 1, keep_best="val/accuracy")
    assert names(tmp_path) == ["step-00000000", "step-00000001"]
    assert number_by_epoch(tmp_path, 2, keep_best="val/accuracy") == 4


def test_a_second_preemption_checkpoint_is_newer_than_the_first(tmp_path):
    number_by_epoch(tmp_path, 2, preempt_at=0)
    number_by_epoch(tmp_path, 2, preempt_at=2)
    assert names(tmp_path)[0] == "step-00000003"
    assert number_by_epoch(tmp_path, 2) == 3
    assert names(tmp_path)[:2] == ["step-00000001", "step-00000000"]


def test_checkpoints_that_cannot_be_read_keep_their_position(tmp_path):
    number_by_epoch(tmp_path, 3)
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    assert names(tmp_path) == ["step-00000002", "step-00000001", "step-00000000"]


# Paths that are not a checkpoint folder


def test_the_error_for_a_file_or_a_missing_path_says_what_to_pass(tmp_path, capsys):
    number_by_epoch(tmp_path, 1)
    one = tmp_path / "step-00000000"
    remedy = "pass the folder that run.checkpoint received, or one checkpoint in it"
    for command in ("inspect", "verify", "export"):
        assert main(["checkpoint", command, str(one / "manifest.json")]) == 2
        error = capsys.readouterr().err
        assert f"samestep: {one / 'manifest.json'} is a file: {remedy}, here {one}\n" in error
    assert main(["checkpoint", "inspect", str(tmp_path / "latest")]) == 2
    assert f"samestep: {tmp_path / 'latest'} is a file: {remedy}\n" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(tmp_path / "nowhere")]) == 2
    assert f"samestep: the folder {tmp_path / 'nowhere'} does not exist: {remedy}\n" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["", " "])
def test_an_empty_folder_name_is_rejected(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    with Run(global_batch=2) as run, pytest.raises(CheckpointError) as caught:
        run.checkpoint(folder, model=nn.Linear(1, 1))
    assert str(caught.value) == (
        f'run.checkpoint({folder!r}) has no folder: pass one, for example run.checkpoint("out", ...), or "." for the '
        "current folder"
    )


def test_the_current_folder_can_be_the_checkpoint_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    number_by_epoch(".", 1)
    assert (tmp_path / "latest").read_text() == "step-00000000\n"


# `latest` on a full disk


def test_removing_old_checkpoints_frees_the_space_for_latest(tmp_path, monkeypatch):
    failed, write_latest = [], checkpoint_folder.write_latest

    def write(path):
        if len(list(tmp_path.glob("step-*"))) > 1:
            failed.append(path.name)
            raise OSError(errno.ENOSPC, "No space left on device")
        write_latest(path)

    monkeypatch.setattr(checkpoint_folder, "write_latest", write)
    with Run(global_batch=2) as run:
        checkpoint = run.checkpoint(tmp_path, model=nn.Linear(1, 1), keep=1)
        checkpoint.save(step=1)
        checkpoint.save(step=2)
        checkpoint.wait()
    assert failed == ["step-00000002"]
    assert (tmp_path / "latest").read_text() == "step-00000002\n"
    assert names(tmp_path) == ["step-00000002"]


def test_a_failure_to_write_latest_is_reported_and_the_checkpoint_is_kept(tmp_path, monkeypatch):
    def write(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_folder, "write_latest", write)
    with Run(global_batch=2) as run:
        checkpoint = run.checkpoint(tmp_path, model=nn.Linear(1, 1), keep=1)
        checkpoint.save(step=1)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.wait()
    assert str(caught.value) == (
        f"{tmp_path / 'step-00000001'} is published, but writing `latest` failed: the disk is full: free some space, "
        "or keep fewer with keep=; the checkpoints already published are unchanged"
    )
    assert find_newest_valid(tmp_path)[1].step == 1


# The folder of a SLURM job


def test_a_job_with_the_default_folder_lets_run_checkpoint_choose():
    from samestep.launch.sbatch import format_sbatch
    from tests.unit.test_sbatch import PLAIN

    assert "--folder-is-default" not in format_sbatch(PLAIN)
    text = format_sbatch(replace(PLAIN, folder_is_explicit=False, module=True))
    assert "_options=(--nproc-per-node auto --folder /home/ada/runs/train --folder-is-default --module)" in text


@pytest.mark.parametrize(("options", "typed"), [((), "0"), (("--folder", "mine"), "1")])
def test_submit_tells_the_launcher_whether_the_folder_was_typed(tmp_path, monkeypatch, capsys, options, typed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert main(["submit", "train.py", "--dry-run", *options]) == 0
    assert ("--folder-is-default" in capsys.readouterr().out) is (typed == "0")
