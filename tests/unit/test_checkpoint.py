"""Checkpoints on one rank: what stays, what is refused and why, what the command tells."""

import errno
import json
import math
import re
import warnings

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.checkpoint import checkpoint_folder as catalog
from samestep.checkpoint import manifest
from samestep.checkpoint import manifest as files
from samestep.checkpoint.tensor_storage import Entry, tensor_blocks
from samestep.cli.checkpoint_command import command
from samestep.cli.main import main
from samestep.errors import CheckpointError
from samestep.messages import SamestepWarning

torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process loads dynamo, which sets a variable for good


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(("step-", ".")))


def save(folder, steps, keep=3, keep_best=None, values=None, model=None):
    """Save under these numbers; before each, log its value where that is not None."""
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
    with Run(global_batch=2, folder=folder / "logs") as run, warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        checkpoint = run.checkpoint(folder, model=model, optimizer=torch.optim.Adam(model.parameters()))
        return checkpoint.restored and checkpoint.restored.name, [str(warning.message) for warning in given]


def test_the_newest_stay_and_latest_points_to_the_last(tmp_path):
    save(tmp_path, [5, 10, 15, 20], keep=2)
    assert names(tmp_path) == ["step-00000015", "step-00000020"]
    assert (tmp_path / "latest").read_text() == "step-00000020\n"


@pytest.mark.parametrize(("metric", "best"), [("val/accuracy", "step-00000010"), ("val/loss", "step-00000005")])
def test_the_best_stays_beside_the_newest(tmp_path, metric, best, capsys):
    save(tmp_path, [5, 10, 15, 20], 1, metric, [0.5, 0.9, 0.7, 0.6])
    assert names(tmp_path) == [best, "step-00000020"]
    order = "lower" if metric.endswith("loss") else "higher"
    assert f"best checkpoint so far: {best} by {metric} ({order} is better)" in capsys.readouterr().out


def test_a_best_value_that_was_never_logged_is_warned_of_once(tmp_path):
    with pytest.warns(
        SamestepWarning, match="keep_best='val/accuracy' cannot judge this checkpoint: no such number"
    ) as w:
        save(tmp_path, [1, 2], keep_best="val/accuracy")
    assert len(w) == 1


def test_a_value_judges_the_checkpoint_after_it_and_no_later_one(tmp_path):
    save(tmp_path, [5, 10, 15, 20, 25], 1, "val/accuracy", [0.5, 0.9, None, 0.7, None])
    assert names(tmp_path) == ["step-00000010", "step-00000025"]
    assert json.loads((tmp_path / "step-00000025" / "manifest.json").read_bytes())["metric"] is None


def test_a_value_that_the_pulse_has_written_judges_the_next_checkpoint_too(tmp_path):
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        checkpoint = run.checkpoint(tmp_path, keep=1, keep_best="val/loss", model=nn.Linear(1, 1))
        run.log({"val/loss": 0.5}, now=True)
        checkpoint.save(step=1)
        run.log({"val/loss": 0.5}, now=True)  # the same number, of other weights
        checkpoint.save(step=2)
        checkpoint.wait()
    assert json.loads((tmp_path / "step-00000002" / "manifest.json").read_bytes())["metric"] == ["val/loss", 0.5]


@pytest.mark.parametrize("metric", ["val/accuracy", "val/loss"])
def test_of_two_equally_good_ones_the_older_is_the_best(tmp_path, metric):
    save(tmp_path, [5, 10, 15], 1, metric, [0.5, 0.5, 0.5])
    assert names(tmp_path) == ["step-00000005", "step-00000015"]


@pytest.mark.parametrize("again", [None, 0.9, 0.8])
def test_the_best_stays_where_its_step_is_saved_again(tmp_path, again):
    save(tmp_path, [5, 10, 10, 15], 1, "val/accuracy", [0.5, 0.9, again, 0.7])
    assert names(tmp_path) == ["step-00000010", "step-00000015"]


