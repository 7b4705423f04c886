"""Checkpoints of a single process: saving, retention, corruption, full disks, and folders."""

import errno
import json
import math
import re
import time
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.checkpoint import checkpoint_folder, manifest
from samestep.checkpoint.tensor_storage import FileEntry, safetensors_blocks
from samestep.cli.main import main
from samestep.errors import CheckpointError
from samestep.messages import SamestepWarning

torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process imports dynamo, which sets an environment variable


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(("step-", ".")))


def save(folder, steps, keep=3, keep_best=None, values=None, model=None):
    """Save under these numbers; before each, log its value unless it is None."""
    with Run(global_batch=2, folder=folder / "logs") as run:
        torch.manual_seed(3)
        model = model or nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.Adam(model.parameters())
        checkpoint = run.checkpoint(folder, keep=keep, keep_best=keep_best, model=model, optimizer=optimizer)
        for at, step in enumerate(steps):
            if values is not None and values[at] is not None:
                run.log({keep_best: values[at]})
            checkpoint.save(step=step)
    return model


def restored(folder):
    with Run(global_batch=2, folder=folder / "logs") as run, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        checkpoint = run.checkpoint(folder, model=model, optimizer=torch.optim.Adam(model.parameters()))
        return checkpoint.restored and checkpoint.restored.name, [str(warning.message) for warning in caught]


def test_the_newest_are_kept_and_latest_names_the_last(tmp_path):
    save(tmp_path, [5, 10, 15, 20], keep=2)
    assert names(tmp_path) == ["step-00000015", "step-00000020"]
    assert (tmp_path / "latest").read_text() == "step-00000020\n"


@pytest.mark.parametrize(("metric", "best"), [("val/accuracy", "step-00000010"), ("val/loss", "step-00000005")])
def test_the_best_is_kept_in_addition_to_the_newest(tmp_path, metric, best, capsys):
    save(tmp_path, [5, 10, 15, 20], 1, metric, [0.5, 0.9, 0.7, 0.6])
    assert names(tmp_path) == [best, "step-00000020"]
    order = "lower" if metric.endswith("loss") else "higher"
    assert f"best checkpoint so far: {best} by {metric} ({order} is better)" in capsys.readouterr().out


def test_the_best_checkpoint_is_reported_at_the_first_step_after_its_save(tmp_path, capsys):
    reports = []
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        model = nn.Linear(1, 1)
        train = run.shard(torch.utils.data.TensorDataset(torch.ones(10, 1)), num_workers=0)
        checkpoint = run.checkpoint(tmp_path, keep_best="val/accuracy", model=model, train=train)
        for epoch in train.epochs(1):
            for step in epoch:
                for _ in step:
                    pass
                if step.number == 1:
                    run.log({"val/accuracy": 0.5})
                    checkpoint.save()
                if step.number == 2:  # the save of step 1 is complete when this step ends
                    while checkpoint._current.is_running:
                        time.sleep(0.01)
                reports += [step.number] * ("best checkpoint so far: step-00000002" in capsys.readouterr().out)
    assert reports == [3]
    assert "best checkpoint" not in capsys.readouterr().out


def test_a_keep_best_metric_that_was_never_logged_warns_once(tmp_path):
    with pytest.warns(
        SamestepWarning, match="keep_best='val/accuracy' cannot rate this checkpoint: no such metric"
    ) as caught:
        save(tmp_path, [1, 2], keep_best="val/accuracy")
    assert len(caught) == 1


def test_a_metric_rates_only_the_next_checkpoint(tmp_path):
    save(tmp_path, [5, 10, 15, 20, 25], 1, "val/accuracy", [0.5, 0.9, None, 0.7, None])
    assert names(tmp_path) == ["step-00000010", "step-00000025"]
    assert json.loads((tmp_path / "step-00000025" / "manifest.json").read_bytes())["metric"] is None


