"""The report of a failed job: which rank failed first, how, and that rank's own traceback last on the screen."""

import json
import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import PREEMPTED, STOPPED
from samestep.hang.log_errors import (
    GLOO_MISMATCH,
    GLOO_TIMEOUT,
    NCCL_WATCHDOG,
    RANK_PREFIX,
    error_message,
    has_timed_out,
    is_lost_peer,
)
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
_COLLECTIVE_FILES = "/torch/distributed/distributed_c10d.py", "/torch/distributed/c10d_logger.py"
_TRACEBACK_FILE = re.compile(r'^  File "([^"]*)"', re.MULTILINE)
_LIBRARY = re.compile(rf"[^\"]*/(?:site-packages|lib/python[\d.]+)/|{re.escape(str(Path(__file__).parent.parent))}/")
_STOPPED_EARLY = re.compile(r"^(?:\S+\.)?StoppedEarly: ", re.MULTILINE)  # of samestep.training.preemption
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
    ended_after_hang: bool = False  # by the launcher, because ranks had waited for others

    @property
    def had_raised(self) -> bool:
        """Whether it was ended while it left its run after it had raised an exception, which is in its error file."""
        return self.ended_by_launcher and self.is_traceback and not _STOPPED_EARLY.search(error_message(self.output))

    @property
    def kind(self) -> str:
        """One of _KINDS: it failed by itself, lost the connection to another rank, or was ended by the launcher."""
        if self.ended_after_hang or (self.ended_by_launcher and not self.had_raised):
            return "ended by launcher"
        if self.code == -signal.SIGABRT and (NCCL_WATCHDOG.search(self.output) or GLOO_MISMATCH.search(self.output)):
            return "lost peer"
        return "lost peer" if self.is_traceback and is_lost_peer(self.output) else "failed"

    @property
    def has_timed_out(self) -> bool:
        """Whether it raised because it had waited for another rank until the timeout."""
        return self.is_traceback and has_timed_out(self.output)

    @property
    def ending(self) -> str:
        """`exit code 1`, or the name of the signal with its usual cause."""
        if self.had_raised:
            return "ended by the launcher after an exception"
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
            if GLOO_MISMATCH.search(self.output):
                return f"killed by {number.name}: gloo got data of another collective: ranks made different calls"
            return f"killed by {number.name}: NCCL waited too long for another rank"
        return f"killed by {number.name}{f': {_SIGNAL_HINTS[number]}' if number in _SIGNAL_HINTS else ''}"

    @property
    def message(self) -> str:
        """The first line of its exception, `ValueError: bad sample`; without one, how it ended."""
        lines = error_message(self.output).splitlines() if self.is_traceback else []
        return lines[0] if lines else self.ending

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it: 128 plus the signal if one ended the process, 1 after an exception."""
        if self.code >= 0:
            return self.code
        return 1 if self.had_raised else 128 - self.code


@dataclass(frozen=True)
class Explanation:
    """Why ranks waited for others until the end of the job."""

    summary: str  # of the cause, several lines
    culprits: list[int]
    """The ranks that the others waited for, the most likely cause first; none if it is the network, for example."""
    report: str = ""  # a line that says where everything is that is known
    is_of_failure: bool = False
    """Found after a rank had failed, which may know more if it has raised an error of samestep."""


def format_hang_report(failures: Sequence[Failure], hang: Explanation, ranks: int, host: str, logs: Path) -> str:
    """The cause of a hang, the table of ranks, and the traceback of a rank that the others waited for, if any."""
    position = {rank: index for index, rank in enumerate(hang.culprits)}
    ordered = sorted(failures, key=lambda failure: (position.get(failure.rank, len(position)), failure.rank))
    lines = [hang.summary, *([f"  {hang.report}"] if hang.report else [])]
    lines += [f"samestep: {len(failures)} of {ranks} rank(s) on {host} ended because of it; logs of all ranks: {logs}"]
    lines += [f"  rank {each.rank:<4} pid {each.pid:<8} {_hang_row(each, hang)}" for each in ordered]
    for each in ordered:
        ended_itself = each.kind != "ended by launcher" and not each.has_timed_out
        if each.rank in hang.culprits and each.output and ended_itself:
            last = "" if each.is_traceback else "; its last lines"
            lines += ["", f"rank {each.rank} on {host}, {each.ending}{last}:\n{each.output}"]
            break
    return "\n".join(lines)


def explains(hang: Explanation, failures: Sequence[Failure]) -> bool:
    """Whether the report begins with an explanation: not if a rank that the others did not wait for failed by itself.

    An explanation that was found after a failure says less than an error of samestep.
    """
    if not all(each.rank in hang.culprits or _is_victim(each) for each in failures):
        return False
    return not hang.is_of_failure or not any(
        "samestep.errors." in error_message(each.output) for each in failures if each.is_traceback
    )


def _is_victim(failure: Failure) -> bool:
    return failure.kind != "failed" or failure.has_timed_out


def exit_code_after_hang(failures: Sequence[Failure], hang: Explanation) -> int:
    """The exit code of a rank that the others waited for, if it has ended by itself; otherwise 1."""
    own = (each for each in failures if each.rank in hang.culprits and each.kind != "ended by launcher")
    return next((each.exit_code for each in own if each.exit_code), 1)


def _hang_row(failure: Failure, hang: Explanation) -> str:
    if failure.rank in hang.culprits:
        ended = failure.kind == "ended by launcher"
        return f"{'ended by the launcher' if ended else failure.ending}  <- the cause"
    if failure.kind == "ended by launcher":
        return (
            "victim: ended by the launcher while it waited"
            if failure.ended_after_hang
            else "victim: ended by the launcher"
        )
    return f"{'victim: ' if _is_victim(failure) else ''}{failure.ending}{_why_it_ended(failure)}"


def _why_it_ended(failure: Failure) -> str:
    """Why a victim has failed, unless its ending says so already, as that by a signal does."""
    if failure.has_timed_out:
        return ", it had waited until the timeout"
    is_lost = failure.kind == "lost peer" and (failure.code >= 0 or failure.had_raised)
    return ", lost the connection to another rank" if is_lost else ""


def format_report(
    failures: Sequence[Failure], ranks: int, host: str, logs: Path, several_nodes: bool, ended: Collection[int] = ()
) -> str:
    """The table of failed ranks, followed by the output of the rank that failed first.

    `ended` are the ranks that had ended with exit code 0 before.
    """
    ordered = sort_by_cause(failures)
    root = ordered[0]
    late = [failure.rank for failure in ordered if failure.kind == "ended by launcher"]
    failed = len(failures) - len(late) or len(failures)
    lines = [f"samestep: {failed} of {ranks} rank(s) on {host} failed; logs of all ranks: {logs}"]
    lines += [f"  rank {failure.rank:<4} pid {failure.pid:<8} {_row(failure, root)}" for failure in ordered]
    if root.kind == "lost peer" and ended:
        shown = format_list([f"rank {rank}" for rank in sorted(ended)], 8)
        lines.append(
            f"  No rank failed by itself: {shown} had ended with exit code 0, while the others still needed it."
        )
    elif root.kind == "lost peer" and several_nodes:
        lines.append("  No rank on this node failed by itself: look for the cause in the logs of the other nodes.")
    elif root.kind == "lost peer" and late and not GLOO_MISMATCH.search(root.output):
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
        how = signal.Signals(-failure.code).name if failure.code < 0 else failure.ending  # its probe has ended it
        return f"ended by the launcher after the first failure ({how})"
    return f"{failure.ending}{_why_it_ended(failure)}"


def sort_by_cause(failures: Sequence[Failure]) -> list[Failure]:
    """The failures with the root cause first: ranks that failed by themselves before ranks that lost a peer.

    Of ranks whose wait has timed out, one that waits in a collective that the script calls comes before those that wait
    in a pass of a model, since these are the same on all ranks. Failures of the same second keep the order in which the
    agent noticed them.
    """
    return sorted(failures, key=lambda each: (_KINDS.index(each.kind), is_timeout_in_pass(each.output), each.time))


def is_timeout_in_pass(traceback: str) -> bool:
    """Whether a rank has waited too long over gloo, and not in a collective that a line of the script calls."""
    files = _TRACEBACK_FILE.findall(traceback)
    while files and files[-1].endswith(_COLLECTIVE_FILES):
        files.pop()
    return bool(GLOO_TIMEOUT.search(traceback)) and bool(files) and bool(_LIBRARY.match(files[-1]))


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
# Log lines of native code, for example about a process group that was not destroyed; they are not the cause.
_NATIVE_LOG = re.compile(r"^\[[WEF]\d{3,4} [\d:.]+ .*\]|^\[rank\d+\]:\[[WEF]\d")
_NATIVE_FRAME = re.compile(r"^frame #\d+: ")  # of C++
_CRASH_HEADER = "Fatal Python error: "  # of faulthandler, after what native code has printed
# What follows it, except for lines of the script.
_CRASH_NOISE = re.compile(
    rf"^(?:Current thread|Thread) 0x|^Extension modules: |^  File \"(?:{_LIBRARY.pattern}|<frozen )"
)
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
    watchdog = [line for line in text.splitlines() if _NATIVE_LOG.match(line) and NCCL_WATCHDOG.search(line)]
    ending = _without_libraries([line for line in lines if line.strip() and not _NATIVE_FRAME.match(line)])
    return "\n".join([*watchdog[:_MAX_WATCHDOG_LINES], *ending[-_MAX_LOG_LINES:]]), False


def read_failure(files: RankFiles, pid: int, code: int) -> Failure:
    """A rank that has failed just now: none was ended by the launcher yet."""
    crashed = is_crash(code)
    output, is_traceback = read_last_output(files, crashed)
    return Failure(files.rank, pid, code, 0.0, ended_by_launcher=False, output=output, is_traceback=is_traceback)


def is_crash(code: int) -> bool:
    """Whether a signal has ended a rank; Python ends itself by SIGINT, after a traceback."""
    return code < 0 and code != -signal.SIGINT


def _without_libraries(lines: list[str]) -> list[str]:
    """The lines of a log without the frames of libraries that faulthandler prints last if native code has crashed."""
    crash = max((index for index, line in enumerate(lines) if line.startswith(_CRASH_HEADER)), default=len(lines))
    return [line for index, line in enumerate(lines) if index <= crash or not _CRASH_NOISE.match(line)]


def read_stop_message(files: RankFiles) -> str:
    """Why a rank was stopped by a signal or a time limit, from its error file; empty if it wrote none."""
    kind, _, text = _read_error_file(files.error)[0].partition(": ")
    return text if kind == "StoppedEarly" else ""  # the exception of samestep.training.preemption


def last_traceback(lines: list[str]) -> list[str]:
    """The last traceback, including the exceptions that it was raised from, up to the last line; empty if none."""
    lines = [RANK_PREFIX.sub("", line) for line in lines]
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
