"""Start a real `samestep run` in a temporary folder; a variable marks all its processes so that tests find them."""

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from uuid import uuid4

import psutil

MARK = "SAMESTEP_TEST_RUN"
LAUNCHERS = (
    "SLURM_",
    "TORCHELASTIC_",
    "TORCH_",
    "GROUP_",
    "MASTER_",
    "LOCAL_",
    "RANK",
    "WORLD_SIZE",
    "OMP_",
    "SAMESTEP_",
)


# Processes start in other folders, where a relative path would be wrong.
IMPORT_PATH = {
    name: os.pathsep.join(map(os.path.abspath, os.environ[name].split(os.pathsep)))
    for name in ("PYTHONPATH",)
    if os.environ.get(name)
}


@dataclass(frozen=True)
class Started:
    process: subprocess.Popen[str]
    folder: Path
    mark: str

    def finish(self, seconds: float = 240.0) -> "Ended":
        """Wait for its end, and kill all its processes in any case."""
        try:
            out, err = self.process.communicate(timeout=seconds)
        finally:
            left = self.processes()
            for process in left:
                process.kill()
        return Ended(self.process.returncode, out, err, self.folder, [process.pid for process in left])

    def processes(self) -> list[psutil.Process]:
        """All running processes of this run, the launcher included."""
        return [process for process in psutil.process_iter() if variable(process, MARK) == self.mark]

    def wait_for_ranks(self, count: int, seconds: float = 150.0) -> None:
        """Wait until this many ranks have written a file `up-RANK`."""
        wait_for(lambda: len(list(self.folder.glob("up-*"))) >= count, seconds)


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    folder: Path
    left: list[int]

    def logs(self, attempt: int = 0) -> dict[str, str]:
        """Text of each log of an attempt by file name."""
        folder = self.folder / "kept" / "logs" / f"attempt-{attempt}"
        return {path.name: path.read_bytes().decode() for path in folder.iterdir()}


def start(folder: Path, script: str, *options: str, env: Mapping[str, str] | None = None, **popen: object) -> Started:
    """Write the script to train.py and start `samestep run OPTIONS`; the options end with train.py or a module."""
    (folder / "train.py").write_text(dedent(script))
    mark = uuid4().hex
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | popen
    # Children of a test runner in the background of a shell would ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-m", "samestep", "run", *options],
        cwd=folder,
        env={**inherited, **IMPORT_PATH, **(env or {}), MARK: mark},
        start_new_session=True,
        **streams,  # type: ignore[call-overload]
    )
    signal.signal(signal.SIGINT, before)
    return Started(process, folder, mark)


def run_script(path: Path, *arguments: str) -> None:
    """Run a script in this process as `python PATH ARGUMENTS` would."""
    before, sys.argv = sys.argv, [str(path), *arguments]
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = before


def variable(process: psutil.Process, name: str) -> str | None:
    try:
        return process.environ().get(name)
    except (psutil.Error, OSError):
        return None


def wait_for(condition: Callable[[], bool], seconds: float, describe: Callable[[], str] = str) -> None:
    """Poll a condition; after `seconds` fail with what `describe` returns."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"timed out after {seconds} s\n{describe()}"
        time.sleep(0.05)
