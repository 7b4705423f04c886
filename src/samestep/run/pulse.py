"""The pulse: one small collective every few steps that carries all that ranks must tell each other."""

import time
from collections.abc import Mapping

from samestep.run.link import Link
from samestep.run.logs import Pending, Row, average, names_mark

_SECONDS = 1.0  # how often ranks tell each other, at most
_MOST_STEPS = 1000
_HEAD = 3


class Pulse:
    """Brings pending log values together about once a second, at step boundaries that all ranks count alike.

    The first rank's clock sets the next interval and its word travels with the values, so no rank decides alone.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.pending = Pending()
        self._interval, self._steps = 1, 0
        self._since = time.monotonic()

    def step(self) -> Mapping[Row, float] | None:
        """Count a step; where the interval is over, the averages of all ranks."""
        self._steps += 1
        return self.beat("the pulse of the steps") if self._steps >= self._interval else None

    def beat(self, act: str) -> Mapping[Row, float]:
        """Exchange now: the averages over all ranks of what was logged since the last time."""
        rows, values = self.pending.take()
        mark = names_mark(rows)
        parts = self._link.exchange(act, [float(self._next_interval()), mark, float(len(rows)), *values])
        self._interval, self._steps, self._since = int(parts[0][0]), 0, time.monotonic()
        if all(float(part[1]) == mark for part in parts):
            return average([dict(zip(rows, part[_HEAD:].tolist(), strict=True)) for part in parts])
        return average(self._link.exchange_objects(act, dict(zip(rows, values, strict=True))))

    def _next_interval(self) -> int:
        if not self._steps:
            return self._interval
        per_step = max((time.monotonic() - self._since) / self._steps, 1e-6)
        wish = min(_MOST_STEPS, max(1, round(_SECONDS / per_step)))
        return min(wish, 4 * self._interval)  # first steps are slow or odd: grow with care
