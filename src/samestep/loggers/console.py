"""The console of a run: a progress bar on a terminal, plain lines in a pipe, a file or a CI log."""

import atexit
import math
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TextIO, cast

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from samestep.disk import describe_os_error, discard_buffer
from samestep.loggers.run_files import (
    format_metric,
    format_progress,
    format_record,
    is_learning_rate,
    is_memory,
    is_throughput,
)
from samestep.messages import format_duration, warn

_LINE_SECONDS = 1.0
_REFRESH_SECONDS = 0.1
_MIN_BAR_WIDTH = 12
# The speed is averaged over this time: an evaluation should not show in it, a slow start should be forgotten.
_SPEED_WINDOW_SECONDS = 60.0
_SPEED_SAMPLE_SECONDS = 0.5


class Console(ABC):
    """A logger for people, which also prints text and shows progress."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._progress, self._limiter = ProgressEstimate(clock), RateLimiter(clock)

    def expect(self, total: int | None, start: int = 0) -> None:
        """Set the first and the last step of the run, for the bar and the remaining time."""
        self._progress.expect(total, start)

    def advance(self, step: int) -> None:
        """Record that a step is done; cheap enough to call in every step."""
        self._progress.advance(step)

    def write(
        self, step: int, values: Mapping[str, float], epoch: int | None = None, between_steps: bool = False
    ) -> None:
        """Print a record that was logged between two steps, always; show that of a step if there is time for it."""
        if between_steps and not all(name.startswith("train/") for name in values):
            self._print_delayed()  # they were logged before this one
            self.print(format_record(step, values, epoch=epoch))
        else:
            self._show(step, values)

    @abstractmethod
    def _show(self, step: int, values: Mapping[str, float]) -> None:
        """Show a record of a step."""

    @abstractmethod
    def print(self, text: str) -> None:
        """Print text, above the bar if there is one."""

    def close(self, summary: Mapping[str, object]) -> None:
        """Print the records that were delayed; a second call does nothing."""
        del summary
        self._print_delayed()

    def _print_delayed(self) -> None:
        for text in self._limiter.flush():
            self.print(text)


class ConsoleStream:
    """A text stream, usually standard output, that never ends training: what it refuses is lost on the screen only.

    The launcher redirects ranks into files, whose disk may be full; the reader of a pipe may end first; a terminal may
    be closed, or its encoding lack a character; a script may replace standard output by its own object, which has
    little more than `write`. None is the stream of a process that was started without standard output.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream, self._failed = stream, False

    def __getattr__(self, name: str) -> Any:
        """Everything else is that of the stream, such as `encoding` and `fileno` for rich."""
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        try:
            return self._stream is not None and self._stream.isatty()
        except (AttributeError, ValueError):
            return False

    def write(self, text: str) -> int:
        """Write text; a character that the encoding does not have becomes an escape."""
        if self._stream is not None:
            try:
                self._try(self._stream.write, text)
            except UnicodeEncodeError as error:
                self._try(self._stream.write, text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        if self._stream is not None:
            self._try(self._stream.flush)

    def _try(self, act: Callable[..., object], *arguments: object) -> None:
        try:
            act(*arguments)
        except UnicodeEncodeError:
            raise
        except (OSError, ValueError) as error:  # ValueError: the script has closed the stream
            with suppress(AttributeError, OSError, ValueError):  # an object without a file, or a closed one
                discard_buffer(cast("TextIO", self._stream), forever=isinstance(error, BrokenPipeError))
            if not self._failed:
                self._failed = True
                reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
                warn(f"standard output cannot be written: {reason}; training continues, and log.txt has all lines")


def open_console(stream: TextIO | None, clock: Callable[[], float] = time.monotonic) -> Console:
    """Open a bar if `stream` is a terminal that can move its cursor, otherwise plain lines."""
    if (safe := ConsoleStream(stream)).isatty():  # FORCE_COLOR makes rich's own check treat a pipe as a terminal
        terminal = _Terminal(file=cast("TextIO", safe), highlight=False)
        if not terminal.is_dumb_terminal:
            return BarConsole(terminal, clock)
    return LineConsole(stream, clock)


class LineConsole(Console):
    """A console of plain lines: of the records of steps one line per second and kind, and always the last one."""

    def __init__(self, stream: TextIO | None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._stream = ConsoleStream(stream)
        self._speed_and_memory: dict[str, float] = {}

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        """Print one record, unless one of its kind was printed less than a second ago."""
        # Only some records contain speed and memory: each training line shows the last known values.
        latest = {name: value for name, value in values.items() if is_throughput(name) or is_memory(name)}
        self._speed_and_memory.update(latest)
        text = format_record(step, values)
        if _training_values(values):
            self._progress.advance(step)
            text = format_record(step, {**values, **self._speed_and_memory}, self._progress.total)
            if (left := self._progress.seconds_left()) is not None:
                text = f"{text} | ETA {format_duration(left)}"
        for line in self._limiter.due(values.keys() - latest.keys(), text):
            self.print(line)

    def print(self, text: str) -> None:
        """Print a line."""
        self._stream.write(f"{text}\n")
        self._stream.flush()


class BarConsole(Console):
    """A console with a progress bar in the last line of a terminal, and text above it.

    No thread refreshes the bar: a process forked while such a thread holds the terminal's lock (a DataLoader worker)
    would wait for it forever. So the bar does not move between two steps.
    """

    def __init__(self, terminal: RichConsole, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._terminal, self._clock = terminal, clock
        self._fields: dict[str, str] = {}
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._refreshed_at = -_REFRESH_SECONDS

    def expect(self, total: int | None, start: int = 0) -> None:
        """Set the ends of the bar."""
        super().expect(total, start)
        self._refresh()

    def advance(self, step: int) -> None:
        """Move the bar, at most ten times per second."""
        super().advance(step)
        if self._clock() - self._refreshed_at >= _REFRESH_SECONDS:
            self._refresh()

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        """Show training values in the bar; print a record with other values above it."""
        training = _training_values(values)
        if training:
            self._progress.advance(step)
            self._fields.update(_bar_fields(training))
            self._refresh()
        if len(training) < len(values):
            for line in self._limiter.due(values, format_record(step, values)):
                self.print(line)

    def print(self, text: str) -> None:
        """Print text above the bar."""
        self._terminal.print(Text.from_ansi(text), soft_wrap=True)

    def close(self, summary: Mapping[str, object]) -> None:
        """Print the records that were delayed and leave the bar as it is."""
        super().close(summary)
        if self._bar is not None:
            self._refresh()
            self._stop()

    def _refresh(self) -> None:
        bar = self._bar or self._start()
        self._refreshed_at = self._clock()
        text = join_fitting(self._texts(), self._terminal.width - _MIN_BAR_WIDTH)
        bar.update(self._task, completed=self._progress.step, total=self._progress.total, text=text)
        bar.refresh()

    def _texts(self) -> list[str]:
        """The texts next to the bar, the most important first."""
        texts = {"step": f"step {format_progress(self._progress.step, self._progress.total)}", **self._fields}
        if (left := self._progress.seconds_left()) is not None:
            texts["eta"] = f"ETA {format_duration(left)}"
        return [texts[key] for key in ("step", "loss", "speed", "eta", "learning_rate", "memory") if key in texts]

    def _start(self) -> Progress:
        bar = Progress(
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True)),
            console=self._terminal,
            auto_refresh=False,
            expand=True,
            redirect_stderr=sys.stderr.isatty(),  # standard error that goes to a file must still arrive there
        )
        self._bar, self._task = bar, bar.add_task("", total=None, text="")
        bar.start()
        # Without this a script that never closes its run would leave the prompt in the middle of the bar.
        atexit.register(self._stop)
        return bar

    def _stop(self) -> None:
        atexit.unregister(self._stop)
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class _Terminal(RichConsole):
    def show_cursor(self, show: bool = True) -> bool:
        """Never hide the cursor: a rank that is killed could not show it again."""
        del show
        return False


class ProgressEstimate:
    """The current step of a run and, from the speed over the last minute, the remaining time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()
        self.step = 0  # the highest step so far
        self.total: int | None = None  # the last step of the run, if it is known

    def expect(self, total: int | None, start: int) -> None:
        """Set the last step, and the first one: a resumed run does not start at 0."""
        self.total, self.step = total, start
        self._samples.clear()
        self._samples.append((self._clock(), start))

    def advance(self, step: int) -> None:
        """Record a step; ignore a lower one (a metric that was logged with a step number of the user's own)."""
        if self._samples and step <= self.step:
            return
        self.step = step
        now = self._clock()
        if not self._samples or now - self._samples[-1][0] >= _SPEED_SAMPLE_SECONDS:
            self._samples.append((now, step))
        while len(self._samples) > 2 and now - self._samples[0][0] > _SPEED_WINDOW_SECONDS:
            self._samples.popleft()

    def seconds_left(self) -> float | None:
        """The time until the last step at the current speed, or None if it is not known yet."""
        if self.total is None or not self._samples:
            return None
        started_at, first_step = self._samples[0]
        seconds, steps = self._clock() - started_at, self.step - first_step
        if steps <= 0 or seconds <= 0:
            return None
        return max(0.0, (self.total - self.step) * seconds / steps)


class RateLimiter:
    """Passes at most one line per second for each kind of record, and keeps the last delayed one.

    The kind is the set of names, so that a value that is logged every 100 steps is not suppressed by the others.
    """

    def __init__(self, clock: Callable[[], float], interval: float = _LINE_SECONDS) -> None:
        self._clock, self._interval = clock, interval
        self._shown_at: dict[frozenset[str], float] = {}
        self._delayed: dict[frozenset[str], str] = {}

    def due(self, names: Iterable[str], text: str) -> list[str]:
        """The texts to show now, in order: delayed ones, and that of a record with these names; if not yet, keep it."""
        kind, now = frozenset(names), self._clock()
        self._delayed.pop(kind, None)
        self._delayed[kind] = text
        due = [each for each in self._delayed if now - self._shown_at.get(each, -math.inf) >= self._interval]
        self._shown_at.update(dict.fromkeys(due, now))
        return [self._delayed.pop(each) for each in due]

    def flush(self) -> list[str]:
        """Return the delayed texts in order, and forget them."""
        delayed = list(self._delayed.values())
        self._delayed.clear()
        return delayed


def join_fitting(texts: Iterable[str], width: int) -> str:
    """Join as many texts, from the first, as fit into `width` columns.

    >>> join_fitting(["step 3", "loss 0.5", "lr 3.0e-04"], 16)
    'step 3  loss 0.5'
    """
    joined = ""
    for text in texts:
        longer = f"{joined}  {text}" if joined else text
        if joined and len(longer) > width:
            break
        joined = longer
    return joined


def _training_values(values: Mapping[str, float]) -> dict[str, float]:
    """The values about training: `train/...`, learning rates, and names without a group."""
    return {
        name: value
        for name, value in values.items()
        if "/" not in name or name.startswith("train/") or is_learning_rate(name)
    }


def _bar_fields(training: Mapping[str, float]) -> dict[str, str]:
    """The values that the bar shows; the first of each field."""
    fields: dict[str, str] = {}
    for name, value in training.items():
        for field, matches in _BAR_FIELDS.items():
            if matches(name):
                fields.setdefault(field, format_metric(name.removeprefix("train/"), value))
    return fields


_BAR_FIELDS: dict[str, Callable[[str], bool]] = {
    "loss": lambda name: name in ("train/loss", "loss"),
    "speed": is_throughput,
    "learning_rate": is_learning_rate,
    "memory": is_memory,
}