def test_a_step_saved_again_is_the_best_where_it_has_a_better_value(tmp_path):
    save(tmp_path, [5, 5, 10], 1, "val/accuracy", [0.5, 0.9, 0.7])
    assert names(tmp_path) == ["step-00000005-2", "step-00000010"]


def test_the_best_and_its_second_save_count_as_one_of_those_that_stay(tmp_path):
    save(tmp_path, [5, 10, 10, 15], 3, "val/accuracy", [0.5, 0.9, None, None])
    assert names(tmp_path) == ["step-00000005", "step-00000010", "step-00000010-2", "step-00000015"]


def test_a_number_below_that_of_another_checkpoint_is_refused_and_nothing_written(tmp_path):
    told = (
        f"this checkpoint would be of step 50, and {tmp_path / 'step-00000100'} is there: run.checkpoint takes the "
        "highest number, so what was trained since would be lost; number checkpoints upwards, as in "
        "checkpoint.save(step=101), or always by the steps done with checkpoint.save(), or give run.checkpoint another "
        "folder"
    )
    with pytest.raises(CheckpointError) as refused:
        save(tmp_path, [100, 50])
    assert str(refused.value) == told
    assert names(tmp_path) == ["step-00000100"]
    with pytest.raises(CheckpointError, match="would be of step 0, and"):  # the steps done, in a run after it
        save(tmp_path, [None])
    save(tmp_path, [100, 101])
    assert names(tmp_path) == ["step-00000100-2", "step-00000101"]
    assert (tmp_path / "latest").read_text() == "step-00000101\n"


@pytest.mark.parametrize("step", [-5, 2.5, "x", True])
def test_what_is_no_number_of_a_step_is_refused_before_anything_is_written(tmp_path, step):
    told = (
        f"checkpoint.save: step={step!r} is not a step: give a whole number from 0 on, e.g. step=epoch.number; without"
    )
    with pytest.raises(CheckpointError, match=re.escape(told)):
        save(tmp_path, [step])
    assert not names(tmp_path)


def test_a_number_of_numpy_or_torch_is_as_good(tmp_path):
    save(tmp_path, [np.int64(3), torch.tensor(4)])
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_a_second_checkpoint_of_a_step_is_the_newer_one(tmp_path):
    save(tmp_path, [5, 5], keep=2)
    assert names(tmp_path) == ["step-00000005-2"]
    assert restored(tmp_path) == ("step-00000005-2", [])


def test_a_bit_that_flips_in_any_file_is_found_and_the_older_one_used(tmp_path):
    save(tmp_path, [5, 10])
    newest = tmp_path / "step-00000010"
    luck = torch.Generator().manual_seed(1)
    for path in sorted(newest.iterdir()):
        kept = path.read_bytes()
        for _ in range(6):
            data = bytearray(kept)
            at = int(torch.randint(len(data), (1,), generator=luck))
            data[at] ^= 1 << int(torch.randint(8, (1,), generator=luck))
            path.write_bytes(data)
            name, told = restored(tmp_path)
            assert name == "step-00000005", (path, at)
            assert len(told) == 1
            assert f"checkpoint {newest} is passed over: {path.name} " in told[0]
        path.write_bytes(kept)
    assert restored(tmp_path) == ("step-00000010", [])


@pytest.mark.parametrize("name", ["manifest.json", "index.json", "state.json", "rank-00000.safetensors"])
def test_a_file_that_is_cut_or_missing_is_found(tmp_path, name):
    save(tmp_path, [5, 10])
    path = tmp_path / "step-00000010" / name
    path.write_bytes(path.read_bytes()[:-9])
    found, told = restored(tmp_path)
    assert found == "step-00000005"
    assert name in told[0]
    path.unlink()
    found, told = restored(tmp_path)
    assert found == "step-00000005"
    assert (f"it has no {name}" if name == "manifest.json" else f"{name} is missing") in told[0]


