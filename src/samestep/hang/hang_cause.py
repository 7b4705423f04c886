"""Find the cause of a hang: which ranks hold up the others, where they are, and what to do.

Pure decisions on the evidence of all ranks. Causes combine: a stopped data worker explains why its rank is elsewhere,
and this explains why all others wait. The rules are in the order of `_RULES`, and the first that applies is the root.
"""

import linecache
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from samestep.hang.evidence import Collective, RankEvidence, user_frame
from samestep.hang.log_errors import GLOO_MISMATCH, has_timed_out, traceback_frame
from samestep.hang.rank_sentences import (
    ReadLines,
    Sentence,
    Snapshot,
    at_line,
    end_of_log,
    hanging_worker,
    is_busy,
    is_debugger,
    is_rank_0_only,
    is_victim,
    waits_for_data_worker,
    waits_for_threads,
)
from samestep.hang.wait_graph import (
    Divergence,
    GroupKey,
    WaitGraph,
    describe_call,
    describe_with_tensors,
    format_ranks,
    is_unrecorded,
    main_stack,
    waits_for_collective,
)
from samestep.messages import format_list, format_seconds

REMEDIES: Final = {
    "out_of_memory": "use fewer data workers or smaller batches, or request more memory for the job",
    "ended": (
        "look at the log of this rank for why it ended; if it ended with exit code 0, did it have fewer batches than "
        "the others, or does it skip a call that they make?"
    ),
    "stopped": "continue the process with `kill -CONT PID`, and find out who stopped it (SIGSTOP, Ctrl-Z, a debugger)",
    "leaving": (
        "find out why this rank leaves its run before the others: it has called sys.exit, raised an exception (see its "
        "log), or had fewer batches"
    ),
    "thread": (
        "start this thread with `daemon=True`, or end and join it in a `finally:` block, so that the process can end; "
        "if the rank raised an exception, repair its cause"
    ),
    "data_worker_died": "look for its error in the log of this rank, and run with num_workers=0 to see the traceback",
    "data_worker": "repair what the dataset waits for, or set `timeout=` of the DataLoader so that it raises instead",
    "debugger": (
        "remove `breakpoint()` or `pdb.set_trace()`, or debug with one rank: `samestep run --nproc-per-node 1 train.py`"
    ),
    "full_disk": "free space on this file system, or write checkpoints and logs to another one",
    "rank_0_only": (
        "do long work of one rank in `run.once`, and raise `start_timeout` if it takes longer; in plain torch, raise "
        "the timeout of init_process_group above its duration, and call barrier() on all ranks after it"
    ),
    "elsewhere": (
        "find out what keeps this rank at its line; if it only needs longer, raise `step_timeout`, or the timeout of "
        "init_process_group in plain torch"
    ),
    "node_lost": "check whether this node is up and can reach the others, and look at the log of its launcher",
    "other_process": (
        "let the launcher start one rank per process, with `samestep run --nproc-per-node N` instead of mp.spawn: it "
        "watches only the ranks that it has started"
    ),
    "network": "check the network between the nodes and which interface is used: run `samestep doctor` on each node",
    "slow": "compare its data, its CPU load and its GPU with those of the other ranks; it is not stuck",
    "different_collectives": (
        "call the same collectives in the same order on every rank, with tensors of the same shape and dtype: is a "
        "call under a condition that differs between ranks, such as `if rank == 0`?"
    ),
    "different_shapes": "pass a tensor of the same shape and dtype on every rank: pad it, or drop the last batch",
    "send_receive": (
        "every `recv` needs a `send` of the other rank with the same tag and size, in the same order; if two ranks "
        "exchange tensors, use torch.distributed.batch_isend_irecv"
    ),
}
"""What to do, for each kind of cause; docs/hangs.md shows the same text.

If ranks are held up by several others, the first kind is the best explanation.
"""

_MAY_BE_SLOW: Final = ("data_worker", "rank_0_only", "elsewhere")
_NEAR_TIMEOUT: Final = 0.8  # of the timeout
_HEADLINES: Final = {
    "leaving": "{culprits} {are} leaving {their} run, and {wait}.",
    "thread": "{culprits} {has} ended {their} script, and {wait}.",
}
_BARRIERS: Final = ("barrier", "run.barrier", "run.once")
_SIGKILL: Final = 9
_SHOWN: Final = 3  # different calls
_LATE_SECONDS: Final = 0.001
_SLOW: Final = 1.2  # times the step of the others
_TRANSFER_SECONDS: Final = 5.0  # a collective that all ranks have called takes less, unless the network is interrupted


