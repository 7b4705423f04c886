"""What each rank is doing, posted in the store at every collective, so that a rank that waits can name the others."""

import contextlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from samestep.errors import RankMissing
from samestep.messages import calling_frame

ORDER_RULE = "every rank must make the same calls in the same order (is one of them under `if run.is_main:`?)"
_NOT_USER_CODE = (str(Path(__file__).parent.parent), contextlib.__file__)
_SHOWN = 8
STORE_GONE = "the key-value store is gone: the rank that hosted it has exited; look for its error message"


_STATE_TEXTS = {
    "waiting": "waits in {operation} at {call_site}",  # inside the collective
    "working": "is still running {operation} at {call_site}",  # it runs `once` for the others
    "past": "was last in {operation} at {call_site} and has left it",
    "failed": "failed: {failure}",
    "ended": "has ended its run",
}


@dataclass(frozen=True)
class RankStatus:
    """The last status that a rank posted."""

    count: int  # the number of collectives it had started
    operation: str  # the collective, such as "run.mean"
    call_site: str  # the line of user code that called it
    state: str  # a key of _STATE_TEXTS
    failure: str = ""  # the first line of the exception, if it failed

    def __str__(self) -> str:
        return _STATE_TEXTS[self.state].format(**vars(self))


class StatusBoard:
    """Posts the status of this rank (about 2 microseconds each) and reads the status of its peers."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self.own = RankStatus(0, "Run.start", "the start", "past")

    def enter(self, operation: str, call_site: str) -> None:
        """Post that this rank has started a collective."""
        self._post(RankStatus(self.own.count + 1, operation, call_site, "waiting"))

    def change(self, state: str) -> None:
        """Post another state in the same collective."""
        self._post(replace(self.own, state=state))

    def end(self, failure: str | None) -> None:
        """Post that the run of this rank is over, with the exception if it failed."""
        self._post(replace(self.own, state="failed" if failure else "ended", failure=failure or ""))

    def peers(self) -> dict[int, RankStatus]:
        """The last known status of every other rank."""
        others = [rank for rank in range(self._size) if rank != self._rank and self._store.check([f"status/{rank}"])]
        return {rank: RankStatus(**json.loads(self._store.get(f"status/{rank}"))) for rank in others}

    def diverged(self) -> dict[int, RankStatus]:
        """Peers that will not reach the collective this rank waits in: they failed, ended, or wait in another one."""
        return {
            rank: status
            for rank, status in self.peers().items()
            if status.state in ("failed", "ended")
            # a peer with a higher count has completed this collective, and its data is on the way
            or (status.state == "waiting" and not self._in_same_collective(status) and status.count <= self.own.count)
        }

    def missing(self) -> dict[int, RankStatus]:
        """Peers that are not in the collective this rank waits in."""
        return {rank: status for rank, status in self.peers().items() if not self._in_same_collective(status)}

    def diverged_error(self, own: RankStatus, diverged: dict[int, RankStatus]) -> RankMissing:
        """The error for peers that will not come: they failed, ended, or wait in another collective."""
        rule = "" if all(status.state == "failed" for status in diverged.values()) else f": {ORDER_RULE}"
        return RankMissing(f"rank {self._rank} {own}, but {_format(diverged)}{rule}")

    def timeout_error(self, own: RankStatus, waited: float, timeout: float, option: str) -> RankMissing:
        """The error for peers that have not come. Before the timeout it means that a connection broke."""
        remedy = (
            f"If that rank is still progressing, raise the timeout with Run({option}=...); if it is stuck, see its "
            "stack with `py-spy dump --pid PID`"
            if waited >= timeout
            else "The connection to a rank was lost: its process exited or was killed; look for its last lines"
        )
        return RankMissing(f"rank {self._rank} {own} since {waited:.0f} s: {_format(self.missing())}. {remedy}")

    def peers_note(self) -> str:
        """A note with the status of all peers, for an exception that torch raised by itself."""
        try:
            return f"status seen from rank {self._rank}: {_format(self.peers())}"
        except RuntimeError:
            return STORE_GONE

    def _in_same_collective(self, status: RankStatus) -> bool:
        same = (status.count, status.operation) == (self.own.count, self.own.operation)
        return status.state == "waiting" and same

    def _post(self, status: RankStatus) -> None:
        self.own = status
        self._store.set(f"status/{self._rank}", json.dumps(vars(status)))


def call_site() -> str:
    """The nearest line outside samestep on the stack, as `train.py:31`."""
    frame = calling_frame(_NOT_USER_CODE)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _format(statuses: dict[int, RankStatus]) -> str:
    shown = (f"rank {rank} {status}" for rank, status in sorted(statuses.items())[:_SHOWN])
    return "; ".join(shown) or "no rank reports why"
