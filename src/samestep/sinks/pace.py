"""How fast steps go by, and how long the rest will take."""

from collections import deque
from collections.abc import Callable

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