@dataclass(frozen=True)
class HangCause:
    """Why ranks wait."""

    kind: str  # a key of REMEDIES
    culprits: list[int]  # ranks that hold up the others, the most likely cause first; empty for the network
    waiting: list[int]  # ranks that are held up; empty if all ranks are culprits that wait for each other
    seconds: float  # how long the longest wait has lasted, 0 if not known
    headline: str
    sentences: list[Sentence] = field(default_factory=list[Sentence])
    collective: Collective | None = None  # that the ranks wait in
    call: str = ""  # the same as people read it
    lateness: float = 0.0  # of a slow rank: how many seconds it is late, on average of the last collectives

    @property
    def remedy(self) -> str:
        """What to do."""
        return REMEDIES[self.kind]

    @property
    def timeout(self) -> float:
        """How long the ranks wait for culprits that may still arrive; 0 if these cannot, or if it is not known."""
        timeout = self.collective.timeout if self.collective is not None else 0.0
        return timeout if self.kind in _MAY_BE_SLOW and self.seconds < _NEAR_TIMEOUT * timeout else 0.0

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "remedy": self.remedy}


def find_cause(
    evidence: Sequence[RankEvidence],
    earlier: Sequence[RankEvidence] | None = None,
    world_size: int | None = None,
    read_lines: ReadLines = linecache.getlines,
) -> HangCause | None:
    """Why ranks wait, or why they lost the connection to another one; None if no rank waits, or all of them progress.

    `earlier` is the evidence about a second before: with it, a rank that is merely slow is distinguished from
    one that is stuck. Ranks below `world_size` that are not in `evidence` are on nodes whose launcher does not answer.
    `read_lines` returns the lines of a source file.
    """
    graph = WaitGraph(evidence, world_size)
    snapshot = Snapshot(graph, None if earlier is None else WaitGraph(earlier, world_size), read_lines)
    if not graph.pending:
        return _mismatch(snapshot) or _lost_peer(snapshot) or _timed_out(snapshot)
    if snapshot.before is not None and snapshot.is_moving:
        return _slow(snapshot, sorted(set(snapshot.roots) & set(snapshot.before.roots())))
    return next((cause for rule in _RULES if (cause := rule(snapshot)) is not None), None)


def is_still_missing(cause: HangCause, evidence: Sequence[RankEvidence]) -> bool:
    """Whether the culprits run and have not called the collective in which the others waited for them."""
    graph, call = WaitGraph(evidence), cause.collective
    live = [rank for rank in cause.culprits if rank in graph.known and not graph.has_ended(rank)]
    return (
        call is not None and call.number > 0 and bool(live) and not any(graph.has_called(rank, call) for rank in live)
    )


def _cause(
    snapshot: Snapshot, kind: str, culprits: Sequence[int], sentences: Sequence[Sentence], headline: str = ""
) -> HangCause:
    """A cause in which the culprits hold up all that wait; `headline` is a template."""
    waiting = snapshot.waiting(culprits)
    seconds = max(map(snapshot.seconds, waiting or snapshot.graph.pending), default=0.0)
    first = next(iter(snapshot.direct(culprits)), None)
    time = f" for {seconds:,.0f} s" if seconds >= 1 else ""
    others = format_ranks(waiting) if waiting else "no rank"
    if len(waiting) > 1 and len(culprits) + len(waiting) == snapshot.graph.size:
        everyone = "both ranks" if len(waiting) == 2 else f"all {len(waiting)} ranks"
        others = f"the other {len(waiting)} ranks" if culprits else everyone
    text = (headline or "{culprits} {are} holding up {waiting}{time}.").format(
        culprits=format_ranks(culprits) if culprits else "",
        are="is" if len(culprits) == 1 else "are",
        has="has" if len(culprits) == 1 else "have",
        their="its" if len(culprits) == 1 else "their",
        waiting=others,
        wait=f"{others} {'has' if len(waiting) == 1 else 'have'} waited{time}" if time else f"{others} must wait",
        time=time,
    )
    collective = None if first is None else snapshot.graph.pending[first]
    call = "" if first is None else snapshot.describe(first)
    return HangCause(kind, list(culprits), waiting, round(seconds, 3), text, list(sentences), collective, call)


