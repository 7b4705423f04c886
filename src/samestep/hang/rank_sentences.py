"""What ranks do, read from their stacks, processes and logs, and the sentences that say it in the summary of a hang."""

import ast
import linecache
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

from samestep.hang.evidence import Collective, Frame, ProcessInfo, RankEvidence, is_user_code, user_frame
from samestep.hang.log_errors import (
    RANK_PREFIX,
    error_message,
    has_timed_out,
    is_lost_peer,
    raised_exception,
    traceback_frame,
)
from samestep.hang.wait_graph import (
    WaitGraph,
    describe_call,
    describe_with_tensors,
    format_ranks,
    in_backward,
    is_unrecorded,
    main_stack,
)

ReadLines = Callable[[str], Sequence[str]]
"""The lines of a source file, as linecache.getlines returns them."""

_LOADER = "/torch/utils/data/dataloader.py"
_FETCH = "/torch/utils/data/_utils/fetch.py"
_WORKER = "/torch/utils/data/_utils/worker.py"
_DEBUGGER = re.compile(r"/(bdb|pdb)\.py$|/(ipdb|pudb|debugpy|pydevd|_pydevd_bundle)/|/IPython/core/debugger\.py$")
_BREAKPOINT = re.compile(r"\bbreakpoint\(|\bset_trace\(|\bpost_mortem\(")
_BREAKPOINT_LINES = 10
_INPUT = re.compile(r"(?<![\w.])input\(|\bgetpass\(|\bstdin\.read")
_DATASET_FUNCTIONS = ("__getitem__", "__getitems__", "__iter__", "__next__")
_RANK_0 = re.compile(
    r"\b\w*rank\w*(\(.*\))?\s*==\s*0|\b0\s*==\s*\w*rank|not\s+\w*rank\b"
    r"|is_main|is_master|main_process|is_global_zero|is_rank_zero|is_local_main|rank_zero"
)
_RANK_0_FUNCTIONS = re.compile(r"rank_zero\.py$|/samestep/distributed/once\.py$|/accelerate/state\.py$")
_BUSY = 0.5  # CPU seconds per second of a process that computes
_THREAD_EXCEPTION = re.compile(r"Exception in thread (.+):")
_WAITS_FOR_THREAD = re.compile(
    r"\bwith \w*(lock|mutex|condition)|\.(acquire|get|put|join|result|wait)\(", re.IGNORECASE
)
_CHILD_FILES = "/subprocess.py", "/multiprocessing/popen_fork.py", "/multiprocessing/process.py"
_COMMAND_SHOWN = 60  # characters
_SHOWN_THREADS = 2
_THREAD_ADDRESS = re.compile(r" 0x[0-9a-f]+$")
_LAST_LINES = 2  # of the log of a rank that ended
_LEAVES_RUN = "/samestep/training/run.py", "__exit__"  # file and function
_WHY_LEAVING = {
    ("/samestep/distributed/rank_status.py", "exit"): "has called sys.exit and ",
    ("/samestep/training/lifecycle.py", "fail"): "has raised an exception and ",
    ("/samestep/training/lifecycle.py", "_inform_peers"): "has raised an exception and ",
}
_STATES = {
    "disk": "is in uninterruptible sleep (a disk, a network drive or a driver)",
    "stopped": "is stopped",
    "sleeping": "sleeps",
    "running": "runs",
}


@dataclass(frozen=True)
class Sentence:
    """A line of the summary; if it ends with a line of code, the report adds its file, number and source."""

    text: str
    frame: Frame | None = None


def at_line(text: str, frame: Frame | None) -> Sentence:
    """A sentence that ends with a line of code, if it is known."""
    return Sentence(f"{text}, at", frame) if frame is not None else Sentence(text)


def end_of_log(each: RankEvidence) -> list[Sentence]:
    """The last lines that a rank has written."""
    lines = [line.strip() for line in each.last_lines if line.strip()]
    return [Sentence(f"its log ends with: {line}") for line in lines[-_LAST_LINES:]]


