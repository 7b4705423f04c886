"""What each rank is doing, posted in the store at every collective, so that a rank that waits can name the others.

A rank that is in no collective of samestep, for example in one of torch that no other rank has called, has posted
nothing new. A rank that waits for it therefore requests its location, and a thread of it answers with the line of the
script that it runs.

The store is one process that serves all ranks. So one waiting rank at a time reads the status of every rank and posts a
summary, and the others read that: a rank that waits sends two requests per check, however many ranks there are.
"""

import atexit
import contextlib
import json
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from samestep.errors import RankMissing
from samestep.messages import calling_frame

ORDER_RULE = "every rank must make the same calls in the same order (is one of them under `if run.is_main:`?)"
_NOT_USER_CODE = (str(Path(__file__).parent.parent), contextlib.__file__)
_LIBRARIES = (*_NOT_USER_CODE, str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"))
_SHOWN = 8
_ANSWER_SECONDS = 1.0  # how often a rank looks for requests: one small message to the store
_REQUEST_EVERY = 3  # a summary in how many requests the locations of missing ranks again
_GROUPS = 32  # different statuses in a summary
_READERS = 16  # ranks that read the status of every rank after an error; the others read what one of these has found
_READER_SECONDS = 5.0  # how long they wait for that
_FIRST_POLL_SECONDS, _POLL_SECONDS = 0.002, 1.0  # between two requests of a rank that waits for a key of the store
_EXIT_SECONDS = 2.0  # how long a rank that leaves by sys.exit(0) waits for the others before it asks where they are
_STOP_SECONDS = 5.0  # how long a rank that ends waits for a message to the store that is under way
STORE_GONE = "the key-value store is gone: the rank that hosted it has exited; look for its error message"


_STATE_TEXTS = {  # what explains a wait best comes last
    "past": "was last in {operation} at {call_site} and has left it",
    "working": "is still running {operation} at {call_site}",  # it runs `once` for the others
    "exiting": "called sys.exit(0) at {call_site} inside of `with Run`",  # and waits until all ranks leave their runs
    "waiting": "waits in {operation} at {call_site}",  # inside the collective
    "ended": "has ended its run",
    "failed": "failed: {failure}",
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


@dataclass(frozen=True)
class _Summary:
    """What one waiting rank has read about all ranks, posted for the others; the first one is empty."""

    number: int = 0
    turn: str = ""  # of the rank that has read it
    statuses: Sequence[tuple[dict[str, Any], list[int]]] = ()  # see `_to_groups`
    collective: Sequence[object] = ()  # that this rank waited in: its count and its operation
    requests: Mapping[str, int] = field(default_factory=dict[str, int])  # the last request to each missing rank
    requested: int = 0  # the number of the summary in which they were sent
    locations: Mapping[str, str] = field(default_factory=dict[str, str])  # the lines that missing ranks run


class StatusBoard:
    """Posts the status of this rank (about 2 microseconds each) and reads the status of its peers."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self.own = RankStatus(0, "Run.start", "the start", "past")
        self.known: dict[int, RankStatus] = {}
        """The status of other ranks in the last summary, for up to eight ranks of each status."""
        self.reports: dict[str, Callable[[], str]] = {}
        """What this rank posts besides its line when another rank requests it, by name."""
        self._locations: dict[int, str] = {}  # the lines that other ranks run, as they answered during this wait
        self._all_posted = False  # whether every rank has posted a status
        self._summary = 0  # the number of the last summary that this rank has read
        self._other_turn = ""  # the turn of another rank to read, if its summary was not there at the last check
        self._store.compare_set("summary", "", json.dumps(vars(_Summary())))
        self._store.set(f"location/{rank}", "0 ")
        self._post(self.own)
        # Held until the end. An Event is locked while it is set, and stays so if a signal handler raises then,
        # like that of torch for data workers that were killed.
        self._running = threading.Lock()
        self._running.acquire()
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

    def leave(self) -> None:
        """Post that this rank has left the code inside of its run."""
        self._store.set(f"leaving/{self._rank}", "")
        self._store.add("leaving", 1)

    def exit(self, call_site: str, timeout: float) -> str:
        """Leave by sys.exit(0): wait until all ranks leave; returns where those are that stay, or an empty text.

        A peer may be busy, and call it later. One that waits for this rank never will: it is twice in the same
        collective of samestep, or in the same backward pass, in which DDP and FSDP exchange gradients.
        """
        self._post(replace(self.own, state="exiting", call_site=call_site))
        since, before = time.monotonic(), dict[int, str]()
        while self._store.add("leaving", 0) < self._size:
            time.sleep(poll_pause(since))
            if (waited := time.monotonic() - since) < min(_EXIT_SECONDS, timeout):
                continue
            inside = {rank: at for rank, at in self.peers().items() if not self._store.check([f"leaving/{rank}"])}
            self._await_locations([str(rank) for rank in sorted(inside)[:_SHOWN]])
            blocked = {rank: self._locations.get(rank, "") for rank, at in inside.items() if self._is_blocked(rank, at)}
            if any(before.get(rank) == line for rank, line in blocked.items()) or (inside and waited >= timeout):
                return self._format(inside)
            before = blocked
        return ""

    def _is_blocked(self, rank: int, status: RankStatus) -> bool:
        """Whether a peer has failed, or is where it may wait for this rank, which has called sys.exit(0)."""
        if status.state == "waiting":
            return status.count > self.own.count
        return status.state in ("failed", "ended") or self._locations.get(rank, "").endswith(" in backward")

    def look(self) -> bool:
        """Called while waiting: read the summary of the status of all ranks; whether it is new to this rank.

        If it is the one of the last call, it is this rank's turn to read the status of every rank, unless another rank
        takes it. Between two summaries is therefore the time between two checks, and a rank that waits alone always
        has a new one. If a rank does not post a summary in its turn, another one takes it at its next check.
        """
        summary = _Summary(**json.loads(self._store.get("summary")))
        if summary.number == self._summary:
            turn = f"{self._summary + 1} by rank {self._rank}"
            found = self._store.compare_set("summary/turn", self._other_turn or summary.turn, turn).decode()
            self._other_turn = "" if found == turn else found
            if self._other_turn:
                return False
            summary = self._summarize(summary, turn)
        self._summary, self._other_turn = summary.number, ""
        self.known = _from_groups(summary.statuses, self._rank)
        same = summary.collective == self._collective()
        self._locations = {int(rank): line for rank, line in summary.locations.items()} if same else {}
        return True

    def _summarize(self, before: _Summary, turn: str) -> _Summary:
        """Read the status of every rank, request the lines that missing ranks run, and post the summary."""
        number, peers, same = before.number + 1, self.peers(), before.collective == self._collective()
        requests = before.requests if same else {}
        locations = {**(before.locations if same else {}), **self._answers(requests)}
        missing, requested = self._first_missing(peers), before.requested
        if not set(missing) <= requests.keys() or number - requested >= _REQUEST_EVERY:
            requests, requested = self._request_locations(missing), number
        statuses = _to_groups({**peers, self._rank: self.own})
        summary = _Summary(number, turn, statuses, self._collective(), requests, requested, locations)
        self._store.set("summary", json.dumps(vars(summary)))
        return summary

    def peers(self) -> dict[int, RankStatus]:
        """The last known status of every other rank: one request to the store, once every rank has posted one."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        if not self._all_posted:
            self._all_posted = self._store.check([f"status/{rank}" for rank in others])
        if not self._all_posted:
            others = [rank for rank in others if self._store.check([f"status/{rank}"])]
        posted = self._store.multi_get([f"status/{rank}" for rank in others]) if others else []
        return {rank: RankStatus(**json.loads(text)) for rank, text in zip(others, posted, strict=True)}

    def peers_after_error(self) -> dict[int, RankStatus]:
        """The status of the other ranks for an error; if all of a thousand ranks fail, most take what one has read."""
        if self._store.add("explanations", 1) > _READERS:
            since = time.monotonic()
            while not (found := self._store.check(["explanation"])) and time.monotonic() - since < _READER_SECONDS:
                time.sleep(poll_pause(since))
            if found:
                return _from_groups(json.loads(self._store.get("explanation")), self._rank)
        peers = self.peers()
        self._store.set("explanation", json.dumps(_to_groups({**peers, self._rank: self.own})))
        return peers

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

    def _first_missing(self, peers: dict[int, RankStatus]) -> list[str]:
        """Of the missing peers, those whose lines an error names."""
        return [str(rank) for rank in sorted(self.missing(peers))[:_SHOWN]]

    def post_report(self, name: str) -> None:
        """Post one of `reports`."""
        self._store.set(f"report/{name}/{self._rank}", self.reports[name]())

    def read_reports(self, name: str) -> dict[int, str]:
        """The reports of the other ranks, as far as they have posted one."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        if not self._store.check([f"report/{name}/{rank}" for rank in others]):
            others = [rank for rank in others if self._store.check([f"report/{name}/{rank}"])]
        texts = self._store.multi_get([f"report/{name}/{rank}" for rank in others]) if others else []
        return {rank: text.decode() for rank, text in zip(others, texts, strict=True)}

    def request_reports(self, ranks: Iterable[int]) -> None:
        """Request the reports of the first of these ranks; a thread of each posts them."""
        self._request_locations([str(rank) for rank in sorted(ranks)[:_SHOWN]])

    def _request_locations(self, ranks: Iterable[str]) -> dict[str, int]:
        """Request the lines that these ranks run; returns the number of the request to each."""
        return {rank: self._store.add(f"location requests/{rank}", 1) for rank in ranks}

    def _answers(self, requests: Mapping[str, int]) -> dict[str, str]:
        """The answers to these requests that are there; an older answer is not where the rank is now."""
        texts = self._store.multi_get([f"location/{rank}" for rank in requests]) if requests else []
        answers = ((rank, text.decode().partition(" ")) for rank, text in zip(requests, texts, strict=True))
        return {rank: line for rank, (number, _, line) in answers if int(number) >= requests[rank]}

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

    def peers_note(self, timed_out: bool, hosts_store: bool = False) -> str:
        """A note with the status of all peers, for an exception that torch raised by itself.

        After a timeout, other ranks may fail at the same moment. The rank that hosts the store lets them read it.
        """
        try:
            peers = self.peers_after_error()
            if timed_out:
                self._await_locations(self._first_missing(peers))
                peers = self.peers()  # a rank that has failed meanwhile gives no answer, and has posted its line
                have_read, since = self._store.add("notes", 1), time.monotonic()
                while hosts_store and have_read < self._size and time.monotonic() - since < _READER_SECONDS:
                    time.sleep(poll_pause(since))
                    have_read = self._store.add("notes", 0)
        except RuntimeError:
            return STORE_GONE
        rule = f": {ORDER_RULE}" if any(status.state == "waiting" for status in peers.values()) else ""
        return f"status seen from rank {self._rank}: {self._format(peers)}{rule}"

    def _await_locations(self, ranks: list[str]) -> None:
        since, requests, answers = time.monotonic(), self._request_locations(ranks), dict[str, str]()
        while len(answers) < len(requests) and time.monotonic() - since < 3 * _ANSWER_SECONDS:
            time.sleep(poll_pause(since))
            answers = self._answers(requests)
        self._locations = {int(rank): line for rank, line in answers.items()}

    def _answer(self) -> None:
        """In a thread: post the line that this rank runs whenever another rank requests it."""
        answered = 0
        with contextlib.suppress(RuntimeError):  # the host of the store has exited
            while not self._running.acquire(timeout=_ANSWER_SECONDS):
                if (requests := self._store.add(f"location requests/{self._rank}", 0)) != answered:
                    answered = requests
                    for name in list(self.reports):
                        self.post_report(name)
                    self._store.set(f"location/{self._rank}", f"{requests} {running_line()}")

    def _stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # a second call
            self._running.release()
        self._thread.join(_STOP_SECONDS)

    def _format(self, statuses: dict[int, RankStatus]) -> str:
        shown = (
            f"rank {rank} {status}"
            + (f", and is now at {self._locations[rank]}" if status.state == "past" and rank in self._locations else "")
            for rank, status in sorted(statuses.items())[:_SHOWN]
        )
        return "; ".join(shown) or "no rank reports why"

    def _collective(self) -> list[object]:
        return [self.own.count, self.own.operation]

    def _in_same_collective(self, status: RankStatus) -> bool:
        same = (status.count, status.operation) == (self.own.count, self.own.operation)
        return status.state == "waiting" and same

    def _post(self, status: RankStatus) -> None:
        self.own = status
        self._store.set(f"status/{self._rank}", json.dumps(vars(status)))


def _to_groups(statuses: Mapping[int, RankStatus]) -> list[tuple[dict[str, Any], list[int]]]:
    """Each status with the first ranks that have it, the most important first: small, however many ranks there are."""
    groups: dict[RankStatus, list[int]] = {}
    for rank, status in sorted(statuses.items()):
        groups.setdefault(status, []).append(rank)
    states = list(_STATE_TEXTS)
    ordered = sorted(groups.items(), key=lambda group: (-states.index(group[0].state), group[1]))[:_GROUPS]
    return [(vars(status), ranks[: _SHOWN + 1]) for status, ranks in ordered]


def _from_groups(groups: Iterable[tuple[dict[str, Any], list[int]]], own: int) -> dict[int, RankStatus]:
    """The status of each rank in the groups, except for this one."""
    return {rank: RankStatus(**status) for status, ranks in groups for rank in ranks if rank != own}


def poll_pause(since: float) -> float:
    """Seconds until a rank that waits since `since` for a key of the store looks for it again.

    About 16 requests in the first second, then soon one per second: a blocking wait would keep the other threads of the
    rank from using the store.
    """
    return min(max(_FIRST_POLL_SECONDS, (time.monotonic() - since) / 2), _POLL_SECONDS)


def call_site() -> str:
    """The nearest line outside samestep on the stack, as `train.py:31`."""
    frame = calling_frame(_NOT_USER_CODE)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def running_line() -> str:
    """The line of the script that the main thread runs, and the function of a library that it has called there."""
    main = threading.main_thread().ident or 0
    if threading.get_ident() == main:  # a frame that refers to itself keeps the tensors on its stack
        return _user_line(traceback.walk_stack(sys._getframe(1)))  # pyright: ignore[reportPrivateUsage]  # as in messages.py
    frame = sys._current_frames().get(main)  # pyright: ignore[reportPrivateUsage]  # the only way
    return "an unknown line" if frame is None else _user_line(traceback.walk_stack(frame))


def failed_line(error: BaseException) -> str:
    """The line of the script at which an exception was raised, for a collective of torch that timed out; or nothing."""
    return f" at {raised_line(error)}" if is_timeout(error) and error.__traceback__ is not None else ""


def raised_line(error: BaseException) -> str:
    """The line of the script at which an exception was raised."""
    if error.__traceback__ is None:
        return "an unknown line"
    # The line of a frame that has caught the exception is that of its `with` by now; the traceback has the one that
    # raised. If no line of the script is in it, `Run.start` has raised, and the script is still in that call.
    raised = reversed(list(traceback.walk_tb(error.__traceback__)))
    return _user_line(chain(raised, traceback.walk_stack(error.__traceback__.tb_frame.f_back)))


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