def _kind(snapshot: Snapshot, rank: int) -> str:
    """Why a rank at the end of a chain holds up the others."""
    each = snapshot.graph.known.get(rank)
    if each is None:
        return "node_lost" if snapshot.graph.is_started(rank) else "other_process"
    if snapshot.graph.has_ended(rank):
        return "out_of_memory" if _is_out_of_memory(each, each.exit_code) else "ended"
    if rank in snapshot.graph.pending:
        return "network"
    kind = _kind_of_live_rank(snapshot, each, snapshot.roots)
    return "slow" if kind in _MAY_BE_SLOW and snapshot.has_progressed(rank) else kind


def _is_out_of_memory(each: RankEvidence, exit_code: int | None) -> bool:
    """Whether the kernel has killed the process with this exit code because memory was full."""
    return exit_code == -_SIGKILL and each.oom_kills > 0


def _kind_of_live_rank(snapshot: Snapshot, each: RankEvidence, culprits: Sequence[int]) -> str:
    """Why a rank does not arrive; `culprits` are all ranks that the others wait for."""
    if snapshot.leaves_early(each.rank):
        return "leaving"
    stack = main_stack(each)
    if waits_for_threads(stack):
        return "thread"
    if waits_for_data_worker(each.process) and (kind := _kind_of_data_worker(snapshot, each)):
        return kind
    if is_debugger(stack):
        return "debugger"
    if each.full_disk:
        return "full_disk"
    if culprits == [0] and not snapshot.waits_for_input(0):
        at_barrier = any(snapshot.describe(rank).startswith(_BARRIERS) for rank in snapshot.graph.pending)
        if at_barrier or is_rank_0_only(stack, snapshot.read_lines):
            return "rank_0_only"
    return "elsewhere"


def _kind_of_data_worker(snapshot: Snapshot, each: RankEvidence) -> str:
    """Why a data worker does not send its batch; empty if the workers do not show it."""
    if (died := snapshot.dead_worker(each.rank)) is not None:
        return "out_of_memory" if _is_out_of_memory(each, died.exit_code) else "data_worker_died"
    if snapshot.stopped_worker(each.rank) is not None:
        return "stopped"
    return "data_worker" if hanging_worker(each.children) is not None else ""


def _stopped_ranks(snapshot: Snapshot) -> HangCause | None:
    culprits = sorted(rank for rank, each in snapshot.graph.known.items() if each.process.state == "stopped")
    return _stopped(snapshot, culprits) if culprits else None


def _stopped(snapshot: Snapshot, culprits: Sequence[int]) -> HangCause:
    sentences, first = snapshot.waiting_sentences(culprits), snapshot.graph.known[culprits[0]]
    if first.process.state == "stopped":
        frame = user_frame(main_stack(first))
        text = f"{snapshot.name(first.rank)} is stopped by a signal"
        sentences.append(at_line(text, frame))
    else:
        sentences += snapshot.location(first.rank)[:1]
        if (worker := snapshot.stopped_worker(first.rank)) is not None:
            sentences.append(Sentence(f"its data worker (pid {worker.pid}) is stopped by a signal"))
    return _cause(snapshot, "stopped", culprits, sentences)


def _ended_with_error(snapshot: Snapshot) -> HangCause | None:
    culprits = [
        rank for rank in snapshot.roots if snapshot.graph.has_ended(rank) and snapshot.graph.known[rank].exit_code != 0
    ]
    return _ended(snapshot, culprits) if culprits else None


def _mismatch(snapshot: Snapshot) -> HangCause | None:
    """The backend gloo ends a rank that receives more than it expects; the other ranks may have lost it already.

    The rank that ends may be the one that is right, so no rank is the culprit.
    """
    known = snapshot.graph.known
    ended = [rank for rank, each in sorted(known.items()) if GLOO_MISMATCH.search("\n".join(each.last_lines))]
    ended = [rank for rank in ended if known[rank].exit_code]
    if not ended:
        return None
    groups = dict[Sentence, list[int]]()
    for rank in sorted(known.keys() - ended):
        if (last := snapshot.last_call(rank)) is not None:
            groups.setdefault(last, []).append(rank)
    shown = list(groups.items())[:_SHOWN]
    sentences = [replace(last, text=f"{snapshot.subject(ranks)} {last.text}") for last, ranks in shown]
    frame = traceback_frame(known[ended[0]].last_lines)
    text = f"{snapshot.name(ended[0])} received more data than it expected"
    sentences.append(at_line(text, frame))
    sentences.append(Sentence("which rank made the wrong call is not known"))
    headline = "{culprits} {has} ended: the ranks called different collectives, or one with different shapes."
    cause = _with_victims(snapshot, _cause(snapshot, "different_collectives", ended, sentences, headline))
    return replace(cause, culprits=[])


