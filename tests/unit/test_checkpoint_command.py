"""`samestep checkpoint inspect`, `verify` and `export`."""

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn

from samestep.checkpoint import checkpoint_folder, manifest
from samestep.cli.checkpoint_command import command
from samestep.cli.main import main
from samestep.errors import CheckpointError
from tests.unit.test_checkpoint import save


def invoke(*arguments):
    answer = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if answer.exception and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    return answer


def test_inspect_shows_the_contents(tmp_path):
    save(tmp_path, [5, 10])
    output = invoke("inspect", tmp_path).output
    assert f"{tmp_path / 'step-00000010'}: step 10, 0 samples, " in output
    assert "parts: model (model), optimizer (optimizer)" in output
    assert "steps 0 to 0 on 1 rank(s), samestep " in output
    assert "model/0.weight" in output
    assert "(2, 3)" in output
    record = json.loads(invoke("inspect", tmp_path / "step-00000005", "--json").output)
    assert record["step"] == 5
    assert record["tensors"]["model/0.weight"]["shape"] == [2, 3]


def test_verify_exits_with_1_if_a_checkpoint_is_corrupt(tmp_path):
    save(tmp_path, [5, 10])
    answer = invoke("verify", tmp_path)
    assert answer.exit_code == 0
    assert answer.output.count("valid: ") == 2
    (tmp_path / "step-00000010" / "index.json").unlink()
    answer = invoke("verify", tmp_path)
    assert answer.exit_code == 1
    assert "step-00000010 is corrupt: index.json is missing" in answer.output
    assert invoke("verify", tmp_path / "step-00000005").exit_code == 0
    report = json.loads(invoke("verify", tmp_path, "--json").output)
    assert [each["valid"] for each in report["checkpoints"]] == [False, True]
    (tmp_path / "step-00000010" / "manifest.json").unlink()
    assert invoke("verify", tmp_path / "step-00000010").exit_code == 1


def test_export_writes_a_file_with_the_names_of_the_module(tmp_path):
    model = save(tmp_path, [5])
    target = tmp_path / "model.safetensors"
    output = invoke("export", tmp_path, "--to", target).output
    assert output.startswith(f"{target}: 7 tensors, ")
    fresh = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    fresh.load_state_dict(load_file(target))
    assert torch.equal(fresh[0].weight, model[0].weight)
    with pytest.raises(CheckpointError, match="already exists: choose another file with --to"):
        invoke("export", tmp_path, "--to", target)
    with pytest.raises(
        CheckpointError, match=r"the folder .*nowhere of --to does not exist: create it, or choose another --to"
    ):
        invoke("export", tmp_path, "--to", tmp_path / "nowhere" / "it")
    with pytest.raises(CheckpointError, match="has no model 'ema': choose one with --part, of model"):
        invoke("export", tmp_path, "--to", tmp_path / "other", "--part", "ema")


def test_a_checkpoint_that_its_run_removes_during_verify_is_not_reported_as_corrupt(tmp_path, monkeypatch, capsys):
    save(tmp_path, [5, 6])
    verify = manifest.verify_checkpoint

    def verify_during_a_live_run(path):
        if path.name == "step-00000005":
            checkpoint_folder.remove_folder(path)
        return verify(path)

    monkeypatch.setattr(manifest, "verify_checkpoint", verify_during_a_live_run)
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"valid: {tmp_path / 'step-00000006'}\n"


def test_an_unknown_option_lists_the_options_of_the_command(capsys):
    assert main(["checkpoint", "verify", "--jsn", "out"]) == 2
    error = "samestep: unknown option --jsn: use one of --help, --json; did you mean --json?\n"
    assert capsys.readouterr().err == error


def test_a_folder_without_checkpoints_is_reported_in_one_line(tmp_path, capsys):
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 2
    assert f"samestep: {tmp_path} has no valid checkpoint: pass the folder" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(tmp_path)]) == 2
    assert f"{tmp_path} has no checkpoint: pass the folder that run.checkpoint received" in capsys.readouterr().err
