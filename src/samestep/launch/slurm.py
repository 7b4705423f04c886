"""Following a job: its log as it grows, until the job has ended."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from samestep.errors import LaunchError
from samestep.launch.sbatch import log_of, notes_of

UNREACHABLE = "UNREACHABLE"
"""The state of a job while SLURM does not answer: a word of ours, not of SLURM's."""
_PATIENCE_SECONDS = 60
# Of `scontrol show job`; each line is matched from its start, since a job's name may hold any text but a line break.
_STATE = re.compile(r"^\s+JobState=(\S+) Reason=(\S+)", re.MULTILINE)
_ENDING = re.compile(r"^\s+Requeue=.* Restarts=(\d+) .*ExitCode=(\d+):(\d+)", re.MULTILINE)
_LIVING = {
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "STOPPED",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "SPECIAL_EXIT",
    "RESIZING",
    "SIGNALING",
    "STAGE_OUT",
    UNREACHABLE,
}


@dataclass(frozen=True)
class JobState:
    """How a job is, in SLURM's words."""

    state: str
    """Such as PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT; UNREACHABLE while SLURM does not answer."""
    reason: str = ""
    """Why it waits, or why it ended so; empty where SLURM gives no reason."""
    code: int = 0
    """Its exit code; 128 and the signal where one ended it."""
    restarts: int = 0
    """How often it was requeued."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will come of it."""
        return self.state not in _LIVING

    @property
    def exit_code(self) -> int:
        """What a shell would call it: 0 only for a job that has completed."""
        return self.code or (0 if self.state == "COMPLETED" else 1)


def check_sbatch() -> None:
    """Complain where there is no SLURM to submit to."""
    if shutil.which("sbatch") is None:
        raise LaunchError(
            "sbatch is not on this machine: submit from a login node of the cluster, type --dry-run to see the file, "
            "or `samestep run` to train here"
        )


def submit(file: Path) -> str:
    """Hand a file to sbatch; gives the job's id."""
    told = _call("sbatch", "--parsable", str(file))
    if told.returncode != 0:
        raise LaunchError(f"sbatch did not take {file}: {_words(told)}")
    return told.stdout.strip().partition(";")[0]  # behind the semicolon: the cluster's name, where there are several


def ask(job: str, silent: dict[str, JobState]) -> JobState | None:
    """How a job is, from the controller, or from accounting once the controller has forgotten it; None if both have.

    The controller forgets a job some minutes after its end, and not every cluster keeps accounts. Which of them does
    not answer is kept in `silent`, and is not asked again: it takes its time.
    """
    told = _ask("scontrol", silent, "show", "job", job)
    if not isinstance(told, subprocess.CompletedProcess):
        return told
    if told.returncode == 0:
        return read_scontrol(told.stdout)
    if "Invalid job id" in told.stderr:
        return _ask_accounting(job, silent)
    silent["scontrol"] = JobState(UNREACHABLE, _words(told))
    return silent["scontrol"]


def read_scontrol(text: str) -> JobState | None:
    r"""What `scontrol show job` says of one job; None where it says nothing of the kind.

    >>> read_scontrol("JobId=7\n   JobState=RUNNING Reason=None X\n   Requeue=1 Restarts=2 X ExitCode=0:0")
    JobState(state='RUNNING', reason='', code=0, restarts=2)
    """
    state, ending = _STATE.search(text), _ENDING.search(text)
    if state is None or ending is None:
        return None
    reason = "" if state[2] == "None" else state[2]
    return JobState(state[1], reason, _code(ending[2], ending[3]), int(ending[1]))


def read_sacct(text: str) -> JobState | None:
    """What `sacct --parsable2 --format=State,ExitCode,Restarts` says of one job; None where it says nothing.

    >>> read_sacct("CANCELLED by 1000|0:15|0")
    JobState(state='CANCELLED', reason='by 1000', code=143, restarts=0)
    """
    fields = text.strip().splitlines()[-1].split("|") if text.strip() else []
    if len(fields) < 3:
        return None
    state, _, reason = fields[0].partition(" ")
    code, _, signal = fields[1].partition(":")
    return JobState(state, reason, _code(code, signal), int(fields[2]) if fields[2].isdecimal() else 0)


def _ask_accounting(job: str, silent: dict[str, JobState]) -> JobState | None:
    options = ["--noheader", "--parsable2", "--allocations", "--format=State,ExitCode,Restarts"]
    told = _ask("sacct", silent, "--jobs", job, *options)
    if not isinstance(told, subprocess.CompletedProcess):
        return told
    return read_sacct(told.stdout) if told.returncode == 0 else None


def _ask(
    program: str, silent: dict[str, JobState], *arguments: str
) -> "subprocess.CompletedProcess[str] | JobState | None":
    """What a program of SLURM's answers; UNREACHABLE where it does not in time, None where it is not here."""
    if program in silent or shutil.which(program) is None:
        return silent.get(program)
    try:
        return _call(program, *arguments)
    except LaunchError as error:
        silent[program] = JobState(UNREACHABLE, str(error))
        return silent[program]


def _code(code: str, signal: str) -> int:
    return int(code) or (128 + int(signal) if int(signal) else 0)