def _lost_peer(snapshot: Snapshot) -> HangCause | None:
    """No rank waits any more: others failed because a rank had ended with exit code 0."""
    known = snapshot.graph.known
    culprits = sorted(rank for rank, each in known.items() if each.exit_code == 0)
    if not (sentences := _victims(snapshot)) or not culprits:
        return None
    sentences.append(Sentence(f"{snapshot.name(culprits[0])} has ended with exit code 0"))
    sentences += end_of_log(known[culprits[0]])
    cause = _cause(snapshot, "ended", culprits, sentences, "{culprits} {has} ended before the others.")
    return _with_victims(snapshot, cause)


def _timed_out(snapshot: Snapshot) -> HangCause | None:
    """Ranks timed out, for example in init_process_group, while they waited for ranks that are elsewhere."""
    known = snapshot.graph.known
    late = sorted(rank for rank, each in known.items() if each.exit_code and has_timed_out("\n".join(each.last_lines)))
    culprits = sorted(rank for rank in known if not snapshot.graph.has_ended(rank))
    if not late or not culprits:
        return None
    headline = f"{format_ranks(late)} timed out waiting for {{culprits}}."
    waited = at_line(f"{format_ranks(late)} timed out", traceback_frame(known[late[0]].last_lines))
    first, kind = known[culprits[0]], "stopped"
    if stopped := [rank for rank in culprits if known[rank].process.state == "stopped"]:
        culprits, sentences = stopped, [waited, Sentence(f"{snapshot.name(stopped[0])} is stopped by a signal")]
    else:
        kind = _kind_of_live_rank(snapshot, first, culprits)
        sentences = [waited, *snapshot.location(first.rank), *_why_elsewhere(snapshot, first, kind)]
    return _with_victims(snapshot, _cause(snapshot, kind, culprits, sentences, headline))


def _with_victims(snapshot: Snapshot, cause: HangCause) -> HangCause:
    victims = [rank for rank, each in snapshot.graph.known.items() if is_victim(each)]
    return replace(cause, waiting=sorted({*cause.waiting, *victims} - set(cause.culprits)))


def _victims(snapshot: Snapshot) -> list[Sentence]:
    ranks = sorted(rank for rank, each in snapshot.graph.known.items() if is_victim(each))
    if not ranks:
        return []
    frame = traceback_frame(snapshot.graph.known[ranks[0]].last_lines)
    text = f"{format_ranks(ranks)} lost the connection to another rank"
    return [at_line(text, frame)]


def _ended(snapshot: Snapshot, culprits: Sequence[int]) -> HangCause:
    first = snapshot.graph.known[culprits[0]]
    code, kind = first.exit_code, _kind(snapshot, first.rank)
    how = "" if code is None else f" by signal {-code}" if code < 0 else f" with exit code {code}"
    memory = ": the kernel killed it because memory was full" if kind == "out_of_memory" else ""
    sentences = [*snapshot.waiting_sentences(culprits), Sentence(f"{snapshot.name(first.rank)} has ended{how}{memory}")]
    sentences += end_of_log(first)
    return _cause(snapshot, kind, culprits, sentences, "{culprits} {has} ended, and {wait}.")


def _diverged(snapshot: Snapshot) -> HangCause | None:
    divergence = snapshot.graph.divergence()
    if divergence is None:
        return None
    return (
        _different_shapes(snapshot, divergence)
        if divergence.differs_in_size_only
        else _different_calls(snapshot, divergence)
    )


def _different_shapes(snapshot: Snapshot, divergence: Divergence) -> HangCause:
    sentences = list[Sentence]()
    for calls in divergence.calls[:_SHOWN]:
        rank, call = next(iter(calls.items()))
        text = f"{snapshot.subject(list(calls))} called {describe_with_tensors(call)}"
        sentences.append(at_line(text, snapshot.line_of_call(rank, call)))
    who = "{culprits} wait for each other" if divergence.is_tie else "{culprits} {are} holding up {waiting}"
    headline = who + "{time}: the shapes or dtypes of one collective differ."
    return _cause(snapshot, "different_shapes", divergence.suspects, sentences, headline)