def test_a_damaged_one_is_replaced_and_never_counts(tmp_path):
    save(tmp_path, [5, 10], keep=2)
    (tmp_path / "step-00000010" / "state.json").write_text("{}")
    with pytest.warns(SamestepWarning, match=r"state.json has 2 bytes and should have"):
        save(tmp_path, [7, 10, 12], keep=2)
    assert names(tmp_path) == ["step-00000010-2", "step-00000012"]
    assert restored(tmp_path) == ("step-00000012", [])


class Moody:
    def state_dict(self):
        return {"good": True}

    def load_state_dict(self, state):
        raise ZeroDivisionError("not today")


def test_what_a_part_of_the_user_raises_is_told_with_the_checkpoint(tmp_path):
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        run.checkpoint(tmp_path, thing=Moody()).save()
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        with pytest.raises(CheckpointError, match="step-00000000 cannot be restored: ZeroDivisionError: not today"):
            run.checkpoint(tmp_path, thing=Moody())
        thing = Moody()
        checkpoint = run.checkpoint(tmp_path / "other", thing=thing)
        thing.state_dict = lambda: 1 / 0
        with pytest.raises(CheckpointError, match="the state cannot be told: ZeroDivisionError"):
            checkpoint.save()


def test_the_last_sound_one_is_never_removed(tmp_path, monkeypatch):
    save(tmp_path, [5], keep=1)
    monkeypatch.setattr(files, "_write_all", no_room)
    with pytest.raises(CheckpointError, match="failed: the disk is full: free some space"):
        save(tmp_path, [6], keep=1)
    monkeypatch.undo()
    assert names(tmp_path) == ["step-00000005"]
    assert restored(tmp_path) == ("step-00000005", [])


def no_room(handle, data):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOSPC, "saving failed: the disk is full: free some space, or keep fewer with keep="),
        (errno.EACCES, "saving failed: there is no permission: choose a folder that you may write"),
        (errno.EROFS, "saving failed: the disk is read-only: choose another folder"),
        (errno.EIO, "saving failed: Input/output error; the checkpoints already published are untouched"),
    ],
)
def test_errors_of_the_disk_say_what_to_do(number, text):
    assert text in str(files.explain(OSError(number, "Input/output error"), "saving"))


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    class Usage:
        free = 1000

    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: Usage)
    with pytest.raises(CheckpointError, match=r"has 1000 B free and this checkpoint needs .* KiB: free some space"):
        save(tmp_path, [1])
    assert not names(tmp_path)


def test_a_file_in_place_of_the_folder_is_told(tmp_path):
    (tmp_path / "out").write_text("")
    with (
        Run(global_batch=2, folder=tmp_path / "logs") as run,
        pytest.raises(CheckpointError, match="a file stands where"),
    ):
        run.checkpoint(tmp_path / "out", model=nn.Linear(1, 1))


def test_a_written_file_that_reads_otherwise_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "checksum", lambda path: files.Written(0, ""))
    with pytest.raises(CheckpointError, match="does not hold what was written to it"):
        files.write_checked(tmp_path / "file", [b"text"])


