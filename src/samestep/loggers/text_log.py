"""log.txt: the story of a run for people to read."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from samestep.loggers.jsonl import AppendedFile, Tell
from samestep.messages import format_bytes
from samestep.messages import warn as give_warning

THROUGHPUT = "samples_per_s"
"""The last part of the name of a metric that counts samples in a second."""
MEMORY = "memory_bytes"
"""The last part of the name of a metric that is an amount of memory in bytes."""
LEARNING_RATES = ("lr", "learning_rate")
"""Parts of a name that make a metric a learning rate: `lr`, `lr/1`, `train/learning_rate`."""


def line(step: int, values: Mapping[str, float], total: int | None = None) -> str:
    """A record on one line.

    >>> line(120, {"train/loss": 0.43117, "lr": 3e-4, "samples_per_s": 15321.4, "memory_bytes": 1.25 * 2**30})
    'step 120 | train/loss 0.4312 | lr 3.0e-04 | 15,321 samples/s | 1.2 GiB'
    """
    return " | ".join((f"step {progress(step, total)}", *(entry(name, value) for name, value in values.items())))


def progress(step: int, total: int | None) -> str:
    """The step, and where the last one is known how far it is."""
    return f"{step:,}" if total is None else f"{step:,}/{total:,}"


def entry(name: str, value: float) -> str:
    """A number with its name; a unit stands for the name where it says the same."""
    for applies, text in _FORMS:
        if applies(name):
            return text(name, value)
    return f"{name} {plain(value)}"


def is_learning_rate(name: str) -> bool:
    """Whether a metric of this name is a learning rate."""
    return any(part in LEARNING_RATES for part in name.split("/"))


def is_throughput(name: str) -> bool:
    """Whether a metric of this name counts samples in a second."""
    return _last(name) == THROUGHPUT


def is_memory(name: str) -> bool:
    """Whether a metric of this name is an amount of memory."""
    return _last(name) == MEMORY


def plain(value: float) -> str:
    """A number to four decimals or digits; a whole one in full."""
    size = abs(value)
    if size < 1e15 and value == int(value):
        return f"{int(value):,}"
    if 1e-2 <= size < 1e5:
        return f"{value:,.4f}" if size < 1e3 else f"{value:,.1f}"
    return f"{value:.3e}"


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _rate(name: str, value: float) -> str:
    return f"{name} {value:.1e}"


def _samples(name: str, value: float) -> str:
    del name
    return f"{value:,.0f} samples/s" if value >= 10 else f"{value:.2f} samples/s"


def _memory(name: str, value: float) -> str:
    del name
    return format_bytes(value)


_FORMS: tuple[tuple[Callable[[str], bool], Callable[[str, float], str]], ...] = (
    (is_learning_rate, _rate),
    (is_throughput, _samples),
    (is_memory, _memory),
)


class TextLog:
    """A sink that writes each record and everything said on a line with its time; a file that exists is continued."""

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.time, warn: Tell = give_warning, say: Tell | None = None
    ) -> None:
        self._clock = clock
        self._file = AppendedFile(path, warn, say)
        self._closed = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one record."""
        self.say(line(step, values))

    def say(self, text: str) -> None:
        """Append text; lines after its first are set in beneath it."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._clock()))
        lines = f"{stamp}  " + text.replace("\n", f"\n{' ' * len(stamp)}  ") + "\n"
        # Paths may hold bytes that are no UTF-8: they must not end a run.
        self._file.append(lines.encode(errors="backslashreplace"))

    def close(self, summary: Mapping[str, object]) -> None:
        """Append the summary and close the file."""
        if self._closed:
            return
        self._closed = True
        if summary:
            self.say("\n".join(("summary", *(f"{name} {_text(value)}" for name, value in sorted(summary.items())))))
        self._file.close()


def _text(value: object) -> str:
    return plain(value) if isinstance(value, float | int) and not isinstance(value, bool) else str(value)