def _different_calls(snapshot: Snapshot, divergence: Divergence) -> HangCause:
    sentences = list[Sentence]()
    for calls in divergence.calls[:_SHOWN]:
        rank, call = next(iter(calls.items()))
        stack = main_stack(snapshot.graph.known[rank]) if call.is_pending else []
        text = f"{snapshot.subject(list(calls))} called {describe_call(call, stack)}"
        sentences.append(at_line(text, snapshot.line_of_call(rank, call)))
    sentences.append(Sentence(f"#{divergence.number} is the first collective of this group in which they differ"))
    return _different(snapshot, divergence.suspects, divergence.is_tie, sentences)


def _different(snapshot: Snapshot, suspects: Sequence[int], is_tie: bool, sentences: Sequence[Sentence]) -> HangCause:
    who = "{culprits} wait for each other" if is_tie else "{culprits} {are} holding up {waiting}"
    return _cause(
        snapshot, "different_collectives", suspects, sentences, who + "{time}: they are in different collectives."
    )


def _held_up(snapshot: Snapshot) -> HangCause | None:
    """Ranks at the end of the chains of who waits for whom."""
    if not snapshot.roots:
        return None
    kinds = {rank: _kind(snapshot, rank) for rank in snapshot.roots}
    if slow := [rank for rank, kind in kinds.items() if kind == "slow"]:
        return _slow(snapshot, slow)
    kind = min(kinds.values(), key=list(REMEDIES).index)
    culprits = [rank for rank in snapshot.roots if kinds[rank] == kind]
    if kind == "network":
        return None
    if kind == "node_lost":
        return _node_lost(snapshot, culprits)
    if kind == "other_process":
        return _other_process(snapshot, culprits)
    if snapshot.graph.has_ended(culprits[0]):
        return _ended(snapshot, culprits)
    if kind == "stopped":
        return _stopped(snapshot, culprits)
    first = culprits[0]
    where = snapshot.unfinished(first) if kind == "thread" else snapshot.location(first)
    sentences = [*snapshot.waiting_sentences(culprits), *where]
    sentences += _why_elsewhere(snapshot, snapshot.graph.known[first], kind)
    headline = _HEADLINES.get(kind, "")
    return _cause(snapshot, kind, culprits, sentences + _other_culprits(snapshot, culprits), headline)


def _leaving(snapshot: Snapshot) -> HangCause | None:
    """Ranks that wait in the end of their run, while others wait in another collective."""
    culprits = [rank for rank in sorted(snapshot.graph.pending) if snapshot.leaves_early(rank)]
    if snapshot.roots or not culprits:
        return None
    divergence = snapshot.graph.divergence()
    calls = {rank: call for each in divergence.calls for rank, call in each.items()} if divergence is not None else {}
    if any(not calls[rank].is_pending for rank in culprits if rank in calls):
        return None  # the ranks have called different collectives before
    sentences = [*snapshot.waiting_sentences(culprits), *snapshot.location(culprits[0])]
    return _cause(snapshot, "leaving", culprits, sentences, _HEADLINES["leaving"])


def _why_elsewhere(snapshot: Snapshot, each: RankEvidence, kind: str) -> list[Sentence]:
    """What explains that a rank is elsewhere."""
    if kind == "data_worker" and (reading := hanging_worker(each.children)) is not None:
        worker, frame = reading
        return [Sentence(f"its data worker (pid {worker.pid}) is at", frame)]
    if kind in ("data_worker_died", "out_of_memory"):
        died = snapshot.dead_worker(each.rank)
        memory = ": the kernel killed it because memory was full" if kind == "out_of_memory" else ""
        return [] if died is None else [Sentence(f"its data worker (pid {died.pid}) has died{memory}")]
    if kind == "full_disk":
        return [Sentence(f"the file system {each.full_disk} is full")]
    return snapshot.waits_inside(each.rank) if kind in ("elsewhere", "rank_0_only") else []


