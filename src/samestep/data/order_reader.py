"""Small slices of an order, step after step, computed for many steps at once."""

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from samestep.data.order import Order

_POSITIONS_AHEAD: Final = 1 << 15
_STEPS_AHEAD: Final = 1 << 10
"""Bounds the Python work of one refill where slices are tiny, so that no step waits a millisecond for it."""


class OrderReader:
    """What one rank reads of an order: the indices of its slice of every step.

    `span(step)` gives the positions (start, stop) that this rank reads in a step, and is pure; `Cut.span` is one. On W
    ranks these are one slice in W, so reading ahead in the order would compute W times what is needed: the reader asks
    for the spans ahead instead and computes only those. Any step of any epoch may be asked for at any time; steps that
    follow each other are cheap, a jump costs about a millisecond.

    >>> reader = OrderReader(Order(n=10, seed=0), span=lambda step: (4 * step, min(4 * step + 4, 10)), steps=3)
    >>> [reader.read(epoch=0, step=step).tolist() for step in range(3)]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    def __init__(self, order: Order, span: Callable[[int], tuple[int, int]], steps: int) -> None:
        self._order, self._span, self._steps = order, span, steps
        self._epoch, self._first = -1, 0
        self._edges: list[int] = [0]
        self._indices = np.empty(0, dtype=np.int64)

    def read(self, epoch: int, step: int) -> npt.NDArray[np.int64]:
        """The dataset indices of this rank's span of a step, as an array of the caller's own."""
        here = step - self._first
        if epoch != self._epoch or not 0 <= here < len(self._edges) - 1:
            self._fill(epoch, step)
            here = 0
        return self._indices[self._edges[here] : self._edges[here + 1]].copy()

    def _fill(self, epoch: int, step: int) -> None:
        starts, stops, edges = [], [], [0]
        for ahead in range(step, max(step + 1, min(step + _STEPS_AHEAD, self._steps))):
            start, stop = self._span(ahead)
            if edges[-1] and edges[-1] + stop - start > _POSITIONS_AHEAD:
                break
            starts.append(start)
            stops.append(stop)
            edges.append(edges[-1] + stop - start)
        lengths = np.subtract(stops, starts, dtype=np.int64)
        # Spans laid end to end: position number i is the start of its span plus how far i lies behind that span's edge.
        positions = np.repeat(np.subtract(starts, edges[:-1], dtype=np.int64), lengths)
        positions += np.arange(edges[-1], dtype=np.int64)
        self._indices = self._order.at(epoch, positions)
        self._epoch, self._first, self._edges = epoch, step, edges