class Snapshot:
    """All ranks of a run at a moment, with the snapshot before if there was one."""

    def __init__(
        self, graph: WaitGraph, before: WaitGraph | None = None, read_lines: ReadLines = linecache.getlines
    ) -> None:
        self.graph, self.before, self.read_lines = graph, before, read_lines

    @cached_property
    def roots(self) -> list[int]:
        """The ranks that others wait for and that wait for no rank themselves.

        Without those that failed because they lost another rank, if there is one that did not.
        """
        roots = self.graph.roots()
        return [rank for rank in roots if not self._is_victim(rank)] or roots

    def _is_victim(self, rank: int) -> bool:
        return rank in self.graph.known and is_victim(self.graph.known[rank])

    @property
    def is_moving(self) -> bool:
        """Whether each rank that waits has got to another collective since the snapshot before."""
        if self.before is None:
            return False
        old = self.before.pending
        return not any(_is_same(call, old.get(rank)) for rank, call in self.graph.pending.items())

    def has_progressed(self, rank: int) -> bool:
        """Whether a rank has called another collective since the snapshot before."""
        if self.before is None:
            return False
        now, then = self.graph.last_numbers, self.before.last_numbers
        return any(0 < then.get(key, {}).get(rank, 0) < numbers.get(rank, 0) for key, numbers in now.items())

    def waiting(self, culprits: Sequence[int]) -> list[int]:
        """The ranks that wait, without the culprits."""
        return sorted(set(self.graph.pending) - set(culprits))

    def direct(self, culprits: Sequence[int]) -> list[int]:
        """The ranks that wait for the culprits themselves, rather than for ranks that wait."""
        found = {rank for rank, missing in self.graph.edges.items() if missing & set(culprits)}
        return sorted(found - set(culprits)) or self.waiting(culprits)

    def seconds(self, rank: int) -> float:
        """How long a rank waits."""
        return max(0.0, self.graph.known[rank].collected - self.graph.pending[rank].called)

    def describe(self, rank: int) -> str:
        """The collective of a rank that waits."""
        return describe_call(self.graph.pending[rank], main_stack(self.graph.known[rank]))

    def line_of_call(self, rank: int, call: Collective) -> Frame | None:
        """The line of user code that called a collective, from the main thread if the call has no stack."""
        return user_frame(call.stack) or user_frame(main_stack(self.graph.known[rank]))

    def data_workers(self, rank: int) -> list[ProcessInfo]:
        """The workers of a rank's DataLoaders, known from this snapshot or the one before; not their own children."""
        children = self.graph.known[rank].children
        earlier = self.before.known.get(rank) if self.before is not None else None
        pids = {child.pid for child in (*children, *(earlier.children if earlier else ())) if child.is_data_worker}
        return [child for child in children if child.pid in pids and child.parent not in pids]

    def dead_worker(self, rank: int) -> ProcessInfo | None:
        """A data worker that has died. One that has returned all its batches ends with exit code 0."""
        return next((each for each in self.data_workers(rank) if each.state == "zombie" and each.exit_code != 0), None)

    def stopped_worker(self, rank: int) -> ProcessInfo | None:
        """A data worker that a signal has stopped."""
        return next((each for each in self.data_workers(rank) if each.state == "stopped"), None)

    def leaves_early(self, rank: int) -> bool:
        """Whether a rank leaves its run while another one that waits for it does not."""
        known = self.graph.known
        return leaves_run(main_stack(known[rank])) and any(
            not leaves_run(main_stack(known[other])) for other in self.direct([rank])
        )

    def source(self, rank: int) -> str:
        """The text of the line of user code that the main thread of a rank is on."""
        frame = user_frame(main_stack(self.graph.known[rank]))
        lines = self.read_lines(frame.file) if frame is not None else []
        return lines[frame.line - 1] if frame is not None and 0 < frame.line <= len(lines) else ""

    def waits_for_input(self, rank: int) -> bool:
        """Whether a rank waits until a user types something."""
        each, stack = self.graph.known[rank], main_stack(self.graph.known[rank])
        is_at_line = each.process.state == "sleeping" and bool(stack) and is_user_code(stack[0])
        return is_at_line and bool(_INPUT.search(self.source(rank)))

    def name(self, rank: int) -> str:
        """A rank with its node and process."""
        each = self.graph.known.get(rank)
        return f"rank {rank}" if each is None else f"rank {rank} (node {each.node}, pid {each.process.pid})"

    def subject(self, ranks: Sequence[int]) -> str:
        """Ranks at the start of a sentence: a single one with its node and process."""
        return self.name(ranks[0]) if len(ranks) == 1 else format_ranks(ranks)

    def wait_sentence(self, ranks: Sequence[int], subject: str = "") -> Sentence:
        """What ranks wait in that wait in the same call."""
        first = ranks[0]
        call, main = self.graph.pending[first], main_stack(self.graph.known[first])
        text = f"{subject or format_ranks(ranks)} wait{'s' * (len(ranks) == 1)} in {self.describe(first)}"
        frame = self.line_of_call(first, call)
        if frame is None:
            return Sentence(text)
        if leaves_run(call.stack or main):
            return Sentence(f"{text} at the end of {'its' if len(ranks) == 1 else 'their'} run, which begins at", frame)
        has_line = call.stack or in_backward(main)  # else the GPU waits, and Python is at a later line
        return Sentence(f"{text}, called from" if has_line else f"{text}; Python is at", frame)

    def last_call(self, rank: int) -> Sentence | None:
        """The last collective of a rank, or else its line in its log or on its stack; None if all are unknown.

        The rank itself is not in the sentence, so that ranks which called the same have the same.
        """
        each = self.graph.known[rank]
        recorded = [call for call in each.collectives or () if not is_unrecorded(call)]
        call = self.graph.pending.get(rank) or max(recorded, key=lambda call: call.called, default=None)
        if call is not None:
            return at_line(f"called {describe_with_tensors(call)}", self.line_of_call(rank, call))
        if (frame := traceback_frame(each.last_lines)) is not None:
            lost = is_lost_peer("\n".join(each.last_lines))
            return Sentence("lost the connection to another rank, at" if lost else "failed at", frame)
        frame = user_frame(main_stack(each))
        return None if frame is None else Sentence("is at", frame)

    def waiting_sentences(self, culprits: Sequence[int]) -> list[Sentence]:
        """What the ranks wait in that wait for the culprits, and how many more wait for these."""
        groups = dict[object, list[int]]()
        for rank in self.direct(culprits):
            call = self.graph.pending[rank]
            groups.setdefault((call.group, call.number, call.name, self.line_of_call(rank, call)), []).append(rank)
        ordered = sorted(groups.values(), key=len, reverse=True)
        sentences = [self.wait_sentence(ranks) for ranks in ordered[:1]]
        if rest := len(self.waiting(culprits)) - len(ordered[0] if ordered else ()):
            sentences.append(Sentence(f"{rest} more rank{'s wait' if rest > 1 else ' waits'} because of this"))
        return sentences

    def unfinished(self, rank: int) -> list[Sentence]:
        """That a rank has ended its script or raised an exception, and which thread keeps its process."""
        each = self.graph.known[rank]
        threads = other_threads(each.process)
        name, frame = threads[0] if threads else ("", None)
        thread = f"thread {name}" if name else "a thread that is not a daemon"
        raised, line = raised_exception(each.last_lines), traceback_frame(each.last_lines)
        if raised and line:
            sentences = [Sentence(f"{self.name(rank)} raised {raised}, at", line)]
            text = f"its process does not end because {thread} still runs"
        else:
            sentences, text = [], f"{self.name(rank)} has ended its script and waits for {thread}"
        return [*sentences, at_line(text, frame)]

    def child_sentences(self, rank: int) -> list[Sentence]:
        """Where the processes are that a rank has started, without those that wait at the line of its collective."""
        line = self.line_of_call(rank, self.graph.pending[rank])
        found = [(child.pid, frame) for child in self.graph.known[rank].children if (frame := _child_line(child))]
        return [
            Sentence(f"a process that rank {rank} started (pid {pid}) is at", frame)
            for pid, frame in found
            if frame != line
        ]

    def waits_inside(self, rank: int) -> list[Sentence]:
        """What keeps a rank at its line: an exception in one of its threads, a child process, or other threads."""
        each = self.graph.known[rank]
        if (failed := thread_exception(each.last_lines)) is not None:
            return [failed]
        if (child := _awaited_child(each)) is not None:
            command = f", `{child.command[:_COMMAND_SHOWN]}`" if child.command else ""
            line = _child_line(child)
            line = None if line == user_frame(main_stack(each)) else line  # a forked child has the frames of its parent
            return [at_line(f"it waits for its child process (pid {child.pid}{command})", line)]
        if cpu_load(each.process) >= _BUSY or not _WAITS_FOR_THREAD.search(self.source(rank)):
            return []
        threads = [(name, frame) for name, frame in other_threads(each.process) if frame is not None]
        return [Sentence(f"its thread {name} is at", frame) for name, frame in threads[:_SHOWN_THREADS]]

    def location(self, rank: int) -> list[Sentence]:
        """Where a live rank is that has not called the collective of the others, and since when."""
        each = self.graph.known[rank]
        frame, start = user_frame(main_stack(each)), "has not called it" if self.graph.pending else ""
        if frame is None and each.collectives is None and (raised := raised_exception(each.last_lines)):
            line = traceback_frame(each.last_lines)
            text = f"its process {describe_process(each)}, and has not ended yet"
            return [at_line(f"{self.name(rank)} raised {raised}", line), Sentence(text)]
        if each.collectives is None:
            start = _describe_silence(each)
        elif runs_for_all(main_stack(each)):
            start = "runs it for the others"
        elif rank in self.graph.pending and not leaves_run(main_stack(each)):
            start = "has called another one and does not wait for it"
        activity = "is waiting for input, " if self.waits_for_input(rank) else _activity(each)
        text = f"{self.name(rank)} {f'{start}; it ' if start else ''}{activity}at"
        shown = find_breakpoint(frame, self.read_lines) if frame and is_debugger(main_stack(each)) else frame
        sentences = [Sentence(text, shown) if shown else Sentence(f"{text} an unknown line")]
        sentences.append(Sentence(f"{self._last_collective(each)}its process {describe_process(each)}"))
        if (old := self._line_before(rank)) not in (None, frame):
            sentences.append(Sentence("it is not stuck at this line: about a second before, it was at", old))
        return sentences

    def _line_before(self, rank: int) -> Frame | None:
        each = self.before.known.get(rank) if self.before is not None else None
        return None if each is None else user_frame(main_stack(each))

    def _last_collective(self, each: RankEvidence) -> str:
        if each.collectives is None:
            return ""
        recorded = [call for call in each.collectives if not is_unrecorded(call)]
        if not recorded:
            return "it has called no collective yet; "
        last = max(recorded, key=lambda call: call.called)
        shown = next((self.graph.pending[rank] for rank in self.direct([each.rank])), None)
        is_same_group = shown is not None and self.graph.key(shown) == self.graph.key(last)
        name = f"#{last.number}" if is_same_group else describe_call(last)
        if shown is not None and not is_same_group and last.group and shown.group:
            name += " of another process group"
        return f"its last collective was {name}, {max(0.0, each.collected - last.called):,.0f} s ago; "


