"""A rank whose launcher is gone ends itself: nobody would restart it, stop it, or hear of its failure."""

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from samestep.launch.processes import kill_children

LAUNCHER: Final = "SAMESTEP_LAUNCHER"
"""The variable in which `samestep run` names itself to its ranks."""
# What a launcher sets for its ranks alone: the nearest process above that does not carry it is the launcher itself, and
# those between, such as a shell, are only in the way.
_MARKS: Final = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID")
_LOOK_SECONDS: Final = 0.5
_EXIT_CODE: Final = 1
_STDERR: Final = 2  # not sys.stderr, whose lock a thread that prints may hold


class LauncherWatch:
    """A thread that ends this process, and all that it started, once its launcher has gone.

    It acts between two bytecodes: code that holds the interpreter for minutes delays it as long.
    """

    def __init__(self, rank: int, environ: Mapping[str, str]) -> None:
        self._rank, self._environ = rank, environ
        self.launched = False
        """Whether a launcher was found, which kills what does not end."""
        self._stopped = threading.Event()

    def start(self) -> None:
        """Watch from now on, where there is a launcher to watch; one that is gone already ends this process at once."""
        launcher = find_launcher(self._environ)
        self.launched = launcher is not None
        if launcher is not None:
            watch = threading.Thread(target=self._watch, args=[launcher], name="samestep launcher watch", daemon=True)
            watch.start()

    def stop(self) -> None:
        """Let this process live on without its launcher."""
        self._stopped.set()

    def _watch(self, launcher: "psutil.Process | int") -> None:
        while not is_gone(launcher):
            if self._stopped.wait(_LOOK_SECONDS):
                return
        pid = launcher if isinstance(launcher, int) else launcher.pid
        text = (
            f"samestep: rank {self._rank} ends itself: its launcher, process {pid}, is gone, and nobody would restart "
            "it or hear of its failure; what the last checkpoint holds is safe, so start the job again to go on\n"
        )
        with suppress(OSError):  # whoever read what this rank prints may be gone as well
            os.write(_STDERR, text.encode())
        kill_children(())
        os._exit(_EXIT_CODE)  # nothing may run on, and exit handlers could wait for other ranks


def name_launcher() -> dict[str, str]:
    """The variable by which the ranks of this process will know it."""
    return {LAUNCHER: f"{os.getpid()} {process_namespace()}"}


def find_launcher(environ: Mapping[str, str]) -> "psutil.Process | int | None":
    """The process that started this rank; its bare number where it is gone already, None where nobody can tell.

    A rank that no launcher started, or one whose variables were set by hand, has none: its parent is a shell, which may
    leave.
    """
    above = psutil.Process().parents()
    pid, _, namespace = environ.get(LAUNCHER, "").partition(" ")
    if pid.isdecimal() and namespace == process_namespace():  # in another container the number means another process
        return next((each for each in above if each.pid == int(pid)), int(pid))
    marks = [(mark, environ[mark]) for mark in _MARKS if mark in environ]
    return next((each for each in above if not _carries(each, *marks[0])), None) if marks else None


def is_gone(launcher: "psutil.Process | int") -> bool:
    """Whether it has ended, be it that nobody has asked for its exit code yet."""
    if isinstance(launcher, int):
        return True
    try:
        return not launcher.is_running() or launcher.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _carries(process: psutil.Process, mark: str, value: str) -> bool:
    try:
        return process.environ().get(mark) == value
    except (psutil.Error, OSError):  # another user's, such as the cluster's own daemon
        return False


def process_namespace() -> str:
    """In which numbering of processes this one lives; empty where there is one for all."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
