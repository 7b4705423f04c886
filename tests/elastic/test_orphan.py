"""A rank whose launcher was killed ends itself and says so; one whose parent is only a shell lives on."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from samestep.launch.processes import LAUNCHER, find_launcher, name_launcher
from tests.elastic.killing import TRAINING, Launch, launch
from tests.launch.started import LAUNCHERS, MARK, Started, variable, wait_for

RANK = """
import os, time
from samestep.launch.processes import LauncherWatch

watch = LauncherWatch(3, dict(os.environ))
watch.start()
open("up", "w").close()
time.sleep(60)
"""
# Starts its arguments with a mark, as launchers do, and waits.
PARENT = "import os, subprocess, sys, time; mark, *rank = sys.argv[1:]; name, _, value = mark.partition('='); "
PARENT += "subprocess.Popen(rank, env={**os.environ, name: value.replace('SELF', str(os.getpid()))}); time.sleep(60)"


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """By this every process of a test is found again, and ended: an orphan is nobody's child."""
    value = uuid4().hex
    monkeypatch.setenv(MARK, value)
    yield value
    for process in carriers(value):
        process.kill()


def carriers(mark: str) -> list[psutil.Process]:
    return [each for each in psutil.process_iter() if each.pid != os.getpid() and variable(each, MARK) == mark]


def start_parent(folder: Path, mark: str, shell: bool) -> subprocess.Popen[bytes]:
    rank = [sys.executable, "-c", RANK]
    # Two commands, so that the shell stays instead of becoming the rank.
    between = ["sh", "-c", '"$@"; true', "sh", *rank] if shell else rank
    with (folder / "err").open("wb") as err:
        parent = subprocess.Popen([sys.executable, "-c", PARENT, mark, *between], cwd=folder, stderr=err)
    wait_for((folder / "up").exists, 30)
    return parent


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@pytest.mark.parametrize("shell", [False, True], ids=["direct", "through a shell"])
@pytest.mark.parametrize("name", ["TORCHELASTIC_RUN_ID=lab", "SLURM_PROCID=3"])
def test_a_rank_ends_itself_when_its_launcher_is_killed(tmp_path: Path, mark: str, name: str, shell: bool):
    parent = start_parent(tmp_path, name, shell)
    kill(parent)
    wait_for(lambda: not carriers(mark), 30)
    said = (tmp_path / "err").read_text()
    assert said.startswith(
        f"samestep: rank 3 ends itself: its launcher, process {parent.pid}, is gone, and nobody would"
    )
    assert said.endswith("so start the job again to go on\n")


def test_a_rank_that_only_a_shell_started_outlives_it(tmp_path: Path, mark: str):
    parent = start_parent(tmp_path, "RANK=3", shell=False)
    kill(parent)
    with pytest.raises(AssertionError, match="in vain"):
        wait_for(lambda: not carriers(mark), 2)
    assert (tmp_path / "err").read_text() == ""


def test_a_rank_knows_the_launcher_that_names_itself_and_one_that_is_gone_already():
    parent = psutil.Process().parent()
    assert parent is not None
    here = name_launcher()[LAUNCHER].partition(" ")[2]
    assert find_launcher({LAUNCHER: f"{parent.pid} {here}"}) == parent
    assert find_launcher({LAUNCHER: f"4194305 {here}"}) == 4194305  # no process has a number above 4194304
    assert find_launcher({LAUNCHER: f"4194305 {here}x"}) is None  # a number of another container
    assert find_launcher({}) is None


# In both a rank serves the store, not the launcher: a lost store ends an orphan as well, and quicker than our watch.


def by_samestep(folder: Path) -> Launch:
    return launch(folder, folder / "out", "--nproc-per-node", "2", "--max-restarts", "1", pause=0.2)


def by_torchrun(folder: Path) -> Launch:
    options = ["--standalone", "--nproc-per-node", "2", "--log-dir", "kept/logs", "--redirects", "3"]
    mark = uuid4().hex
    around = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, str(TRAINING), "out", "4", "0.2"],
        cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**around, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", MARK: mark},
    )  # fmt: skip
    return Launch(Started(process, folder, mark), folder / "out")


@pytest.mark.slow
@pytest.mark.parametrize("start", [by_samestep, by_torchrun])
def test_no_rank_trains_on_when_its_launcher_is_killed(tmp_path: Path, start: Callable[[Path], Launch]):
    live = start(tmp_path)
    process = live.started.process
    try:
        live.wait_until("computing", 2, size=2)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=20)
        wait_for(lambda: not live.started.processes(), 30)
    finally:
        for each in live.started.processes():
            each.kill()
    said = [path.read_text() for path in (tmp_path / "kept" / "logs").rglob("*err*") if path.is_file()]
    told = [line for text in said for line in text.splitlines() if "ends itself" in line]
    assert told
    for line in told:
        assert re.search(rf"rank \d ends itself: its launcher, process {process.pid}, is gone", line)
