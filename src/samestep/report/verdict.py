"""What has become of a run, in words: finished, failed with its cause, preempted, killed, or running."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.messages import format_duration, plain_text
from samestep.report.curves import largest_step
from samestep.report.run_data import RunData, Start
from samestep.report.run_records import Record


@dataclass(frozen=True)
class Verdict:
    """The state of a run."""

    status: str  # "finished", "failed", "preempted", "stopped", "killed" or "running"
    text: str  # a sentence about it

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return self.status in ("finished", "running")


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
    steps = steps_done(run)
    done = f"{steps:,} steps in {format_duration(active_seconds(run))}{again}"
    if last.status == "finished":
        return Verdict("finished", f"Finished: {done}.")
    if last.status == "running":
        return Verdict("running", f"Running: {done} so far.")
    if last.status == "preempted":
        cause = next((event["cause"] for event in reversed(last.named("preempted"))), "a signal")
        return Verdict("preempted", f"Preempted ({cause}) after {done}. Start it again to resume.")
    if last.status == "stopped":
        return Verdict("stopped", f"Stopped by a signal after {done}; nothing was saved.")
    found = failures(run)
    cause = found[-1].cause if found and found[-1].time >= last.time else ""
    if last.status == "failed":
        return Verdict("failed", f"Failed after {done}. {cause}".strip())
    reason = cause or "Rank 0 wrote no end: it was killed, ran out of memory, or its node went down."
    return Verdict("killed", f"Killed after {done}. {reason}")


def failures(run: RunData) -> list[FailureRecord]:
    """All failures, in the order in which they happened: what the launcher says of them, or else what rank 0 says."""
    found = [_of_launcher(event) for event in run.launches if event["event"] == "failure"]
    for start in run.starts:
        known = any(start.time <= each.time <= start.until + _LAUNCHER_SECONDS for each in found)
        if start.end is not None and "error" in start.end and not known:
            found.append(FailureRecord(start.end["time"], _first_line(start.end["error"]), start.end["traceback"]))
    return sorted(found, key=lambda each: each.time)


_LAUNCHER_SECONDS = 60.0  # that a launcher may need to report a failure after rank 0 has ended


def steps_done(run: RunData) -> int:
    """The optimizer steps that are done."""
    ends = [int(start.end["steps"]) for start in run.starts if start.end is not None]
    logged = largest_step([curve for name, curve in run.curves.items() if name.startswith("train/")])
    return max([*ends, 0 if logged is None else logged + 1]) if ends or logged is not None else 0


def active_seconds(run: RunData) -> float:
    """How long the run was active, without the time between its starts."""
    return sum(start.until - start.time for start in run.starts)


def rank_hours(run: RunData) -> float:
    """Hours of all ranks: GPU-hours if they have GPUs."""
    return sum((start.until - start.time) * start.ranks for start in run.starts) / 3600


def has_gpus(run: RunData) -> bool:
    """Whether its ranks have GPUs."""
    return any(
        start.fields["backend"] == "nccl" or "gpu_percent" in record for start in run.starts for record in run.times[:1]
    )


def _restarts_text(starts: Sequence[Start]) -> str:
    if len(starts) == 1:
        return ""
    sizes = list(dict.fromkeys(start.ranks for start in starts))
    on = f", on {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} ranks" if len(sizes) > 1 else ""
    ended = Counter(start.status for start in starts[:-1])
    how = ", ".join(f"{status} {count} times" if count > 1 else status for status, count in ended.items())
    return f", in {len(starts)} starts{on} ({how} before)"


def _of_launcher(event: Record) -> FailureRecord:
    return FailureRecord(event["time"], _first_line(event["cause"]), event["report"], event.get("logs", ""))


def _first_line(text: str) -> str:
    return next((line.strip() for line in plain_text(text).splitlines() if line.strip()), "")


def _without_run(run: RunData) -> Verdict:
    """The verdict on a script without a Run that `samestep run` has started."""
    if not run.launches:
        return Verdict("running", "It has metrics and no events: an older version of samestep has written them.")
    ends = [event for event in run.launches if event["event"] == "end"]
    if not ends:
        return Verdict("running", "The launcher is running, or was killed; the script has not created a Run.")
    code = ends[-1]["code"]
    found = failures(run)
    if code:
        return Verdict("failed", f"Failed with exit code {code}. {found[-1].cause if found else ''}".strip())
    return Verdict("finished", "Finished; the script has not created a Run, so only the launcher's events are known.")
