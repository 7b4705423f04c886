"""A file to which whole records are appended; where the disk takes none they wait, and training goes on."""

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from samestep.disk import in_words
from samestep.log import warn as give_warning

Tell = Callable[[str], None]
RETRY_SECONDS: Final = 10.0
"""How long a disk that took nothing is left alone."""
_HELD_BYTES: Final = 4 << 20


class AppendedFile:
    """A file that is never an error: what logs are for is not worth a training that could go on.

    `warn` hears once of each time that the disk takes nothing, `say` that it does again. Of what waits meanwhile up to
    4 MiB are kept, the newest. There must be one writer only: half a record is cut off again.
    """

    def __init__(self, path: Path, warn: Tell = give_warning, say: Tell | None = None, text: bool = True) -> None:
        self._path, self._warn, self._say, self._text = path, warn, say or _nobody, text
        self._file: int | None = None
        self._held: deque[bytes] = deque()
        self._bytes = self._lost = 0
        self._refused: float | None = None
        self._closed = False
        self._write_held()

    def append(self, record: bytes) -> None:
        """Write one record, now if the disk takes it."""
        if self._closed:
            raise ValueError(f"{self._path} is a closed file")
        self._held.append(record)
        self._bytes += len(record)
        while self._bytes > _HELD_BYTES:
            self._bytes -= len(self._held.popleft())
            self._lost += 1
        if self._refused is None or time.monotonic() - self._refused >= RETRY_SECONDS:
            self._write_held()

    def close(self, record: bytes = b"") -> None:
        """Bring all to the disk, this last, and say what it does not take even now; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if record:
            self._held.append(record)
            self._bytes += len(record)
        self._write_held(last=True)
        if self._file is not None:
            os.close(self._file)

    def _write_held(self, last: bool = False) -> None:
        try:
            file = self._open() if self._file is None else self._file
            while self._held:
                _write_whole(file, self._held[0])
                self._bytes -= len(self._held.popleft())
            if last:
                with suppress(OSError):  # the operating system has it, and says no more of it than that
                    os.fsync(file)
        except OSError as error:
            self._refuse(error, last)
        else:
            self._recover()

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        if self._text and (size := os.fstat(self._file).st_size) and os.pread(self._file, 1, size - 1) != b"\n":
            _write_whole(self._file, b"\n")  # a kill tore the last line
        return self._file

    def _refuse(self, error: OSError, last: bool) -> None:
        if self._file is not None:
            with suppress(OSError):  # a disk that takes nothing may not even let go
                os.close(self._file)
            self._file = None
        told, self._refused = self._refused is not None, time.monotonic()
        if last:
            self._warn(f"{self._path} lacks {self._lost + len(self._held)} record(s) at its end: {in_words(error)}")
        elif not told:
            self._warn(
                f"{self._path} cannot be written: {in_words(error)}; training goes on, and what belongs into it is "
                f"added when it can be, tried every {RETRY_SECONDS:.0f} s"
            )

    def _recover(self) -> None:
        if self._refused is None:
            return
        lost, self._refused, self._lost = self._lost, None, 0
        self._say(
            f"{self._path} is written again; "
            + (f"{lost} record(s) of the time before are missing in it" if lost else "nothing is missing in it")
        )


def _write_whole(file: int, record: bytes) -> None:
    """Write all of a record or nothing of it."""
    before, rest = os.fstat(file).st_size, memoryview(record)
    try:
        while rest:  # a nearly full disk or a signal may take a part only
            rest = rest[os.write(file, rest) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(file, before)
        raise


def _nobody(text: str) -> None:
    """Tell nobody."""