def _activity(each: RankEvidence) -> str:
    stack = main_stack(each)
    if leaves_run(stack):
        why = next((text for where, text in _WHY_LEAVING.items() if _is_inside(stack, *where)), "")
        return f"{why}is leaving its run, which begins "
    if is_debugger(stack):
        return "is in a debugger that waits for input, "
    if is_in_dataset(stack):
        return "is reading a sample of its dataset, "
    return "is waiting for its DataLoader, " if waits_for_data_worker(each.process) else "is "


def _describe_silence(each: RankEvidence) -> str:
    """Why the collectives of a rank are not known."""
    if each.error:
        return f"has collectives that samestep cannot read ({each.error})"
    return "does not answer" + (": a thread of it may hold the GIL" * (cpu_load(each.process) >= _BUSY))


def describe_process(each: RankEvidence) -> str:
    """What the process of a rank does."""
    process = each.process
    text = _STATES.get(process.state, f"is {process.state}")
    if process.state in ("running", "sleeping") and (load := cpu_load(process)) >= _BUSY:
        text = f"runs at {100 * load:.0f} % CPU"
    if process.is_swapping:
        text += " and is swapping"
    return text if each.gpu_percent is None else f"{text}, its GPU is at {each.gpu_percent:.0f} %"


def is_victim(each: RankEvidence) -> bool:
    """Whether a rank failed because it lost another rank, or had waited for it for too long."""
    log = "\n".join(each.last_lines)
    return bool(each.exit_code) and (has_timed_out(log) or is_lost_peer(log))


