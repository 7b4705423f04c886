"""Mistakes on the command line: one line that explains them, and exit code 2."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from samestep.cli.main import COMMANDS, NumberRange, main, samestep
from samestep.errors import LaunchError

OPTIONS = (
    "--config, --folder, --grace, --help, --local-addr, --master-addr, --master-port, --max-restarts, --module, "
    "--nnodes, --node-rank, --nproc-per-node, --on-hang, --precision, --profile, --rdzv-backend, --rdzv-conf, "
    "--rdzv-endpoint, --rdzv-id, --show-ranks, --standalone, --time-limit, --verbose"
)
KNOWN = ", ".join(COMMANDS)

# Arguments of `samestep` in a folder that contains ok.py and a package lab without __main__.py.
MISTAKES = [
    ("rum", f"unknown command rum: use one of {KNOWN}; did you mean `samestep run`?"),
    ("zzz", f"unknown command zzz: use one of {KNOWN}"),
    ("train.py", f"unknown command train.py: use one of {KNOWN}; did you mean `samestep run train.py`?"),
    ("recipe ran", "unknown command ran: use one of copy, list, run; did you mean `samestep recipe run`?"),
    ("checkpoint zzz", "unknown command zzz: use one of export, inspect, verify\n"),
    ("audit", "argument RUN_DIR is missing: run `samestep audit RUN_DIR`; `samestep audit --help` explains it"),
    (
        "checkpoint inspect",
        "argument FOLDER is missing: run `samestep checkpoint inspect FOLDER`; `samestep checkpoint inspect",
    ),
    ("--fast", "unknown option --fast: use one of --help, --version"),
    ("run", "no script given: run `samestep run train.py`, or `samestep run -m package.module`"),
    ("run --fast ok.py", f"unknown option --fast: use one of {OPTIONS}\n"),
    ("run --nproc 2 ok.py", f"unknown option --nproc: use one of {OPTIONS}; did you mean --nproc-per-node?"),
    (
        "run --max-restart 2 ok.py",
        f"unknown option --max-restart: use one of {OPTIONS}; did you mean --max-restarts?",
    ),
    ("run train.py", "script train.py not found in HERE; scripts there: ok.py"),
    ("run .", ". is a folder, not a script: pass a file, or `samestep run -m PACKAGE` for a package"),
    (
        "run -m lab.nope",
        "module lab.nope not found: lab.nope is neither in HERE nor installed; pass the dotted name as in "
        "`samestep run -m package.module`, from the folder that contains the package",
    ),
    ("run -m nowhere.train", "module nowhere.train not found: nowhere is neither in HERE nor installed; pass the"),
    ("run -m ok.train", "module ok.train not found: ok.train is neither in HERE nor installed; pass the"),
    ("run -m lab", "lab is a package without __main__.py: pass a module in it, as in lab.train"),
    ("run --nproc-per-node 0 ok.py", "--nproc-per-node must be auto, gpu, cpu or a number of at least 1, got 0"),
    ("run --nproc_per_node=-1 ok.py", "--nproc-per-node must be auto, gpu, cpu or a number of at least 1, got -1"),
    (
        "run --nproc-per-node banana ok.py",
        "--nproc-per-node must be auto, gpu, cpu or a number of at least 1, got banana",
    ),
    ("run --nproc-per-node", "Option '--nproc-per-node' requires an argument."),
    ("run --nnodes 3:1 ok.py", "--nnodes 3:1 is not a number of nodes: pass a number of at least 1, or MIN:MAX as in"),
    ("run --max-restarts -1 ok.py", "--max-restarts must be an integer from 0 to 1000000, got -1"),
    (
        "run --local-addr no..where ok.py",
        "--local-addr no..where cannot be resolved: pass an address of this machine at which other",
    ),
    (
        "run --time-limit soon ok.py",
        "--time-limit soon is not a time limit: pass hours, minutes and seconds as in 4:00:00",
    ),
    (
        "run --profile 10 ok.py",
        "--profile must be FIRST:END with the first step below the end, as in 10:13, got 10\n",
    ),
    (
        "run --profile 13:10 ok.py",
        "--profile must be FIRST:END with the first step below the end, as in 10:13, got 13:10\n",
    ),
    (
        "run --on-hang restart ok.py",
        "--on-hang restart needs restarts, and --max-restarts is 0: add --max-restarts 3, or pass --on-hang stop",
    ),
    ("hang nowhere", "there is no folder nowhere: pass the folder of a run, which `samestep run` prints at its start"),
    ("hang lab", "lab is not the folder of a run that `samestep run` has started: pass the one that it prints at its"),
    ("hang 2000000000", "there is no process 2000000000 on this machine: run `samestep hang` on the machine of the"),
    ("hang", "no run in HERE/runs is running: pass the folder that `samestep run` prints at its start, as in"),
    ("run --grace -1 ok.py", "--grace must be an integer from 0 to 10000000, got -1"),
    ("run --show-ranks some ok.py", "Invalid value for '--show-ranks': 'some' is not one of 'first', 'all'."),
    ("run --master-port PORT ok.py", "port PORT is in use (by "),
    ("run --rdzv-endpoint localhost:PORT ok.py", "port PORT is in use (by "),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ok.py").touch()
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[arguments for arguments, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: str, message: str, here: Path, capsys: pytest.CaptureFixture[str]
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        code = main(arguments.replace("PORT", port).split())
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("samestep: " + message.replace("HERE", str(here)).replace("PORT", port))
    assert err.count("\n") == 1
    assert not (here / "runs").exists()


def test_the_process_that_uses_a_port_is_named(here: Path, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert main(["run", "--master-port", str(server.getsockname()[1]), "ok.py"]) == 2
    message = f"pid {os.getpid()}): choose another port, or leave it out to use a free one"
    assert message in capsys.readouterr().err


def test_a_folder_that_is_a_file_is_rejected(here: Path):
    from samestep.launch.job import make_folder

    with pytest.raises(LaunchError, match=r"^--folder ok\.py is a file: choose a folder or a new name$"):
        make_folder(Path("ok.py"), "train")
    with pytest.raises(
        LaunchError, match=r"^cannot create the run's folder ok.py/x \(Not a directory\): choose another --"
    ):
        make_folder(Path("ok.py/x"), "train")


def test_runs_that_start_within_a_second_get_different_folders(here: Path):
    from samestep.launch.job import make_folder

    folders = [str(make_folder(None, "train-1")) for _ in range(3)]
    assert folders == ["runs/train-1", "runs/train-1-2", "runs/train-1-3"]


def test_every_command_is_listed_without_being_imported(capsys: pytest.CaptureFixture[str]):
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("group", ["recipe", "checkpoint"])
def test_a_group_without_a_command_shows_its_help(
    group: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([group]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"Usage: samestep {group} [OPTIONS] COMMAND")
    assert "..." not in out.partition("Commands:")[2]
    assert err == ""


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "samestep 0.1.0\n"


@pytest.mark.parametrize("statement", ["import samestep", "from samestep.cli.main import main; main(['--help'])"])
def test_it_starts_quickly_and_without_torch(statement: str):
    code = f"{statement}; import sys; sys.exit(3 if 'torch' in sys.modules or 'numpy' in sys.modules else 0)"
    seconds: list[float] = []
    for _ in range(3):
        before = cpu_seconds_of_children()
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
        seconds.append(cpu_seconds_of_children() - before)
    assert min(seconds) < 0.6  # 0.2 on an idle machine; a busy one has slower cores


def cpu_seconds_of_children() -> float:
    spent = os.times()
    return spent.children_user + spent.children_system


# Numbers

TOO_LONG = "9" * 5000
NOT_NUMBERS = ("nan", "inf", "-inf", "1e400", "x", "-1", "-0.5", TOO_LONG, "0x10", "1,", "\N{SUPERSCRIPT TWO}")
# Options that are text but contain a number, with valid values
NUMBERS_IN_TEXT = {
    "--nproc-per-node": "2",
    "--nnodes": "1",
    "--profile": "10:13",
    "--gpus-per-node": "a100:2",
    "--mem": "64G",
    "--time": "4:00:00",
    "--time-limit": "4:00:00",
    "--ranks": "1,2",
}
TEXTS = {
    "--account", "--blocks", "--constraint", "--env", "--explain", "--gpus", "--job-name", "--local-addr",
    "--master-addr", "--optimizer", "--part", "--partition", "--qos", "--rdzv-backend", "--rdzv-conf",
    "--rdzv-endpoint", "--rdzv-id", "--sbatch", "--select", "--ignore", "--output", "--setup", "--sort",
}  # fmt: skip
RANGES = (" must be ", "pass a number", "pass N or", "pass hours", "at most", "is more than", "is longer than")
ARGUMENTS = {"plan": ["m:build"], "jobs": [], "recipe run": ["saliency"]}


def number_options(command: click.Command = samestep, names: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Every option of every command that is a number; fails for one that is neither a number nor known to be text."""
    context = click.Context(command)
    for option in (each for each in command.params if isinstance(each, click.Option) and not each.hidden):
        is_text = isinstance(option.type, click.types.StringParamType)
        assert not is_text or option.opts[-1] in {*NUMBERS_IN_TEXT, *TEXTS}, f"{option.opts} may be a number or text"
        unlimited = isinstance(option.type, click.types.IntParamType | click.types.FloatParamType)
        is_number = isinstance(option.type, NumberRange)
        assert is_number or not unlimited, f"{option.opts} needs a NumberRange"
        if is_number or option.opts[-1] in NUMBERS_IN_TEXT:
            yield " ".join(names), option.opts[-1]
    group = command if isinstance(command, click.Group) else click.Group()
    for name in group.list_commands(context):
        each = group.get_command(context, name)
        assert each is not None
        yield from number_options(each, (*names, name))


@pytest.mark.parametrize(("command", "option"), list(number_options()), ids=str)
def test_an_option_that_is_not_a_number_or_out_of_range_is_named(
    command: str, option: str, here: Path, capsys: pytest.CaptureFixture[str]
):
    for value in NOT_NUMBERS:
        rest = ARGUMENTS.get(command, ["ok.py"])
        assert main([*command.split(), f"{option}={value}", *rest]) == 2, f"{option}={value[:10]} is accepted"
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), len(err) < 400) == ("", 1, True), err
        assert err.startswith("samestep: ")
        assert option in err
        assert value in err or value[:20] in err
        assert any(words in err for words in RANGES)


def test_every_number_of_a_command_is_swept():
    assert {option for _, option in number_options()} >= {"--tolerance", "--grace", "--margin", "--last", "--samples"}
