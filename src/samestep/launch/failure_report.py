"""Which rank's failure ended the job, and how that is told: a short table, then that rank's own traceback."""

import json
import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from samestep.launch.rank_logs import RankFiles

# EX_TEMPFAIL of sysexits.h, "try again later": the ranks were warned, have saved what they had, and go on when started
# anew. No signal and no Python error gives this code by itself.
PREEMPTED = 75
# As a shell tells that SIGTERM ended a process: the ranks were asked to end and had nothing to save, so that starting
# them anew would begin at the beginning.
STOPPED = 143
# The next one, which no signal and no Python error gives either: the first steps ran out of memory, and half the
# micro-batch may fit.
OUT_OF_MEMORY = 76
# As timeout(1) has it: the launcher ended ranks that had not ended by themselves when their time was over.
TIME_LIMIT_REACHED = 124


_HEADER = re.compile(r"^(?:  \+ Exception Group )?Traceback \(most recent call last\):$")
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
# torch puts the rank before each line of a traceback once a process group stands.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
# Messages of native code, such as the one about a process group that was not destroyed: true, but not the cause.
_NATIVE = re.compile(r"^\[[WEF]\d{3,4} [\d:.]+ .*\]|^\[rank\d+\]:\[[WEF]\d")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ENDED_EARLY = "EndedEarly"  # as samestep.training.preemption has it
_LONGEST = 200
_TAIL = 20


def last_words(files: RankFiles, crashed: bool) -> tuple[str, bool]:
    """What to show of a failed rank, and whether it is a traceback.

    The error file comes first, since it holds nothing else; then the last traceback of its log; then the log's end. A
    rank that crashed, which a signal shows, did not end by an exception: a traceback in its log is an older matter.
    """
    recorded = _recorded(files.error)
    if recorded:
        return recorded, True
    text = "\n".join(_lines(path) for path in (files.screen, files.out, files.err) if path.exists())
    lines = [line for line in text.splitlines() if not _NATIVE.match(line)]
    trace = None if crashed else last_traceback(lines)
    if trace:
        return "\n".join(trace), True
    return "\n".join([line for line in lines if line.strip()][-_TAIL:]), False


