"""The record of submitted jobs: one line of JSON each in the user's state folder, and what each job noted itself."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from samestep.errors import LaunchError
from samestep.launch.sbatch import notes_of
from samestep.launch.slurm import JobState, ask

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
