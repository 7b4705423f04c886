"""Read the folder of a run: its starts, metrics, times, events, checkpoints and ledger, also of a live run."""

import json
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from socket import gethostname
from typing import Any, Final

import numpy as np

from samestep import __version__
from samestep.checkpoint.checkpoint_folder import is_lower_better, list_newest_first
from samestep.checkpoint.manifest import CorruptCheckpoint, read_manifest
from samestep.data.audit import AuditReport, audit
from samestep.environment.processes import process_runs
from samestep.environment.world import LAUNCHER_LINK
from samestep.errors import CheckpointError, LedgerError, ReportError
from samestep.loggers.loggers import METRICS_FILE, SUMMARY_FILE
from samestep.loggers.run_files import EVENTS_FILE, TIMES_FILE
from samestep.report.curves import Curve, Numbers, read_curves
from samestep.report.run_records import Record, read_events, read_launches, read_times

_TAIL_BYTES: Final = 65_536
_TAIL_LINES: Final = 20
_SILENT_SECONDS: Final = 60.0  # after which a run on another host, which writes every second, counts as ended


@dataclass(frozen=True)
class Start:
    """One start of the run: a process of rank 0 from its beginning to its end."""

    fields: Record  # of its event
    events: tuple[Record, ...]  # from this start to the next
    until: float  # when it ended, or wrote its last record

    @property
    def time(self) -> float:
        """When it began, in seconds since 1970."""
        return float(self.fields["time"])

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return int(self.fields["ranks"])

    @property
    def end(self) -> Record | None:
        """Its last event, unless it was killed or still runs."""
        return next((event for event in reversed(self.events) if event["event"] == "end"), None)

    @property
    def status(self) -> str:
        """The status of its end, "killed" or "running"."""
        if self.end is not None:
            return str(self.end["status"])
        return "running" if self._is_running else "killed"

    @property
    def first_step(self) -> int:
        """The first step that it trained."""
        return next((int(event["step"]) for event in self.events if event["event"] == "restored"), 0)

    def named(self, event: str) -> list[Record]:
        """Its events of one kind."""
        return [each for each in self.events if each["event"] == event]

    @property
    def _is_running(self) -> bool:
        if self.fields["host"] == gethostname():
            return process_runs(self.fields.get("pid", 0), self.fields.get("started_from_boot", -1.0))
        return time.time() - self.until < _SILENT_SECONDS


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was saved, or could not be; it may have been removed since."""

    name: str
    step: int
    time: float | None  # when it was complete
    size: int | None  # bytes
    seconds: float | None  # from the call to the published folder
    waited: float | None  # for which training has waited
    metric: tuple[str, float] | None
    exists: bool
    error: str | None = None


@dataclass(frozen=True, eq=False)
class RunData:
    """What the folder of a run says about it."""

    folder: Path
    starts: Sequence[Start]
    curves: dict[str, Curve]  # of each metric, in the order in which they were first logged
    epochs: int  # that have begun, as far as metrics say
    times: Sequence[Record]
    launches: Sequence[Record]  # events of the launchers of all nodes, by time
    summary: Record = field(default_factory=dict[str, Any])
    """summary.json of the last start that ended; empty if none did."""
    skipped: Sequence[int] = ()
    """Numbers of lines of metrics.jsonl that are not records."""

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.name or str(self.folder)

    @cached_property
    def attempts(self) -> list[Start]:
        """The starts as the launcher saw them, of a script without a Run: all ranks start and end together."""
        return _attempts(self.launches)

    @property
    def first(self) -> Start:
        """The first start."""
        return self.starts[0]

    @property
    def last(self) -> Start:
        """The last start."""
        return self.starts[-1]

    @cached_property
    def checkpoints(self) -> list[SavedCheckpoint]:
        """All checkpoints of the run that are known, by step."""
        saved = {Path(event["checkpoint"]).name: event for start in self.starts for event in start.named("checkpoint")}
        here = {path.name: path for folder in self._checkpoint_folders(saved.values()) for path in _list(folder)}
        found = [_from_event(name, event, name in here) for name, event in saved.items()]
        found += [each for name, path in here.items() if name not in saved and (each := _from_manifest(path))]
        return sorted(found, key=lambda each: (each.step, each.time or 0.0))

    @cached_property
    def audit(self) -> AuditReport | str | None:
        """The audit of the ledger, or why it cannot be read; None without a ledger."""
        if not (self.folder / "ledger").is_dir():
            return None
        try:
            return audit(self.folder)
        except LedgerError as error:
            return str(error)

    def _checkpoint_folders(self, saved: Iterable[Record]) -> set[Path]:
        return {self.folder, *(Path(event["checkpoint"]).parent for event in saved)}


@contextmanager
def reading(folder: Path) -> Generator[None]:
    """Raise ReportError for the run in `folder` if a record has values of unexpected types inside of its fields."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ReportError(
            f"{folder} has a record that samestep {__version__} cannot read ({type(error).__name__}: {error}): if no "
            "other program has written to its files, please report this"
        ) from error


def read_run(folder: str | Path) -> RunData:
    """Read the folder of a run, or that of its launcher; raises ReportError if it is neither."""
    path = find_run_folder(Path(folder))
    with reading(path):
        return _read_run(path)


def _read_run(path: Path) -> RunData:
    events = read_events(path / EVENTS_FILE)
    read = read_curves(path / METRICS_FILE)
    curves = read.by_name
    times = read_times(path / TIMES_FILE)
    written = [np.array([record["time"] for record in times]), *(curve.times for curve in curves.values())]
    starts = _starts(events, np.sort(np.concatenate(written)))
    launchers = {Path(each) for start in starts if (each := start.fields.get("launcher_folder"))} | {path}
    launches = [record for each in sorted(launchers) for record in read_launches(each)]
    if not starts and not launches and not curves:
        raise ReportError(f"{path} is not the folder of a run: it has neither {EVENTS_FILE} nor {METRICS_FILE}")
    summary = read_summary(path / SUMMARY_FILE)
    launches.sort(key=lambda event: event["time"])
    return RunData(path, starts, curves, read.epochs, times, launches, summary, read.skipped)


