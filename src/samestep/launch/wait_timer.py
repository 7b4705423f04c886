"""How long ranks wait in their collectives, and from when on a wait is too long."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from samestep.hang.evidence import Progress

_SAME_CALL_SECONDS = 0.5  # by which the time of the same call may differ between two answers of a rank
_LEAST_SECONDS = 20.0  # that are never too long, unless the timeout is short
_FIRST_SECONDS = 60.0  # the same before ranks have called a few collectives: they compile, or read their data
_TIMES_USUAL = 10
_TIMES_LONGEST = 2
_OF_TIMEOUT = 0.6


@dataclass(frozen=True)
class Wait:
    """How long ranks have waited in a collective, its timeout (0 if it is not known), and how long a wait may be."""

    seconds: float
    timeout: float
    expected: float

    @property
    def remaining(self) -> float:
        """Until the timeout."""
        return self.timeout - self.seconds if self.timeout else float("inf")


def expected_wait(usual: float | None, timeout: float, longest: float = 0.0) -> float:
    """How long a rank may wait in a collective before the launcher looks for the cause.

    `usual` is the time between its collectives, `longest` that of a wait which ended well. The timeout is 0 if it is
    not known: while ranks connect in init_process_group, for example, whose members may start minutes apart.

    >>> expected_wait(0.5, 600), expected_wait(30, 600), expected_wait(30, 60), expected_wait(0.5, 600, longest=45)
    (20.0, 300, 36.0, 90)
    """
    usually = _FIRST_SECONDS if usual is None else usual * _TIMES_USUAL
    if not timeout:
        return max(_FIRST_SECONDS, usually, longest * _TIMES_LONGEST)
    return min(max(_LEAST_SECONDS, usually, longest * _TIMES_LONGEST), timeout * _OF_TIMEOUT)


class WaitTimer:
    """How long each rank of a node has waited in its oldest pending collective.

    A collective that was called long ago may wait for those before it: its time counts from when it is the oldest.
    """

    def __init__(self) -> None:
        self.longest = 0.0  # of the waits that were too long and ended well
        self.shortest_timeout = float("inf")  # of the collectives that ranks wait in
        self.has_continued = False  # whether a rank has called a collective after the last wait that was too long
        self._called, self._since, self._answered = dict[int, float](), dict[int, float](), dict[int, float]()
        self._waits = dict[int, Wait]()  # of each rank that waits
        self._calls = dict[int, int]()  # of each rank, while one waits for too long

    def update(self, progress: Mapping[int, Progress | None], now: float) -> Wait | None:
        """The wait that is too long and nearest to its timeout; None if no rank waits for too long.

        `progress` is that of each running rank at the time `now`. A rank that does not answer may still wait: its time
        stays as it was, and since it may have continued, its timeout is not known.
        """
        waits = dict[int, Wait]()
        for rank, each in progress.items():
            if each is not None:
                if (seconds := self._measure(rank, each, now)) is not None:
                    waits[rank] = Wait(seconds, each.timeout, expected_wait(each.interval, each.timeout, self.longest))
            elif rank in self._waits:
                waits[rank] = replace(self._waits[rank], timeout=0.0)
        before, self._waits = _too_long(self._waits), waits
        late = _too_long(waits)
        self.longest = max([self.longest, *(wait.seconds for rank, wait in before.items() if rank not in late)])
        self.shortest_timeout = min((wait.timeout for wait in waits.values() if wait.timeout), default=float("inf"))
        calls = {rank: each.calls for rank, each in progress.items() if each is not None}
        if late:
            self._calls, self.has_continued = self._calls | calls, False
        elif any(count > self._calls.get(rank, count) for rank, count in calls.items()):
            self.has_continued = True
        return min(late.values(), key=lambda wait: wait.remaining, default=None)

    def _measure(self, rank: int, progress: Progress, now: float) -> float | None:
        """How long a rank has waited in its oldest pending collective; None if it does not wait."""
        called, answered = now - progress.waiting, self._answered.get(rank, 0.0)
        self._answered[rank] = now
        if not progress.waiting:
            self._called.pop(rank, None)
            return None
        if called > self._called.get(rank, float("-inf")) + _SAME_CALL_SECONDS:
            self._called[rank], self._since[rank] = called, max(called, answered)
        return now - self._since[rank]


def _too_long(waits: Mapping[int, Wait]) -> dict[int, Wait]:
    return {rank: wait for rank, wait in waits.items() if wait.seconds > wait.expected}
