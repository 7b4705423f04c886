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
    "--node-rank, --nproc-per-node, --rdzv-backend, --rdzv-conf, --rdzv-endpoint, --rdzv-id, --show-ranks, "
    "--standalone, --time-limit, --verbose"
)
KNOWN = ", ".join(COMMANDS)

# What is typed after `samestep`, in a folder with ok.py, a package lab without __main__.py and nothing else.
MISTAKES = [
    ("rum", f"there is no command rum: there are {KNOWN}; did you mean `samestep run`?"),
    ("zzz", f"there is no command zzz: there are {KNOWN}"),
    ("train.py", f"there is no command train.py: there are {KNOWN}; did you mean `samestep run train.py`?"),
    ("recipe ran", "there is no command ran: there are copy, list, run; did you mean `samestep recipe run`?"),
    ("checkpoint zzz", "there is no command zzz: there are export, inspect, verify\n"),
    ("audit", "RUN_DIR is missing: type `samestep audit RUN_DIR`; `samestep audit --help` says what it is"),
    (
        "checkpoint inspect",
        "FOLDER is missing: type `samestep checkpoint inspect FOLDER`; `samestep checkpoint inspect",
    ),
    ("--fast", "there is no option --fast: there are --help, --version"),
    ("run", "no script was named: type `samestep run train.py`, or `samestep run -m package.module`"),
    ("run --fast ok.py", f"there is no option --fast: there are {OPTIONS}\n"),
    ("run --nproc 2 ok.py", f"there is no option --nproc: there are {OPTIONS}; did you mean --nproc-per-node?"),
    (
        "run --max-restart 2 ok.py",
        f"there is no option --max-restart: there are {OPTIONS}; did you mean --max-restarts?",
    ),
    ("run train.py", "there is no script train.py in HERE: here are ok.py"),
    ("run .", ". is a folder, not a script: name a file in it, or type `samestep run -m PACKAGE` for a package"),
    (
        "run -m lab.nope",
        "there is no module lab.nope: lab.nope is neither in HERE nor installed; type its dotted name as in "
        "`samestep run -m package.module`, from the folder that holds the package",
    ),
    ("run -m nowhere.train", "there is no module nowhere.train: nowhere is neither in HERE nor installed; type its"),
    ("run -m ok.train", "there is no module ok.train: ok.train is neither in HERE nor installed; type its"),
    ("run -m lab", "lab is a package without __main__.py: name a module in it, as in lab.train"),
    ("run --nproc-per-node 0 ok.py", "--nproc-per-node 0 is impossible: type auto, gpu, cpu or a number from 1 up"),
    ("run --nproc_per_node=-1 ok.py", "--nproc-per-node -1 is impossible: type auto, gpu, cpu or a number from 1 up"),
    ("run --nproc-per-node banana ok.py", "--nproc-per-node banana is impossible: type auto, gpu, cpu or a number"),
    ("run --nproc-per-node", "Option '--nproc-per-node' requires an argument."),
    ("run --nnodes 3:1 ok.py", "--nnodes 3:1 is not a number of nodes: type one number from 1 up, or MIN:MAX with"),
    ("run --max-restarts -1 ok.py", "Invalid value for '--max-restarts': -1 is not in the range x>=0."),
    (
        "run --local-addr no..where ok.py",
        "--local-addr no..where leads nowhere from here: type an address of this machine, under which other",
    ),
    (
        "run --time-limit soon ok.py",
        "--time-limit soon is not a time limit: type hours, minutes and seconds as in 4:00:00",
    ),
    ("run --grace -1 ok.py", "Invalid value for '--grace': -1 is not in the range x>=0."),
    ("run --show-ranks some ok.py", "Invalid value for '--show-ranks': 'some' is not one of 'first', 'all'."),
    ("run --master-port PORT ok.py", "port PORT is taken (by "),
    ("run --rdzv-endpoint localhost:PORT ok.py", "port PORT is taken (by "),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ok.py").touch()
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "__init__.py").write_text("raise AssertionError('imported only to look for it')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("typed", "complaint"), MISTAKES, ids=[typed for typed, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(
    typed: str, complaint: str, here: Path, capsys: pytest.CaptureFixture[str]
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code = main(typed.replace("PORT", port).split())
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("samestep: " + complaint.replace("HERE", str(here)).replace("PORT", port))
    assert err.count("\n") == 1
    assert not (here / "runs").exists()


def test_a_taken_port_names_its_holder(here: Path, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["run", "--master-port", str(taken.getsockname()[1]), "ok.py"]) == 2
    told = capsys.readouterr().err
    assert f"pid {os.getpid()}): choose another, or leave the port out and a free one is found" in told


def test_a_folder_that_is_a_file_is_refused(here: Path):
    from samestep.launch.job import make_folder

    with pytest.raises(LaunchError, match=r"^--folder ok\.py is a file: name a folder, or a new name$"):
        make_folder(Path("ok.py"), "train")
    with pytest.raises(
        LaunchError, match=r"^the run's folder ok.py/x cannot be made \(Not a directory\): name another --"
    ):
        make_folder(Path("ok.py/x"), "train")


def test_folders_of_runs_within_a_second_differ(here: Path):
    from samestep.launch.job import make_folder

    folders = [str(make_folder(None, "train-1")) for _ in range(3)]
    assert folders == ["runs/train-1", "runs/train-1-2", "runs/train-1-3"]


def test_every_command_is_listed_without_being_imported(capsys: pytest.CaptureFixture[str]):
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("group", ["recipe", "checkpoint"])
def test_a_group_alone_shows_its_help_with_whole_sentences(
    group: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([group]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"Usage: samestep {group} [OPTIONS] COMMAND")
    assert "..." not in out.partition("Commands:")[2]
    assert err == ""


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "samestep 0.1.0\n"


@pytest.mark.parametrize("work", ["import samestep", "from samestep.cli.main import main; main(['--help'])"])
def test_it_starts_quickly_and_without_torch(work: str):
    code = f"{work}; import sys; sys.exit(3 if 'torch' in sys.modules or 'numpy' in sys.modules else 0)"
    seconds: list[float] = []
    for _ in range(3):
        since = cpu_seconds_of_children()
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
        seconds.append(cpu_seconds_of_children() - since)
    assert min(seconds) < 0.6  # 0.2 on an idle machine; a busy one has slower cores


def cpu_seconds_of_children() -> float:
    spent = os.times()
    return spent.children_user + spent.children_system