def _other_culprits(snapshot: Snapshot, culprits: Sequence[int]) -> list[Sentence]:
    """Where the second of several culprits is; and if most ranks are culprits, that the one that waits is suspect."""
    if len(culprits) == 1:
        return []
    others = culprits[1:]
    frame = user_frame(main_stack(snapshot.graph.known[others[0]]))
    where = f"{format_ranks(others)} {'is' if len(others) == 1 else 'are'} not there either"
    sentences = [Sentence(f"{where}; rank {others[0]} is at", frame) if frame else Sentence(where)]
    waiting = snapshot.waiting(culprits)
    if len(waiting) == 1:
        text = f"rank {waiting[0]} alone has called it: is its line under a condition, such as `if rank == 0`?"
        sentences.append(Sentence(text))
    return sentences


def _node_lost(snapshot: Snapshot, culprits: Sequence[int]) -> HangCause:
    text = f"the launcher of {format_ranks(culprits)} does not answer: its node is down or unreachable"
    return _cause(snapshot, "node_lost", culprits, [*snapshot.waiting_sentences(culprits), Sentence(text)])


def _other_process(snapshot: Snapshot, members: Sequence[int]) -> HangCause:
    """Members of a group that no launcher has started: children of a rank, or processes of another program.

    Their numbers are not shown: if children of a rank are the group, any of them may be the one whose calls are known.
    """
    who = "a process" if len(members) == 1 else f"{len(members)} processes"
    where = snapshot.child_sentences(snapshot.direct(members)[0])[:_SHOWN]
    unknown = Sentence("the group has members that samestep run did not start, and whose lines it does not know")
    sentences = [*snapshot.waiting_sentences(members), *(where or [unknown])]
    headline = f"{who} that samestep run did not start {{are}} holding up {{waiting}}{{time}}."
    return replace(_cause(snapshot, "other_process", members, sentences, headline), culprits=[])


