"""Options from a file: what YAML, TOML and JSON mean, which mistakes are reported with their line, what wins."""

import argparse
import json
import sys

import pytest

from samestep.errors import LaunchError
from samestep.launch.configuration import (
    config_values,
    config_variable,
    describe_command,
    given_names,
    merge_arguments,
    read_launch,
    read_options_file,
    recorded_variables,
    write_launch,
)

YAML = """\
# options of train.py
lr: 1e-3
epochs: 10
seed: 007
optimizer: on  # a text, not true
name: "5"
fast: true
compile: false
resume: null
sizes: [8, 1e1]
tags:
  - a
  - b c
date: 2026-01-31
"""
TOML = 'lr = 1e-3\nepochs = 10\nname = "5"\nfast = true\nsizes = [8, 16]\ndate = 2026-01-31\n'
JSON = '{"lr": 1e-3,\n "epochs": 10, "name": "5", "fast": true, "sizes": [8, 16], "resume": null}'


def read(folder, name, text):
    path = folder / name
    path.write_text(text)
    return read_options_file(path)


def test_yaml_keeps_the_text_of_numbers_and_knows_true_false_and_null_only(tmp_path):
    file = read(tmp_path, "run.yaml", YAML)
    assert file.values() == {
        "lr": 0.001, "epochs": 10, "seed": 7, "optimizer": "on", "name": "5", "fast": True, "compile": False,
        "resume": None, "sizes": [8, 10.0], "tags": ["a", "b c"], "date": "2026-01-31",
    }  # fmt: skip
    assert merge_arguments(file.options, [], repeat_lists=False) == [
        "--lr=1e-3", "--epochs=10", "--seed=007", "--optimizer=on", "--name=5", "--fast", "--no-compile",
        "--date=2026-01-31", "--sizes", "8", "1e1", "--tags", "a", "b c",
    ]  # fmt: skip
    assert file.options["sizes"].line == 10


@pytest.mark.parametrize(("name", "text"), [("run.toml", TOML), ("run.json", JSON)])
def test_toml_and_json_give_the_same_options(tmp_path, name, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)  # they need no package
    file = read(tmp_path, name, text)
    values = file.values()
    assert (values["lr"], values["epochs"], values["name"], values["fast"]) == (0.001, 10, "5", True)
    arguments = merge_arguments(file.options, [], repeat_lists=True)
    assert arguments[:6] == ["--lr=0.001", "--epochs=10", "--name=5", "--fast", "--sizes=8", "--sizes=16"]
    assert [file.options[name].line for name in ("lr", "epochs")] == [1, 2]


def test_digits_with_underscores_are_a_number_only_where_python_reads_one(tmp_path):
    file = read(tmp_path, "run.yaml", "a: 1_000\nb: 1_\nc: 2024__05\nd: 1_0.5\ne: -1_0\n")
    assert file.values() == {"a": 1000, "b": "1_", "c": "2024__05", "d": 10.5, "e": -10}


@pytest.mark.parametrize(("name", "text"), [("run.json", '{"a": %s}'), ("run.toml", "a = %s")])
def test_a_number_of_thousands_of_digits_is_a_mistake(tmp_path, name, text):
    with pytest.raises(LaunchError) as caught:
        read(tmp_path, name, text % ("1" * 5000))
    shown = "Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits"
    assert str(caught.value) == (
        f"{tmp_path / name}, line 1: has a value that cannot be read ({shown}): write it as a text"
    )


def test_an_empty_file_has_no_options(tmp_path):
    assert read(tmp_path, "run.yaml", "# nothing\n").options == {}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.yaml", "lr: 0.1\nsteps: [1, 2\n", "line 3: not valid YAML (expected ',' or ']', but got '<stream end>')"),
        ("run.yaml", "lr: 0.1\n\tx: 2\n", "line 2: not valid YAML (found character '\\t' that cannot start any token)"),
        ("run.yaml", "lr: \x07\n", "line 1: not valid YAML (a control character)"),
        ("run.yaml", "- lr\n", "line 1: a list or a text, not options: write one option per line, as in lr: 0.1"),
        ("run.yaml", "a: 1\nlr: 1\na: 2\n", "line 3: a is given twice, first in line 1: remove one"),
        (
            "run.yaml",
            "lr: 0.1\nmodel:\n  depth: 2\n",
            "line 2: model has nested values, and an option has one value or a list: write one line per option",
        ),
        (
            "run.yaml",
            "sizes: [[1], [2]]\n",
            "line 1: sizes has nested values, and an option has one value or a list: write one line per option",
        ),
        (
            "run.yaml",
            "a: &a [*a]\n",
            "line 1: has values inside of values, too deep to read: write one line per option",
        ),
        (
            "run.yaml",
            "--lr: 0.1\n",
            "line 1: '--lr' is not the name of an option: write it without dashes in front, as in lr: 0.1",
        ),
        (
            "run.yaml",
            'name: "\\UFFFFFFFF"\n',
            "line 1: has a value that cannot be read (Python int too large to convert to C int): write it as a text",
        ),
        ("run.toml", "lr = 0.1\nepochs == 2\n", "line 2: not valid TOML (Invalid value)"),
        (
            "run.toml",
            "lr = 0.1\n[model]\ndepth = 2\n",
            "line 2: model has nested values, and an option has one value or a list: write one line per option",
        ),
        ("run.json", '{"lr": 0.1,\n "a" 2}', "line 2: not valid JSON (Expecting ':' delimiter)"),
        ("run.json", "[1]", 'line 1: a list or a text, not options: write an object, as in {"lr": 0.1}'),
        ("run.json", '{"lr": 1,\n "lr": 2}', "line 1: lr is given twice, first in line 1: remove one"),
    ],
)
def test_a_mistake_is_reported_with_its_line(tmp_path, name, text, message):
    with pytest.raises(LaunchError) as caught:
        read(tmp_path, name, text)
    assert str(caught.value) == f"{tmp_path / name}, {message}"


