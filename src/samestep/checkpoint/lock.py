"""One live run in a folder of checkpoints: a file says who writes there, and its time that he is alive."""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import psutil

from samestep.errors import CheckpointError
from samestep.facts.world import launch_name
from samestep.launch.orphan import is_gone, process_namespace

NAME: Final = "run.lock"
_BEAT_SECONDS: Final = 2.0
# Ranks whose launcher was killed need a second to end, and a shared disk shows a beat late.
_PATIENCE_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 0.2
_CLOCK_SECONDS: Final = 5.0  # when a process began is told a little otherwise after the clock was set


@dataclass(frozen=True)
class Holder:
    """Who writes to a folder."""

    host: str
    """The name of his machine."""
    namespace: str
    """In which numbering of processes `pid` counts."""
    pid: int
    """His process."""
    began: float
    """When that began, since numbers are given again."""
    launch: str
    """What his launcher calls this launch; empty without one."""
    since: str
    """When he took the folder."""
    token: str
    """Tells him from all others."""


class Lock:
    """Held from run.restore to the end of the run; a process that was killed leaves the file, which then ages."""

    def __init__(self, path: Path, holder: Holder) -> None:
        self._path, self._holder = path, holder
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="samestep lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let others write here."""
        self._stopped.set()
        self._thread.join()
        with suppress(OSError):  # gone with its disk, or removed by hand
            if _read(self._path)[0] == self._holder:
                self._path.unlink()

    def _beat(self) -> None:
        while not self._stopped.wait(_BEAT_SECONDS):
            try:
                if _read(self._path)[0] != self._holder:  # taken over by another start of this job, or of this process
                    return
                os.utime(self._path)
            except FileNotFoundError:
                return
            except OSError:  # the disk is away for a while: it is no reason to end a training
                continue


def hold(folder: Path) -> Lock | None:
    """Take the folder, or raise where a live run has it; None where nobody may write, so that nothing can be lost."""
    path, mine = folder / NAME, _describe()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while not _create(path, mine):
            with suppress(FileNotFoundError):  # its holder has let go of it just now
                _take_away(path, _wait_for_end(path, mine), mine.token)
    except OSError:
        return None
    return Lock(path, mine)


def _describe() -> Holder:
    began, since = psutil.Process().create_time(), datetime.now().astimezone().isoformat(timespec="seconds")
    host, token = socket.gethostname(), f"{time.time_ns():x}-{os.getpid():x}"
    return Holder(host, process_namespace(), os.getpid(), began, launch_name(), since, token)


def _create(path: Path, mine: Holder) -> bool:
    try:
        file = path.open("x")  # of several, one succeeds, on a shared disk too
    except FileExistsError:
        return False
    try:
        with file:
            file.write(json.dumps(asdict(mine)))
    except OSError:  # a full disk: an empty file would keep the next start waiting
        path.unlink()
        raise
    return True


def _read(path: Path) -> tuple[Holder | None, int]:
    """Who holds it, None where that cannot be read, and when he last said that he lives."""
    with path.open() as file:  # opened anew each time, or a shared disk would answer from its memory
        text, beat = file.read(), os.fstat(file.fileno()).st_mtime_ns
    try:
        return Holder(**json.loads(text)), beat
    except (ValueError, TypeError):  # its holder is about to write it, or was killed then
        return None, beat


def _wait_for_end(path: Path, mine: Holder) -> Holder | None:
    """The holder, once he is known to be gone; raise where he lives on."""
    began = changed = time.monotonic()
    first, beat = _read(path)
    while not _is_over(first, mine) and time.monotonic() < began + _PATIENCE_SECONDS:
        time.sleep(_LOOK_SECONDS)
        holder, last = _read(path)
        if holder != first:
            return _wait_for_end(path, mine)
        if last != beat:
            beat, changed = last, time.monotonic()
    if first is None or _is_over(first, mine):
        return first
    # On another machine one who was killed is silent for all of the time, or for its second half.
    if _is_here(first, mine) or time.monotonic() - changed < _PATIENCE_SECONDS / 2:
        raise CheckpointError(
            f"{path.parent} is in use by another run, process {first.pid} on {first.host} since {first.since}: two "
            "runs in one folder lose each other's checkpoints; wait until it has ended, or end it (on "
            f"{first.host}: kill {first.pid}), or give run.restore another folder"
        )
    return first


def _is_here(holder: Holder, mine: Holder) -> bool:
    return (holder.host, holder.namespace) == (mine.host, mine.namespace)


def _is_over(holder: Holder | None, mine: Holder) -> bool:
    """Whether he is known to write no more: an earlier start of this job or process, or a process that has ended."""
    if holder is None:
        return False
    if holder.launch and holder.launch == mine.launch:
        return True
    if not _is_here(holder, mine):
        return False
    try:
        process = psutil.Process(holder.pid)
        other = abs(process.create_time() - holder.began) > _CLOCK_SECONDS
    except psutil.NoSuchProcess:
        return True
    return other or holder.pid == mine.pid or is_gone(process)


def _take_away(path: Path, holder: Holder | None, token: str) -> None:
    """Remove the file of a holder who is gone, but not that of one who took the folder meanwhile."""
    aside = path.with_name(f".{NAME}-{token}")
    path.rename(aside)
    if _read(aside)[0] == holder:
        aside.unlink()
    else:
        aside.rename(path)
