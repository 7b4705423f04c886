"""The lock of a checkpoint folder: one run writes to it at a time, and a killed run does not block the next one.

The file run.lock names the process that holds the folder. That process touches the file every two seconds (the
heartbeat). Another run takes the lock over if the process has ended, or, on another host, if the heartbeat has stopped.

The file appears with its content in one operation. Only the process that holds a second lock, named after the holder,
may replace or remove it: of several runs that find the same holder gone, one takes over.
"""

import json
import os
import socket
import stat
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Final
from uuid import uuid4

from samestep.environment.processes import process_namespace, process_runs, seconds_from_boot
from samestep.environment.world import launch_name
from samestep.errors import CheckpointError

LOCK_FILE: Final = "run.lock"
_HEARTBEAT_SECONDS: Final = 2.0
# Ranks whose launcher was killed need a second to exit, and a shared disk shows a heartbeat late.
_TAKEOVER_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.2
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_MAX_BYTES: Final = 1 << 16  # of a lock file, which has a few hundred
_KINDS: Final = {stat.S_IFDIR: "a directory", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a named pipe"}


@dataclass(frozen=True)
class LockHolder:
    """The process that writes to a folder."""

    host: str
    namespace: str  # the PID namespace and the boot of the host in which `pid` is valid
    pid: int
    started_at: float  # when the process started, in seconds since boot, because pids are reused
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
        with suppress(OSError, CheckpointError):  # the disk is gone, or another run takes the lock over just now
            try:
                _change(self._path, self._holder, None)
            except OSError:  # a full disk: no second lock can be created
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
        _lock(path, holder)
    except OSError:
        return None
    return FolderLock(path, holder)


def _lock(path: Path, own: LockHolder) -> None:
    """Create the file, or take it over from a holder that is gone."""
    while not _create(path, own):
        try:
            if _change(path, _wait_for_stale_holder(path, own), own):
                return
        except FileNotFoundError:  # it was released just now
            continue


def _change(path: Path, holder: LockHolder | None, own: LockHolder | None) -> bool:
    """Replace the file of `holder` by one of `own`, or remove it; return False if it is no longer that of `holder`."""
    claim = path.with_name(f".{path.name.lstrip('.')[:40]}-{holder.token if holder else 'empty'}")
    _lock(claim, replace(own or _this_process(), launch=""))  # a restart of the job must not take this one over
    try:
        if _read(path)[0] != holder:  # another run was quicker
            return False
        if own is None:
            path.unlink()
        else:
            _write_aside(path, own).replace(path)
        return True
    finally:
        claim.unlink(missing_ok=True)


def _this_process() -> LockHolder:
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return LockHolder(
        host=socket.gethostname(),
        namespace=f"{process_namespace()} {boot_id}",
        pid=os.getpid(),
        started_at=seconds_from_boot(os.getpid()),
        launch=launch_name(),
        since=datetime.now().astimezone().isoformat(timespec="seconds"),
        token=uuid4().hex,
    )


def _create(path: Path, holder: LockHolder) -> bool:
    """Create the file with its content in one operation; return False if it exists."""
    aside = _write_aside(path, holder)
    try:
        os.link(aside, path)
    except FileExistsError:
        return aside.stat().st_nlink == 2  # NFS may repeat a request that was successful
    except OSError:  # a file system without hard links
        return _create_without_link(path, aside.read_bytes())
    finally:
        aside.unlink(missing_ok=True)
    return True


def _write_aside(path: Path, holder: LockHolder) -> Path:
    aside = path.with_name(f".{holder.token}-{uuid4().hex}")
    try:
        aside.write_text(json.dumps(asdict(holder)))
    except OSError:  # full disk
        aside.unlink(missing_ok=True)
        raise
    return aside


def _create_without_link(path: Path, content: bytes) -> bool:
    try:
        file = path.open("xb")  # atomic, also on a shared disk, but empty at first
    except FileExistsError:
        return False
    try:
        with file:
            file.write(content)
    except OSError:  # full disk
        path.unlink(missing_ok=True)
        raise
    return True


def _read(path: Path) -> tuple[LockHolder | None, int]:
    """Return the holder, None if the file is still empty, and the time of its last heartbeat."""
    kind = stat.S_IFMT(path.lstat().st_mode)
    if kind != stat.S_IFREG:
        raise _unusable(path, _KINDS.get(kind, "a special file"))
    try:
        with path.open("rb") as file:  # opened each time, because a shared disk caches the attributes of an open file
            text, heartbeat = file.read(_MAX_BYTES), os.fstat(file.fileno()).st_mtime_ns
    except PermissionError as error:
        raise _unusable(path, "a file of another user that you cannot read") from error
    return (_parse(text) if text else None), heartbeat


def _unusable(path: Path, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is {kind}, and samestep needs a file of this name to keep other runs out of the folder: remove it if "
        "no run uses the folder, or pass another folder to run.checkpoint"
    )


def _parse(text: bytes) -> LockHolder:
    """Return the holder; for garbage one with pid 0, which counts as ended."""
    try:
        holder = LockHolder(**json.loads(text))
        fields = [(getattr(holder, name), kind) for name, kind in LockHolder.__annotations__.items()]
        valid = all(isinstance(value, kind) for value, kind in fields) and 0 < holder.pid < 1 << 31
    except (ValueError, TypeError, RecursionError):
        valid, holder = False, None
    return holder if holder and valid else LockHolder("", "", 0, 0.0, "", "", sha256(text).hexdigest()[:32])


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
    if not holder.pid:
        return True
    if holder.launch and holder.launch == own.launch:
        return True
    if not _is_same_host(holder, own):
        return False
    return holder.pid == own.pid or not process_runs(holder.pid, holder.started_at)
