"""The report of a failed job: which rank failed first, how, and that rank's own traceback last on the screen."""

import json
import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import PREEMPTED, STOPPED
from samestep.launch.rank_logs import RankFiles
from samestep.messages import format_list

_SIGNAL_HINTS = {
    signal.SIGINT: "Ctrl-C, or a KeyboardInterrupt in the script",
    signal.SIGKILL: "often the kernel's out-of-memory killer",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "often a full /dev/shm (shared memory)",
    signal.SIGABRT: "native code aborted",
    signal.SIGILL: "an instruction that this CPU lacks; run `samestep doctor`",
    signal.SIGFPE: "an arithmetic error in native code",
}
_CHILD_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
# Messages of a rank whose connection to another rank broke. The other rank's failure is the cause.
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
# The watchdog of NCCL aborts a rank that has waited for another one for longer than the timeout.
_NCCL_WATCHDOG = re.compile(r"Watchdog caught collective operation timeout|failure detected by watchdog")
_AGENT_TIMEOUT = 29  # one second less than torch's agent gives ranks to end, since its timestamps are whole seconds

_KINDS = ("failed", "lost peer", "ended by launcher")


@dataclass(frozen=True)
class Failure:
    """How one rank ended that did not end with exit code 0."""

    rank: int
    pid: int
    code: int  # exit code, or the negative number of the signal that ended the process
    time: float  # of the failure, in whole seconds since the epoch
    ended_by_launcher: bool  # or by torch's agent, because another rank had failed
    output: str  # its traceback, or the last lines of its log; may be empty
    is_traceback: bool
    already_shown: bool = False  # whether the console shows everything it printed directly above the report

    @property
    def kind(self) -> str:
        """One of _KINDS: it failed by itself, lost the connection to another rank, or was ended by the launcher."""
        if self.ended_by_launcher:
            return "ended by launcher"
        if self.code == -signal.SIGABRT and _NCCL_WATCHDOG.search(self.output):
            return "lost peer"
        return "lost peer" if self.is_traceback and is_lost_peer(self.output) else "failed"

    @property
    def ending(self) -> str:
        """`exit code 1`, or the name of the signal with its usual cause."""
        if self.code >= 0:
            # Python keeps the lowest 8 bits of sys.exit(-15).
            child = next((number.name for number in _CHILD_SIGNALS if 256 - number == self.code), "")
            hint = f": `sys.exit` got the return code of a subprocess that {child} killed" if child else ""
            return f"exit code {self.code}{hint}"
        try:
            number = signal.Signals(-self.code)
        except ValueError:
            return f"killed by signal {-self.code}"
        if self.kind == "lost peer":  # signals end no rank with a traceback
            return f"killed by {number.name}: NCCL waited too long for another rank"
        return f"killed by {number.name}{f': {_SIGNAL_HINTS[number]}' if number in _SIGNAL_HINTS else ''}"

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it: 128 plus the signal if one ended the process."""
        return 128 - self.code if self.code < 0 else self.code


def format_report(failures: Sequence[Failure], ranks: int, host: str, logs: Path, several_nodes: bool) -> str:
    """The table of failed ranks, followed by the output of the rank that failed first."""
    ordered = sort_by_cause(failures)
    root = ordered[0]
    failed = sum(failure.kind != "ended by launcher" for failure in failures) or len(failures)
    lines = [f"samestep: {failed} of {ranks} rank(s) on {host} failed; logs of all ranks: {logs}"]
    lines += [f"  rank {failure.rank:<4} pid {failure.pid:<8} {_row(failure, root)}" for failure in ordered]
    if root.kind == "lost peer" and several_nodes:
        lines.append("  No rank on this node failed by itself: look for the cause in the logs of the other nodes.")
    elif root.kind == "lost peer" and (late := [each.rank for each in ordered if each.kind == "ended by launcher"]):
        shown = format_list([f"rank {rank}" for rank in sorted(late)], 8)
        lines.append(f"  No rank failed by itself: the others may have waited for {shown}, which the launcher ended.")
    lines += ["", f"rank {root.rank} on {host}, {root.ending}"]
    if not root.output:
        lines[-1] += "; it printed nothing"
    elif root.already_shown and not root.is_traceback:  # for example the usage message of the script
        lines[-1] += "; its last lines are above"
    else:
        lines[-1] += f"{'' if root.is_traceback else '; its last lines'}:\n{root.output}"
    return "\n".join(lines)


def _row(failure: Failure, root: Failure) -> str:
    if failure is root:
        return f"{failure.ending}  <- first failure"
    if failure.kind == "ended by launcher":
        return f"ended by the launcher after the first failure ({signal.Signals(-failure.code).name})"
    lost = failure.kind == "lost peer" and failure.code >= 0  # the ending by a signal says so already
    return f"{failure.ending}{', lost the connection to another rank' if lost else ''}"


def sort_by_cause(failures: Sequence[Failure]) -> list[Failure]:
    """The failures with the root cause first: ranks that failed by themselves before ranks that lost a peer.

    Failures of the same second keep the order in which the agent noticed them.
    """
    return sorted(failures, key=lambda failure: (_KINDS.index(failure.kind), failure.time))


def is_lost_peer(traceback: str) -> bool:
    """Whether a traceback ends in an error that only says that the connection to another rank broke.

    Only the message counts, not the frames above it: source lines may contain the same words.
    """
    lines = traceback.splitlines()
    indented = [index for index, line in enumerate(lines) if line.startswith("  ")]
    message = "\n".join(lines[indented[-1] + 1 :] if indented else lines)
    return any(words in message for words in _LOST_PEER)


def is_ended_by_agent(code: int, seconds_after_first: float) -> bool:
    """Whether torch's agent ended a rank after another one had failed: by SIGTERM, or later by SIGKILL."""
    return code == -signal.SIGTERM or (code == -signal.SIGKILL and seconds_after_first >= _AGENT_TIMEOUT)