def last_traceback(lines: list[str]) -> list[str]:
    """The last traceback with the exceptions it grew from, to the end of the lines; empty where there is none."""
    lines = [_RANK_PREFIX.sub("", line) for line in lines]
    headers = [at for at, line in enumerate(lines) if _HEADER.match(line)]
    if not headers:
        return []
    start = headers.pop()
    while headers and any(line.startswith(_CHAIN) for line in lines[headers[-1] : start]):
        start = headers.pop()
    trace = lines[start:]
    while trace and not trace[-1].strip():
        trace.pop()
    return trace if len(trace) <= _LONGEST else [*trace[: _LONGEST // 2], "  ...", *trace[-_LONGEST // 2 :]]


def recorded_message(files: RankFiles) -> str:
    """What a rank that was told to end has to say, from its error file; empty where it said nothing."""
    try:
        kind, _, text = str(json.loads(files.error.read_text())["message"]["message"]).partition(": ")
    except (OSError, ValueError, KeyError, TypeError):  # a script without a Run writes none
        return ""
    return text if kind == _ENDED_EARLY else ""


def _recorded(path: Path) -> str:
    """The traceback in an error file as torch writes it; empty where there is none."""
    try:
        message = json.loads(path.read_text())["message"]
        return str(message["extraInfo"]["py_callstack"] if isinstance(message, dict) else message).rstrip()
    except (OSError, ValueError, KeyError, TypeError):  # none was written, or the rank died while writing it
        return ""


def _lines(path: Path) -> str:
    """A log's text as a person would have seen it; of a very long log only the end is read."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 20)))
        text = file.read().decode(errors="replace")
    return _CONTROL.sub("", text.replace("\r\n", "\n"))


Kind = Literal["own", "lost", "ended"]

_WORDS = {
    signal.SIGKILL: "often the kernel's out-of-memory killer",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "often shared memory (/dev/shm) that is full",
    signal.SIGABRT: "native code gave up",
    signal.SIGILL: "an instruction that this CPU lacks; `samestep doctor` looks for it",
    signal.SIGFPE: "an arithmetic error in native code",
}
# How a rank puts it that a peer has gone. Its own code is not to blame; the peer's failure is the cause.
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket Timeout",
    "DistNetworkError",
    "failed to recv, got 0 bytes",
    "remote process exited",
    "NCCL communicator was aborted",
    "connectFullMesh failed",
    "samestep.errors.RankMissing",
)
_AGENT_WAITS = 29  # seconds, one less than the agent gives ranks to end: times are known to the second
_ORDER: tuple[Kind, ...] = ("own", "lost", "ended")


@dataclass(frozen=True)
class Failure:
    """How one rank ended that did not end well."""

    rank: int
    """Its number among all ranks."""
    pid: int
    """Its process."""
    code: int
    """Its exit code, or the negative number of the signal that ended it."""
    when: float
    """When it failed, in seconds since the epoch; known to the second only."""
    ended: bool
    """Whether the launcher ended it, because another rank had failed."""
    said: str
    """Its own traceback, or the last lines of its log; may be empty."""
    traceback: bool
    """Whether `said` is a traceback."""
    shown: bool = False
    """Whether all that it printed was shown while it ran, just where the report comes."""

    @property
    def kind(self) -> Kind:
        """Whether it failed by itself, because it lost a peer, or because the launcher ended it after another."""
        if self.ended:
            return "ended"
        return "lost" if self.traceback and is_lost_peer(self.said) else "own"

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            number = signal.Signals(-self.code)
        except ValueError:
            return f"killed by signal {-self.code}"
        return f"killed by {number.name}{f': {_WORDS[number]}' if number in _WORDS else ''}"

    @property
    def exit_code(self) -> int:
        """What a shell would call it: its own code, or 128 and the signal."""
        return 128 - self.code if self.code < 0 else self.code


def is_agents_doing(code: int, seconds_after_first: float) -> bool:
    """Whether torch's agent ended a rank after another had failed: asked it to, or killed it when it did not."""
    return code == -signal.SIGTERM or (code == -signal.SIGKILL and seconds_after_first >= _AGENT_WAITS)


def is_told_to_end(codes: Collection[int]) -> bool:
    """Whether ranks ended because they were told to: after saving, or at a step boundary with nothing to save.

    The agent asks the others to end as soon as it has seen the first one's end.
    """
    return bool({PREEMPTED, STOPPED} & set(codes)) and set(codes) <= {PREEMPTED, STOPPED, -signal.SIGTERM}


def is_lost_peer(traceback: str) -> bool:
    """Whether a traceback ends in an error that says no more than that another rank has gone.

    Only the message counts: the frames above it name functions, and a name proves nothing.
    """
    lines = traceback.splitlines()
    indented = [at for at, line in enumerate(lines) if line.startswith("  ")]
    message = "\n".join(lines[indented[-1] + 1 :] if indented else lines)
    return any(words in message for words in _LOST_PEER)


def by_cause(failures: Sequence[Failure]) -> list[Failure]:
    """The failures with the root cause first: a rank that failed by itself before ranks that only lost it.

    Failures of the same second keep the order in which the agent noticed them.
    """
    return sorted(failures, key=lambda failure: (_ORDER.index(failure.kind), failure.when))


def tell(failures: Sequence[Failure], ranks: int, host: str, logs: str, other_nodes: bool) -> str:
    """The report of a failed attempt; its last line is the last line of the first failing rank's own words."""
    ordered = by_cause(failures)
    root = ordered[0]
    failed = sum(failure.kind != "ended" for failure in failures) or len(failures)
    lines = [f"samestep: {failed} of {ranks} rank(s) on {host} failed; what each of them printed is in {logs}"]
    lines += [f"  rank {failure.rank:<4} pid {failure.pid:<8} {_row(failure, root)}" for failure in ordered]
    if root.kind == "lost" and other_nodes:
        lines.append("  No rank failed by itself here: look for the cause in the logs of the other nodes.")
    lines += ["", f"rank {root.rank} on {host}, {root.ending}{_introduce(root)}"]
    return "\n".join([*lines, root.said] if root.said and not _is_above(root) else lines)


def _row(failure: Failure, root: Failure) -> str:
    if failure is root:
        return f"{failure.ending}  <- first failure"
    if failure.kind == "ended":
        return f"ended by the launcher after the first failure ({signal.Signals(-failure.code).name})"
    return f"{failure.ending}{', when it lost a peer' if failure.kind == 'lost' else ''}"


def _is_above(root: Failure) -> bool:
    """Whether its words, such as the usage of its script, would stand there twice; a traceback comes last anyway."""
    return root.shown and not root.traceback


def _introduce(root: Failure) -> str:
    if not root.said:
        return "; it printed nothing"
    if _is_above(root):
        return "; its last lines are above"
    return ":" if root.traceback else "; its last lines:"
