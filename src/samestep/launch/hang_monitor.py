"""Watch the ranks for hangs: notice that some wait for longer than expected, find the cause, report it, end the ranks.

The launcher of each node asks its ranks once per second how long they have waited in a collective. If one waits for too
long, the launchers of all nodes collect what their ranks do (samestep.hang.node_evidence), and that of node 0 finds the
cause (samestep.hang.hang_cause), prints it and writes a report. The report of a failure that follows begins with it.
"""

import json
import linecache
import logging
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from samestep.disk import describe_os_error
from samestep.environment.processes import exit_code, running, send_signal
from samestep.environment.world import read_environ
from samestep.hang.evidence import RankEvidence, read_evidence
from samestep.hang.hang_cause import HangCause, find_cause, is_still_missing
from samestep.hang.hang_report import (
    format_end,
    format_overview,
    format_report,
    format_summary,
    format_unreadable,
    report_json,
)
from samestep.hang.node_evidence import NodeProbe
from samestep.hang.rank_sentences import Sentence
from samestep.hang.wait_graph import format_ranks
from samestep.launch.failure_report import Explanation, Failure, explains, read_failure
from samestep.launch.hang_exchange import BoundedThread, HangFolder, LauncherInfo, NodeInfo, NodeStore, Request
from samestep.launch.job import Job, OnHang
from samestep.launch.rank_logs import LauncherEvents, RankFiles
from samestep.launch.straggler_watch import StragglerWatch, format_straggler
from samestep.launch.wait_timer import Wait, WaitTimer

if TYPE_CHECKING:
    from torch.distributed import Store

_LOOK_SECONDS = 1.0  # between two looks at the progress of the ranks
_SHORT_TIMEOUT, _OFTEN_SECONDS = 10.0, 0.2  # with a timeout below, ranks that wait are polled more often
_LOOK_AGAIN_SECONDS = 30.0
_LAST_LOOK_SECONDS = 2.0  # before the timeout, after which ranks over gloo raise
_EXCHANGE_SECONDS = 5.0  # that the launchers of other nodes get to answer
_RAISE_SECONDS = 2.0  # that ranks get to raise by themselves after the timeout
_JOIN_SECONDS = 4.0  # that the thread gets to end: it may collect
_CONTINUES_SECONDS = 10.0  # without a wait, after which ranks count as continuing: one that raised may still end
_ENDS_LATE_SECONDS = 120.0  # the same if a rank has written an error: on a busy machine it ends late
_TIMEOUT_MARGIN_SECONDS = 1.0  # before the timeout, in which the end of a wait may be the timeout
_END_AGAIN_SECONDS = 10.0  # after no rank was found to wait any more
_ENDS_SECONDS = 3.0  # that the launchers of other nodes get to read that they should end their ranks
_SHORT_WAIT_SECONDS = 3.0  # `samestep hang` reports no hang before
_LATE_SECONDS = 0.05  # per collective: a rank that is less late is not reported as slow
_TWO_LOOKS_SECONDS = 12.0  # before the timeout, so that both are complete before it
_END_SECONDS = 2.0  # that a rank gets to close its files before it is killed

# Kinds of causes that last until the timeout. A rank at another line, or an interrupted network, may continue.
_CERTAIN = (
    "different_collectives",
    "different_shapes",
    "ended",
    "data_worker_died",
    "out_of_memory",
    "stopped",
    "debugger",
)

_OF_A_FAILURE = ("different_collectives", "different_shapes", "ended", "out_of_memory")

Action = Literal["nothing", "look", "end", "continue"]
_log = logging.getLogger(__name__)


def unknown_cause(ranks: Sequence[int], wait: Wait) -> str:
    """The summary of a hang whose cause is not known."""
    return (
        f"samestep: {format_ranks(ranks)} waited for {wait.seconds:.0f} s in a collective with a timeout of "
        f"{wait.timeout:.0f} s, and the cause is not known.\n  what to do: look at the lines of all ranks in the report"
    )


def still_waits(evidence: Sequence[RankEvidence], wait: Wait) -> bool:
    """Whether a rank waits in a collective that was called before `wait` began to be too long, or over its timeout."""
    seconds = wait.timeout if wait.remaining < 0 else wait.expected
    pending = ((each, call) for each in evidence for call in each.collectives or () if call.is_pending)
    return any(each.collected - call.called >= seconds for each, call in pending)