def is_requested_exit(codes: Collection[int]) -> bool:
    """Whether the ranks were stopped by a signal or a time limit, after saving or with nothing to save.

    The agent sends SIGTERM to the other ranks as soon as the first one has ended, so that code may appear too.
    """
    return bool({PREEMPTED, STOPPED} & set(codes)) and set(codes) <= {PREEMPTED, STOPPED, -signal.SIGTERM}


_TRACEBACK_HEADER = re.compile(r"^(?:  \+ Exception Group )?Traceback \(most recent call last\):$")
_TRACEBACK_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
# torch prefixes each line of a traceback with the rank if there is a process group.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
# Log lines of native code, for example about a process group that was not destroyed; they are not the cause.
_NATIVE_LOG = re.compile(r"^\[[WEF]\d{3,4} [\d:.]+ .*\]|^\[rank\d+\]:\[[WEF]\d")
_NATIVE_FRAME = re.compile(r"^frame #\d+: ")  # of C++
_TERMINAL_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_MAX_TRACEBACK_LINES = 200
_MAX_LOG_LINES = 20
_MAX_WATCHDOG_LINES = 4
_MAX_LOG_BYTES = 1 << 20


def read_last_output(files: RankFiles, crashed: bool) -> tuple[str, bool]:
    """What to show of a failed rank, and whether it is a traceback.

    The error file is preferred, then the last traceback in the log, then the end of the log with what the watchdog of
    NCCL wrote before. A rank that crashed by a signal did not end with an exception, so a traceback in its log is older
    and not shown.
    """
    if recorded := _read_error_file(files.error)[1]:
        return recorded, True
    text = "\n".join(_read_log(path) for path in (files.screen, files.out, files.err) if path.exists())
    lines = [line for line in text.splitlines() if not _NATIVE_LOG.match(line)]
    if not crashed and (traceback := last_traceback(lines)):
        return "\n".join(traceback), True
    watchdog = [line for line in text.splitlines() if _NATIVE_LOG.match(line) and _NCCL_WATCHDOG.search(line)]
    ending = [line for line in lines if line.strip() and not _NATIVE_FRAME.match(line)]
    return "\n".join([*watchdog[:_MAX_WATCHDOG_LINES], *ending[-_MAX_LOG_LINES:]]), False


def read_stop_message(files: RankFiles) -> str:
    """Why a rank was stopped by a signal or a time limit, from its error file; empty if it wrote none."""
    kind, _, text = _read_error_file(files.error)[0].partition(": ")
    return text if kind == "StoppedEarly" else ""  # the exception of samestep.training.preemption


def last_traceback(lines: list[str]) -> list[str]:
    """The last traceback, including the exceptions that it was raised from, up to the last line; empty if none."""
    lines = [_RANK_PREFIX.sub("", line) for line in lines]
    headers = [index for index, line in enumerate(lines) if _TRACEBACK_HEADER.match(line)]
    if not headers:
        return []
    start = headers.pop()
    while headers and any(line.startswith(_TRACEBACK_CHAIN) for line in lines[headers[-1] : start]):
        start = headers.pop()
    trace = lines[start:]
    while trace and not trace[-1].strip():
        trace.pop()
    half = _MAX_TRACEBACK_LINES // 2
    return trace if len(trace) <= _MAX_TRACEBACK_LINES else [*trace[:half], "  ...", *trace[-half:]]


def _read_error_file(path: Path) -> tuple[str, str]:
    """Message and traceback in an error file as torch writes it; empty if a script without a Run wrote none."""
    try:
        message = json.loads(path.read_text())["message"]
        if not isinstance(message, dict):
            return "", str(message).rstrip()
        return str(message["message"]), str(message.get("extraInfo", {}).get("py_callstack", "")).rstrip()
    except (OSError, ValueError, KeyError, TypeError):  # none was written, or the rank died while writing it
        return "", ""


def _read_log(path: Path) -> str:
    """The end of a log, without terminal control codes."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MAX_LOG_BYTES))
        text = file.read().decode(errors="replace")
    return _TERMINAL_CODE.sub("", text.replace("\r\n", "\n"))
