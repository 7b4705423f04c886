"""What a person sees while a run goes on: a progress bar on a terminal, plain lines elsewhere."""

import atexit
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from samestep.disk import is_disk_error
from samestep.loggers.text_log import entry, is_learning_rate, is_memory, is_throughput, line, progress
from samestep.messages import format_duration

# Long enough to even out an evaluation now and then, short enough to forget a slow start.
_WINDOW_SECONDS = 60.0
_SAMPLE_SECONDS = 0.5


class Pace:
    """The step a run has reached and its speed over the last minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()
        self.step = 0
        """The furthest step reached."""
        self.total: int | None = None
        """The step at which the run will end, where it is known."""

    def expect(self, total: int | None, start: int) -> None:
        """Tell where the run begins and ends; a run that goes on from a checkpoint does not begin at 0."""
        self.total, self.step = total, start
        self._seen.clear()
        self._seen.append((self._clock(), start))

    def reach(self, step: int) -> None:
        """Note a step; one that lies behind (a metric logged by epoch number) moves nothing."""
        if self._seen and step <= self.step:
            return
        self.step = step
        now = self._clock()
        if not self._seen or now - self._seen[-1][0] >= _SAMPLE_SECONDS:
            self._seen.append((now, step))
        while len(self._seen) > 2 and now - self._seen[0][0] > _WINDOW_SECONDS:
            self._seen.popleft()

    def seconds_left(self) -> float | None:
        """The time until the last step at the present speed, or None while that cannot be told."""
        if self.total is None or not self._seen:
            return None
        began, first = self._seen[0]
        spent, done = self._clock() - began, self.step - first
        if done <= 0 or spent <= 0:
            return None
        return max(0.0, (self.total - self.step) * spent / done)


_LINE_SECONDS = 1.0
_REFRESH_SECONDS = 0.1
_NARROWEST_BAR = 12


class Console(Protocol):
    """A sink for people, which also prints what is said."""

    def expect(self, total: int | None, start: int = 0) -> None:
        """Tell at which step the run begins and ends, for the bar and the time left."""
        ...

    def advance(self, step: int) -> None:
        """Show that a step is done; cheap, so that every step may call it."""
        ...

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Show one record."""
        ...

    def say(self, text: str) -> None:
        """Print text, above the bar where there is one."""
        ...

    def close(self, summary: Mapping[str, object]) -> None:
        """Show what was held back and leave the terminal as it was; a second call does nothing."""
        ...


def open_console(stream: TextIO, clock: Callable[[], float] = time.monotonic) -> Console:
    """A bar where `stream` is a terminal that can move its cursor, lines where it is a file, a pipe or CI's log."""
    # Asked of the stream itself: FORCE_COLOR makes rich take a pipe for a terminal.
    if stream.isatty():
        terminal = _Terminal(file=stream, highlight=False)
        if not terminal.is_dumb_terminal:
            return BarConsole(terminal, clock)
    return LineConsole(stream, clock)


class Cadence:
    """Lets one line of each kind through a second and keeps the last that had to wait.

    Kinds are kept apart, so that the result of an evaluation is never lost in the stream of training records.
    """

    def __init__(self, clock: Callable[[], float], interval: float = _LINE_SECONDS) -> None:
        self._clock, self._interval = clock, interval
        self._shown: dict[frozenset[str], float] = {}
        self._kept: dict[frozenset[str], str] = {}

    def offer(self, names: Iterable[str], text: str) -> list[str]:
        """The text, if a record of these names is due; otherwise nothing, and it is kept."""
        kind, now = frozenset(names), self._clock()
        self._kept.pop(kind, None)
        if kind in self._shown and now - self._shown[kind] < self._interval:
            self._kept[kind] = text
            return []
        self._shown[kind] = now
        return [text]

    def rest(self) -> list[str]:
        """What was kept, in the order it came; it is kept no longer."""
        kept = list(self._kept.values())
        self._kept.clear()
        return kept


class LineConsole:
    """A Console of plain lines, at most one a second of each kind, and always the last."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._pace, self._cadence = stream, Pace(clock), Cadence(clock)
        self._state: dict[str, float] = {}

    def expect(self, total: int | None, start: int = 0) -> None:
        """Tell at which step the run begins and ends."""
        self._pace.expect(total, start)

    def advance(self, step: int) -> None:
        """Note a step; lines come with records only."""
        self._pace.reach(step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Print one record, if one of its kind is due."""
        # Speed and memory come with some records only: each line of training tells the last that is known.
        state = {name: value for name, value in values.items() if is_throughput(name) or is_memory(name)}
        self._state.update(state)
        kind = values.keys() - state.keys()
        if not _of_training(values):
            self._print(self._cadence.offer(kind, line(step, values)))
            return
        self._pace.reach(step)
        text, left = line(step, {**values, **self._state}, self._pace.total), self._pace.seconds_left()
        self._print(self._cadence.offer(kind, text if left is None else f"{text} | ETA {format_duration(left)}"))

    def say(self, text: str) -> None:
        """Print text."""
        self._print([text])

    def close(self, summary: Mapping[str, object]) -> None:
        """Print what was held back."""
        del summary
        self._print(self._cadence.rest())

    def _print(self, lines: Iterable[str]) -> None:
        for text in lines:
            try:
                print(text, file=self._stream, flush=True)
            except OSError as error:
                # A launcher keeps what ranks print in files: where their disk is full nobody is left to tell, and
                # log.txt waits for room. A reader who has gone is another matter.
                if not is_disk_error(error):
                    raise


