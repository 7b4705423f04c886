"""What has become of a run, in words: finished, failed with its cause, preempted, killed, or running."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from samestep.messages import format_span, plain_text
from samestep.report.curves import largest_step
from samestep.report.run_data import RunData, Start
from samestep.report.run_records import Record

_STATUSES: Final = ("finished", "failed", "preempted", "stopped")  # of an end, and in summary.json
_LAUNCHER_SECONDS: Final = 60.0  # that a launcher may need to report a failure after rank 0 has ended
_PAST: Final = {"killed": "was killed", "preempted": "was preempted", "stopped": "was stopped", "running": "was killed"}


@dataclass(frozen=True)
class Verdict:
    """The state of a run."""

    status: str  # "finished", "failed", "preempted", "stopped", "killed", "running" or "unknown"
    sentence: str  # what has become of it; begins with the status
    cause: str = ""  # why, in one line

    @property
    def text(self) -> str:
        """All of it."""
        return f"{self.sentence} {self.cause}".strip()

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return self.status in ("finished", "running", "unknown")


@dataclass(frozen=True)
class FailureRecord:
    """A failure of one start, or of one launch."""

    time: float
    cause: str  # one line
    report: str  # what the launcher has printed, or the traceback of rank 0
    logs: str = ""  # the folder of the logs of all ranks


def describe_run(run: RunData) -> Verdict:
    """The verdict on a run."""
    if not run.starts:
        return _without_run(run)
    last, again = run.last, _restarts_text(run.starts)
    done = f"{_steps_text(steps_done(run))} in {format_span(active_seconds(run))}"
    status, word = last.status, last.status.capitalize()
    if status == "running":
        return Verdict(status, f"Running: {done} so far.{again}")
    if status == "preempted":
        signal = next((event["cause"] for event in reversed(last.named("preempted"))), "a signal")
        return Verdict(status, f"Preempted by {signal} after {done}.{again}", "Start it again to resume.")
    if status == "stopped":
        return Verdict(status, f"Stopped by a signal after {done}; nothing was saved.{again}")
    found = failures(run)
    cause = found[-1].cause if status != "finished" and found and found[-1].time >= last.time else ""
    if status == "killed":
        cause = cause or "Rank 0 wrote no end: it was killed, ran out of memory, or its node went down."
    return Verdict(status, f"{word} after {done}.{again}", cause)


def failures(run: RunData) -> list[FailureRecord]:
    """All failures, in the order in which they happened: what the launcher says of them, or else what rank 0 says."""
    found = [_of_launcher(event) for event in run.launches if event["event"] == "failure"]
    for start in run.starts:
        known = any(start.time <= each.time <= start.until + _LAUNCHER_SECONDS for each in found)
        if start.end is not None and "error" in start.end and not known:
            found.append(FailureRecord(start.end["time"], _first_line(start.end["error"]), start.end["traceback"]))
    return sorted(found, key=lambda each: each.time)


def steps_done(run: RunData) -> int:
    """The optimizer steps that are done."""
    ends = [int(start.end["steps"]) for start in run.starts if start.end is not None]
    logged = largest_step([curve for name, curve in run.curves.items() if name.startswith("train/")])
    return max([*ends, 0 if logged is None else logged + 1])


def active_seconds(run: RunData) -> float:
    """How long the run was active, without the time between its starts."""
    return sum(start.until - start.time for start in run.starts or run.attempts)


def rank_hours(run: RunData) -> float:
    """Hours of all ranks: GPU-hours if they have GPUs."""
    return sum((start.until - start.time) * start.ranks for start in run.starts or run.attempts) / 3600


def has_gpus(run: RunData) -> bool:
    """Whether its ranks have GPUs."""
    has_nccl = any(start.fields["backend"] == "nccl" for start in run.starts)
    return has_nccl or any("gpu_percent" in record for record in run.times[:1])


def _steps_text(steps: int) -> str:
    return f"{steps:,} step{'s' * (steps != 1)}"


def _restarts_text(starts: Sequence[Start]) -> str:
    """How earlier starts ended, and on how many ranks the run continued; begins with a space."""
    if len(starts) == 1:
        return ""
    ended = Counter(_PAST.get(start.status, start.status) for start in starts[:-1])
    how = " and ".join(f"{text} {count} times" if count > 1 else text for text, count in ended.items())
    sizes = [size for size, _ in groupby(start.ranks for start in starts)]
    now = f" on {sizes[-1]} rank{'s' * (sizes[-1] != 1)}"
    on = f"{now} instead of {', '.join(map(str, sizes[:-1]))}" if len(sizes) > 1 else ""
    again = "resumed" if any(start.named("restored") for start in starts[1:]) else "started again"
    return f" Before, it {how}; it {again}{on}."


def _of_launcher(event: Record) -> FailureRecord:
    return FailureRecord(event["time"], _first_line(event["cause"]), event["report"], event.get("logs", ""))


def _first_line(text: str) -> str:
    return next((line.strip() for line in plain_text(text).splitlines() if line.strip()), "")


def _without_run(run: RunData) -> Verdict:
    """The verdict on a script without a Run that `samestep run` has started, or on metrics without events."""
    ends = [event for event in run.launches if event["event"] == "end"]
    if ends and ends[-1]["code"]:
        found = failures(run)
        return Verdict("failed", f"Failed with exit code {ends[-1]['code']}.", found[-1].cause if found else "")
    seconds = format_span(active_seconds(run))
    script = "The script has not created a Run, so only what its launcher saw is known."
    if ends:
        return Verdict("finished", f"Finished after {seconds}.", script)
    if run.launches:
        status = run.attempts[-1].status if run.attempts else "unknown"
        return Verdict(
            status, {"running": f"Running for {seconds} so far."}.get(status, f"{status.capitalize()}."), script
        )
    status = str(run.summary.get("status"))
    status = status if status in _STATUSES else "unknown"
    return Verdict(
        status,
        f"{status.capitalize()} after {_steps_text(steps_done(run))}.",
        "Only its metrics are known: events.jsonl is damaged, or an older version of samestep has written them.",
    )
