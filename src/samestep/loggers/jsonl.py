"""metrics.jsonl: one record a line, written so that a kill costs at most the last one.

A line is `{"step": 12, "time": 1767225600.0, "train/loss": 0.43}`. JSON has no word for numbers that are not finite,
and readers that keep to the standard refuse Python's own: NaN is written as null, and so is infinity, whose sign is
then kept beside it as `"infinite": {"train/loss": 1}`. `read_metrics` gives both back as they were.
"""

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from samestep.disk import describe_os_error
from samestep.errors import LogError
from samestep.messages import warn as give_warning

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
            self._warn(
                f"{self._path} lacks {self._lost + len(self._held)} record(s) at its end: {describe_os_error(error)}"
            )
        elif not told:
            self._warn(
                f"{self._path} cannot be written: {describe_os_error(error)}; training goes on, and what belongs into it is "
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


class MetricsFile:
    """A sink that appends each record with a single write to the operating system.

    A file that exists is continued, on a fresh line also where a kill tore the last one. There must be one writer only.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.time, warn: Tell = give_warning, say: Tell | None = None
    ) -> None:
        self._clock = clock
        self._file = AppendedFile(path, warn, say)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one record."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        record: dict[str, object] = {"step": step, "time": round(self._clock(), 3), **finite}
        signs = {name: round(math.copysign(1, value)) for name, value in values.items() if math.isinf(value)}
        if signs:
            record["infinite"] = signs
        self._file.append(json.dumps(record, allow_nan=False).encode() + b"\n")

    def close(self, summary: Mapping[str, object]) -> None:
        """Bring the file to the disk and close it; the summary has a file of its own."""
        del summary
        self._file.close()


def read_metrics(path: str | Path, by_step: bool = False) -> list[dict[str, float]]:
    """Every record of a metrics.jsonl in the order written; a line torn by a kill is left out.

    With `by_step`, one record a step, in order: what was logged at a step more than once (a run that was killed and
    went on from an older checkpoint) has its last value.

    ```python
    losses = [record["train/loss"] for record in read_metrics("runs/first/metrics.jsonl")]
    ```
    """
    path = Path(path)
    if not path.is_file():
        raise LogError(f"there is no file {path}: give the metrics.jsonl that lies in a run's folder")
    records = list(_records(path))
    if not by_step:
        return records
    merged: dict[float, dict[str, float]] = {}
    for record in records:
        merged.setdefault(record["step"], {}).update(record)
    return [merged[step] for step in sorted(merged)]


def _records(path: Path) -> Iterator[dict[str, float]]:
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        # Blocks that a crash of the machine left unwritten read as zeros.
        text = line.strip(b"\0\r ")
        if not text:
            continue
        try:
            record = json.loads(text)
        except ValueError as error:
            # Every record begins with a brace and none ends early, so a broken one that begins so was torn.
            if text.startswith(b"{"):
                continue
            raise LogError(_stranger(path, number)) from error
        if not isinstance(record, dict) or "step" not in record:
            raise LogError(_stranger(path, number))
        yield _restored(record)


def _restored(record: dict[str, object]) -> dict[str, float]:
    signs = record.pop("infinite", {})
    assert isinstance(signs, dict)
    restored: dict[str, float] = {}
    for name, value in record.items():
        if value is None:
            value = math.copysign(math.inf, signs[name]) if name in signs else math.nan
        assert isinstance(value, float | int)
        restored[name] = value
    return restored


def _stranger(path: Path, number: int) -> str:
    shape = '{"step": 12, "train/loss": 0.43}'
    return f"{path}, line {number} is not a record like {shape}: give the metrics.jsonl of a run"