def _slow(snapshot: Snapshot, culprits: Sequence[int]) -> HangCause | None:
    """Ranks that others wait for, but that progress."""
    culprits = [rank for rank in culprits if rank in snapshot.graph.known and snapshot.has_progressed(rank)]
    if not culprits:
        return None
    first = culprits[0]
    sentences = [*snapshot.waiting_sentences(culprits), *snapshot.location(first)[:2]]
    late, count = snapshot.graph.lateness(first)
    if late >= _LATE_SECONDS:
        after = f"{format_seconds(late)} after the earliest rank, on average"
        sentences.append(Sentence(f"rank {first} called the last {count} collectives {after}"))
    known = snapshot.graph.known.values()
    times = sorted(each.step_seconds for each in known if each.step_seconds and each.rank not in culprits)
    if times and (snapshot.graph.known[first].step_seconds or 0) > _SLOW * (usual := times[len(times) // 2]):
        own = format_seconds(snapshot.graph.known[first].step_seconds or 0)
        sentences.append(Sentence(f"rank {first} needs {own} per step, the others {format_seconds(usual)}"))
    cause = _cause(snapshot, "slow", culprits, sentences, "{culprits} {are} slow, not stuck: {wait}.")
    return replace(cause, lateness=round(late, 6))


def _send_receive(snapshot: Snapshot) -> HangCause | None:
    """Ranks that wait in sends and receives for each other, rather than for a rank that is elsewhere."""
    pending, edges = snapshot.graph.pending, snapshot.graph.edges
    inside = {rank for rank, call in pending.items() if call.is_p2p}
    stuck = sorted(rank for rank in inside if edges[rank] <= inside)
    if not stuck:
        return None
    groups = dict[object, list[int]]()
    for rank in stuck:
        groups.setdefault((_is_send(pending[rank]), snapshot.line_of_call(rank, pending[rank])), []).append(rank)
    sentences = [snapshot.wait_sentence(ranks, snapshot.subject(ranks)) for ranks in list(groups.values())[:_SHOWN]]
    if rest := len(pending) - len(stuck):
        sentences.append(Sentence(f"{rest} more rank{'s wait' if rest > 1 else ' waits'} because of this"))
    sends = {_is_send(pending[rank]) for rank in stuck}
    if len(sends) == 1:
        what = "wait to send, and none receives" if True in sends else "wait to receive, and none sends"
        who = "both" if len(stuck) == 2 else "all"
        return _cause(
            snapshot, "send_receive", stuck, sentences, f"{{culprits}} wait for each other{{time}}: {who} {what}."
        )
    if all(pending[rank].number and not edges[rank] for rank in stuck):  # their ends are known
        headline = "{wait}: a send and its receive do not complete, the network may be interrupted."
        return _cause(snapshot, "network", [], sentences, headline)
    headline = (
        "{culprits} wait for each other{time}: their sends and receives do not match, or the network is interrupted."
    )
    return _cause(snapshot, "send_receive", stuck, sentences, headline)


def _is_send(call: Collective) -> bool:
    return "send" in call.name


def _circular(snapshot: Snapshot) -> HangCause | None:
    """Ranks in different process groups that wait for each other."""
    pending = snapshot.graph.pending
    if snapshot.roots or not any(snapshot.graph.edges.values()):
        return None
    busy = [rank for rank in pending if not waits_for_collective(snapshot.graph.known[rank], snapshot.source(rank))]
    if busy and len(busy) < len(pending):
        return _cause(snapshot, "elsewhere", busy, [*snapshot.waiting_sentences(busy), *snapshot.location(busy[0])])
    groups = dict[tuple[GroupKey, int, str], list[int]]()
    for rank, call in sorted(pending.items()):
        groups.setdefault((snapshot.graph.key(call), call.number, call.name), []).append(rank)
    ordered = sorted(groups.values(), key=lambda ranks: (-len(ranks), *snapshot.graph.order_of_suspicion(ranks[0])))
    is_tie = len(ordered) == 1 or len(ordered[0]) == len(ordered[1])
    suspects = [rank for ranks in (ordered if is_tie else ordered[1:]) for rank in ranks]
    sentences = [snapshot.wait_sentence(ranks, snapshot.subject(ranks)) for ranks in ordered[:_SHOWN]]
    if len({key for key, _, _ in groups}) > 1:
        text = "these collectives are of different process groups, so each call waits for the other"
        sentences.append(Sentence(text))
    return _different(snapshot, suspects, is_tie, sentences)


def _network(snapshot: Snapshot, at_least: float = 0.0) -> HangCause | None:
    """All members of a group have called the collective, and it does not complete."""
    pending = snapshot.graph.pending
    stuck = sorted(rank for rank, missing in snapshot.graph.edges.items() if not missing)
    stuck = [rank for rank in stuck if not pending[rank].is_p2p and not is_unrecorded(pending[rank])]
    stuck = [rank for rank in stuck if _since_all(snapshot, rank) >= at_least]
    if not stuck:
        return None
    by_node = dict[str, list[int]]()
    for rank in stuck:
        by_node.setdefault(snapshot.graph.known[rank].node, []).append(rank)
    nodes = [f"{format_ranks(ranks)} on node {node}" for node, ranks in by_node.items()]
    members = snapshot.graph.members(pending[stuck[0]])
    sentences = [snapshot.wait_sentence(stuck)]
    sentences.append(
        Sentence(f"all {len(members)} ranks have called it; it is not complete on {format_list(nodes, 4)}")
    )
    if busy := [rank for rank in stuck if is_busy(snapshot.graph.known[rank], pending[rank])]:
        text = f"{format_ranks(busy)} {'is' if len(busy) == 1 else 'are'} busy, so this may be a slow transfer"
        sentences.append(Sentence(text))
    if pending[stuck[0]].backend == "nccl":
        sentences.append(Sentence("over NCCL, a GPU that still computes what was called before looks the same"))
    headline = "{wait} in the same collective, which does not complete: the network may be interrupted."
    if len(stuck) < len(pending):
        headline = "{wait}: a collective that all ranks have called does not complete, the network may be interrupted."
    return _cause(snapshot, "network", [], sentences, headline)


def _since_all(snapshot: Snapshot, rank: int) -> float:
    """Seconds since the last member of the group has called the collective that a rank waits in."""
    call = snapshot.graph.pending[rank]
    calls = snapshot.graph.history.get(snapshot.graph.key(call), {}).get(call.number, {})
    return min((snapshot.graph.known[each].collected - other.called for each, other in calls.items()), default=0.0)


def _interrupted(snapshot: Snapshot) -> HangCause | None:
    """A network that is interrupted although a rank is elsewhere: what all have called completes without that rank."""
    return _network(snapshot, _TRANSFER_SECONDS)


_RULES: Final[tuple[Callable[[Snapshot], HangCause | None], ...]] = (
    _stopped_ranks,
    _mismatch,
    _ended_with_error,
    _leaving,
    _diverged,
    _interrupted,
    _held_up,
    _send_receive,
    _circular,
    _network,
)
