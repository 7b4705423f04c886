"""What `samestep runs` and `samestep report --json` say about runs, as plain JSON values."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from samestep.loggers.loggers import METRICS_FILE
from samestep.loggers.run_files import EVENTS_FILE, WAIT_PREFIX
from samestep.report.chart_data import find_differences
from samestep.report.facts import facts_of, last_metrics
from samestep.report.page import run_names
from samestep.report.run_data import RunData, find_run_folder
from samestep.report.run_records import LAUNCHER_EVENTS
from samestep.report.time_shares import PARTS, sum_times
from samestep.report.verdict import active_seconds, describe_run, failures, rank_hours, steps_done

_DEEPEST: Final = 3  # folders below the one that is searched


def find_runs(folder: Path) -> list[Path]:
    """The folders of runs at or below `folder`, each once; those of a run's checkpoints and logs are not searched.

    The folder of a launcher is replaced by that of the run to which it links.
    """
    return sorted({find_run_folder(each) for each in _find(folder, _DEEPEST)})


def _find(folder: Path, deeper: int) -> Iterator[Path]:
    if any((folder / name).is_file() for name in (EVENTS_FILE, METRICS_FILE)) or any(
        (folder / "logs").glob(LAUNCHER_EVENTS)
    ):
        yield folder
    elif deeper:
        for each in folder.iterdir():
            if each.is_dir() and not each.is_symlink() and not each.name.startswith("."):
                yield from _find(each, deeper - 1)


def describe_row(run: RunData) -> dict[str, Any]:
    """A row of `samestep runs`."""
    verdict = describe_run(run)
    return {
        "name": run.name,
        "folder": str(run.folder),
        "status": verdict.status,
        "verdict": verdict.text,
        "started": run.first.time if run.starts else run.launches[0]["time"] if run.launches else None,
        "seconds": round(active_seconds(run), 3),
        "starts": len(run.starts),
        "ranks": started[-1].ranks if (started := run.starts or run.attempts) else None,
        "rank_hours": round(rank_hours(run), 6),
        "steps": steps_done(run),
        "epochs": run.epochs,
        "metrics": _strict(last_metrics(run)),
    }


def describe_json(run: RunData) -> dict[str, Any]:
    """What the page says about a run."""
    times, report = sum_times(run.times), run.audit
    return {
        **describe_row(run),
        "facts": facts_of(run),
        "time": None
        if times is None
        else {
            "steps": times.steps,
            "step_seconds": times.step_seconds,
            "shares": {part: round(times.share(part), 6) for part in PARTS},
        },
        "audit": None if report is None else report if isinstance(report, str) else report.verdict,
        "checkpoints": [asdict(each) for each in run.checkpoints],
        "failures": [asdict(each) for each in failures(run)],
        "warnings": [event for start in run.starts for event in start.named("warning")],
    }


def describe_runs_json(runs: Sequence[RunData]) -> dict[str, Any]:
    """One run, or several with their differences from the first."""
    names = run_names(runs)
    described = [{**describe_json(run), "name": name} for name, run in zip(names, runs, strict=True)]
    compared = [
        {
            "metric": metric,
            "run": names[number],
            "steps": len(each.steps),
            "largest": each.largest if math.isfinite(each.largest) else None,
            "relative": each.relative if math.isfinite(each.relative) else None,
            "step": each.step,
            "relative_step": each.relative_step,
        }
        for metric, number, each in find_differences(runs)
    ]
    return {"runs": described, "differences": compared}


def _strict(metrics: dict[str, float]) -> dict[str, float | None]:
    shown = {name: value for name, value in metrics.items() if not name.startswith(WAIT_PREFIX)}
    return {name: value if math.isfinite(value) else None for name, value in shown.items()}
