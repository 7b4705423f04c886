"""The processes that ranks leave behind: found, ended and reaped."""

import ctypes
import os
import signal
import sys
from collections.abc import Collection, Iterable

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
