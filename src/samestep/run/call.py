"""The call: a rank with news has the pulse come before its time, agreed through the store and without a collective.

How many steps lie between two pulses is set by how quick steps were. Where they suddenly take a hundred times longer,
the next pulse is minutes away, and a cluster that has sent a signal does not wait so long. So a thread of each rank
looks up while the pulse is late. A rank with news leaves a word in the store; every rank that finds it promises not to
go beyond its next step boundary before it knows where the pulse is, and posts that boundary; the furthest one that was
posted is where all meet. No thread waits for training and no rank is beyond what it has posted, so the boundary is
ahead of all. While the pulse is in time nothing is asked and nothing is sent.
"""

import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

import torch.distributed as dist

from samestep.ranks.link import Link
from samestep.ranks.places import Place

_LATE_SECONDS: Final = 2.0  # twice the time between two pulses
_LOOK_SECONDS: Final = 1.0
_MEET_SECONDS: Final = 0.05  # once a call is out somebody may be waiting
_ACT: Final = "the call for the pulse"


class Call:
    """One rank's part in it; `has_news` says whether this rank would have the pulse come early."""

    def __init__(self, link: Link, has_news: Callable[[], bool]) -> None:
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
            since, seen = time.monotonic(), dict[int, Place]()
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


def _keep_looking(held: "weakref.ref[Call]", closed: threading.Event) -> None:
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
