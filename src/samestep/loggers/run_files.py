"""The files of a run: metrics.jsonl, events.jsonl, times.jsonl, log.txt, TensorBoard's; and metrics as text.

A line of metrics.jsonl is `{"step": 12, "epoch": 0, "time": 1767225600.0, "train/loss": 0.43}`. Each is one write, so
that a kill loses at most the last one. Strict JSON has no NaN and no infinity: both are written as null, and the sign
of an infinity is stored as `"infinite": {"train/loss": 1}`. `read_metrics` restores them.

A line of events.jsonl is `{"event": "checkpoint", "time": 1767225600.0, "step": 400, ...}`, one of times.jsonl
`{"step": 400, "time": 1767225600.0, "steps": 97, "seconds": 1.003, "phases": {"forward": [0.31, 0.32], ...}, ...}`.
docs/run_folder.md describes all fields.
"""

import io
import json
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from samestep.disk import AppendFile
from samestep.errors import LogError
from samestep.messages import format_bytes, warn

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE: Final = "events.jsonl"
TIMES_FILE: Final = "times.jsonl"
LONGEST_TEXT: Final = 20_000
"""Characters of a text in an event; of a longer one, such as a traceback, its end is kept."""
WAIT_PREFIX = "ranks/wait/"
"""Begins the names of metrics about the ranks themselves, which are in metrics.jsonl and TensorBoard only."""
_FLUSH_SECONDS = 10.0  # a kill loses at most the records of this time from TensorBoard's file
_EVENT_FORMAT = "brain.Event:2"


class JsonlLogger:
    """Logger that appends each record with a single write; continues an existing file. Use one writer only."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.time,
        warn: Callable[[str], None] = warn,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._clock = clock
        self._file = AppendFile(path, warn, report)

    def write(
        self,
        step: int,
        values: Mapping[str, float],
        epoch: int | None = None,
        between_steps: bool = False,
        logged_at: float | None = None,
    ) -> None:
        """Append one record, which was logged now or at another time, in seconds since 1970."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        position = {"step": step} if epoch is None else {"step": step, "epoch": epoch}
        record: dict[str, object] = {**position, "time": round(logged_at or self._clock(), 3), **finite}
        signs = {name: round(math.copysign(1, value)) for name, value in values.items() if math.isinf(value)}
        if signs:
            record["infinite"] = signs
        self._file.append(json.dumps(record, allow_nan=False).encode() + b"\n")

    def close(self, summary: Mapping[str, object]) -> None:
        """Flush and close the file."""
        del summary  # it has its own file
        self._file.close()


def read_metrics(path: str | Path, by_step: bool = False) -> list[dict[str, float]]:
    """Read every record of a metrics.jsonl in the order written; skip a line that a kill cut off.

    With `by_step=True` you get one record per step, in order. If a value was logged more than once at a step (the run
    was killed and resumed from an older checkpoint), the last one counts.

    ```python
    losses = [record["train/loss"] for record in read_metrics("runs/first/metrics.jsonl")]
    ```
    """
    records = iterate_metrics(path)
    if not by_step:
        return list(records)
    merged: dict[float, dict[str, float]] = {}
    for record in records:
        merged.setdefault(record["step"], {}).update(record)
    return [merged[step] for step in sorted(merged)]


def iterate_metrics(path: str | Path, skipped: list[int] | None = None) -> Iterator[dict[str, float]]:
    """The records of a metrics.jsonl, one after the other: a file may be larger than the memory.

    A line that is not a record raises LogError, or its number is added to `skipped`.
    """
    path = Path(path)
    if not path.is_file():
        raise LogError(f"{path} does not exist: pass the metrics.jsonl in a run's folder")
    with path.open("rb") as file:
        yield from _records(path, file, skipped)


def _records(path: Path, lines: Iterable[bytes], skipped: list[int] | None) -> Iterator[dict[str, float]]:
    for number, line in enumerate(lines, start=1):
        text = line.strip(b"\0\r\n ")  # blocks that were not written before a crash read as zeros
        if not text:
            continue
        try:
            record = json.loads(text.decode())  # json needs longer for bytes
        except (ValueError, RecursionError):
            if text.startswith(b"{"):  # a record that was cut off by a kill
                continue
            record = None
        if not isinstance(record, dict) or "step" not in record:
            if skipped is not None:
                skipped.append(number)
                continue
            example = '{"step": 12, "train/loss": 0.43}'
            raise LogError(f"{path}, line {number} is not a record like {example}: pass the metrics.jsonl of a run")
        if b"null" in text:
            given = record.pop("infinite", {})
            signs = {name: sign for name, sign in given.items() if sign in (-1, 1)} if isinstance(given, dict) else {}
            for name in [name for name, value in record.items() if value is None]:
                record[name] = math.copysign(math.inf, signs[name]) if name in signs else math.nan
        yield record