def cpu_load(process: ProcessInfo) -> float:
    """CPU seconds per second, while the evidence was collected."""
    return process.cpu_seconds / process.window if process.window else 0.0


def is_busy(each: RankEvidence, call: Collective) -> bool:
    """Whether a process that waits computes; one that waits for NCCL spins, so that its load says nothing."""
    return call.backend != "nccl" and cpu_load(each.process) >= _BUSY


def _is_same(call: Collective, other: Collective | None) -> bool:
    return other is not None and (call.group, call.number, call.name) == (other.group, other.number, other.name)


def is_debugger(stack: Sequence[Frame]) -> bool:
    """Whether a thread is inside of a debugger."""
    return any(_DEBUGGER.search(frame.file) for frame in stack)


def find_breakpoint(frame: Frame, read_lines: ReadLines) -> Frame:
    """The line that started a debugger, which shows the line after it; the frame itself if it is not found near."""
    lines = read_lines(frame.file)
    near = range(min(frame.line, len(lines)), max(0, frame.line - _BREAKPOINT_LINES), -1)
    found = next((number for number in near if _BREAKPOINT.search(lines[number - 1])), frame.line)
    return replace(frame, line=found)


def is_in_dataset(stack: Sequence[Frame]) -> bool:
    """Whether a thread reads a sample: user code of a dataset that a DataLoader or samestep calls."""
    loader = next((index for index, frame in enumerate(stack) if frame.file.endswith((_FETCH, _WORKER, _LOADER))), 0)
    return any(is_user_code(frame) and frame.function in _DATASET_FUNCTIONS for frame in stack[:loader])