def test_a_file_that_cannot_be_used_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.txt").write_text("lr: 0.1")
    (tmp_path / "latin.yaml").write_bytes("name: Zürich".encode("latin-1"))
    (tmp_path / "large.yaml").write_text("#" * 70_000)
    for name, message in (
        ("gone.yaml", f"does not exist: check its path, which starts in {tmp_path}"),
        (".", "cannot be read (Is a directory): pass a file"),
        ("run.txt", "has the suffix '.txt': pass a .yaml, .yml, .toml or .json file"),
        ("latin.yaml", "is not UTF-8: save it as UTF-8"),
        ("large.yaml", "has 70,000 bytes: options have at most 65,536"),
    ):
        with pytest.raises(LaunchError) as caught:
            read_options_file((tmp_path / name).relative_to(tmp_path))
        assert str(caught.value) == f"--config {name} {message}"


def test_without_a_yaml_parser_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(LaunchError) as caught:
        read(tmp_path, "run.yaml", "lr: 0.1")
    assert str(caught.value) == (
        f"--config {tmp_path / 'run.yaml'} needs PyYAML, which is not installed: pip install 'samestep[yaml]', or "
        "write the options as .toml or .json"
    )


@pytest.mark.parametrize(
    ("explicit", "expected"),
    [
        (["--lr", "1"], ["--global_batch=4", "--fast", "--lr", "1"]),
        (["--lr=1"], ["--global_batch=4", "--fast", "--lr=1"]),
        (["--global-batch", "8"], ["--lr=0.1", "--fast", "--global-batch", "8"]),
        (["--no-fast"], ["--lr=0.1", "--global_batch=4", "--no-fast"]),
        (["-l", "1"], ["--lr=0.1", "--global_batch=4", "--fast", "-l", "1"]),  # the last one counts
        (["--", "--lr"], ["--lr=0.1", "--global_batch=4", "--fast", "--", "--lr"]),
    ],
)
def test_explicit_arguments_win(tmp_path, explicit, expected):
    file = read(tmp_path, "run.yaml", "lr: 0.1\nglobal_batch: 4\nfast: true\n")
    assert merge_arguments(file.options, explicit, repeat_lists=False) == expected


def test_a_list_does_not_take_a_positional_argument_of_the_script(tmp_path):
    file = read(tmp_path, "run.yaml", "sizes: [1, 2]\n")
    assert merge_arguments(file.options, ["data", "--lr", "1"], False) == ["data", "--sizes", "1", "2", "--lr", "1"]
    assert merge_arguments(file.options, ["a", "-1", "--", "b"], False) == ["a", "-1", "--sizes", "1", "2", "--", "b"]


@pytest.mark.parametrize("explicit", [["-s", "3"], ["--siz", "3"], ["data", "-s", "3"]])
def test_a_list_that_is_given_by_a_short_name_wins(tmp_path, explicit):
    parser = argparse.ArgumentParser()
    parser.add_argument("-s", "--sizes", type=int, nargs="+")
    parser.add_argument("data", nargs="?")
    file = read(tmp_path, "run.yaml", "sizes: [1, 2]\n")
    assert parser.parse_args(merge_arguments(file.options, explicit, repeat_lists=False)).sizes == [3]


def test_names_of_given_options():
    assert given_names(["data", "--lr=1", "--no-fast", "-x", "--", "--other"]) == {"lr", "no-fast", "fast"}


def test_the_values_reach_the_ranks_in_a_variable():
    variable = config_variable({"lr": 0.1, "sizes": [1, None]})
    assert config_values(variable) == {"lr": 0.1, "sizes": [1, None]}
    assert config_variable({}) == {"SAMESTEP_CONFIG": None}
    with pytest.raises(
        LaunchError, match="SAMESTEP_CONFIG is not a JSON object: samestep sets this variable itself; run"
    ):
        config_values({"SAMESTEP_CONFIG": "{"})


def test_variables_that_change_results_or_are_about_gpus_are_recorded_without_secrets():
    environ = {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "2",
        "NCCL_DEBUG": "INFO",
        "TORCH_API_KEY": "x",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    assert recorded_variables(environ) == {"CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}


def test_a_missing_or_broken_record_reads_as_empty(tmp_path):
    assert read_launch(None) == read_launch(tmp_path) == {}
    (tmp_path / "config.json").write_text("{")
    assert read_launch(tmp_path) == {}
    write_launch(tmp_path, {"script": "train.py"})
    assert read_launch(tmp_path) == {"script": "train.py"}


def test_the_command_of_a_process_names_its_module_and_hides_secrets(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/lab/train.py", "--api-key", "abc", "--lr", "0.1"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert describe_command() == {
        "script": "/lab/train.py",
        "module": False,
        "arguments": ["--api-key", "***", "--lr", "0.1"],
    }
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", json.__spec__)
    assert (describe_command()["script"], describe_command()["module"]) == ("json", True)