def test_a_metric_that_was_already_synced_rates_the_next_checkpoint(tmp_path):
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        checkpoint = run.checkpoint(tmp_path, keep=1, keep_best="val/loss", model=nn.Linear(1, 1))
        run.log({"val/loss": 0.5}, now=True)
        checkpoint.save(step=1)
        run.log({"val/loss": 0.5}, now=True)  # the same value for other weights
        checkpoint.save(step=2)
        checkpoint.wait()
    assert json.loads((tmp_path / "step-00000002" / "manifest.json").read_bytes())["metric"] == ["val/loss", 0.5]


@pytest.mark.parametrize("metric", ["val/accuracy", "val/loss"])
def test_of_equal_values_the_oldest_checkpoint_is_the_best(tmp_path, metric):
    save(tmp_path, [5, 10, 15], 1, metric, [0.5, 0.5, 0.5])
    assert names(tmp_path) == ["step-00000005", "step-00000015"]


@pytest.mark.parametrize("again", [None, 0.9, 0.8])
def test_the_best_is_kept_if_its_step_is_saved_again(tmp_path, again):
    save(tmp_path, [5, 10, 10, 15], 1, "val/accuracy", [0.5, 0.9, again, 0.7])
    assert names(tmp_path) == ["step-00000010", "step-00000015"]


def test_a_step_saved_again_with_a_better_value_is_the_best(tmp_path):
    save(tmp_path, [5, 5, 10], 1, "val/accuracy", [0.5, 0.9, 0.7])
    assert names(tmp_path) == ["step-00000005-2", "step-00000010"]


def test_two_saves_of_one_step_count_once_for_keep(tmp_path):
    save(tmp_path, [5, 10, 10, 15], 3, "val/accuracy", [0.5, 0.9, None, None])
    assert names(tmp_path) == ["step-00000005", "step-00000010", "step-00000010-2", "step-00000015"]


def test_a_step_below_that_of_an_existing_checkpoint_is_rejected(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, [100, 50])
    assert str(caught.value) == (
        f"checkpoint step 50 is below the step of {tmp_path / 'step-00000100'}: run.checkpoint resumes from the "
        "highest number, so this training would be lost; number checkpoints upwards, for example "
        "checkpoint.save(step=101), or always use the steps done with checkpoint.save(), or pass another folder to "
        "run.checkpoint"
    )
    assert names(tmp_path) == ["step-00000100"]
    with pytest.raises(CheckpointError, match="checkpoint step 0 is below the step of"):  # the steps done, in a new run
        save(tmp_path, [None])
    save(tmp_path, [100, 101])
    assert names(tmp_path) == ["step-00000100-2", "step-00000101"]
    assert (tmp_path / "latest").read_text() == "step-00000101\n"


@pytest.mark.parametrize("step", [-5, 2.5, "x", True])
def test_an_invalid_step_is_rejected_before_anything_is_written(tmp_path, step):
    error = (
        f"checkpoint.save: step must be an integer of at least 0, got {step!r}: pass e.g. step=epoch.number, or omit"
    )
    with pytest.raises(CheckpointError, match=re.escape(error)):
        save(tmp_path, [step])
    assert not names(tmp_path)


def test_a_step_can_be_an_integer_of_numpy_or_torch(tmp_path):
    save(tmp_path, [np.int64(3), torch.tensor(4)])
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_a_second_checkpoint_of_a_step_replaces_the_first(tmp_path):
    save(tmp_path, [5, 5], keep=2)
    assert names(tmp_path) == ["step-00000005-2"]
    assert restored(tmp_path) == ("step-00000005-2", [])