def test_what_killed_writers_left_is_cleared_away(tmp_path):
    for name in (".writing-step-00000007-abc", ".deleting-step-00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".mine").mkdir()
    save(tmp_path, [5])
    assert names(tmp_path) == [".mine", "step-00000005"]


def test_a_killed_removal_keeps_nobody_from_removing_another_of_that_name(tmp_path):
    half = tmp_path / ".deleting-step-00000005"
    for folder in (half, tmp_path / "step-00000005"):
        folder.mkdir()
        (folder / "rank-00000.safetensors").touch()
    files.remove_folder(tmp_path / "step-00000005")
    assert names(tmp_path) == []


def test_what_is_no_checkpoint_is_removed_under_the_name_by_which_it_is_found_again(tmp_path, monkeypatch):
    left = tmp_path / ".writing-step-00000005-1a2b"
    left.mkdir()
    monkeypatch.setattr(files.shutil, "rmtree", lambda folder: None)  # killed before it began
    files.remove_folder(left)
    monkeypatch.undo()
    assert catalog.clean(tmp_path, "now") == [left.name]
    assert names(tmp_path) == []


def test_a_newer_format_is_refused_and_nothing_changed(tmp_path, monkeypatch):
    save(tmp_path, [5])
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "VERSION", 2)
        save(tmp_path, [10])
    with pytest.raises(
        CheckpointError, match="step-00000010 is of format version 2 and this samestep reads up to 1: update"
    ):
        restored(tmp_path)
    assert names(tmp_path) == ["step-00000005", "step-00000010"]


def test_another_model_is_refused_with_the_names_that_differ(tmp_path):
    save(tmp_path, [5])
    other = nn.Sequential(nn.Linear(3, 4), nn.Identity())
    with pytest.raises(CheckpointError) as told:
        save(tmp_path, [6], model=other)
    assert (
        "the checkpoint belongs to another run, for model is another model: 0.bias is (2,) there and (4,) here"
        in str(told.value)
    )
    assert "1.bias is there only" in str(told.value)
    assert "and 2 more; give run.checkpoint another folder, or build the model as it was" in str(told.value)
    assert names(tmp_path) == ["step-00000005"]


class Nothing:
    pass


def test_what_run_restore_cannot_take_is_told(tmp_path):
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        model = nn.Linear(1, 1)
        with pytest.raises(CheckpointError, match="got a Nothing, which has no state_dict and no load_state_dict"):
            run.checkpoint(tmp_path, thing=Nothing())
        for keep in (0, 2.5, "3"):
            with pytest.raises(CheckpointError, match=f"keep={keep!r} is no number of checkpoints: keep 1 or more"):
                run.checkpoint(tmp_path, keep=keep, model=model)
        checkpoint = run.checkpoint(tmp_path, model=model)
        with pytest.raises(CheckpointError, match=r"says no time to save: give steps=, a whole number as in every\("):
            checkpoint.every()
        for times in ({"steps": 0}, {"steps": 2.5}, {"steps": "9"}, {"minutes": -1}, {"minutes": math.nan}):
            with pytest.raises(CheckpointError, match=r"every\(steps=.*, minutes=.*\) says no time to save"):
                checkpoint.every(**times)


def test_parts_that_are_not_there_are_missed_and_parts_not_asked_for_are_told(tmp_path):
    save(tmp_path, [5])
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        with pytest.raises(
            CheckpointError, match=r"holds no ema, only model, optimizer: leave it out of run.checkpoint"
        ):
            run.checkpoint(tmp_path, model=model, ema=nn.Linear(1, 1))
        with pytest.warns(SamestepWarning, match="also holds optimizer, which run.checkpoint was not given"):
            run.checkpoint(tmp_path, model=model)


