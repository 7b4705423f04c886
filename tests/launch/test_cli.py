"""Mistakes on the command line: one line that explains them, and exit code 2."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.cli.main import COMMANDS, main
from samestep.errors import LaunchError

OPTIONS = (
    "--folder, --grace, --help, --local-addr, --master-addr, --master-port, --max-restarts, --module, --nnodes, "
    "--node-rank, --nproc-per-node, --precision, --rdzv-backend, --rdzv-conf, --rdzv-endpoint, --rdzv-id, "
    "--show-ranks, --standalone, --time-limit, --verbose"
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
    ("run --max-restarts -1 ok.py", "Invalid value for '--max-restarts': -1 is not in the range x>=0."),
    (
        "run --local-addr no..where ok.py",
        "--local-addr no..where cannot be resolved: pass an address of this machine at which other",
    ),
    (
        "run --time-limit soon ok.py",
        "--time-limit soon is not a time limit: pass hours, minutes and seconds as in 4:00:00",
    ),
    ("run --grace -1 ok.py", "Invalid value for '--grace': -1 is not in the range 0<=x<=10000000."),
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
