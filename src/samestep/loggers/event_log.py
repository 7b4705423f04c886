"""What happens in a run, in events.jsonl, and what its ranks spend their time on, in times.jsonl; rank 0 writes both.

A line of events.jsonl is `{"event": "checkpoint", "time": 1767225600.0, "step": 400, ...}`, one of times.jsonl
`{"step": 400, "time": 1767225600.0, "steps": 97, "seconds": 1.003, "phases": {"forward": [0.31, 0.32], ...}, ...}`.
Each is one write, so that a kill loses at most the last one. docs/run_folder.md describes all fields.
"""

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from samestep.disk import AppendFile
from samestep.messages import warn

EVENTS_FILE: Final = "events.jsonl"
TIMES_FILE: Final = "times.jsonl"
LONGEST_TEXT: Final = 20_000
"""Characters of a text in an event; of a longer one, such as a traceback, its end is kept."""


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
