"""Loggers that you pass to `Run(loggers=[...])`: their Protocol, and the thread in which each of them works.

A tracker may wait for a network or a locked database. Its thread waits, not the training step, and what it raises is a
warning.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

from samestep.errors import ConfigError

_LONGEST_QUEUE: Final = 10_000  # records that wait for a slow logger: a quarter of an hour at ten per second
_FINISHED_SECONDS: Final = 60.0
_STOPPED_SECONDS: Final = 10.0  # after a failure or a signal, a launcher or a scheduler kills this process soon


@dataclass(frozen=True)
class RunInfo:
    """What a logger gets when it is opened."""

    folder: Path
    """The folder of the run. A run that starts again has the same folder, so keep an id of your tracker in it."""
    name: str
    """The name of the folder."""
    config: Mapping[str, Any]
    """The values of `samestep run --config` and `Run(config=...)`; under `samestep`, the options of `Run`."""
    resumed: bool
    """Whether the folder has metrics of an earlier start."""
    warn: Callable[[str], None]
    """Shows a warning; training continues."""


class Logger(Protocol):
    """Receives records on rank 0: names and plain numbers, already averaged over the ranks.

    samestep calls the three methods in a thread that belongs to the logger. If one raises, samestep warns once and
    training continues.
    """

    def open(self, run: RunInfo) -> None:
        """Connect; called before the first record."""
        ...

    def write(self, step: int, values: Mapping[str, float], epoch: int | None) -> None:
        """Log one record. After a resume from an older checkpoint, steps come again."""
        ...

    def close(self, summary: Mapping[str, Any]) -> None:
        """Send what is pending and disconnect; `summary["status"]` is that of summary.json."""
        ...


def check_loggers(loggers: Sequence[object] | None) -> None:
    """Raise if an element of `Run(loggers=...)` is not a logger, or needs a package that is not installed."""
    if loggers is None:
        return
    if not isinstance(loggers, list | tuple):
        raise ConfigError(
            f"loggers is a {type(loggers).__name__}: pass a list, e.g. loggers=[samestep.loggers.CSVLogger()]"
        )
    for index, each in enumerate(loggers):
        if isinstance(each, type):
            raise ConfigError(f"loggers[{index}] is the class {each.__name__}: create a logger with {each.__name__}()")
        missing = [name for name in ("open", "write", "close") if not callable(getattr(each, name, None))]
        if missing:
            raise ConfigError(
                f"loggers[{index}] is a {type(each).__name__} without {', '.join(missing)}: pass e.g. "
                "samestep.loggers.CSVLogger(), or an object with the methods of samestep.loggers.Logger"
            )
        package, extra = getattr(each, "requires", (None, None))
        if package is not None and not _is_installed(package):
            raise ConfigError(
                f"{type(each).__name__} needs {package}, which is not installed: pip install 'samestep[{extra}]'"
            )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # a module without a specification, such as one that a script has defined
        return False


class LoggerThread:
    """Passes records to one logger, in a thread, in the order in which they were logged.

    Warnings are shown by the thread that writes and closes, so that your filters and its line hold for them.
    """

    def __init__(
        self,
        logger: Logger,
        folder: Path,
        config: Mapping[str, Any],
        resumed: bool,
        warn: Callable[[str], None],
        report: Callable[[str], None],
    ) -> None:
        self._logger, self._name, self._warn, self._report = logger, type(logger).__name__, warn, report
        self._queue: deque[tuple[int, Mapping[str, float], int | None]] = deque()
        self._changed = threading.Condition()
        self._summary: Mapping[str, Any] | None = None  # given when the logger is to be closed
        self._messages: deque[str] = deque()
        self._lost = 0
        self._longest_wait = self._closed_by = 0.0  # seconds, and a time
        self._has_failed = self._is_closed = self._is_off = self._is_overloaded = False
        run = RunInfo(folder, folder.name, config, resumed, self._messages.append)
        self._thread = threading.Thread(target=self._work, args=[run], name=f"samestep {self._name}", daemon=True)
        self._thread.start()

    def write(
        self, step: int, values: Mapping[str, float], epoch: int | None = None, between_steps: bool = False
    ) -> None:
        """Hand over one record, without waiting for the logger."""
        del between_steps
        with self._changed:
            if not self._is_off:
                self._queue.append((step, dict(values), epoch))  # a logger may change what it gets
                self._changed.notify()
            if self._is_off:
                self._lost += 1
            elif len(self._queue) > _LONGEST_QUEUE:
                self._drop_oldest()
        self._show_messages()

    def end(self, summary: Mapping[str, Any], longest_wait: float = math.inf) -> None:
        """Let the logger close when it has everything, without waiting for it; `close` waits `longest_wait` at most."""
        with self._changed:
            if self._summary is None:
                seconds = _FINISHED_SECONDS if summary.get("status") == "finished" else _STOPPED_SECONDS
                self._summary, self._longest_wait = summary, min(seconds, longest_wait)
                self._closed_by = time.monotonic() + self._longest_wait
            self._changed.notify()

    def close(self, summary: Mapping[str, Any]) -> None:
        """End, and wait for the logger, but not forever; a second call does nothing."""
        self.end(summary)
        if self._is_closed:
            return
        self._is_closed = True
        self._thread.join(max(0.0, self._closed_by - time.monotonic()))
        self._show_messages()
        if self._thread.is_alive():
            waited = f"{self._longest_wait:.0f} s"
            self._warn(f"{self._name} was not closed within {waited}: its last records may be missing there")
        elif self._lost:
            self._report(f"{self._name} lacks {self._lost} record(s), which metrics.jsonl has")

    def _drop_oldest(self) -> None:
        self._queue.popleft()
        self._lost += 1
        if not self._is_overloaded:
            self._is_overloaded = True
            self._messages.append(f"{self._name} is slower than training logs: records that waited longest are lost")

    def _show_messages(self) -> None:
        while self._messages:
            self._warn(self._messages.popleft())

    def _work(self, run: RunInfo) -> None:
        """The thread."""
        if not self._try("open", "training continues without it", self._logger.open, run):
            with self._changed:
                self._is_off = True
                self._lost += len(self._queue)
            return
        while (record := self._next()) is not None:
            if not self._try("write", "training continues", self._logger.write, *record):
                with self._changed:
                    self._lost += 1
        self._try("close", "its last records may be missing there", self._logger.close, self._summary)

    def _next(self) -> tuple[int, Mapping[str, float], int | None] | None:
        with self._changed:
            while not self._queue:
                if self._summary is not None:
                    return None
                self._changed.wait()
            return self._queue.popleft()

    def _try(self, method: str, consequence: str, function: Callable[..., object], *arguments: object) -> bool:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001  # a tracker is not worth ending a training run
            if not self._has_failed:
                self._has_failed = True
                cause = " ".join(f"{type(error).__name__}: {error}".split())
                self._messages.append(f"{self._name}.{method} failed, {consequence}: {cause}")
            return False
        return True