def test_a_flipped_bit_in_any_file_is_detected_and_the_previous_checkpoint_is_loaded(tmp_path):
    save(tmp_path, [5, 10])
    newest = tmp_path / "step-00000010"
    generator = torch.Generator().manual_seed(1)
    for path in sorted(newest.iterdir()):
        kept = path.read_bytes()
        for _ in range(6):
            data = bytearray(kept)
            at = int(torch.randint(len(data), (1,), generator=generator))
            data[at] ^= 1 << int(torch.randint(8, (1,), generator=generator))
            path.write_bytes(data)
            name, warned = restored(tmp_path)
            assert name == "step-00000005", (path, at)
            assert len(warned) == 1
            assert f"checkpoint {newest} is corrupt: {path.name} " in warned[0]
        path.write_bytes(kept)
    assert restored(tmp_path) == ("step-00000010", [])


@pytest.mark.parametrize("name", ["manifest.json", "index.json", "state.json", "rank-00000.safetensors"])
def test_a_truncated_or_missing_file_is_detected(tmp_path, name):
    save(tmp_path, [5, 10])
    path = tmp_path / "step-00000010" / name
    path.write_bytes(path.read_bytes()[:-9])
    found, warned = restored(tmp_path)
    assert found == "step-00000005"
    assert name in warned[0]
    path.unlink()
    found, warned = restored(tmp_path)
    assert found == "step-00000005"
    assert (f"it has no {name}" if name == "manifest.json" else f"{name} is missing") in warned[0]


def test_a_corrupt_checkpoint_does_not_count_and_its_step_can_be_saved_again(tmp_path):
    save(tmp_path, [5, 10], keep=2)
    (tmp_path / "step-00000010" / "state.json").write_text("{}")
    with pytest.warns(SamestepWarning, match=r"state.json has 2 bytes and should have"):
        save(tmp_path, [7, 10, 12], keep=2)
    assert names(tmp_path) == ["step-00000010-2", "step-00000012"]
    assert restored(tmp_path) == ("step-00000012", [])


class FailingPart:
    def state_dict(self):
        return {"value": True}

    def load_state_dict(self, state):
        raise ZeroDivisionError("not today")


def test_an_exception_in_a_users_part_is_reported_with_the_checkpoint(tmp_path):
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        run.checkpoint(tmp_path, thing=FailingPart()).save()
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        with pytest.raises(CheckpointError, match="step-00000000 cannot be restored: ZeroDivisionError: not today"):
            run.checkpoint(tmp_path, thing=FailingPart())
        thing = FailingPart()
        checkpoint = run.checkpoint(tmp_path / "other", thing=thing)
        thing.state_dict = lambda: 1 / 0
        with pytest.raises(CheckpointError, match=r"state_dict\(\) failed: ZeroDivisionError"):
            checkpoint.save()


def test_the_last_valid_checkpoint_is_never_removed(tmp_path, monkeypatch):
    save(tmp_path, [5], keep=1)
    monkeypatch.setattr(manifest.os, "fsync", full_disk)
    with pytest.raises(CheckpointError, match="failed: the disk is full: free some space"):
        save(tmp_path, [6], keep=1)
    monkeypatch.undo()
    assert names(tmp_path) == ["step-00000005"]
    assert restored(tmp_path) == ("step-00000005", [])


def full_disk(handle):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOSPC, "saving failed: the disk is full: free some space, or keep fewer with keep="),
        (errno.EACCES, "saving failed: permission denied: choose a folder that you can write to"),
        (errno.EROFS, "saving failed: the disk is read-only: choose another folder"),
        (errno.EIO, "saving failed: Input/output error; the checkpoints already published are unchanged"),
    ],
)
def test_disk_errors_say_what_to_do(number, text):
    assert text in str(manifest.disk_error(OSError(number, "Input/output error"), "saving"))


def test_too_little_free_space_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    class Usage:
        free = 1000

    monkeypatch.setattr(checkpoint_folder.shutil, "disk_usage", lambda folder: Usage)
    with pytest.raises(CheckpointError, match=r"has 1000 B free and this checkpoint needs .* KiB: free some space"):
        save(tmp_path, [1])
    assert not names(tmp_path)