def read_last_values(folder: Path) -> RunData:
    """Read a run for a list of runs: if it has ended, its last values from summary.json, not the whole curves."""
    path = find_run_folder(folder)
    with reading(path):
        events, summary = read_events(path / EVENTS_FILE), read_summary(path / SUMMARY_FILE)
        starts = _starts(events, np.array([]))
        last = summary.get("metrics")
        if not starts or any(start.end is None for start in starts) or not last:
            return _read_run(path)
        step = max(0, int(summary.get("steps", 1)) - 1)
        ended = starts[-1].until
        curves = {
            name: Curve(np.array([step]), np.array([np.nan if value is None else float(value)]), np.array([ended]))
            for name, value in last.items()
        }
        return RunData(path, starts, curves, _last_epoch(path / METRICS_FILE) + 1, [], [], summary)


def _last_epoch(path: Path) -> int:
    """The last epoch that the end of a metrics.jsonl names; -1 if it names none."""
    if not path.is_file():
        return -1
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines()[-_TAIL_LINES:]
    found = -1
    for line in lines:
        with suppress(ValueError, TypeError):
            found = max(found, int(json.loads(line).get("epoch", -1)))
    return found


def find_run_folder(folder: Path) -> Path:
    """The folder that holds the files of a run: `folder`, or the one that the folder of a launcher links to."""
    if not folder.exists():
        raise ReportError(f"{folder} does not exist: pass the folder of a run, such as runs/train-20260131-093005")
    if not folder.is_dir():
        raise ReportError(f"{folder} is a file: pass the folder of a run, such as {folder.parent}")
    linked = folder / LAUNCHER_LINK
    has_own = any((folder / name).exists() for name in (EVENTS_FILE, METRICS_FILE))
    return linked.resolve() if not has_own and linked.is_dir() else folder.resolve()


def read_summary(path: Path) -> dict[str, Any]:
    """What summary.json contains; empty if there is none."""
    try:
        summary = json.loads(path.read_bytes())
    except (OSError, ValueError):  # the run has not ended, or a crash of the machine has cut the file off
        return {}
    return summary if isinstance(summary, dict) else {}


def _starts(events: Sequence[Record], written: Numbers) -> list[Start]:
    """The starts with their events; each lasts until its last record, by the times at which records were `written`."""
    begins = [index for index, event in enumerate(events) if event["event"] == "start"]
    found = list[Start]()
    for begin, end in zip(begins, [*begins[1:], len(events)], strict=False):
        own, later = tuple(events[begin:end]), events[end]["time"] if end < len(events) else np.inf
        last = int(np.searchsorted(written, later))
        until = max(own[-1]["time"], float(written[last - 1]) if last else 0.0)
        found.append(Start(own[0], own, until))
    return found


def _attempts(launches: Sequence[Record]) -> list[Start]:
    """One start per attempt of the launcher of the first node, which lasts until a failure or its launcher's end."""
    own = [event for event in launches if event["host"] == launches[0]["host"]]
    begins = [index for index, event in enumerate(own) if event["event"] in ("launch", "attempt")]
    launch: Record = {}
    found = list[Start]()
    for begin, stop in zip(begins, [*begins[1:], len(own)], strict=False):
        first, *later = own[begin:stop]
        if first["event"] == "launch":
            launch = first
            continue
        end = next((event for event in later if event["event"] in ("failure", "stopped", "end")), None)
        events = [first] if end is None else [first, {**end, "event": "end", "status": _end_of_attempt(end)}]
        until = end or own[stop - 1]
        found.append(Start({**launch, **first, "ranks": first["world_size"]}, tuple(events), float(until["time"])))
    return found


def _end_of_attempt(event: Record) -> str:
    if event["event"] == "end":
        return "failed" if event["code"] else "finished"
    return "failed" if event["event"] == "failure" else "stopped"


def best_checkpoints(found: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """For each metric that `keep_best` compares, the checkpoint with the best value; the oldest if several have it."""
    rated = [(each.metric, each) for each in found if each.metric is not None and not each.error]
    best = dict[str, tuple[float, SavedCheckpoint]]()
    for (metric, value), each in rated:
        signed = value if is_lower_better(metric) else -value
        if metric not in best or signed < best[metric][0]:
            best[metric] = signed, each
    return [each for _, each in best.values()]


def _list(folder: Path) -> list[Path]:
    try:
        return [found.path for found in list_newest_first(folder)]
    except (CheckpointError, OSError):  # it was removed, or is on a disk of another machine
        return []


def _from_event(name: str, event: Record, exists: bool) -> SavedCheckpoint:
    metric = event.get("metric")
    return SavedCheckpoint(
        name, event["step"], event["time"], event["bytes"], event["seconds"], event["waited_seconds"],
        tuple(metric) if metric else None, exists, event.get("error"),
    )  # fmt: skip


def _from_manifest(path: Path) -> SavedCheckpoint | None:
    """A checkpoint without an event: the run was killed after it was complete, or an older samestep has saved it."""
    try:
        manifest = read_manifest(path)
    except CorruptCheckpoint as error:
        return SavedCheckpoint(path.name, 0, None, None, None, None, None, exists=True, error=str(error))
    size = sum(file.bytes for file in manifest.files.values())
    return SavedCheckpoint(path.name, manifest.step, None, size, None, None, manifest.metric, exists=True)
