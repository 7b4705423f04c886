"""Speaking to SLURM: submit a file, ask how a job is."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import LaunchError

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