def test_a_file_in_place_of_the_folder_is_rejected(tmp_path):
    (tmp_path / "out").write_text("")
    with (
        Run(global_batch=2, folder=tmp_path / "logs") as run,
        pytest.raises(CheckpointError, match="a file is where a folder is needed"),
    ):
        run.checkpoint(tmp_path / "out", model=nn.Linear(1, 1))


def test_a_written_file_that_reads_back_differently_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "hash_file", lambda path: manifest.FileRecord(0, ""))
    with pytest.raises(CheckpointError, match="does not contain what was written to it"):
        manifest.write_verified(tmp_path / "file", [b"text"])


def test_leftovers_of_killed_writers_are_removed(tmp_path):
    for name in (".writing-step-00000007-abc", ".deleting-step-00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".mine").mkdir()
    save(tmp_path, [5])
    assert names(tmp_path) == [".mine", "step-00000005"]


def test_a_half_removed_folder_does_not_block_the_removal_of_another_of_that_name(tmp_path):
    half = tmp_path / ".deleting-step-00000005"
    for folder in (half, tmp_path / "step-00000005"):
        folder.mkdir()
        (folder / "rank-00000.safetensors").touch()
    checkpoint_folder.remove_folder(tmp_path / "step-00000005")
    assert names(tmp_path) == []


def test_a_leftover_whose_removal_was_killed_is_found_again(tmp_path, monkeypatch):
    left = tmp_path / ".writing-step-00000005-1a2b"
    left.mkdir()
    monkeypatch.setattr(checkpoint_folder.shutil, "rmtree", lambda folder: None)  # killed before it started
    checkpoint_folder.remove_folder(left)
    monkeypatch.undo()
    assert checkpoint_folder.remove_leftovers(tmp_path, "now") == [left.name]
    assert names(tmp_path) == []


def test_a_newer_format_version_is_rejected_and_nothing_is_changed(tmp_path, monkeypatch):
    save(tmp_path, [5])
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "VERSION", 2)
        save(tmp_path, [10])
    with pytest.raises(
        CheckpointError, match="step-00000010 has format version 2 and this version of samestep reads up to 1: update"
    ):
        restored(tmp_path)
    assert names(tmp_path) == ["step-00000005", "step-00000010"]


def test_a_different_model_is_rejected_with_the_names_that_differ(tmp_path):
    save(tmp_path, [5])
    other = nn.Sequential(nn.Linear(3, 4), nn.Identity())
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, [6], model=other)
    error = str(caught.value)
    assert "the checkpoint was saved with a different model: 0.bias is (2,) in the checkpoint and (4,) in the" in error
    assert "1.bias is only in the checkpoint" in error
    assert "and 2 more; pass another folder to run.checkpoint, or build the model as it was" in error
    assert names(tmp_path) == ["step-00000005"]


class Stateless:
    pass


def test_invalid_arguments_are_rejected(tmp_path):
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        model = nn.Linear(1, 1)
        with pytest.raises(CheckpointError, match="got a Stateless without state_dict and load_state_dict: pass"):
            run.checkpoint(tmp_path, thing=Stateless())
        for keep in (0, 2.5, "3"):
            with pytest.raises(CheckpointError, match=f"keep must be an integer of at least 1, got {keep!r}: pass"):
                run.checkpoint(tmp_path, keep=keep, model=model)
        checkpoint = run.checkpoint(tmp_path, model=model)
        with pytest.raises(CheckpointError, match=r"is not an interval: pass a positive integer, for example every\("):
            checkpoint.every()
        for interval in ({"steps": 0}, {"steps": 2.5}, {"steps": "9"}, {"minutes": -1}, {"minutes": math.nan}):
            with pytest.raises(CheckpointError, match=r"every\(steps=.*, minutes=.*\) is not an interval"):
                checkpoint.every(**interval)


