"""The pulse: one small collective every few steps that carries all that ranks must tell each other."""

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from samestep.ranks.link import Link
from samestep.run.call import Call
from samestep.run.logs import Pending, Row, average, names_mark

_SECONDS = 1.0  # how often ranks tell each other, at most
_MOST_STEPS = 1000
_HEAD = 3


class Rider(Protocol):
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


class Pulse:
    """Brings pending log values together about once a second, at step boundaries that all ranks count alike.

    The first rank's clock sets the next interval and its word travels with the values, so no rank decides alone. Where
    steps have become slow since then, a rank with news calls for it earlier.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.pending = Pending()
        self.riders: list[Rider] = []
        self._interval, self._steps = 1, 0
        self._since = time.monotonic()
        self._call = Call(link, lambda riders=self.riders: any(rider.urgent() for rider in riders))

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
