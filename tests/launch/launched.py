"""Start a real `samestep run` in a temporary folder; a variable marks all its processes so that tests find them.

The launcher is forked from a process that has imported torch, which saves more than a second. Its ranks are processes
with interpreters of their own. A test that replaces a stream of the launcher starts an interpreter for it, too.
"""

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import get_all_start_methods, get_context, set_forkserver_preload, set_start_method
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent
from uuid import uuid4

import psutil

from tests.warm import PRELOADED

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
    process: "subprocess.Popen[str] | ForkedLauncher"
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
        running = [process for process in psutil.process_iter() if variable(process, MARK) == self.mark]
        if isinstance(self.process, ForkedLauncher) and self.process.poll() is None:
            running.append(
                psutil.Process(self.process.pid)
            )  # Linux shows the variables of the process it is forked from
        return running

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


def start(
    folder: Path, script: str, *options: str, env: Mapping[str, str] | None = None, fresh: bool = False, **popen: object
) -> Started:
    """Write the script to train.py and start `samestep run OPTIONS`; the options end with train.py or a module.

    With `fresh` or other streams, the launcher is not forked: variables that torch reads when it is imported count.
    """
    (folder / "train.py").write_text(dedent(script))
    mark = uuid4().hex
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    environment = {**inherited, **IMPORT_PATH, **(env or {}), MARK: mark}
    if not (fresh or popen):
        return Started(ForkedLauncher(list(options), folder, environment), folder, mark)
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | popen
    # Children of a test runner in the background of a shell would ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-m", "samestep", "run", *options],
        cwd=folder,
        env=environment,
        start_new_session=True,
        **streams,  # type: ignore[call-overload]
    )
    signal.signal(signal.SIGINT, before)
    return Started(process, folder, mark)


class ForkedLauncher:
    """`samestep run OPTIONS` in a process that is forked; used like a subprocess.Popen."""

    def __init__(self, options: list[str], folder: Path, environment: dict[str, str]) -> None:
        set_forkserver_preload(PRELOADED)
        self._texts: tuple[str, str] | None = None  # once it has ended
        self._streams = TemporaryDirectory(prefix="launcher-")
        self._out, self._err = (Path(self._streams.name) / name for name in ("out", "err"))
        self._process = get_context("forkserver").Process(
            target=_become_launcher, args=(options, str(folder), environment, str(self._out), str(self._err))
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, as Popen has it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; return what it has printed."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("samestep run", timeout or 0.0)
        if self._texts is None:
            self._texts = self._out.read_text(), self._err.read_text()
            self._streams.cleanup()
        return self._texts


def _become_launcher(options: list[str], folder: str, environment: dict[str, str], out: str, err: str) -> None:
    """In the forked process: become `python -m samestep run OPTIONS`."""
    os.setsid()
    set_start_method(get_all_start_methods()[0], force=True)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in (1, out), (2, err):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv, sys.path[0:0] = ["samestep", "run", *options], [folder]
    from samestep.cli.main import main

    sys.exit(main(sys.argv[1:]))


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