def test_a_missing_part_raises_and_an_unused_part_warns(tmp_path):
    save(tmp_path, [5])
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        with pytest.raises(
            CheckpointError, match=r"has no ema, only model, optimizer: leave it out of run\.checkpoint"
        ):
            run.checkpoint(tmp_path, model=model, ema=nn.Linear(1, 1))
        with pytest.warns(SamestepWarning, match="also has optimizer, which run.checkpoint did not receive"):
            run.checkpoint(tmp_path, model=model)


def test_an_optimizer_with_different_parameter_groups_is_rejected(tmp_path):
    save(tmp_path, [5])
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.Adam([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
        with pytest.raises(CheckpointError, match=r"\[4\] parameters per group in the checkpoint, \[2, 2\] here"):
            run.checkpoint(tmp_path, model=model, optimizer=optimizer)


def test_a_position_in_different_data_is_rejected(tmp_path):
    def run_with(n):
        with Run(global_batch=2, folder=tmp_path / "logs") as run:
            data = run.shard(TensorDataset(torch.zeros(n)), num_workers=0)
            run.checkpoint(tmp_path, train=data).save()

    run_with(6)
    with pytest.raises(CheckpointError, match="the saved position has n=6 and this shard has n=8"):
        run_with(8)


def test_saving_before_the_first_step_does_not_change_the_optimizer(tmp_path):
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.Adam(model.parameters())
        run.checkpoint(tmp_path, model=model, optimizer=optimizer).save()
        assert not optimizer.state
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        run.checkpoint(tmp_path, model=model, optimizer=optimizer)
        assert not optimizer.state


def test_device_options_of_an_optimizer_are_not_restored(tmp_path):
    def run_with(**options):
        with Run(global_batch=2, folder=tmp_path / "logs") as run:
            model = nn.Linear(1, 1)
            optimizer = torch.optim.Adam(model.parameters(), **options)
            checkpoint = run.checkpoint(tmp_path, model=model, optimizer=optimizer)
            checkpoint.save()
            return optimizer.param_groups[0]

    run_with(lr=0.5, foreach=True)
    group = run_with(lr=0.1, foreach=False)
    assert (group["lr"], group["foreach"]) == (0.5, False)


def test_logs_and_ledger_are_in_the_checkpoint_folder_if_the_run_has_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with Run(global_batch=2, ledger=True) as run:
            model = run.wrap(nn.Linear(1, 1))
            data = run.shard(TensorDataset(torch.zeros(4, 1)), num_workers=0)
            checkpoint = run.checkpoint("out", model=model, train=data)
            assert run.folder == tmp_path / "out"
            for epoch in data.epochs(1 if checkpoint.restored is None else 2):
                for step in epoch:
                    for (x,) in step:
                        step.mean(model(x).sum(1)).backward()
                checkpoint.save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert (tmp_path / "out" / "summary.json").exists()
    assert main(["audit", str(tmp_path / "out")]) == 0


def test_a_folder_can_start_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with Run(global_batch=2, seed=0, folder="~/logs") as run:
        assert run.folder == tmp_path / "logs"
        run.checkpoint("~/saved", model=run.wrap(nn.Linear(2, 1))).save()
    assert [path.name for path in (tmp_path / "saved").glob("step-*")] == ["step-00000000"]


@pytest.mark.parametrize("typed", [False, True])
def test_the_checkpoint_folder_replaces_the_launchers_default_folder_but_not_a_typed_one(tmp_path, monkeypatch, typed):
    monkeypatch.setenv("SAMESTEP_FOLDER", str(tmp_path / "launched"))
    monkeypatch.setenv("SAMESTEP_FOLDER_IS_EXPLICIT", str(int(typed)))
    with Run(global_batch=2, ledger=True) as run:
        model = run.wrap(nn.Linear(1, 1))
        data = run.shard(TensorDataset(torch.zeros(4, 1)), num_workers=0)
        run.checkpoint(tmp_path / "out", model=model, train=data)
        run.checkpoint(tmp_path / "second", model=model)  # only the first one counts
        assert run.folder == tmp_path / ("launched" if typed else "out")
        for epoch in data.epochs(1):
            for step in epoch:
                for (x,) in step:
                    step.mean(model(x).sum(1)).backward()
    there = {path.name for path in run.folder.iterdir()}
    assert there >= {"ledger", "log.txt", "metrics.jsonl", "summary.json"}
    assert main(["audit", str(run.folder)]) == 0
    assert typed or not (tmp_path / "launched").exists()


def test_a_run_without_checkpoints_writes_to_the_launchers_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMESTEP_FOLDER", str(tmp_path / "launched"))
    monkeypatch.setenv("SAMESTEP_FOLDER_IS_EXPLICIT", "0")
    with Run(global_batch=2) as run:
        run.log({"val/accuracy": 1.0})
    assert (tmp_path / "launched" / "summary.json").exists()


def test_a_save_inside_a_step_happens_at_its_end(tmp_path):
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        model = run.wrap(nn.Linear(1, 1))
        data = run.shard(TensorDataset(torch.zeros(6, 1)), num_workers=0)
        checkpoint = run.checkpoint(tmp_path, model=model, train=data)
        for epoch in data.epochs(1):
            for step in epoch:
                for (x,) in step:
                    step.mean(model(x).sum(1)).backward()
                if step.number == 1:
                    checkpoint.save()
                    checkpoint.wait()
                    assert not names(tmp_path)
        checkpoint.wait()
        assert names(tmp_path) == ["step-00000002"]
    assert json.loads((tmp_path / "step-00000002" / "state.json").read_bytes())["train"]["step"] == 2


def test_a_skipped_step_is_not_saved_twice(tmp_path):
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        model = run.wrap(nn.Linear(1, 1))
        data = run.shard(TensorDataset(torch.zeros(12, 1)), num_workers=0)
        checkpoint = run.checkpoint(tmp_path, model=model, train=data, keep=9)
        checkpoint.every(steps=2)
        for epoch in data.epochs(1):
            for step in epoch:
                if step.number == 2:
                    continue
                for (x,) in step:
                    step.mean(model(x).sum(1)).backward()
    assert names(tmp_path) == ["step-00000002", "step-00000004", "step-00000006"]


def test_nothing_in_a_checkpoint_is_pickled(tmp_path):
    save(tmp_path, [5])
    for path in (tmp_path / "step-00000005").iterdir():
        assert path.suffix in (".json", ".safetensors")
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        else:
            assert load_file(path)


def test_the_safetensors_library_reads_our_files_in_every_dtype(tmp_path):
    tensors = {
        str(dtype): torch.ones(3, 5).to(dtype) for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.float64)
    }
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(7), "strided": torch.arange(12.0).reshape(3, 4).t()}
    entries = [
        FileEntry(name, value.dtype, tuple(value.shape), lambda value=value: value) for name, value in tensors.items()
    ]
    manifest.write_verified(tmp_path / "file.safetensors", safetensors_blocks(entries))
    read = load_file(tmp_path / "file.safetensors")
    assert read.keys() == tensors.keys()
    for name, value in tensors.items():
        assert torch.equal(read[name], value)
        assert read[name].dtype == value.dtype


def test_a_manifest_that_lists_files_outside_of_the_checkpoint_is_rejected(tmp_path):
    save(tmp_path, [5])
    valid = manifest.read_manifest(tmp_path / "step-00000005")
    valid.files["../latest"] = manifest.FileRecord(1, "")
    (tmp_path / "step-00000006").mkdir()
    manifest.write_manifest(tmp_path / "step-00000006", valid)
    with pytest.raises(manifest.CorruptCheckpoint, match="lists a file outside of the checkpoint"):
        manifest.read_manifest(tmp_path / "step-00000006")