@dataclass(frozen=True)
class Look:
    """The last look at a hang."""

    at: float  # seconds of waiting
    kind: str = ""  # of the cause; empty if it is not known


def next_action(wait: Wait | None, last: Look | None, policy: OnHang, last_look: float) -> Action:
    """What the launcher of node 0 does, given the longest wait and its last look at it.

    `last_look` is how many seconds before the timeout it looks for the last time. Ranks are never ended if the timeout
    is not known.
    """
    if wait is None:
        return "nothing" if last is None else "continue"
    if last is None:
        return "look"
    if policy in ("stop", "restart") and last.kind in _CERTAIN and wait.timeout:
        return "end"
    if wait.remaining < -_RAISE_SECONDS:
        return "nothing" if policy == "report" else "end"
    is_last = last.at < wait.timeout - last_look <= wait.seconds and wait.remaining > 0
    return "look" if is_last or wait.seconds - last.at > _LOOK_AGAIN_SECONDS else "nothing"


@dataclass(frozen=True)
class Ranks:
    """The ranks of this node in one attempt."""

    attempt: int
    pids: Mapping[int, int]  # by rank
    logs: Mapping[int, RankFiles]
    node: int
    nodes: int
    world_size: int
    store: "Store"


class HangMonitor:
    """Watches the ranks of every attempt, and keeps what the report of a failure needs."""

    def __init__(
        self, job: Job, echo: Callable[[str], None], events: LauncherEvents, probe: NodeProbe | None = None
    ) -> None:
        self.policy: OnHang = job.on_hang
        self.echo = echo
        self._events = events
        self.probe = probe or open_probe(echo)
        self.folder = HangFolder(job.folder)
        self.explanation: Explanation | None = None  # of the hang that has ended the last attempt
        self.ended_pids = set[int]()  # ranks that were ended because of it
        self.has_warned = False  # that the collectives of ranks cannot be read
        self._watch: _Watch | None = None

    @property
    def forbids_restart(self) -> bool:
        """Whether a hang has ended the ranks and the user does not want to restart them."""
        return self.policy == "stop" and bool(self.ended_pids)

    def variables(self) -> dict[str, str]:
        """Variables to set for the ranks, so that they answer."""
        return self.probe.variables(read_environ()) if self.probe is not None else {}

    def start(self, ranks: Ranks) -> None:
        """Watch the ranks of an attempt, which have just started."""
        self.stop()
        self.explanation, self.ended_pids = None, set()
        if self.probe is not None:
            self._watch = _Watch(self, self.probe, ranks)

    def rank_failed(self) -> None:
        """A rank has failed, so that what the others do from now on explains nothing."""
        if self._watch is not None:
            self._watch.rank_failed()

    def report(self, hang: Explanation) -> None:
        """Print an explanation, and record it for `samestep report`."""
        self.echo(f"{hang.summary}\n  {hang.report}")
        self._events.record("hang", summary=hang.summary, culprits=hang.culprits, report=hang.report)

    def stop(self) -> None:
        """Stop watching: the ranks have ended, or are about to be ended."""
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.stop()
            self.explanation = watch.explanation

    def close(self) -> None:
        """Stop watching, for the last time."""
        self.stop()
        self.folder.close()
        if self.probe is not None:
            self.probe.close()


def open_probe(echo: Callable[[str], None]) -> NodeProbe | None:
    """The probe of the ranks; None if they cannot be watched: without a temporary folder, and not on Linux."""
    try:
        return NodeProbe() if sys.platform == "linux" else None
    except OSError as error:
        echo(
            f"samestep: the launcher does not watch for hangs, since it cannot create a temporary folder "
            f"({describe_os_error(error)}): free space there, or set TMPDIR to another folder"
        )
        return None


def is_long(cause: HangCause) -> bool:
    """Whether ranks wait for longer than in every healthy run, in which one of them is always the last."""
    return cause.lateness >= _LATE_SECONDS if cause.kind == "slow" else cause.seconds >= _SHORT_WAIT_SECONDS


