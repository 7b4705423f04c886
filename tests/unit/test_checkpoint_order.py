"""Which checkpoint is the newest, what is no folder of them, and what a full disk leaves of a publication."""

import errno
import os
import signal
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.checkpoint import checkpoint_folder as catalog
from samestep.checkpoint.checkpoint_folder import newest_first, newest_sound
from samestep.cli.main import main
from samestep.errors import CheckpointError
from samestep.training.preemption import StoppedEarly


def number_by_epoch(folder, epochs, told_at=None, keep_best=None):
    """Four steps an epoch, checkpoints named by the epoch; told to end after one step. Steps done when it began."""
    try:
        with Run(global_batch=2, seed=0, folder=folder) as run:
            model = run.wrap(nn.Linear(1, 1))
            data = run.shard(TensorDataset(torch.zeros(8, 1)), num_workers=0)
            checkpoint = run.checkpoint(folder, model=model, train=data, keep=9, keep_best=keep_best)
            began = run._life.engine.steps
            for epoch in data.epochs(epochs):
                for step in epoch:
                    for (x,) in step:
                        step.mean(model(x).sum(1)).backward()
                    if step.number == told_at:
                        os.kill(os.getpid(), signal.SIGTERM)
                    run.log({"val/accuracy": 1.0 / (1 + step.number)}, now=True)
                checkpoint.save(step=epoch.number)
    except StoppedEarly:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return began


def names(folder):
    return [found.path.name for found in newest_first(folder)]


def test_of_an_early_end_and_the_first_number_of_the_script_the_one_with_more_steps_is_restored(tmp_path, monkeypatch):
    number_by_epoch(tmp_path, 2, told_at=2)
    assert names(tmp_path) == ["step-00000003"]
    monkeypatch.setattr(catalog, "remove_folder", lambda path: None)  # killed before the older one was removed
    number_by_epoch(tmp_path, 1)
    assert names(tmp_path) == ["step-00000000", "step-00000003"]
    assert newest_sound(tmp_path)[1].history[-1].last_step == 4
    assert number_by_epoch(tmp_path, 1) == 4


def test_an_early_end_that_is_the_best_stays_and_is_not_taken_for_the_newest(tmp_path):
    number_by_epoch(tmp_path, 2, told_at=0, keep_best="val/accuracy")  # its value is the highest
    number_by_epoch(tmp_path, 1, keep_best="val/accuracy")
    assert names(tmp_path) == ["step-00000000", "step-00000001"]
    assert number_by_epoch(tmp_path, 2, keep_best="val/accuracy") == 4


def test_a_second_early_end_is_newer_than_the_first(tmp_path):
    number_by_epoch(tmp_path, 2, told_at=0)
    number_by_epoch(tmp_path, 2, told_at=2)
    assert names(tmp_path)[0] == "step-00000003"
    assert number_by_epoch(tmp_path, 2) == 3
    assert names(tmp_path)[:2] == ["step-00000001", "step-00000000"]


def test_checkpoints_that_cannot_be_read_keep_their_place(tmp_path):
    number_by_epoch(tmp_path, 3)
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    assert names(tmp_path) == ["step-00000002", "step-00000001", "step-00000000"]


# What is no folder


def test_a_file_or_nothing_in_place_of_a_folder_is_told_with_what_to_give(tmp_path, capsys):
    number_by_epoch(tmp_path, 1)
    one = tmp_path / "step-00000000"
    remedy = "give the folder that run.checkpoint was given, or one checkpoint in it"
    for command in ("inspect", "verify", "export"):
        assert main(["checkpoint", command, str(one / "manifest.json")]) == 2
        told = capsys.readouterr().err
        assert f"samestep: {one / 'manifest.json'} is a file: {remedy}, here {one}\n" in told
    assert main(["checkpoint", "inspect", str(tmp_path / "latest")]) == 2
    assert f"samestep: {tmp_path / 'latest'} is a file: {remedy}\n" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(tmp_path / "nowhere")]) == 2
    assert f"samestep: there is no folder {tmp_path / 'nowhere'}: {remedy}\n" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["", " "])
def test_restoring_from_no_folder_is_refused(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    with Run(global_batch=2) as run, pytest.raises(CheckpointError) as caught:
        run.checkpoint(given, model=nn.Linear(1, 1))
    assert str(caught.value) == (
        f'run.checkpoint({given!r}) names no folder: give one, as in run.checkpoint("out", ...), or "." for the folder '
        "in which the script was started"
    )


def test_restoring_from_the_folder_one_is_in_is_taken_as_such(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    number_by_epoch(".", 1)
    assert (tmp_path / "latest").read_text() == "step-00000000\n"


# Room that comes with what is removed


def test_a_disk_without_room_for_latest_gets_it_by_removing_what_is_too_old(tmp_path, monkeypatch):
    full, point_to = [], catalog.point_to

    def point(path):
        if len(list(tmp_path.glob("step-*"))) > 1:
            full.append(path.name)
            raise OSError(errno.ENOSPC, "No space left on device")
        point_to(path)

    monkeypatch.setattr(catalog, "point_to", point)
    with Run(global_batch=2) as run:
        checkpoint = run.checkpoint(tmp_path, model=nn.Linear(1, 1), keep=1)
        checkpoint.save(step=1)
        checkpoint.save(step=2)
        checkpoint.wait()
    assert full == ["step-00000002"]
    assert (tmp_path / "latest").read_text() == "step-00000002\n"
    assert names(tmp_path) == ["step-00000002"]


def test_a_disk_without_room_for_latest_at_all_is_told_and_the_checkpoint_stays(tmp_path, monkeypatch):
    def point(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(catalog, "point_to", point)
    with Run(global_batch=2) as run:
        checkpoint = run.checkpoint(tmp_path, model=nn.Linear(1, 1), keep=1)
        checkpoint.save(step=1)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.wait()
    assert str(caught.value) == (
        f"{tmp_path / 'step-00000001'} is published, but to let `latest` name it failed: the disk is full: free some "
        "space, or keep fewer with keep=; the checkpoints already published are untouched"
    )
    assert newest_sound(tmp_path)[1].step == 1


# The folder of a job


def test_a_job_whose_folder_nobody_named_leaves_the_choice_to_run_restore():
    from samestep.launch.sbatch import sbatch_text
    from tests.unit.test_sbatch import PLAIN

    assert "--folder-is-default" not in sbatch_text(PLAIN)
    told = sbatch_text(replace(PLAIN, folder_is_explicit=False, module=True))
    assert "_options=(--nproc-per-node auto --folder /home/ada/runs/train --folder-is-default --module)" in told


@pytest.mark.parametrize(("options", "typed"), [((), "0"), (("--folder", "mine"), "1")])
def test_submit_tells_the_launcher_whether_the_folder_was_named(tmp_path, monkeypatch, capsys, options, typed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert main(["submit", "train.py", "--dry-run", *options]) == 0
    assert ("--folder-is-default" in capsys.readouterr().out) is (typed == "0")
