"""Submitted SLURM jobs: hand a script to sbatch, keep a list of jobs, query their states, follow a job's log."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from samestep.environment.world import home_folder
from samestep.errors import LaunchError
from samestep.launch.sbatch import events_path, log_path

UNREACHABLE = "UNREACHABLE"
"""The state of a job while SLURM does not answer; not one of SLURM's own states."""
_TIMEOUT_SECONDS = 60
_POLL_SECONDS = 1.0  # between two queries, since other users query SLURM too
_LOG_DELAY_SECONDS = 2.0  # by which the last lines of a log may arrive late on a network drive
_CHUNK = 1 << 16
# Output of `scontrol show job`; matched from the start of a line, since a job's name may contain any other text.
_STATE = re.compile(r"^\s+JobState=(\S+) Reason=(\S+)", re.MULTILINE)
_EXIT = re.compile(r"^\s+Requeue=.* Restarts=(\d+) .*ExitCode=(\d+):(\d+)", re.MULTILINE)
_ACTIVE_STATES = frozenset(
    "PENDING CONFIGURING RUNNING COMPLETING SUSPENDED STOPPED REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT RESIZING "
    f"SIGNALING STAGE_OUT {UNREACHABLE}".split()
)


@dataclass(frozen=True)
class SubmittedJob:
    """One submitted job."""

    job_id: str
    name: str
    submitted_at: str  # ISO 8601 with the time zone
    nodes: int
    folder: str  # of the run, with the log
    sbatch_file: str  # the script that sbatch got
    command: tuple[str, ...]


@dataclass(frozen=True)
class JobState:
    """State of a job in SLURM's terms."""

    state: str  # such as PENDING, RUNNING, COMPLETED, FAILED, TIMEOUT; UNREACHABLE while SLURM does not answer
    reason: str = ""  # why it waits or has ended, if SLURM gives a reason
    code: int = 0  # 128 plus the signal if one ended it
    restarts: int = 0  # how often it was requeued

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.state not in _ACTIVE_STATES

    @property
    def exit_code(self) -> int:
        """The exit code; 0 only for a job that has completed."""
        return self.code or (0 if self.state == "COMPLETED" else 1)


def check_sbatch() -> None:
    """Raise if sbatch is not installed here."""
    if shutil.which("sbatch") is None:
        raise LaunchError(
            "sbatch is not installed on this machine: submit from a login node of the cluster, pass --dry-run to print "
            "the script, or use `samestep run` to train here"
        )


def submit(path: Path) -> str:
    """Hand a script to sbatch; returns the job's id."""
    done = _call("sbatch", "--parsable", str(path))
    if done.returncode != 0:
        raise LaunchError(f"sbatch rejected {path}: {_error_line(done)}")
    return done.stdout.strip().partition(";")[0]  # with several clusters, `;CLUSTER` follows


def job_list_path(environ: Mapping[str, str]) -> Path:
    """The file that lists the submitted jobs: $XDG_STATE_HOME/samestep/jobs.jsonl, by default under ~/.local/state.

    >>> str(job_list_path({"XDG_STATE_HOME": "/home/ada/.state"}))
    '/home/ada/.state/samestep/jobs.jsonl'
    """
    state, home = Path(environ.get("XDG_STATE_HOME", "")), home_folder(environ)
    if not state.is_absolute() and home is None:
        raise LaunchError(
            f"your user id {os.getuid()} has no home directory for the list of submitted jobs: set XDG_STATE_HOME or "
            "HOME to a writable folder"
        )
    folder = state if state.is_absolute() or home is None else home / ".local" / "state"
    return folder / "samestep" / "jobs.jsonl"