def _end_processes(probe: NodeProbe, pids: Collection[int]) -> None:
    """End ranks: they get two seconds to close their files."""
    with ThreadPoolExecutor(max_workers=max(1, len(pids))) as pool:
        agreed = {pid for pid, has_agreed in zip(pids, pool.map(probe.end, pids), strict=True) if has_agreed}
    send_signal(set(pids) - agreed, signal.SIGKILL)
    deadline = time.monotonic() + _END_SECONDS
    while (left := running(agreed)) and time.monotonic() < deadline:
        time.sleep(_OFTEN_SECONDS)
    send_signal(left, signal.SIGKILL)


def silent_nodes(nodes: NodeStore, evidence: Sequence[RankEvidence]) -> list[Sentence]:
    """A sentence about each node whose launcher has not answered."""
    known = {each.rank for each in evidence}
    silent = [info for info in nodes.read_nodes().values() if not known & set(info.ranks)]
    return [Sentence(f"node {info.host} does not answer ({format_ranks(info.ranks)})") for info in silent]


class _RunFiles:
    """The reports, requests and logs of an attempt, and its script.

    A thread reads and writes them, because they may be on a network drive that hangs.
    """

    def __init__(self, folder: HangFolder, attempt: int) -> None:
        self._folder, self._attempt = folder, attempt
        self._thread = BoundedThread("samestep hang files")
        self.call, self.close = self._thread.call, self._thread.close

    def read_lines(self, file: str) -> Sequence[str]:
        """The lines of a source file; none if it does not answer."""
        return self.call(lambda: linecache.getlines(file)) or ()

    def summarize(self, cause: HangCause) -> str:
        """The summary; if the files of the script do not answer, without lines."""
        short = f"samestep: {cause.headline}\n  what to do: {cause.remedy}"
        return self.call(lambda: format_summary(cause)) or short

    def write_report(self, cause: HangCause | None, evidence: Sequence[RankEvidence]) -> str:
        """Write a report; returns where it is, as a line of the summary."""

        def write() -> str:
            text, value = format_report(cause, evidence), report_json(cause, evidence)
            try:
                return f"full report: {self._folder.write_report(self._attempt, text, value)}"
            except OSError as error:
                return f"the full report cannot be written to {self._folder.path} ({describe_os_error(error)})"

        return self.call(write) or f"the full report is not written yet: {self._folder.path} does not answer"