def waits_for_data_worker(process: ProcessInfo) -> bool:
    """Whether a process waits until a data worker sends a batch, in its main thread or in one that loads for it."""
    main = process.stacks.get("main", [])
    if not main or is_user_code(main[0]):
        return False
    return any(_waits_for_worker(stack) for stack in (main, *process.stacks.values()))


def _waits_for_worker(stack: Sequence[Frame]) -> bool:
    for frame in stack:
        if frame.file.endswith(_LOADER):
            return True
        if is_user_code(frame) or frame.file.endswith((_FETCH, _WORKER)):
            return False  # it reads the sample itself
    return False


def hanging_worker(children: Sequence[ProcessInfo]) -> tuple[ProcessInfo, Frame] | None:
    """The data worker that is reading a sample, and its line; None if all wait for work.

    If several are reading, returns the one that used the least CPU time.
    """
    reading = [(child, frame) for child in children if (frame := _reading_line(child.stacks.get("main", [])))]
    return min(reading, key=lambda each: each[0].cpu_seconds, default=None)


def _reading_line(stack: Sequence[Frame]) -> Frame | None:
    """The line of user code, or of a library, that reads a sample; None if the worker waits for work.

    A forked worker has the frames of its rank too, outside of the DataLoader's loop.
    """
    loop = next((index for index, frame in enumerate(stack) if frame.file.endswith(_WORKER)), 0)
    inside = stack[:loop]
    if not any(frame.file.endswith(_FETCH) or is_user_code(frame) for frame in inside):
        return None
    return next((frame for frame in inside if is_user_code(frame)), inside[0])