def add_to_job_list(path: Path, job: SubmittedJob) -> None:
    """Append a job to the list."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(job)) + "\n")
    except OSError as error:
        raise LaunchError(
            f"job {job.job_id} is submitted, but {path} cannot be written ({error.strerror}), so `samestep jobs` will "
            "not list it: set XDG_STATE_HOME to a writable folder"
        ) from error


def read_job_list(path: Path) -> tuple[list[SubmittedJob], int]:
    """The listed jobs, oldest first, and the number of lines that are not jobs, such as one left by a crash."""
    if path.exists() and not path.is_file():
        raise LaunchError(f"the list of submitted jobs {path} is not a file: remove it")
    try:
        lines = _read_json_lines(path)
    except OSError as error:
        raise LaunchError(
            f"the list of submitted jobs {path} cannot be read ({error.strerror}): change its permissions, or set "
            "XDG_STATE_HOME to another folder"
        ) from error
    jobs = [job for line in lines if (job := _read_job(line)) is not None]
    return jobs, len(lines) - len(jobs)


def _read_job(line: Mapping[str, Any]) -> SubmittedJob | None:
    """The job of a line, which another version may have written; None if it is not one."""
    values: dict[str, Any] = {field.name: line.get(field.name) for field in fields(SubmittedJob)}
    nodes, command, submitted_at = values.pop("nodes"), values.pop("command"), values["submitted_at"]
    texts: list[object] = [*values.values(), *(command if isinstance(command, list) else [None])]
    try:
        datetime.fromisoformat(submitted_at)
    except (TypeError, ValueError):
        return None
    if not all(isinstance(text, str) for text in texts) or not isinstance(nodes, int):
        return None
    job = SubmittedJob(nodes=nodes, command=tuple(cast("list[str]", command)), **values)
    return job if re.fullmatch(r"[\w.+][\w.+-]*", job.job_id) else None


class StateQuery:
    """Queries the states of jobs; a SLURM program that does not answer is called once, not once per job."""

    def __init__(self) -> None:
        self._unreachable: dict[str, JobState] = {}

    def state(self, job: SubmittedJob) -> JobState:
        """The state that the job recorded itself when it ended, or else what SLURM reports."""
        events: list[dict[str, Any]] = []
        with suppress(OSError):  # a folder that is not readable any more: SLURM may know the state
            events = [event for event in _read_json_lines(events_path(Path(job.folder), job.job_id)) if event]
        last = events[-1] if events else {}
        event, code, restarts = last.get("event"), last.get("code", 0), last.get("restart", 0)
        if not isinstance(code, int) or not isinstance(restarts, int):  # not written by the job
            event, code, restarts = "", 0, 0
        if event == "ended":
            return JobState("FAILED" if code else "COMPLETED", "", code, restarts)
        # Only SLURM knows whether a stopped job will be requeued.
        if (state := self._query(job.job_id)) is not None:
            return state
        if event == "stopped":
            return JobState("ENDED", "cancelled or timed out; SLURM has no record of it any more", code, restarts)
        return JobState("UNKNOWN", "SLURM has no record of it any more, and it recorded no end")

    def _query(self, job_id: str) -> JobState | None:
        """Query the controller, which drops a job minutes after its end, then accounting, which may not be set up."""
        columns = ["--noheader", "--parsable2", "--allocations", "--format=State,ExitCode,Restarts"]
        for parse, program, *arguments in (
            (parse_scontrol, "scontrol", "show", "job", job_id),
            (parse_sacct, "sacct", "--jobs", job_id, *columns),
        ):
            if program in self._unreachable or shutil.which(program) is None:
                return self._unreachable.get(program)
            try:
                done = _call(program, *arguments)
                if done.returncode == 0:
                    return parse(done.stdout)
                if program == "scontrol" and "Invalid job id" not in done.stderr:
                    raise LaunchError(_error_line(done))
            except LaunchError as error:
                self._unreachable[program] = JobState(UNREACHABLE, str(error))
                return self._unreachable[program]
        return None


def parse_scontrol(text: str) -> JobState | None:
    r"""The state in the output of `scontrol show job`; None if there is none.

    >>> parse_scontrol("JobId=7\n   JobState=RUNNING Reason=None X\n   Requeue=1 Restarts=2 X ExitCode=0:0")
    JobState(state='RUNNING', reason='', code=0, restarts=2)
    """
    state, end = _STATE.search(text), _EXIT.search(text)
    if state is None or end is None:
        return None
    return JobState(state[1], "" if state[2] == "None" else state[2], _exit_code(end[2], end[3]), int(end[1]))


def parse_sacct(text: str) -> JobState | None:
    """The state in the output of `sacct --parsable2 --format=State,ExitCode,Restarts`; None if there is none.

    >>> parse_sacct("CANCELLED by 1000|0:15|0")
    JobState(state='CANCELLED', reason='by 1000', code=143, restarts=0)
    """
    columns = text.strip().splitlines()[-1].split("|") if text.strip() else []
    if len(columns) < 3:
        return None
    state, _, reason = columns[0].partition(" ")
    code, _, signal = columns[1].partition(":")
    return JobState(state, reason, _exit_code(code, signal), int(columns[2]) if columns[2].isdecimal() else 0)


def _exit_code(code: str, signal: str) -> int:
    return int(code) or (128 + int(signal) if int(signal) else 0)


def _call(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"{command[0]} did not answer within {_TIMEOUT_SECONDS} s: the cluster may be busy; try again later"
        ) from error


def _error_line(done: subprocess.CompletedProcess[str]) -> str:
    """The errors that a program printed, in one line."""
    lines = [line.partition(": error: ")[2] or line for line in done.stderr.splitlines() if line.strip()]
    return "; ".join(lines) or f"exit code {done.returncode}, without a message"


def _read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, if it exists; empty ones for lines that are not objects, as after a crash."""
    objects: list[dict[str, Any]] = []
    for line in filter(bytes.strip, path.read_bytes().splitlines() if path.is_file() else []):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):  # ValueError: also numbers of thousands of digits
            value = None
        objects.append(value if isinstance(value, dict) else {})
    return objects


def follow(job: SubmittedJob, show: Callable[[bytes], None], echo: Callable[[str], None]) -> JobState:
    """Show a job's log and why it waits, until it ends; returns its final state."""
    log, position, last_reason = log_path(Path(job.folder), job.job_id), 0, ""
    while not (state := StateQuery().state(job)).ended:
        position = show_log(log, position, show)
        reason = state.reason if state.state in ("PENDING", UNREACHABLE) else ""
        if reason not in (last_reason, ""):
            echo(f"samestep: job {job.job_id} is waiting: {reason}")
        last_reason = reason
        time.sleep(_POLL_SECONDS)
    # The log may arrive later than the state, so wait until nothing new arrives.
    deadline = time.monotonic() + _LOG_DELAY_SECONDS
    while time.monotonic() < deadline:
        if (end := show_log(log, position, show)) > position:
            position, deadline = end, time.monotonic() + _LOG_DELAY_SECONDS
        time.sleep(_LOG_DELAY_SECONDS / 10)
    return state


def show_log(log: Path, position: int, show: Callable[[bytes], None]) -> int:
    """Show what was written to the log, which may not exist yet, after `position`; returns the new position."""
    if not log.exists():
        return position
    with log.open("rb") as file:
        file.seek(position)
        while text := file.read(_CHUNK):
            show(text)
        return file.tell()
