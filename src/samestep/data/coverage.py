"""Which positions a set of ranges covers never, and which more than once: by sorting, without a look at single ones."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ranges:
    """Ranges of positions, one in each row of the two arrays."""

    start: _Positions
    stop: _Positions

    @property
    def total(self) -> int:
        """How many positions they hold together."""
        return int((self.stop - self.start).sum())

    def first(self, limit: int) -> tuple[int, ...]:
        """The first few positions."""
        found: list[int] = []
        for start, stop in zip(self.start[:limit].tolist(), self.stop[:limit].tolist(), strict=True):
            found += range(start, min(stop, start + limit - len(found)))
        return tuple(found)


@dataclass(frozen=True)
class Coverage:
    """How ranges cover the positions from `start` to `stop`."""

    missing: Ranges
    """What no range holds."""
    repeated: Ranges
    """What a range holds that one before it holds too; a position that three hold is here twice."""


def cover(first: _Positions, count: _Positions, start: int, stop: int) -> Coverage:
    """How the ranges of `count` positions from `first` on cover start..stop; repetitions are sought outside it too.

    >>> coverage = cover(np.array([0, 3, 4]), np.array([2, 2, 4]), start=0, stop=10)
    >>> coverage.missing.first(9), coverage.repeated.first(9)
    ((2, 8, 9), (4,))
    """
    order = np.argsort(first, kind="stable")
    begins = first[order]
    ends = begins + count[order]
    furthest = np.maximum.accumulate(ends)
    covered = np.clip(np.concatenate([[start], furthest]), start, stop)
    nexts = np.clip(np.concatenate([begins, [stop]]), start, stop)
    gap = nexts > covered
    again = np.flatnonzero(begins[1:] < furthest[:-1]) + 1
    return Coverage(
        missing=Ranges(covered[gap], nexts[gap]),
        repeated=Ranges(begins[again], np.minimum(ends[again], furthest[again - 1])),
    )