def test_an_optimizer_with_other_groups_is_refused(tmp_path):
    save(tmp_path, [5])
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.Adam([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
        with pytest.raises(CheckpointError, match=r"\[4\] parameters in its groups there, \[2, 2\] here"):
            run.checkpoint(tmp_path, model=model, optimizer=optimizer)


def test_a_position_in_other_data_is_refused_by_the_data(tmp_path):
    def go(n):
        with Run(global_batch=2, folder=tmp_path / "logs") as run:
            data = run.shard(TensorDataset(torch.zeros(n)), num_workers=0)
            run.checkpoint(tmp_path, train=data).save()

    go(6)
    with pytest.raises(CheckpointError, match="the saved position has n=6 and this shard has n=8"):
        go(8)


def test_saving_before_the_first_step_leaves_the_optimizer_as_it_is(tmp_path):
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.Adam(model.parameters())
        run.checkpoint(tmp_path, model=model, optimizer=optimizer).save()
        assert not optimizer.state
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        run.checkpoint(tmp_path, model=model, optimizer=optimizer)
        assert not optimizer.state


def test_how_an_optimizer_computes_stays_a_matter_of_the_machine(tmp_path):
    def go(**options):
        with Run(global_batch=2, folder=tmp_path / "logs") as run:
            model = nn.Linear(1, 1)
            optimizer = torch.optim.Adam(model.parameters(), **options)
            checkpoint = run.checkpoint(tmp_path, model=model, optimizer=optimizer)
            checkpoint.save()
            return optimizer.param_groups[0]

    go(lr=0.5, foreach=True)
    group = go(lr=0.1, foreach=False)
    assert (group["lr"], group["foreach"]) == (0.5, False)


def test_logs_and_ledger_lie_beside_the_checkpoints_where_no_folder_was_named(tmp_path, monkeypatch):
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


def test_a_folder_may_be_in_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with Run(global_batch=2, seed=0, folder="~/logs") as run:
        assert run.folder == tmp_path / "logs"
        run.checkpoint("~/saved", model=run.wrap(nn.Linear(2, 1))).save()
    assert [path.name for path in (tmp_path / "saved").glob("step-*")] == ["step-00000000"]


@pytest.mark.parametrize("typed", [False, True])
def test_a_folder_of_the_launchers_own_gives_way_to_that_of_restore_and_a_typed_one_does_not(
    tmp_path, monkeypatch, typed
):
    monkeypatch.setenv("SAMESTEP_FOLDER", str(tmp_path / "launched"))
    monkeypatch.setenv("SAMESTEP_FOLDER_IS_EXPLICIT", str(int(typed)))
    with Run(global_batch=2, ledger=True) as run:
        model = run.wrap(nn.Linear(1, 1))
        data = run.shard(TensorDataset(torch.zeros(4, 1)), num_workers=0)
        run.checkpoint(tmp_path / "out", model=model, train=data)
        run.checkpoint(tmp_path / "second", model=model)  # the first one counts
        assert run.folder == tmp_path / ("launched" if typed else "out")
        for epoch in data.epochs(1):
            for step in epoch:
                for (x,) in step:
                    step.mean(model(x).sum(1)).backward()
    there = {path.name for path in run.folder.iterdir()}
    assert there >= {"ledger", "log.txt", "metrics.jsonl", "summary.json"}
    assert main(["audit", str(run.folder)]) == 0
    assert typed or not (tmp_path / "launched").exists()


def test_without_restore_a_run_writes_to_the_launchers_own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMESTEP_FOLDER", str(tmp_path / "launched"))
    monkeypatch.setenv("SAMESTEP_FOLDER_IS_EXPLICIT", "0")
    with Run(global_batch=2) as run:
        run.log({"val/accuracy": 1.0})
    assert (tmp_path / "launched" / "summary.json").exists()


def test_a_save_inside_a_step_waits_for_its_end(tmp_path):
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


def test_a_step_that_is_passed_over_is_not_saved_twice(tmp_path):
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


def test_our_files_are_read_by_the_library_in_every_dtype(tmp_path):
    tensors = {
        str(dtype): torch.ones(3, 5).to(dtype) for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.float64)
    }
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(7), "strided": torch.arange(12.0).reshape(3, 4).t()}
    entries = [
        Entry(name, value.dtype, tuple(value.shape), lambda value=value: value) for name, value in tensors.items()
    ]
    files.write_checked(tmp_path / "file.safetensors", tensor_blocks(entries))
    read = load_file(tmp_path / "file.safetensors")
    assert read.keys() == tensors.keys()
    for name, value in tensors.items():
        assert torch.equal(read[name], value)
        assert read[name].dtype == value.dtype


def invoke(*arguments):
    answer = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if answer.exception and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    return answer


