"""A rank whose launcher is gone ends itself: nobody would restart it, stop it, or hear of its failure."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_ROUNDS = 3


def adopt_orphans(wanted: bool) -> None:
    """Make this process the parent of every descendant whose own parent dies, so that none can slip away.

    Linux alone knows this. Elsewhere a data worker whose rank was killed is found only while its rank still lives.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


def children() -> set[int]:
    """Process ids of all descendants of this process, and of those that have ended unnoticed."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def living(pids: Collection[int]) -> set[int]:
    """Those of these descendants that have not ended."""
    return {each.pid for each in _living(()) if each.pid in pids}


def end_children(spare: Collection[int], patience: float) -> None:
    """End every descendant but those to spare: ask, wait `patience` seconds, then kill.

    A process stuck in the kernel, as on a hung network drive, survives even that and is left after a few seconds.
    """
    asked = _living(spare)
    for process in asked:
        _signal(process, ask=True)
    psutil.wait_procs(asked, timeout=patience)
    for _ in range(_ROUNDS):  # a process that was just ending may have started another
        alive = _living(spare)
        if not alive:
            break
        for process in alive:
            _signal(process, ask=False)
        psutil.wait_procs(alive, timeout=1.0)
    _reap(spare)


def kill_children(spare: Collection[int]) -> None:
    """Kill every descendant but those to spare, at once and without waiting."""
    for process in _living(spare):
        _signal(process, ask=False)


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes of which some may have ended."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # it went by itself meanwhile
            continue


def _living(spare: Collection[int]) -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [each for each in found if each.pid not in spare and _is_alive(each)]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(process: psutil.Process, ask: bool) -> None:
    try:
        if ask:
            process.terminate()
        else:
            process.kill()
    except psutil.NoSuchProcess:  # it went by itself meanwhile
        return


def _reap(spare: Collection[int]) -> None:
    """Collect the exit of ended children, adopted ones too: the first process of a container may not."""
    for child in psutil.Process().children():
        if child.pid not in spare and not _is_alive(child):
            try:
                os.waitpid(child.pid, os.WNOHANG)
            except ChildProcessError:  # collected already
                continue


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
        while not process_is_gone(launcher):
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


def process_is_gone(launcher: "psutil.Process | int") -> bool:
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
