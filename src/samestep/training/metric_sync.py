"""The pulse: one small collective every few steps that carries all that ranks must tell each other."""

import math
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
import torch.distributed as dist

from samestep.distributed.communicator import Communicator, RankStatus
from samestep.loggers.console import Console
from samestep.loggers.loggers import Loggers, check_log_step, check_metric_name, check_metric_value

_LATE_SECONDS: Final = 2.0  # twice the time between two pulses
_LOOK_SECONDS: Final = 1.0
_MEET_SECONDS: Final = 0.05  # once a call is out somebody may be waiting
_ACT: Final = "the call for the pulse"


class EarlySync:
    """One rank's part in it; `has_news` says whether this rank would have the pulse come early."""

    def __init__(self, link: Communicator, has_news: Callable[[], bool]) -> None:
        self._link, self._has_news = link, has_news
        self._store = None if link.alone else dist.PrefixStore("call", link.store)
        self._boundary = self._round = 0
        self._promised: int | None = None
        self._meeting: int | None = None
        self._beaten, self._coming = time.monotonic(), False
        self._changed = threading.Condition()
        self._closed = threading.Event()
        if self._store is not None:
            looking = (weakref.ref(self), self._closed)
            threading.Thread(target=_keep_looking, args=looking, name="samestep call", daemon=True).start()

    def beaten(self) -> None:
        """The pulse has come: it is in time again."""
        self._beaten, self._coming = time.monotonic(), False

    def reached(self) -> bool:
        """Count a step boundary; whether the pulse was called for here, which is so on all ranks or on none."""
        if self._store is None:
            return self._is_late() and self._has_news()
        with self._changed:
            self._boundary += 1
            if self._promised is None or self._boundary < self._promised:
                return False
            since, seen = time.monotonic(), dict[int, RankStatus]()
            while self._meeting is None:
                if not self._changed.wait(1.0):
                    seen = self._link.look_around(since, seen, self._link.timeout, _ACT)
            if self._boundary < self._meeting:
                return False
            self._coming = True  # nobody is to call for the next one until all have come to this
            self._promised, self._meeting, self._round = None, None, self._round + 1
            return True

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def look(self) -> float:
        """What the thread does from time to time; how many seconds until the next."""
        if self._promised is None and self._is_late():
            self._join()
        if self._promised is not None and self._meeting is None:
            self._meet()
            return _MEET_SECONDS
        return _LOOK_SECONDS

    def _is_late(self) -> bool:
        return not self._coming and time.monotonic() - self._beaten > _LATE_SECONDS

    def _join(self) -> None:
        assert self._store is not None
        word = f"{self._round}/called"
        if self._has_news():
            self._store.set(word, "")
        elif not self._store.check([word]):
            return
        with self._changed:
            self._promised = self._boundary + 1
        self._store.set(f"{self._round}/{self._link.world.rank}", str(self._promised))

    def _meet(self) -> None:
        assert self._store is not None
        keys = [f"{self._round}/{rank}" for rank in range(self._link.world.size)]
        if self._store.check(keys):
            furthest = max(int(told) for told in self._store.multi_get(keys))
            with self._changed:
                self._meeting = furthest
                self._changed.notify_all()


def _keep_looking(held: "weakref.ref[EarlySync]", closed: threading.Event) -> None:
    """The thread: it keeps no run alive that was dropped and never closed."""
    pause = _LOOK_SECONDS
    while not closed.wait(pause):
        call = held()
        if call is None:
            return
        try:
            pause = call.look()
        except RuntimeError:  # the store is gone with the rank that served it: training hears of that by itself
            return
        del call


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
        kept = value.detach().clone() if lazy and isinstance(value, torch.Tensor) else check_metric_value(name, value)
        self.values[check_log_step(step), check_metric_name(name)] = kept

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

    def __init__(self, open_files: Callable[[], Loggers], console: Console) -> None:
        self._open, self._console = open_files, console
        self._sinks: Loggers | None = None
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
            self._sinks.print(text)
        else:
            self._console.print(text)
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

    def _opened(self) -> Loggers:
        self._sinks = self._open()
        for text in self._said:
            self._sinks.print_to_file(text)
        return self._sinks


_SECONDS = 1.0  # how often ranks tell each other, at most
_MOST_STEPS = 1000
_HEAD = 3


class StepCallback(Protocol):
    """Who goes with the steps of a run; every rank must have the same riders in the same order."""

    def word(self) -> float:
        """What this rank has to tell with the next pulse."""
        ...

    def heard(self, words: Sequence[float]) -> None:
        """Take note of what all ranks told, in rank order."""
        ...

    def urgent(self) -> bool:
        """Whether this rank has something to tell that should not wait; asked from another thread, changes nothing."""
        ...

    def reached(self, steps: int) -> None:
        """Called at every step boundary, after the pulse: so many steps are done."""
        ...

    def ended(self, failed: bool) -> None:
        """Called when the run ends; where it failed, no other rank may be waited for."""
        ...

    def save_last(self) -> str | None:
        """Called at a step boundary before the run ends early: save; the name of what was saved, None for nothing."""
        ...

    def saving(self) -> float:
        """About how many seconds `save_last` will take."""
        ...


class MetricSync:
    """Brings pending log values together about once a second, at step boundaries that all ranks count alike.

    The first rank's clock sets the next interval and its word travels with the values, so no rank decides alone. Where
    steps have become slow since then, a rank with news calls for it earlier.
    """

    def __init__(self, link: Communicator) -> None:
        self._link = link
        self.pending = Pending()
        self.riders: list[StepCallback] = []
        self._interval, self._steps = 1, 0
        self._since = time.monotonic()
        self._call = EarlySync(link, lambda riders=self.riders: any(rider.urgent() for rider in riders))

    def step(self) -> Mapping[Row, float] | None:
        """Count a step; where the interval is over, the averages of all ranks."""
        self._steps += 1
        due = self._call.reached() or self._steps >= self._interval
        return self.beat("the pulse of the steps") if due else None

    def beat(self, act: str) -> Mapping[Row, float]:
        """Exchange now: the averages over all ranks of what was logged since the last time."""
        rows, values = self.pending.take()
        mark = names_mark(rows)
        words, head = [rider.word() for rider in self.riders], _HEAD + len(self.riders)
        parts = self._link.exchange(act, [float(self._next_interval()), mark, float(len(rows)), *words, *values])
        self._interval, self._steps, self._since = int(parts[0][0]), 0, time.monotonic()
        self._call.beaten()
        for at, rider in enumerate(self.riders, start=_HEAD):
            rider.heard([float(part[at]) for part in parts])
        if all(float(part[1]) == mark for part in parts):
            return average([dict(zip(rows, part[head:].tolist(), strict=True)) for part in parts])
        return average(self._link.exchange_objects(act, dict(zip(rows, values, strict=True))))

    def close(self) -> None:
        """No rank calls any more."""
        self._call.close()

    def _next_interval(self) -> int:
        if not self._steps:
            return self._interval
        per_step = max((time.monotonic() - self._since) / self._steps, 1e-6)
        wish = min(_MOST_STEPS, max(1, round(_SECONDS / per_step)))
        return min(wish, 4 * self._interval)  # first steps are slow or odd: grow with care