def test_inspect_tells_what_is_inside(tmp_path):
    save(tmp_path, [5, 10])
    told = invoke("inspect", tmp_path).output
    assert f"{tmp_path / 'step-00000010'}: step 10, 0 samples, " in told
    assert "parts: model (model), optimizer (optimizer)" in told
    assert "steps 0 to 0 on 1 rank(s), samestep " in told
    assert "model/0.weight" in told
    assert "(2, 3)" in told
    record = json.loads(invoke("inspect", tmp_path / "step-00000005", "--json").output)
    assert record["step"] == 5
    assert record["tensors"]["model/0.weight"]["shape"] == [2, 3]


def test_verify_ends_with_1_where_something_is_wrong(tmp_path):
    save(tmp_path, [5, 10])
    answer = invoke("verify", tmp_path)
    assert answer.exit_code == 0
    assert answer.output.count("sound: ") == 2
    (tmp_path / "step-00000010" / "index.json").unlink()
    answer = invoke("verify", tmp_path)
    assert answer.exit_code == 1
    assert "step-00000010 is damaged: index.json is missing" in answer.output
    assert invoke("verify", tmp_path / "step-00000005").exit_code == 0
    told = json.loads(invoke("verify", tmp_path, "--json").output)
    assert [each["sound"] for each in told["checkpoints"]] == [False, True]
    (tmp_path / "step-00000010" / "manifest.json").unlink()
    assert invoke("verify", tmp_path / "step-00000010").exit_code == 1


def test_export_gives_a_plain_file_with_the_names_of_the_module(tmp_path):
    model = save(tmp_path, [5])
    target = tmp_path / "model.safetensors"
    told = invoke("export", tmp_path, "--to", target).output
    assert told.startswith(f"{target}: 7 tensors, ")
    fresh = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    fresh.load_state_dict(load_file(target))
    assert torch.equal(fresh[0].weight, model[0].weight)
    with pytest.raises(CheckpointError, match="is there already: choose another file with --to"):
        invoke("export", tmp_path, "--to", target)
    with pytest.raises(CheckpointError, match=r"there is no folder .*nowhere to write it to: make it, or choose --to"):
        invoke("export", tmp_path, "--to", tmp_path / "nowhere" / "it")
    with pytest.raises(CheckpointError, match="holds no model 'ema': choose one with --part, of model"):
        invoke("export", tmp_path, "--to", tmp_path / "other", "--part", "ema")


def test_a_checkpoint_that_its_run_removes_while_all_are_verified_is_no_damage(tmp_path, monkeypatch, capsys):
    save(tmp_path, [5, 6])
    check = catalog.check_whole

    def check_beside_a_live_run(path):
        if path.name == "step-00000005":
            files.remove_folder(path)
        return check(path)

    monkeypatch.setattr(catalog, "check_whole", check_beside_a_live_run)
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"sound: {tmp_path / 'step-00000006'}\n"


def test_an_unknown_option_lists_those_there_are_and_speaks_of_no_script(capsys):
    assert main(["checkpoint", "verify", "--jsn", "out"]) == 2
    told = "samestep: there is no option --jsn: there are --help, --json; did you mean --json?\n"
    assert capsys.readouterr().err == told


def test_a_folder_without_checkpoints_is_told_in_one_line(tmp_path, capsys):
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 2
    assert f"samestep: {tmp_path} holds no sound checkpoint: give the folder" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no checkpoint: give the folder that run.checkpoint was given" in capsys.readouterr().err


def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path):
    save(tmp_path, [5])
    whole = manifest.read_manifest(tmp_path / "step-00000005")
    whole.files["../latest"] = files.Written(1, "")
    (tmp_path / "step-00000006").mkdir()
    manifest.write_manifest(tmp_path / "step-00000006", whole)
    with pytest.raises(manifest.Damaged, match="names a file outside of the checkpoint"):
        manifest.read_manifest(tmp_path / "step-00000006")