def _child_line(child: ProcessInfo) -> Frame | None:
    """The line of user code in a child process that is not a data worker."""
    frame = user_frame(child.stacks.get("main", []))
    is_line = frame is not None and is_user_code(frame) and not frame.file.startswith("<")
    return frame if is_line and not child.is_data_worker else None


def waits_for_threads(stack: Sequence[Frame]) -> bool:
    """Whether the script is over, and the main thread waits for threads that are not daemons."""
    return bool(stack) and stack[-1].function == "_shutdown" and stack[-1].file.endswith("/threading.py")


def other_threads(process: ProcessInfo) -> list[tuple[str, Frame | None]]:
    """The threads of a process without the main one, and their lines of user code; those that have one first."""
    found = list[tuple[str, Frame | None]]()
    for name, stack in process.stacks.items():
        frame = user_frame(stack)
        shown = frame if frame is not None and is_user_code(frame) else None
        if name != "main":
            found.append((_THREAD_ADDRESS.sub("", name), shown))
    return sorted(found, key=lambda each: each[1] is None)


def thread_exception(lines: Sequence[str]) -> Sentence | None:
    """That a thread has raised an exception, which ends this thread only: the last one in the log; None without one."""
    starts = [index for index, line in enumerate(lines) if _THREAD_EXCEPTION.fullmatch(RANK_PREFIX.sub("", line))]
    if not starts:
        return None
    inside = lines[starts[-1] :]
    name = _THREAD_EXCEPTION.search(inside[0])
    raised = error_message("\n".join(inside)).splitlines()[:1]
    text = f"its thread {name[1] if name else ''} raised {raised[0] if raised else 'an exception'}"
    return at_line(text, traceback_frame(inside))


def _awaited_child(each: RankEvidence) -> ProcessInfo | None:
    """The process that the main thread waits for, in subprocess.run or Process.join; None if it waits for none."""
    inside = takewhile(lambda frame: not is_user_code(frame), main_stack(each))
    if not any(frame.file.endswith(_CHILD_FILES) for frame in inside):
        return None
    own = [child for child in each.children if not child.is_data_worker and child.parent in (0, each.process.pid)]
    return next((child for child in own if child.state not in ("zombie", "gone")), None)


def leaves_run(stack: Sequence[Frame]) -> bool:
    """Whether a thread is in the end of `with Run(...)`, whose line is then that of the `with` statement."""
    return _is_inside(stack, *_LEAVES_RUN)


def _is_inside(stack: Sequence[Frame], file: str, function: str) -> bool:
    return any(frame.file.endswith(file) and frame.function == function for frame in stack)


def runs_for_all(stack: Sequence[Frame]) -> bool:
    """Whether a thread runs the function of `run.once`."""
    return _is_inside(stack, "/samestep/distributed/once.py", "run_and_pickle")


def is_rank_0_only(stack: Sequence[Frame], read_lines: ReadLines) -> bool:
    """Whether a thread of rank 0 runs code that only rank 0 runs, such as code under `if rank == 0:`."""
    if any(_RANK_0_FUNCTIONS.search(frame.file) for frame in stack):
        return True
    return any(_is_under_condition(frame, read_lines) for frame in stack if is_user_code(frame))


def _is_under_condition(frame: Frame, read_lines: ReadLines) -> bool:
    text = "".join(read_lines(frame.file))
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a template, or an encoding that cannot be read
        return False
    conditions = (node for node in ast.walk(tree) if isinstance(node, ast.If))
    return any(
        _RANK_0.search(ast.unparse(node.test)) and node.body[0].lineno <= frame.line <= (node.body[-1].end_lineno or 0)
        for node in conditions
    )