class BarConsole:
    """A Console with a progress bar in the last line of a terminal; records that are not of training stand above it.

    No thread refreshes the bar: a process forked while such a thread holds the terminal (a worker of a DataLoader)
    would wait for it forever. Between two steps the bar stands still.
    """

    def __init__(self, terminal: RichConsole, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal, self._clock = terminal, clock
        self._pace, self._cadence = Pace(clock), Cadence(clock)
        self._facts: dict[str, str] = {}
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._refreshed = -_REFRESH_SECONDS

    def expect(self, total: int | None, start: int = 0) -> None:
        """Set the bar's ends."""
        self._pace.expect(total, start)
        self._refresh()

    def advance(self, step: int) -> None:
        """Move the bar, ten times a second at most."""
        self._pace.reach(step)
        if self._clock() - self._refreshed >= _REFRESH_SECONDS:
            self._refresh()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take a record's numbers into the bar, and print it above if it is not of training alone."""
        training = _of_training(values)
        if training:
            self._pace.reach(step)
            self._facts.update(_bar_facts(training))
            self._refresh()
        if len(training) < len(values):
            self._print(self._cadence.offer(values, line(step, values)))

    def say(self, text: str) -> None:
        """Print text above the bar."""
        self._print([text])

    def close(self, summary: Mapping[str, object]) -> None:
        """Print what was held back and leave the bar as it stands."""
        del summary
        self._print(self._cadence.rest())
        if self._bar is not None:
            self._refresh()
            self._stop()

    def _refresh(self) -> None:
        bar = self._bar or self._start()
        self._refreshed = self._clock()
        facts = fit(self._words(), self._terminal.width - _NARROWEST_BAR)
        bar.update(self._task, completed=self._pace.step, total=self._pace.total, facts=facts)
        bar.refresh()

    def _words(self) -> list[str]:
        """What the bar tells, the most important first."""
        words = {"step": f"step {progress(self._pace.step, self._pace.total)}", **self._facts}
        left = self._pace.seconds_left()
        if left is not None:
            words["left"] = f"ETA {format_duration(left)}"
        return [words[key] for key in ("step", "loss", "speed", "left", "rate", "memory") if key in words]

    def _start(self) -> Progress:
        bar = Progress(
            BarColumn(bar_width=None),
            TextColumn("{task.fields[facts]}", markup=False, table_column=Column(no_wrap=True)),
            console=self._terminal,
            auto_refresh=False,
            expand=True,
            # What goes elsewhere (2> errors.txt) must still arrive there.
            redirect_stderr=sys.stderr.isatty(),
        )
        self._bar, self._task = bar, bar.add_task("", total=None, facts="")
        bar.start()
        # A script that never closes its run would leave the prompt in the middle of the bar.
        atexit.register(self._stop)
        return bar

    def _stop(self) -> None:
        atexit.unregister(self._stop)
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, lines: Iterable[str]) -> None:
        for text in lines:
            self._terminal.print(Text.from_ansi(text), soft_wrap=True)


def fit(words: Iterable[str], width: int) -> str:
    """As many of the words, from the first, as fit into `width` columns.

    >>> fit(["step 3", "loss 0.5", "lr 3.0e-04"], 16)
    'step 3  loss 0.5'
    """
    text = ""
    for word in words:
        longer = f"{text}  {word}" if text else word
        if text and len(longer) > width:
            break
        text = longer
    return text


class _Terminal(RichConsole):
    def show_cursor(self, show: bool = True) -> bool:
        """Leave the cursor as it is: a rank that is killed could not bring it back."""
        del show
        return False


def _of_training(values: Mapping[str, float]) -> dict[str, float]:
    """The numbers that tell how training goes on: `train/...`, the learning rates, and names without a group."""
    return {
        name: value
        for name, value in values.items()
        if "/" not in name or name.startswith("train/") or is_learning_rate(name)
    }


def _bar_facts(training: Mapping[str, float]) -> dict[str, str]:
    """The numbers the bar has a place for; the first of each sort."""
    facts: dict[str, str] = {}
    for name, value in training.items():
        for key, applies in _PLACES.items():
            if applies(name):
                facts.setdefault(key, entry(name.removeprefix("train/"), value))
    return facts


_PLACES: dict[str, Callable[[str], bool]] = {
    "loss": lambda name: name in ("train/loss", "loss"),
    "speed": is_throughput,
    "rate": is_learning_rate,
    "memory": is_memory,
}
