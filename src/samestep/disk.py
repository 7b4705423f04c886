"""Files on disks that fill up or fail: atomic writes, log files that survive a full disk, and readable OS errors."""

import errno
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from stat import S_ISFIFO
from typing import IO, Any, Final

DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_CAUSES: Final = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is exceeded: free some space",
    errno.EACCES: "permission denied: choose a folder that you can write to, or change its permissions",
    errno.EPERM: "operation not permitted: choose a folder that you can write to, or change its permissions",
    errno.EROFS: "the disk is read-only: choose another folder",
    errno.ENOTDIR: "a file is where a folder is needed: choose another folder",
    errno.EISDIR: "a folder is where a file is needed: choose another folder",
    errno.EEXIST: "a file is where a folder is needed: choose another folder",
    errno.ELOOP: "a symbolic link leads to itself: remove it",
    errno.ESPIPE: "a pipe is where a file is needed: remove it",
    errno.EFBIG: "the file would exceed the size limit: raise the limit (ulimit -f)",
}

RETRY_SECONDS: Final = 10.0
"""How long AppendFile waits after a failed write before it tries again."""
_BUFFER_BYTES: Final = 4 << 20


def describe_os_error(error: OSError) -> str:
    """Say why the operating system refused, and what to do.

    >>> describe_os_error(OSError(errno.ENOSPC, "No space left on device"))
    'the disk is full: free some space'
    """
    return _CAUSES.get(error.errno or 0, error.strerror or str(error))


def discard_buffer(stream: IO[Any], forever: bool = False) -> None:
    """Empty the buffer of a stream that cannot be written into /dev/null; `forever`: connect the stream to it."""
    number = stream.fileno()
    before, null = os.dup(number), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    stream.flush()
    if not forever:
        os.dup2(before, number)
    os.close(before)
    os.close(null)


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file in one operation: a reader sees the old or the new content, also after a crash."""
    # In the same folder, because rename is atomic only within a file system; with the pid, because other processes may
    # write the same file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Flush a folder, so that the renames in it survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class AppendFile:
    """A log file that never raises: a log is not worth ending a training run.

    If the disk refuses a record, `warn` gets one message and records wait in memory, up to 4 MiB of the newest.
    `report` gets a message when writing works again. There must be one writer only: half a record is truncated again.
    """

    def __init__(
        self,
        path: Path,
        warn: Callable[[str], None],
        report: Callable[[str], None] | None = None,
        *,
        is_text: bool = True,
    ) -> None:
        self._path, self._warn, self._report, self._is_text = path, warn, report, is_text
        self._file: int | None = None
        self._buffer: deque[bytes] = deque()
        self._buffered_bytes = self._dropped = 0
        self._failed_at: float | None = None
        self._closed = False
        self._flush()

    def append(self, record: bytes) -> None:
        """Write one record, now if the disk accepts it."""
        if self._closed:
            raise ValueError(f"{self._path} is a closed file")
        self._buffer.append(record)
        self._buffered_bytes += len(record)
        while self._buffered_bytes > _BUFFER_BYTES:
            self._buffered_bytes -= len(self._buffer.popleft())
            self._dropped += 1
        if self._failed_at is None or time.monotonic() - self._failed_at >= RETRY_SECONDS:
            self._flush()

    def close(self, record: bytes = b"") -> None:
        """Write everything, `record` last, and warn about what the disk still refuses; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if record:
            self._buffer.append(record)
            self._buffered_bytes += len(record)
        self._flush(last=True)
        if self._file is not None:
            os.close(self._file)

    def _flush(self, last: bool = False) -> None:
        try:
            file = self._open() if self._file is None else self._file
            while self._buffer:
                write_all_or_nothing(file, self._buffer[0])
                self._buffered_bytes -= len(self._buffer.popleft())
            if last:
                with suppress(OSError):  # the data is in the page cache, and there is nothing else we could do
                    os.fsync(file)
        except OSError as error:
            self._on_failure(error, last)
        else:
            self._on_success()

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        if S_ISFIFO(os.fstat(self._file).st_mode):
            raise OSError(errno.ESPIPE, "a pipe")  # writing would block when its buffer is full
        if self._is_text and (size := os.fstat(self._file).st_size) and os.pread(self._file, 1, size - 1) != b"\n":
            write_all_or_nothing(self._file, b"\n")  # an earlier writer was killed within its last line
        return self._file

    def _on_failure(self, error: OSError, last: bool) -> None:
        if self._file is not None:
            with suppress(OSError):  # closing may fail for the same reason
                os.close(self._file)
            self._file = None
        warned, self._failed_at = self._failed_at is not None, time.monotonic()
        reason = describe_os_error(error)
        if last:
            self._warn(f"{self._path} lacks its last {self._dropped + len(self._buffer)} record(s): {reason}")
        elif not warned:
            self._warn(
                f"{self._path} cannot be written: {reason}; training continues, and samestep tries again every "
                f"{RETRY_SECONDS:.0f} s"
            )

    def _on_success(self) -> None:
        if self._failed_at is None:
            return
        dropped, self._failed_at, self._dropped = self._dropped, None, 0
        if self._report is not None:
            missing = f"{dropped} earlier record(s) are missing" if dropped else "no record is missing"
            self._report(f"{self._path} can be written again; {missing}")


def write_all_or_nothing(file: int, record: bytes) -> None:
    """Append a record to an open file, or leave the file as it was and raise."""
    size_before, rest = os.fstat(file).st_size, memoryview(record)
    try:
        while rest:  # a nearly full disk or a signal may cause a partial write
            rest = rest[os.write(file, rest) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(file, size_before)
        raise
