"""`samestep hang` finds the launcher of a run by its folder or by a process, or says why it cannot."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from samestep.cli import hang_command
from samestep.cli.main import main
from samestep.launch.hang_exchange import HangFolder, LauncherInfo
from tests.launch.launched import wait_for

# Starts a process that ends at once, which it does not collect, and then one with the variable of a run.
LAUNCHER = """
import os, subprocess, sys
ended = subprocess.Popen(["true"])
rank = subprocess.Popen(["sleep", "600"], env={**os.environ, "SAMESTEP_FOLDER": sys.argv[1]})
print(ended.pid, rank.pid, flush=True)
input()
rank.kill()
"""


@pytest.fixture(autouse=True)
def _in_a_folder_without_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SAMESTEP_FOLDER", raising=False)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[tuple[int, int, int]]:
    """The process ids of a launcher, of a child that has ended, and of a rank."""
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path / "runs/a")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ended, rank = map(int, process.stdout.readline().split())
        wait_for(lambda: psutil.Process(ended).status() == psutil.STATUS_ZOMBIE, 120)
        yield process.pid, ended, rank
        process.communicate("end\n")


def write_launcher(name: str, modified: int, **changes: object) -> Path:
    """Let this process look like the launcher of a run in ./runs."""
    folder = Path("runs") / name
    HangFolder(folder).open(replace(LauncherInfo.of_this_process(0, "gpu-07"), **changes))  # type: ignore[arg-type]
    os.utime(folder / "hang/launcher.json", (modified, modified))
    return folder


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line that `samestep hang` prints instead of a report."""
    code = main(["hang", *arguments])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err.removeprefix("samestep: ").rstrip("\n")


def test_a_launcher_is_found_by_the_variable_of_its_ranks_although_another_child_has_ended(
    tmp_path: Path, launcher: tuple[int, int, int], capsys: pytest.CaptureFixture[str]
):
    pid, _, rank = launcher
    (tmp_path / "runs/a").mkdir(parents=True)
    for each in (pid, rank):
        assert mistake(capsys, str(each)).startswith(f"{tmp_path / 'runs/a'} is not the folder of a run that")


def test_a_process_that_has_ended_and_is_not_collected(
    launcher: tuple[int, int, int], capsys: pytest.CaptureFixture[str]
):
    assert mistake(capsys, str(launcher[1])) == f"process {launcher[1]} has ended: pass the folder of the run"


def test_a_process_that_samestep_did_not_start_or_that_belongs_to_another_user(
    launcher: tuple[int, int, int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def refuse(process: psutil.Process) -> dict[str, str]:
        raise psutil.AccessDenied(process.pid)

    pid = launcher[0]
    with monkeypatch.context() as patch:
        patch.setattr(psutil.Process, "children", lambda process, recursive: [])
        assert mistake(capsys, str(pid)) == (
            f"process {pid} was not started by `samestep run`, which watches its ranks: for a process of torchrun use "
            f"`py-spy dump --pid {pid}`, or start the script with `samestep run`"
        )
    monkeypatch.setattr(psutil.Process, "environ", refuse)
    assert mistake(capsys, str(pid)) == (
        f"process {pid} cannot be read: it belongs to another user; pass the folder of the run"
    )


def test_the_newest_run_that_is_running_is_found_next_to_others_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str],
):
    running = write_launcher("running", 100)
    write_launcher("ended", 200, has_ended=True)
    write_launcher("killed", 300, started=1.0)  # its process id is now that of another process
    write_launcher("elsewhere", 400, host="another-host")  # it may have been killed
    for name, text in (("empty", ""), ("newer", json.dumps({**asdict(LauncherInfo.of_this_process(0, "")), "new": 1}))):
        (Path("runs") / name / "hang").mkdir(parents=True)
        (Path("runs") / name / "hang/launcher.json").write_text(text)
    assert hang_command._newest_running() == running
    HangFolder(running).open(replace(LauncherInfo.of_this_process(0, "gpu-07"), has_ended=True))
    assert hang_command._newest_running() == Path("runs/elsewhere")
    HangFolder(Path("runs/elsewhere")).open(replace(LauncherInfo.of_this_process(0, "gpu-07"), has_ended=True))
    assert "/hang/launcher.json cannot be read (" in mistake(capsys)


def test_a_run_whose_launcher_has_ended_or_was_killed(capsys: pytest.CaptureFixture[str]):
    for changes in ({"has_ended": True}, {"started": 1.0}):
        folder = write_launcher("a", 100, **changes)
        assert mistake(capsys, str(folder)) == (
            f"the run in {folder} has ended: its logs are in {folder}/logs, reports of hangs in {folder}/hang"
        )


def test_the_folder_of_another_node_than_node_0(capsys: pytest.CaptureFixture[str]):
    folder = Path("runs/b")
    HangFolder(folder).open(LauncherInfo.of_this_process(1, "gpu-07"))
    assert mistake(capsys, str(folder)) == (
        f"{folder} is the folder of node 1 of the run, and the launcher of node 0 answers: run `samestep hang` on "
        "gpu-07, or start all nodes with the same --folder on a shared disk"
    )


def test_a_launcher_that_does_not_answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hang_command, "_ANSWER_SECONDS", 0.2)
    folder, info = write_launcher("a", 100), LauncherInfo.of_this_process(0, "gpu-07")
    assert mistake(capsys, str(folder)) == (
        f"the launcher of {folder} (process {info.pid} on {info.host}) has not answered within 0 s: check that it runs "
        f"with `ps {info.pid}` there, that it is not stopped (state T), and that this folder is the same on both "
        "machines"
    )
    assert [path.name for path in (folder / "hang").iterdir()] == ["launcher.json"]
