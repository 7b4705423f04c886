"""What each rank is doing, posted in the store at every collective, so that a rank that waits can name the others.

A rank that is in no collective of samestep, for example in one of torch that no other rank has called, has posted
nothing new. A rank that waits for it therefore requests its location, and a thread of it answers with the line of the
script that it runs.
"""

import atexit
import contextlib
import json
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from samestep.errors import RankMissing
from samestep.messages import calling_frame

ORDER_RULE = "every rank must make the same calls in the same order (is one of them under `if run.is_main:`?)"
_NOT_USER_CODE = (str(Path(__file__).parent.parent), contextlib.__file__)
_LIBRARIES = (*_NOT_USER_CODE, str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"))
_SHOWN = 8
_ANSWER_SECONDS = 1.0  # how often a rank looks for requests: one small message to the store
_REQUEST_SECONDS = 10.0  # how often a rank that waits requests the locations of the others
_STOP_SECONDS = 5.0  # how long a rank that ends waits for a message to the store that is under way
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
        self._locations: dict[int, str] = {}  # the lines that other ranks run, as they answered during this wait
        self._requests: dict[int, int] = {}  # the number of the last request to each rank
        self._requested_at = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="samestep status", daemon=True)
        self._thread.start()
        atexit.register(self._stop)  # a thread inside the store aborts the process when the interpreter ends

    def enter(self, operation: str, call_site: str) -> None:
        """Post that this rank has started a collective."""
        self._locations.clear()
        self._post(RankStatus(self.own.count + 1, operation, call_site, "waiting"))

    def change(self, state: str) -> None:
        """Post another state in the same collective."""
        self._post(replace(self.own, state=state))

    def end(self, failure: str | None) -> None:
        """Post that the run of this rank is over, with the exception if it failed."""
        self._stop()
        atexit.unregister(self._stop)
        self._post(replace(self.own, state="failed" if failure else "ended", failure=failure or ""))

    def peers(self) -> dict[int, RankStatus]:
        """The last known status of every other rank: two requests to the store, once every rank has posted one."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        if not self._store.check([f"status/{rank}" for rank in others]):
            others = [rank for rank in others if self._store.check([f"status/{rank}"])]
        posted = self._store.multi_get([f"status/{rank}" for rank in others]) if others else []
        return {rank: RankStatus(**json.loads(text)) for rank, text in zip(others, posted, strict=True)}

    def diverged(self, peers: dict[int, RankStatus]) -> dict[int, RankStatus]:
        """Peers that will not reach the collective this rank waits in: they failed, ended, or wait in another one."""
        return {
            rank: status
            for rank, status in peers.items()
            if status.state in ("failed", "ended")
            # a peer with a higher count has completed this collective, and its data is on the way
            or (status.state == "waiting" and not self._in_same_collective(status) and status.count <= self.own.count)
        }

    def missing(self, peers: dict[int, RankStatus]) -> dict[int, RankStatus]:
        """Peers that are not in the collective this rank waits in."""
        return {rank: status for rank, status in peers.items() if not self._in_same_collective(status)}

    def request_locations(self, ranks: Iterable[int], since: float, timeout: float = 0.0) -> None:
        """Request the lines that the first of these ranks run, for a wait that began at `since`.

        Reads the answers that are there, or waits up to `timeout` seconds for all of them.
        """
        shown, now = sorted(ranks)[:_SHOWN], time.monotonic()
        if self._requested_at < since:
            self._locations.clear()
        if self._requested_at < max(since, now - _REQUEST_SECONDS):
            self._requested_at = now
            self._requests = {rank: self._store.add(f"location requests/{rank}", 1) for rank in shown}
        while True:
            self._read_locations(shown)
            if set(shown) <= self._locations.keys() or time.monotonic() - now >= timeout:
                return
            time.sleep(_ANSWER_SECONDS / 10)

    def _read_locations(self, ranks: list[int]) -> None:
        """Read the answers to the last requests; an older answer is not where the rank is now."""
        for rank in ranks:
            if rank in self._requests and self._store.check([f"location/{rank}"]):
                number, _, line = self._store.get(f"location/{rank}").decode().partition(" ")
                if int(number) >= self._requests[rank]:
                    self._locations[rank] = line

    def diverged_error(self, own: RankStatus, diverged: dict[int, RankStatus]) -> RankMissing:
        """The error for peers that will not come: they failed, ended, or wait in another collective."""
        rule = "" if all(status.state == "failed" for status in diverged.values()) else f": {ORDER_RULE}"
        return RankMissing(f"rank {self._rank} {own}, but {self._format(diverged)}{rule}")

    def timeout_error(
        self, own: RankStatus, waited: float, timeout: float, option: str, peers: dict[int, RankStatus]
    ) -> RankMissing:
        """The error for peers that have not come. Before the timeout it means that a connection broke."""
        remedy = (
            f"If that rank is still progressing, raise the timeout with Run({option}=...); if it is in a collective of "
            f"torch, {ORDER_RULE}; if it is stuck, see its stack with `py-spy dump --pid PID`"
            if waited >= timeout
            else "The connection to a rank was lost: its process exited or was killed; look for its last lines"
        )
        missing = self._format(self.missing(peers))
        return RankMissing(f"rank {self._rank} {own} since {waited:.0f} s: {missing}. {remedy}")

    def store_gone_error(self, own: RankStatus) -> RankMissing:
        """The error if the status of the peers cannot be read: the host of the store has exited."""
        known = "".join(f"; rank {rank} was at {line}" for rank, line in sorted(self._locations.items())[:_SHOWN])
        return RankMissing(f"rank {self._rank} {own}, and {STORE_GONE}{known}")

    def peers_note(self, timed_out: bool) -> str:
        """A note with the status of all peers, for an exception that torch raised by itself."""
        try:
            peers = self.peers()
            if timed_out:
                self.request_locations(self.missing(peers), time.monotonic(), timeout=3 * _ANSWER_SECONDS)
        except RuntimeError:
            return STORE_GONE
        rule = f": {ORDER_RULE}" if any(status.state == "waiting" for status in peers.values()) else ""
        return f"status seen from rank {self._rank}: {self._format(peers)}{rule}"

    def _answer(self) -> None:
        """In a thread: post the line that this rank runs whenever another rank requests it."""
        answered = 0
        with contextlib.suppress(RuntimeError):  # the host of the store has exited
            while not self._ended.wait(_ANSWER_SECONDS):
                if (requests := self._store.add(f"location requests/{self._rank}", 0)) != answered:
                    answered = requests
                    self._store.set(f"location/{self._rank}", f"{requests} {running_line()}")

    def _stop(self) -> None:
        self._ended.set()
        self._thread.join(_STOP_SECONDS)

    def _format(self, statuses: dict[int, RankStatus]) -> str:
        shown = (
            f"rank {rank} {status}"
            + (f", and is now at {self._locations[rank]}" if status.state == "past" and rank in self._locations else "")
            for rank, status in sorted(statuses.items())[:_SHOWN]
        )
        return "; ".join(shown) or "no rank reports why"

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


def running_line() -> str:
    """The line of the script that the main thread runs, and the function of a library that it has called there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]  # the only way
    return "an unknown line" if frame is None else _user_line(traceback.walk_stack(frame))


def failed_line(error: BaseException) -> str:
    """The line of the script at which an exception was raised, for a collective of torch that timed out; or nothing."""
    if not is_timeout(error) or error.__traceback__ is None:
        return ""
    # The line of a frame that has caught the exception is that of its `with` by now; the traceback has the one that
    # raised. If no line of the script is in it, `Run.start` has raised, and the script is still in that call.
    raised = reversed(list(traceback.walk_tb(error.__traceback__)))
    return f" at {_user_line(chain(raised, traceback.walk_stack(error.__traceback__.tb_frame.f_back)))}"


def is_timeout(error: BaseException | None) -> bool:
    """Whether this is how gloo reports that another rank did not come."""
    return isinstance(error, RuntimeError) and "Timed out waiting" in str(error)


def _user_line(stack: Iterable[tuple[FrameType, int]]) -> str:
    """The first line outside of libraries in a stack of frames and line numbers, the innermost first."""
    called = ""
    for frame, line in stack:
        name = frame.f_code.co_name
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            return f"{Path(frame.f_code.co_filename).name}:{line}" + (f" in {called}" if called else "")
        called = called if name == "wrapper" else name
    return "an unknown line"
