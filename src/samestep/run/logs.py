"""What ranks log, kept until it is brought together, then written by one of them."""

import math
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from samestep.sinks.console import Console
from samestep.sinks.sinks import Sinks
from samestep.sinks.values import checked_name, checked_step, number

Row = tuple[int, str]
_SINGLE = torch.Size(())
_SHOWN_AT_ONCE = 10  # ranks tell each other once a second, and a screen or a curve needs no more points of it


@dataclass
class Pending:
    """What this rank has logged since ranks last told each other; tensors stay on their device."""

    values: dict[Row, float | torch.Tensor] = field(default_factory=dict)

    def add(self, step: int, name: str, value: object) -> None:
        """Keep one value; a tensor is not read yet, since that would wait for the device."""
        lazy = isinstance(value, torch.Tensor) and value.shape == _SINGLE and not value.is_complex()
        kept = value.detach().clone() if lazy and isinstance(value, torch.Tensor) else number(name, value)
        self.values[checked_step(step), checked_name(name)] = kept

    def take(self) -> tuple[list[Row], list[float]]:
        """All rows and their values, fetched from each device in one transfer; nothing is pending afterwards."""
        rows, values = list(self.values), list(self.values.values())
        self.values = {}
        lazy = [(at, value) for at, value in enumerate(values) if isinstance(value, torch.Tensor)]
        plain: list[float] = [0.0 if isinstance(value, torch.Tensor) else value for value in values]
        by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for at, value in lazy:
            by_device.setdefault(value.device, []).append((at, value))
        for members in by_device.values():
            fetched = torch.stack(
                [value.double() if value.device.type != "mps" else value.float() for _, value in members]
            )
            for (at, _), item in zip(members, fetched.tolist(), strict=True):
                plain[at] = item
        return rows, plain


def names_mark(rows: list[Row]) -> float:
    """A number that tells whether two ranks logged the same names at the same steps."""
    return float(zlib.crc32(repr(rows).encode()))


def average(parts: list[dict[Row, float]]) -> dict[Row, float]:
    """The mean over the ranks that logged a row; ranks that agree to the last bit keep that bit."""
    gathered: dict[Row, list[float]] = {}
    for part in parts:
        for row, value in part.items():
            gathered.setdefault(row, []).append(value)
    return {row: _mean(values) for row, values in gathered.items()}


def _mean(values: list[float]) -> float:
    first = values[0]
    if all(value == first for value in values):
        return first
    finite = all(math.isfinite(value) for value in values)
    return (math.fsum(values) if finite else sum(values)) / len(values)


class Writer:
    """The one writer: opens the run's files when the first record comes, and keeps what the summary needs."""

    def __init__(self, open_files: Callable[[], Sinks], console: Console) -> None:
        self._open, self._console = open_files, console
        self._sinks: Sinks | None = None
        self._said: list[str] = []
        self.last: dict[str, float] = {}
        self.times: Counter[str] = Counter()

    @property
    def opened(self) -> bool:
        """Whether anything was written, so that there is a folder."""
        return self._sinks is not None

    def expect(self, total: int, start: int) -> None:
        """Tell where training begins and ends."""
        self._console.expect(total, start)

    def advance(self, step: int) -> None:
        """Show that a step is done."""
        self._console.advance(step)

    def say(self, text: str) -> None:
        """Print at once; the text log gets it when it is opened."""
        if self._sinks is not None:
            self._sinks.say(text)
        else:
            self._console.say(text)
            self._said.append(text)

    def write(self, records: Mapping[Row, float]) -> None:
        """Write rows, one record a step, in order; of many steps at once people see some, and metrics.jsonl has all."""
        by_step: dict[int, dict[str, float]] = {}
        for (step, name), value in records.items():
            by_step.setdefault(step, {})[name] = value
        sinks = self._sinks or self._opened()
        stride = -(-len(by_step) // _SHOWN_AT_ONCE)
        for left, step in zip(range(len(by_step) - 1, -1, -1), sorted(by_step), strict=True):
            values = by_step[step]
            shown = left % stride == 0 or not all(name.startswith("train/") for name in values)
            sinks.write(step, values, shown)
            self.last.update(values)
            self.times.update(values.keys())

    def close(self, summary: Mapping[str, object]) -> None:
        """Close all files; a summary is written where there are any."""
        (self._sinks or self._console).close(summary)

    def _opened(self) -> Sinks:
        self._sinks = self._open()
        for text in self._said:
            self._sinks.keep(text)
        return self._sinks
