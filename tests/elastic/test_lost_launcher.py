"""A rank whose launcher was killed exits with a message; a process started by a shell continues without it."""

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

from samestep.environment.processes import LAUNCHER, find_launcher, launcher_variable
from tests.elastic.kills import TRAINING, Launch, launch
from tests.launch.launched import LAUNCHERS, MARK, Started, variable, wait_for

RANK = """
import os, time
from samestep.environment.processes import LauncherWatch

watch = LauncherWatch(3, dict(os.environ))
watch.start()
open("up", "w").close()
time.sleep(60)
"""
# Starts its arguments with a variable set, as launchers do, and waits.
PARENT = "import os, subprocess, sys, time; mark, *rank = sys.argv[1:]; name, _, value = mark.partition('='); "
PARENT += "subprocess.Popen(rank, env={**os.environ, name: value.replace('SELF', str(os.getpid()))}); time.sleep(60)"


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A variable that marks every process of a test, so that orphans can be found and ended."""
    value = uuid4().hex
    monkeypatch.setenv(MARK, value)
    yield value
    for process in marked_processes(value):
        process.kill()


def marked_processes(mark: str) -> list[psutil.Process]:
    return [each for each in psutil.process_iter() if each.pid != os.getpid() and variable(each, MARK) == mark]


def start_parent(folder: Path, mark: str, shell: bool) -> subprocess.Popen[bytes]:
    rank = [sys.executable, "-c", RANK]
    # Two commands, so that the shell does not replace itself by the rank.
    between = ["sh", "-c", '"$@"; true', "sh", *rank] if shell else rank
    with (folder / "err").open("wb") as err:
        parent = subprocess.Popen([sys.executable, "-c", PARENT, mark, *between], cwd=folder, stderr=err)
    wait_for((folder / "up").exists, 120)
    return parent


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("shell", [False, True], ids=["direct", "through a shell"])
@pytest.mark.parametrize("name", ["TORCHELASTIC_RUN_ID=lab", "SLURM_PROCID=3"])
def test_a_rank_exits_when_its_launcher_is_killed(tmp_path: Path, mark: str, name: str, shell: bool):
    parent = start_parent(tmp_path, name, shell)
    kill(parent)
    wait_for(lambda: not marked_processes(mark), 120)
    message = (tmp_path / "err").read_text()
    assert message.startswith(f"samestep: rank 3 exits because its launcher (process {parent.pid}) is gone and cannot")
    assert message.endswith("start the job again to resume\n")


@pytest.mark.slow
def test_a_process_started_by_a_shell_outlives_it(tmp_path: Path, mark: str):
    parent = start_parent(tmp_path, "RANK=3", shell=False)
    kill(parent)
    with pytest.raises(AssertionError, match="timed out"):
        wait_for(lambda: not marked_processes(mark), 2)
    assert (tmp_path / "err").read_text() == ""


def test_a_rank_finds_its_launcher_by_the_variable_even_if_it_is_gone():
    parent = psutil.Process().parent()
    assert parent is not None
    namespace = launcher_variable()[LAUNCHER].partition(" ")[2]
    assert find_launcher({LAUNCHER: f"{parent.pid} {namespace}"}) == parent
    assert find_launcher({LAUNCHER: f"4194305 {namespace}"}) == 4194305  # no process has a pid above 4194304
    assert find_launcher({LAUNCHER: f"4194305 {namespace}x"}) is None  # a pid in another container
    assert find_launcher({}) is None


# In both, a rank serves the store: if the launcher did, the lost store would end the ranks before LauncherWatch does.


def by_samestep(folder: Path) -> Launch:
    return launch(folder, folder / "out", "--nproc-per-node", "2", "--max-restarts", "1", pause=0.2)


def by_torchrun(folder: Path) -> Launch:
    options = ["--standalone", "--nproc-per-node", "2", "--log-dir", "kept/logs", "--redirects", "3"]
    mark = uuid4().hex
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, str(TRAINING), "out", "4", "0.2"],
        cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**inherited, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", MARK: mark},
    )  # fmt: skip
    return Launch(Started(process, folder, mark), folder / "out")


@pytest.mark.slow
@pytest.mark.parametrize("start", [by_samestep, by_torchrun])
def test_no_rank_continues_when_its_launcher_is_killed(tmp_path: Path, start: Callable[[Path], Launch]):
    launched = start(tmp_path)
    process = launched.started.process
    try:
        launched.wait_until("computing", 2, size=2)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=120)
        wait_for(lambda: not launched.started.processes(), 120)
    finally:
        for each in launched.started.processes():
            each.kill()
    texts = [path.read_text() for path in (tmp_path / "kept" / "logs").rglob("*err*") if path.is_file()]
    lines = [line for text in texts for line in text.splitlines() if "exits because" in line]
    assert lines
    for line in lines:
        assert re.search(rf"rank \d exits because its launcher \(process {process.pid}\) is gone", line)
