"""Which rank's failure ended the job, and how that is told: a short table, then that rank's own traceback."""

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from samestep.launch.exit_codes import PREEMPTED, STOPPED

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