def _words(told: subprocess.CompletedProcess[str]) -> str:
    """What a program complained of, in one line."""
    lines = [line.partition(": error: ")[2] or line for line in told.stderr.splitlines() if line.strip()]
    return "; ".join(lines) or f"exit code {told.returncode}, without a word"


def _call(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"{command[0]} has not answered for {_PATIENCE_SECONDS} s: the cluster may be busy, try again later"
        ) from error


# What SLURM has forgotten: how much of its end the job could note.
_STOPPED = "cancelled or out of time; SLURM has forgotten which"
_FORGOTTEN = JobState("UNKNOWN", "SLURM has forgotten it, and it noted no end")


@dataclass(frozen=True)
class Submitted:
    """One job as it was submitted."""

    job: str
    """SLURM's id."""
    name: str
    """SLURM's name."""
    submitted: str
    """When, as ISO 8601 with the zone."""
    nodes: int
    """How many nodes it asked for."""
    folder: str
    """The run's folder, with the log and the notes."""
    file: str
    """What sbatch got."""
    command: tuple[str, ...]
    """Script and arguments."""


def record_path(environ: Mapping[str, str]) -> Path:
    """Where the record lies: $XDG_STATE_HOME/samestep/jobs.jsonl, by default under ~/.local/state.

    >>> str(record_path({"XDG_STATE_HOME": "/home/ada/.state"}))
    '/home/ada/.state/samestep/jobs.jsonl'
    """
    state = environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    return folder / "samestep" / "jobs.jsonl"


def remember(path: Path, submitted: Submitted) -> None:
    """Add a job to the record."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(submitted)) + "\n")
    except OSError as error:
        raise LaunchError(
            f"job {submitted.job} is submitted, but {path} cannot be written ({error.strerror}), so `samestep jobs` "
            "will not list it: set XDG_STATE_HOME to a folder that can"
        ) from error


def read_record(path: Path) -> list[Submitted]:
    """The jobs of the record, oldest first; a line that a crash left unfinished is passed over."""
    names = {field.name for field in fields(Submitted)}
    return [
        Submitted(
            job=line["job"],
            name=line["name"],
            submitted=line["submitted"],
            nodes=line["nodes"],
            folder=line["folder"],
            file=line["file"],
            command=tuple(line["command"]),
        )
        for line in _lines(path)
        if names <= line.keys()
    ]


def how_are(jobs: Sequence[Submitted]) -> list[JobState]:
    """How each of these jobs is; a program of SLURM's that does not answer is waited for once, not for each of them."""
    silent: dict[str, JobState] = {}
    return [how_is(each, silent) for each in jobs]


def how_is(submitted: Submitted, silent: dict[str, JobState] | None = None) -> JobState:
    """How a job is or how it ended: its own note of its end, or what SLURM says, as `ask` has it."""
    notes = _lines(notes_of(Path(submitted.folder), submitted.job))
    last = notes[-1] if notes else {"event": "", "code": 0, "restart": 0}
    code, restarts = int(last["code"]), int(last["restart"])
    if last["event"] == "ended":
        return JobState("FAILED" if code else "COMPLETED", "", code, restarts)
    # Whether a job that was stopped goes on later, SLURM alone knows.
    return ask(submitted.job, {} if silent is None else silent) or (
        JobState("ENDED", _STOPPED, code, restarts) if last["event"] == "stopped" else _FORGOTTEN
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    parsed = [_parse(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in parsed if line is not None]


def _parse(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:  # the last words of a machine that went down
        return None
    return line if isinstance(line, dict) else None


_PAUSE = 1.0  # seconds between two questions to SLURM, which others ask too
_LATE = 2.0  # seconds in which the last lines of a log may still come over a network drive
_CHUNK = 1 << 16


class LogTail:
    """Reads on in a file that another writes; it may not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def rest(self) -> bytes:
        """What has come since the last call."""
        if not self._path.exists():
            return b""
        with self._path.open("rb") as file:
            file.seek(self._read)
            text = file.read(_CHUNK)
            self._read = file.tell()
        return text


def follow(submitted: Submitted, show: Callable[[bytes], None], say: Callable[[str], None]) -> JobState:
    """Show a job's log until it ends, and say when and why it waits; gives how it ended."""
    tail = LogTail(log_of(Path(submitted.folder), submitted.job))
    told = ""
    while True:
        state = how_is(submitted)
        _show_rest(tail, show)
        if state.ended:
            _wait_for_last_lines(tail, show)
            return state
        waits = state.reason if state.state in ("PENDING", UNREACHABLE) else ""
        if waits not in (told, ""):
            say(f"samestep: job {submitted.job} waits: {waits}")
        told = waits
        time.sleep(_PAUSE)


def _show_rest(tail: LogTail, show: Callable[[bytes], None]) -> int:
    shown = 0
    while text := tail.rest():
        show(text)
        shown += len(text)
    return shown


def _wait_for_last_lines(tail: LogTail, show: Callable[[bytes], None]) -> None:
    """A log on a network drive may lag behind the controller's word, so wait until nothing more comes."""
    until = time.monotonic() + _LATE
    while time.monotonic() < until:
        if _show_rest(tail, show):
            until = time.monotonic() + _LATE
        time.sleep(_LATE / 10)