class TextLog:
    """Logger that writes each record and each printed text to log.txt with a timestamp; continues an existing file."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.time,
        warn: Callable[[str], None] = warn,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._clock = clock
        self._file = AppendFile(path, warn, report)
        self._closed = False

    def write(
        self, step: int, values: Mapping[str, float], epoch: int | None = None, between_steps: bool = False
    ) -> None:
        """Append one record."""
        self.print(format_record(step, values, epoch=epoch if between_steps else None))

    def print(self, text: str) -> None:
        """Append text; its second and later lines are indented."""
        timestamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._clock()))
        lines = f"{timestamp}  " + text.replace("\n", f"\n{' ' * len(timestamp)}  ") + "\n"
        # a path may contain bytes that are not UTF-8
        self._file.append(lines.encode(errors="backslashreplace"))

    def close(self, summary: Mapping[str, object]) -> None:
        """Append the summary and close the file."""
        if self._closed:
            return
        self._closed = True
        if summary:
            shown = sorted(item for item in summary.items() if item[0] != "ledger")  # for `samestep audit` only
            self.print("\n".join(("summary", *(f"{name} {_text(value)}" for name, value in shown))))
        self._file.close()


def _text(value: object) -> str:
    return format_number(value) if isinstance(value, float | int) and not isinstance(value, bool) else str(value)


def format_record(step: int, values: Mapping[str, float], total: int | None = None, epoch: int | None = None) -> str:
    """Format a record as one line.

    >>> format_record(120, {"train/loss": 0.43117, "lr": 3e-4, "samples_per_s": 15321.4, "memory_bytes": 1.25 * 2**30})
    'step 120 | train/loss 0.4312 | lr 3.0e-04 | 15,321 samples/s | 1.2 GiB'
    >>> format_record(299, {"test/accuracy": 0.75}, epoch=2)
    'epoch 2 | step 299 | test/accuracy 0.7500'
    """
    metrics = (format_metric(name, value) for name, value in values.items())
    position = [] if epoch is None else [f"epoch {epoch}"]
    return " | ".join((*position, f"step {format_progress(step, total)}", *metrics))


def format_progress(step: int, total: int | None) -> str:
    """Format the step, and the last step if it is known."""
    return f"{step:,}" if total is None else f"{step:,}/{total:,}"


def format_metric(name: str, value: float) -> str:
    """Format a value with its name, or with a unit that makes the name redundant."""
    if is_learning_rate(name):
        return f"{name} {value:.1e}"
    if is_throughput(name):
        return f"{value:,.0f} samples/s" if value >= 10 else f"{value:.2f} samples/s"
    if is_memory(name):
        return format_bytes(value)
    return f"{name} {format_number(value)}"


def format_number(value: float) -> str:
    """Format a number with four decimals or digits, and an integer in full."""
    size = abs(value)
    if size < 1e15 and value == int(value):
        return f"{int(value):,}"
    if 1e-2 <= size < 1e5:
        return f"{value:,.4f}" if size < 1e3 else f"{value:,.1f}"
    return f"{value:.3e}"


def is_learning_rate(name: str) -> bool:
    """Whether the name is that of a learning rate: `lr`, `lr/1`, `train/learning_rate`."""
    return any(part in ("lr", "learning_rate") for part in name.split("/"))


def is_throughput(name: str) -> bool:
    """Whether the name ends with `samples_per_s`."""
    return name.rpartition("/")[2] == "samples_per_s"


def is_memory(name: str) -> bool:
    """Whether the name ends with `memory_bytes`."""
    return name.rpartition("/")[2] == "memory_bytes"


class TensorBoardFile:
    """Logger that adds each value to an event file, at its step; the curve `epoch` has a point where an epoch begins.

    Event files cannot be rewritten: after a resume from an older checkpoint, a curve shows the repeated steps twice.
    tensorboard's own writer is not used: on a full disk its thread ends with a traceback that no caller can catch.
    """

    def __init__(self, file: AppendFile, encode: Callable[[int | None, Mapping[str, float]], bytes]) -> None:
        self._file, self._encode = file, encode
        self._pending = [encode(None, {})]
        self._epoch: int | None = None
        self._flushed_at = 0.0  # so that the first record is written immediately

    def write(
        self, step: int, values: Mapping[str, float], epoch: int | None = None, between_steps: bool = False
    ) -> None:
        """Add one point per name; one event for all of them costs a third of one event each."""
        if epoch is not None and epoch != self._epoch:
            self._epoch, values = epoch, {**values, "epoch": float(epoch)}
        self._pending.append(self._encode(step, values))
        if time.monotonic() - self._flushed_at >= _FLUSH_SECONDS:
            self._flushed_at = time.monotonic()
            self._file.append(b"".join(self._pending))
            self._pending = []

    def close(self, summary: Mapping[str, object]) -> None:
        """Write the pending events."""
        del summary  # it has its own file
        self._file.close(b"".join(self._pending))


def open_tensorboard(
    folder: Path, warn: Callable[[str], None], report: Callable[[str], None] | None = None
) -> TensorBoardFile | None:
    """Open a logger for `folder`; if tensorboard cannot be imported, warn and return None."""
    try:
        import tensorboard  # noqa: F401  # pyright: ignore[reportUnusedImport]  # torch's message for its absence is less clear
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]  # generated
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]  # generated
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        warn(
            f"TensorBoard is not installed ({error}), so samestep writes no curves: pip install 'samestep[tensorboard]'"
        )
        return None

    def encode(step: int | None, values: Mapping[str, float]) -> bytes:
        """Encode a record as one event; without a step, the event that starts a file."""
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        fields = {"file_version": _EVENT_FORMAT} if step is None else {"step": step, "summary": Summary(value=points)}
        written = io.BytesIO()
        RecordWriter(written).write(Event(wall_time=time.time(), **fields).SerializeToString())
        return written.getvalue()

    name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{time.time_ns() % 10**9}"
    return TensorBoardFile(AppendFile(folder / name, warn, report, is_text=False), encode)


# Events and times


class EventLog:
    """The two files; records wait in memory until it is known which folder they belong to. Threads may record, too."""

    def __init__(
        self,
        warn: Callable[[str], None] = warn,
        report: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._warn, self._report, self._clock = warn, report, clock
        self._lock = threading.RLock()
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._files: dict[str, AppendFile] = {}
        self._folder: Path | None = None
        self._writing = self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether records are written immediately."""
        return self._folder is not None

    @property
    def is_waiting(self) -> bool:
        """Whether there are records and no files yet."""
        return self._folder is None and bool(self._waiting)

    def record(self, event: str, fields: Mapping[str, object]) -> None:
        """Record that something has happened."""
        self._append(EVENTS_FILE, {"event": event, "time": round(self._clock(), 3), **fields})

    def record_times(self, step: int, fields: Mapping[str, object]) -> None:
        """Record what the ranks have spent their time on since the record before; `step` is the last step."""
        self._append(TIMES_FILE, {"step": step, "time": round(self._clock(), 3), **fields})

    def open(self, folder: Path) -> None:
        """Write what waits, and from now on everything immediately."""
        with self._lock:
            self._folder = folder
            self._write()

    def close(self) -> None:
        """Close the files; what comes later is not recorded."""
        with self._lock:
            self._closed = True
            for file in self._files.values():
                file.close()

    def _append(self, name: str, record: Mapping[str, object]) -> None:
        line = json.dumps(_without_nan(record), allow_nan=False, default=str).encode() + b"\n"
        with self._lock:
            if not self._closed:
                self._waiting.append((name, line))
                self._write()

    def _write(self) -> None:
        """Write what waits. That a disk is full is a warning, which is an event itself: it waits for its turn."""
        if self._folder is None or self._writing:
            return
        self._writing = True
        try:
            while self._waiting:
                name, line = self._waiting.popleft()
                if name not in self._files:
                    self._files[name] = AppendFile(self._folder / name, self._warn, self._report)
                self._files[name].append(line)
        finally:
            self._writing = False


def end_of_text(text: str) -> str:
    """The text, or the end of a very long one."""
    return text if len(text) <= LONGEST_TEXT else f"[...]{text[-LONGEST_TEXT:]}"


def _without_nan(value: object) -> object:
    """The value with null in place of numbers that strict JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _without_nan(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return value


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of events.jsonl or times.jsonl; a line that a kill has cut off is skipped. Empty without the file."""
    if not path.is_file():
        return
    for line in path.read_bytes().split(b"\n"):
        with suppress(ValueError, RecursionError):
            record = json.loads(line.strip(b"\0\r "))
            if isinstance(record, dict):
                yield record
