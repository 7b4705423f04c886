"""The lock of a checkpoint folder: one run writes to it at a time, and a killed run does not block the next one.

The file run.lock names the process that holds the folder. That process touches the file every two seconds (the
heartbeat). Another run takes the lock over if the process has ended, or, on another host, if the heartbeat has stopped.
"""

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

from samestep.environment.processes import process_is_gone, process_namespace
from samestep.environment.world import launch_name
from samestep.errors import CheckpointError

LOCK_FILE: Final = "run.lock"
_HEARTBEAT_SECONDS: Final = 2.0
# Ranks whose launcher was killed need a second to exit, and a shared disk shows a heartbeat late.
_TAKEOVER_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.2
_START_TIME_TOLERANCE: Final = 5.0  # the start time of a process changes a little when the clock is set


@dataclass(frozen=True)
class LockHolder:
    """The process that writes to a folder."""

    host: str
    namespace: str  # the PID namespace in which `pid` is valid
    pid: int
    started_at: float  # the start time of the process, because pids are reused
    launch: str  # the id of its launch, the same for all restarts of a job; empty without a launcher
    since: str  # when it acquired the lock
    token: str  # unique per acquisition


class FolderLock:
    """A lock that is held, with its heartbeat thread."""

    def __init__(self, path: Path, holder: LockHolder) -> None:
        self._path, self._holder = path, holder
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._heartbeat, name="samestep lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Stop the heartbeat and remove the file."""
        self._released.set()
        self._thread.join()
        with suppress(OSError):  # the disk is gone, or the file was removed by hand
            if _read(self._path)[0] == self._holder:
                self._path.unlink()

    def _heartbeat(self) -> None:
        while not self._released.wait(_HEARTBEAT_SECONDS):
            try:
                if _read(self._path)[0] != self._holder:  # a restart of this job, or this process, took it over
                    return
                os.utime(self._path)
            except FileNotFoundError:
                return
            except OSError:  # a disk that is unavailable for a while does not end training
                continue


def acquire(folder: Path) -> FolderLock | None:
    """Lock the folder; raise CheckpointError if a live run holds it, return None if the folder cannot be written."""
    path, holder = folder / LOCK_FILE, _this_process()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while not _create(path, holder):
            with suppress(FileNotFoundError):  # it was released just now
                _remove_stale(path, _wait_for_stale_holder(path, holder), holder.token)
    except OSError:
        return None
    return FolderLock(path, holder)


def _this_process() -> LockHolder:
    return LockHolder(
        host=socket.gethostname(),
        namespace=process_namespace(),
        pid=os.getpid(),
        started_at=psutil.Process().create_time(),
        launch=launch_name(),
        since=datetime.now().astimezone().isoformat(timespec="seconds"),
        token=f"{time.time_ns():x}-{os.getpid():x}",
    )


def _create(path: Path, holder: LockHolder) -> bool:
    try:
        file = path.open("x")  # atomic, also on a shared disk
    except FileExistsError:
        return False
    try:
        with file:
            file.write(json.dumps(asdict(holder)))
    except OSError:  # full disk: an empty file would delay the next run
        path.unlink()
        raise
    return True


def _read(path: Path) -> tuple[LockHolder | None, int]:
    """Return the holder, None if it cannot be parsed, and the time of its last heartbeat."""
    with path.open() as file:  # opened each time, because a shared disk caches the attributes of an open file
        text, heartbeat = file.read(), os.fstat(file.fileno()).st_mtime_ns
    try:
        return LockHolder(**json.loads(text)), heartbeat
    except (ValueError, TypeError):  # the holder is about to write it, or was killed then
        return None, heartbeat


def _wait_for_stale_holder(path: Path, own: LockHolder) -> LockHolder | None:
    """Return the holder if it is gone after at most `_TAKEOVER_SECONDS`, else raise CheckpointError."""
    started = changed = time.monotonic()
    holder, heartbeat = _read(path)
    while not _has_ended(holder, own) and time.monotonic() < started + _TAKEOVER_SECONDS:
        time.sleep(_POLL_SECONDS)
        current, latest = _read(path)
        if current != holder:
            return _wait_for_stale_holder(path, own)
        if latest != heartbeat:
            heartbeat, changed = latest, time.monotonic()
    if holder is None or _has_ended(holder, own):
        return holder
    # On another host a killed process has no heartbeat for all of the time, or at least for its second half.
    if _is_same_host(holder, own) or time.monotonic() - changed < _TAKEOVER_SECONDS / 2:
        raise CheckpointError(
            f"{path.parent} is in use by another run (process {holder.pid} on {holder.host} since {holder.since}): two "
            "runs in one folder would overwrite each other's checkpoints; wait until it ends, end it (on "
            f"{holder.host}: kill {holder.pid}), or pass another folder to run.checkpoint"
        )
    return holder


def _is_same_host(holder: LockHolder, own: LockHolder) -> bool:
    return (holder.host, holder.namespace) == (own.host, own.namespace)


def _has_ended(holder: LockHolder | None, own: LockHolder) -> bool:
    """Whether the holder certainly no longer writes: an earlier start of this job or process, or an ended process."""
    if holder is None:
        return False
    if holder.launch and holder.launch == own.launch:
        return True
    if not _is_same_host(holder, own):
        return False
    try:
        process = psutil.Process(holder.pid)
        is_reused = abs(process.create_time() - holder.started_at) > _START_TIME_TOLERANCE
    except psutil.NoSuchProcess:
        return True
    return is_reused or holder.pid == own.pid or process_is_gone(process)


def _remove_stale(path: Path, holder: LockHolder | None, token: str) -> None:
    """Remove the file of `holder`, but not that of a run which acquired the lock in the meantime."""
    aside = path.with_name(f".{LOCK_FILE}-{token}")
    path.rename(aside)
    if _read(aside)[0] == holder:
        aside.unlink()
    else:
        aside.rename(path)