class _Watch:
    """Watches the ranks of one attempt in a thread. That of node 0 finds the cause and decides for all nodes."""

    def __init__(self, monitor: HangMonitor, probe: NodeProbe, ranks: Ranks) -> None:
        self._monitor, self._ranks = monitor, ranks
        self._probe, self._folder = probe, monitor.folder
        self._files = _RunFiles(monitor.folder, ranks.attempt)
        self._host = socket.gethostname()
        self._timer = WaitTimer()
        self._stragglers: StragglerWatch | None = None
        self._wait: Wait | None = None  # the last one of all nodes that was too long
        self._end_after = 0.0  # when ranks may be ended
        self._times_out = float("inf")  # when it reaches its timeout; a rank that does not answer has none
        self._wait_ended = 0.0  # when no rank was first seen to wait any more
        self._last: Look | None = None
        self._reported: tuple[object, ...] | None = None  # what identifies the cause that was printed
        self._stopped, self._has_ended, self._has_failed = threading.Event(), False, False
        self._errors = dict[int, str]()  # of ranks whose collectives could not be read at the last look
        self._nodes: NodeStore | None = None
        self._cause: HangCause | None = None  # of the explanation
        self.explanation: Explanation | None = None
        self._thread = threading.Thread(target=self._run, name="samestep hang monitor", daemon=True)
        self._thread.start()

    def rank_failed(self) -> None:
        """A rank has failed, so that what the others do from now on explains nothing.

        If it has waited until the timeout, the ranks that it waited for are ended now: a samestep rank takes torch's
        SIGTERM as a request to save.
        """
        is_first, self._has_failed = not self._has_failed, True
        self._stopped.set()
        if not is_first:
            return
        if self.explanation is None and self._nodes is not None:
            self._read_explanation(self._nodes)
        if self.explanation is None or {self._codes().get(rank) for rank in self.explanation.culprits} == {0}:
            self._explain_failure()  # where ranks were that have ended with exit code 0 since says little
        elif not explains(self.explanation, self._read_failures()):
            self.explanation = None
            if self._nodes is not None:
                self._nodes.set("failed", "1")
        elif self._monitor.policy != "report":
            culprits = [pid for rank, pid in self._ranks.pids.items() if rank in self.explanation.culprits]
            threading.Thread(
                target=self._end_ranks, args=[culprits], name="samestep end of a hang", daemon=True
            ).start()

    def _read_failures(self) -> list[Failure]:
        """The ranks of this node that have failed so far."""
        pids, ended = self._ranks.pids, self._monitor.ended_pids
        codes = {rank: code for rank, code in self._codes().items() if code and pids[rank] not in ended}
        return [read_failure(self._ranks.logs[rank], pids[rank], code) for rank, code in codes.items()]

    def _read_explanation(self, nodes: NodeStore) -> None:
        """Take over the explanation of node 0, unless a rank of another node has failed for another reason."""
        if nodes.get("failed"):
            self.explanation = None
        elif self.explanation is None and (text := nodes.get("cause")):
            self.explanation = Explanation(**json.loads(text))

    def _explain_failure(self) -> None:
        """Find out why a rank lost its connection to a rank that had ended, was aborted, or timed out.

        A timeout is not explained before if the launcher does not know it, as in init_process_group.
        """
        codes = self._codes().values()
        timed_out = any(each.has_timed_out for each in self._read_failures())
        if self._ranks.nodes == 1 and (0 in codes or -signal.SIGABRT in codes or timed_out):
            evidence = self._collect()
            cause = find_cause(evidence, None, self._ranks.world_size, self._files.read_lines)
            if cause is not None and (timed_out or cause.kind in _OF_A_FAILURE):
                path = self._files.write_report(cause, evidence)
                self.explanation = Explanation(self._files.summarize(cause), cause.culprits, path, is_of_failure=True)

    def stop(self) -> None:
        """End the thread, and let the launchers of other nodes know the cause of a hang."""
        self._stopped.set()
        self._thread.join(_JOIN_SECONDS)
        self._files.close()
        if self._nodes is None:
            return
        if not self._has_ended:
            self._read_explanation(self._nodes)
        if self._ranks.node == 0 and self._has_failed and self.explanation and self._monitor.policy != "report":
            if not self._has_ended:
                self._nodes.request("end", asdict(self.explanation))
            self._nodes.wait_for_ends(_ENDS_SECONDS)
        self._nodes.close()

    def _run(self) -> None:
        try:
            self._open()
            while not self._stopped.wait(self._pause()):
                self._tick()
        except Exception as error:  # noqa: BLE001  # training continues, and torch's timeouts still act
            _log.info("the watch for hangs", exc_info=True)
            self._monitor.echo(
                f"samestep: the launcher has stopped watching for hangs ({type(error).__name__}: {error}); the ranks "
                "continue"
            )

    def _open(self) -> None:
        node, nodes = self._ranks.node, self._ranks.nodes
        main_host = self._host
        if nodes > 1:
            self._nodes = NodeStore(self._ranks.store, f"samestep/hang/{self._ranks.attempt}", node, nodes)
            self._nodes.introduce(NodeInfo(self._host, sorted(self._ranks.pids)))
            first = self._nodes.get("node/0")
            main_host = json.loads(first)["host"] if first else "another host"
        self._stragglers = StragglerWatch(self._host, self._ranks.pids, self._nodes)
        info = LauncherInfo.of_this_process(node, main_host)
        self._files.call(lambda: self._folder.open(info))  # may fail, on a full disk: only `samestep hang` needs it

    def _pause(self) -> float:
        # Not in step with the ranks: a StragglerWatch counts what they do at random moments.
        seconds = _LOOK_SECONDS * random.uniform(0.8, 1.2)
        return _OFTEN_SECONDS if self._timer.shortest_timeout < _SHORT_TIMEOUT else seconds

    def _tick(self) -> None:
        now = time.monotonic()
        running_ranks = {rank: pid for rank, pid in self._ranks.pids.items() if exit_code(pid) is None}
        progress = self._probe.progress_of(running_ranks.values())
        self._warn_of_errors(
            {rank: error for rank, pid in running_ranks.items() if (error := self._probe.errors.get(pid))}
        )
        by_rank = {rank: progress[pid] for rank, pid in running_ranks.items()}
        wait = self._timer.update(by_rank, now)
        if wait is None and self._stragglers is not None:
            self._stragglers.look(by_rank, now)
        waits = [] if wait is None else [wait]
        if self._nodes is not None:
            self._nodes.set_wait(wait and asdict(wait))
            if self._ranks.node == 0:
                waits += [Wait(**each) for each in self._nodes.waits()]
            for request in self._nodes.new_requests():
                self._serve(request, self._nodes)
        if self._ranks.node == 0 and not self._stopped.is_set():
            self._lead(min(waits, key=lambda wait: wait.remaining, default=None), now)
            if self._stragglers is not None and (slow := self._stragglers.find()) is not None:
                self._monitor.echo(self._files.call(partial(format_straggler, slow)) or f"samestep: {slow.headline}")
            for name in self._files.call(self._folder.requests) or ():
                self._files.call(partial(self._folder.answer, name, self._describe()))

    def _warn_of_errors(self, errors: dict[int, str]) -> None:
        """Print once that the collectives of a rank cannot be read, if it is so at two looks in a row."""
        lasting, self._errors = {rank: error for rank, error in errors.items() if rank in self._errors}, errors
        if lasting and not self._monitor.has_warned:
            self._monitor.has_warned = True
            self._monitor.echo(format_unreadable(lasting))

    def _serve(self, request: Request, nodes: NodeStore) -> None:
        value, node = request.value, self._ranks.node
        if request.kind == "end" and not self._has_ended:
            self._has_ended = True
            self.explanation = Explanation(**value)
            nodes.set(f"ended/{node}", "1")
            self._end_ranks(self._ranks.pids.values())
        elif request.kind == "look" and node != 0:
            nodes.answer(request.number, [each.to_json() for each in self._collect()])

    def _lead(self, wait: Wait | None, now: float) -> None:
        if wait is not None:
            self._wait, self._wait_ended = wait, 0.0
            if wait.timeout:
                self._times_out = now + wait.remaining
        elif self._last is not None and not self._timer.has_continued:
            self._wait_ended = self._wait_ended or time.monotonic()
            if self._wait_ended > self._times_out - _TIMEOUT_MARGIN_SECONDS:
                self._end_after_exit()
                return  # the wait has most likely not ended well
            if now < self._wait_ended + self._seconds_to_end():
                return  # the rank that waited may have raised
        last_look = _LAST_LOOK_SECONDS + (_EXCHANGE_SECONDS if self._nodes is not None else 0.0)
        action = next_action(wait, self._last, self._monitor.policy, last_look)
        if action == "look" and wait is not None:
            self._look(wait)
        elif action == "end" and wait is not None and now > self._end_after:
            self._end(wait)
        elif action == "continue":
            self._continue()

    def _seconds_to_end(self) -> float:
        """How long a rank that no longer waits may take to end, if it has raised."""
        has_error = self._files.call(lambda: any(each.error.exists() for each in self._ranks.logs.values()))
        return _ENDS_LATE_SECONDS if has_error else _CONTINUES_SECONDS

    def _look(self, wait: Wait) -> None:
        evidence, cause = self._find_cause(two_looks=wait.remaining > _TWO_LOOKS_SECONDS)
        if self._stopped.is_set():  # a rank has failed in the meantime
            return
        self._last = Look(wait.seconds, cause.kind if cause is not None else "")
        if cause is not None:
            self._explain(cause, evidence)

    def _explain(self, cause: HangCause, evidence: Sequence[RankEvidence]) -> None:
        """Print the cause if it is new, and keep it for the report of a failure."""
        known = self.explanation is not None and set(cause.culprits) <= set(self.explanation.culprits)
        if known and any(each.collectives is None for each in evidence if each.rank in cause.culprits):
            return  # a culprit that answered before says less now, such as one that is exiting
        is_new = (cause.kind, *cause.culprits) != self._reported
        summary = self._files.summarize(cause)
        path = self.explanation.report if self.explanation is not None else ""
        if is_new:
            self._reported = cause.kind, *cause.culprits
            path = self._files.write_report(cause, evidence)
        self.explanation, self._cause = Explanation(summary, cause.culprits, path), cause
        if is_new:
            self._monitor.report(self.explanation)
        if self._nodes is not None:
            self._nodes.set("cause", json.dumps(asdict(self.explanation)))

    def _continue(self) -> None:
        if self._reported is not None and self._wait is not None:
            self._monitor.echo(format_end(self._wait.seconds, self._timer.has_continued, self._codes()))
        self._last = self._reported = self.explanation = self._cause = None
        self._times_out = float("inf")
        if self._nodes is not None:
            self._nodes.set("cause", "")

    def _end_after_exit(self) -> None:
        """End the culprits if a rank timed out and ended with exit code 0: the job would last until they end."""
        codes, cause = self._codes(), self._cause
        if cause is None or self._monitor.policy == "report" or self._nodes is not None:
            return
        if any(codes[rank] == 0 for rank in cause.waiting) and is_still_missing(cause, self._collect()):
            self._has_ended = True
            self._end_ranks(self._ranks.pids.values())

    def _end(self, wait: Wait) -> None:
        """End all ranks if one of them still waits in the same collective."""
        evidence, cause = self._find_cause(two_looks=False)
        if self._stopped.is_set():  # a rank has failed in the meantime
            return
        if not still_waits(evidence, wait):
            self._end_after = time.monotonic() + _END_AGAIN_SECONDS
            return
        if cause is not None:
            self._explain(cause, evidence)
        if self.explanation is None:
            waiting = sorted(each.rank for each in evidence if any(call.is_pending for call in each.collectives or ()))
            self.explanation = Explanation(unknown_cause(waiting, wait), [], self._files.write_report(None, evidence))
            self._monitor.report(self.explanation)
        if self._nodes is not None:
            self._nodes.request("end", asdict(self.explanation))
        self._has_ended = True
        self._end_ranks(self._ranks.pids.values())

    def _end_ranks(self, pids: Collection[int]) -> None:
        """End these ranks, because others have waited for them."""
        self._has_failed = True
        self._stopped.set()
        pids = running(pids)
        self._monitor.ended_pids |= pids
        _end_processes(self._probe, pids)

    def _describe(self) -> dict[str, Any]:
        """The answer to `samestep hang`."""
        evidence, cause = self._find_cause(two_looks=True)
        if cause is not None and not is_long(cause):
            cause = None
        path = self._files.write_report(cause, evidence)
        return {"text": format_overview(cause, evidence), "path": path, "report": report_json(cause, evidence)}

    def _find_cause(self, two_looks: bool) -> tuple[list[RankEvidence], HangCause | None]:
        """What is known of all ranks, and why they wait; two looks tell a rank that is slow from one that is stuck."""
        earlier = None
        if two_looks:
            earlier = self._collect_all()
            self._stopped.wait(_LOOK_SECONDS)
        evidence = self._collect_all()
        cause = find_cause(evidence, earlier, self._ranks.world_size, self._files.read_lines)
        if cause is not None and self._nodes is not None and len(evidence) < self._ranks.world_size:
            cause = replace(cause, sentences=[*cause.sentences, *silent_nodes(self._nodes, evidence)])
        return evidence, cause

    def _collect_all(self) -> list[RankEvidence]:
        """Of the ranks of all nodes whose launchers answer."""
        if self._nodes is None:
            return self._collect()
        number = self._nodes.request("look")
        evidence = self._collect()
        answers = {} if number is None else self._nodes.answers(number, _EXCHANGE_SECONDS)
        return evidence + [read_evidence(each) for answer in answers.values() for each in answer]

    def _codes(self) -> dict[int, int | None]:
        """The exit code of each rank of this node, None while it runs."""
        return {rank: exit_code(pid) for rank, pid in self._ranks.pids.items()}

    def _collect(self) -> list[RankEvidence]:
        pids = self._ranks.pids
        ended = {rank: code for rank, code in self._codes().items() if code is not None}
        logs = self._files.call(lambda: {rank: files.last_written for rank, files in self._ranks.logs.items()})
        return self._probe.collect(pids, logs or {}, ended)
