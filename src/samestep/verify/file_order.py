"""Which accesses to files are ordered: by collectives, messages, keys of a store, locks, or an atomic rename.

Every rank has a list of synchronizing events, and every access to a file knows how many of them came before it. The
events of all ranks are replayed together with vector clocks: an access is ordered before another one if the other rank
has learned of what follows it.
"""

from collections import defaultdict
from collections.abc import Sequence

from samestep.verify.rank_trace import RankTrace
from samestep.verify.trace_events import FileEvent, SyncEvent

_STORE_DELAY = 0.05  # seconds between setting a key and writing that to the trace
_OPPOSITES = {"get": "set", "exists": "set", "lock": "unlock"}
Clock = list[int]  # for each rank, how many of its intervals between synchronizing events have ended


class FileOrder:
    """The order of the accesses of all ranks."""

    def __init__(self, ranks: Sequence[RankTrace]) -> None:
        self._ranks = ranks
        self._events = [trace.sync_events for trace in ranks]
        self.locks = {event.key for events in self._events for event in events if event.kind == "lock"}
        """Files that serve as locks."""
        self._clocks = [[self._initial(rank, 0)] for rank in range(len(ranks))]  # by interval
        self._messages = defaultdict[tuple[int, int], list[Clock]](list)
        self._keys = defaultdict[str, Clock](lambda: [0] * len(ranks))
        while self._advance():
            pass

    def _initial(self, rank: int, ended: int) -> Clock:
        return [ended if each == rank else 0 for each in range(len(self._ranks))]

    def is_ordered(self, rank: int, event: FileEvent, other_rank: int, other: FileEvent) -> bool:
        """Whether an access of a rank has ended before one of another rank begins, or both hold the same lock."""
        if event.action == "rename" and other.action == "read":  # the file appears complete: the reader has waited
            return event.time < other.time
        if event.locks & other.locks:
            return True
        clocks = self._clocks[other_rank]
        return clocks[min(other.sync, len(clocks) - 1)][rank] > event.sync

    def _advance(self) -> bool:
        """Replay what can be replayed; returns whether that was anything."""
        heads = [self._head(rank) for rank in range(len(self._ranks))]
        moved = False
        for rank, head in enumerate(heads):
            if head is not None and head.kind != "collective" and self._is_ready(rank, head):
                self._move(rank, self._learn(rank, head))
                moved = True
        if moved or not heads:
            return moved
        known = [head for head in heads if head is not None]
        if len(known) == len(heads) and len({(head.kind, head.key, head.root) for head in known}) == 1:
            self._meet(known[0])
            return True
        for rank, head in enumerate(heads):  # it has not waited for what comes later: a key may be set several times
            if head is not None and head.kind in _OPPOSITES:
                self._move(rank, self._learn(rank, head))
                return True
        return False  # a rank has ended, or the ranks differ

    def _head(self, rank: int) -> SyncEvent | None:
        done = len(self._clocks[rank]) - 1
        return self._events[rank][done] if done < len(self._events[rank]) else None

    def _is_ready(self, rank: int, head: SyncEvent) -> bool:
        """Whether what an event waits for was replayed."""
        if head.kind == "receive":
            return bool(self._messages[head.root or 0, rank])
        if head.kind in _OPPOSITES:
            opposite = _OPPOSITES[head.kind]
            time = head.time + (_STORE_DELAY if head.kind == "get" else 0.0)
            return not any(
                event.kind == opposite and event.key == head.key and event.time < time
                for other, events in enumerate(self._events)
                if other != rank
                for event in events[len(self._clocks[other]) - 1 :]
            )
        return True

    def _learn(self, rank: int, head: SyncEvent) -> Clock:
        """What a rank knows after an event that does not involve all ranks."""
        own = self._clocks[rank][-1]
        ended = [value + (each == rank) for each, value in enumerate(own)]
        match head.kind:
            case "send":
                self._messages[rank, head.root or 0].append(ended)
            case "receive":
                return _join(own, self._messages[head.root or 0, rank].pop(0))
            case "set" | "unlock":
                self._keys[head.key] = _join(self._keys[head.key], ended)
            case _:
                return _join(own, self._keys[head.key])
        return own

    def _meet(self, head: SyncEvent) -> None:
        """A collective: all ranks learn from all, from the root, or only the root learns."""
        before = [clocks[-1] for clocks in self._clocks]
        ended = [[value + (each == rank) for each, value in enumerate(own)] for rank, own in enumerate(before)]
        everything = _join(*ended)
        for rank, own in enumerate(before):
            if head.direction == "all":
                learned = everything
            elif head.direction == "from root":
                learned = ended[head.root] if head.root is not None and head.root < len(ended) else own
            else:
                learned = everything if rank == head.root else own
            self._move(rank, _join(own, learned))

    def _move(self, rank: int, clock: Clock) -> None:
        clock = list(clock)
        clock[rank] = len(self._clocks[rank])
        self._clocks[rank].append(clock)


def _join(*clocks: Clock) -> Clock:
    return [max(values) for values in zip(*clocks, strict=True)]
