"""What the charts of the page draw: the curves of one or several runs, thinned out to a size that a mail can carry."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from samestep.loggers.run_files import WAIT_PREFIX
from samestep.report.curves import Curve, Difference, compare, thin_out
from samestep.report.facts import is_result, planned
from samestep.report.run_data import RunData, Start
from samestep.report.verdict import has_gpus

_MOST_POINTS: Final = 4000  # of a curve
_ALL_POINTS: Final = 60_000  # of all curves: about 40 bytes each
_FEWEST_POINTS: Final = 200
_USAGE: Final[Mapping[str, tuple[str, float]]] = {
    "memory_bytes": ("memory, GiB", 2.0**30),
    "cpu_cores": ("CPU cores in use", 1.0),
    "gpu_percent": ("GPU utilization, %", 1.0),
}
"""Columns of times.jsonl: the title of their chart, and the unit."""
_TITLES: Final = {WAIT_PREFIX.rstrip("/"): "wait that each rank causes, seconds per step"}


@dataclass(frozen=True)
class Chart:
    """One chart: several curves over steps or time."""

    key: str
    title: str
    series: list[dict[str, Any]]
    logarithmic: bool = False
    x: str = "step"  # or "time", if it has no steps
    note: str = ""
    is_difference: bool = False  # of two runs, which has steps and no times

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        options = {"x": self.x, "log": self.logarithmic, "isDifference": self.is_difference}
        return {"key": self.key, "title": self.title, **options, "series": self.series}


def metric_charts(runs: Sequence[RunData]) -> list[Chart]:
    """A chart per metric with a curve per run; how long ranks make the others wait is one chart."""
    names = list(dict.fromkeys(name for run in runs for name in run.curves))
    most = points_per_curve(sum(len(run.curves) for run in runs))
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=_rank_of_name):
        groups.setdefault(WAIT_PREFIX.rstrip("/") if name.startswith(WAIT_PREFIX) else name, []).append(name)
    charts = list[Chart]()
    for title, members in groups.items():
        series = [
            _series(run.curves[name], index, run, most, _wait_label(name) if len(members) > 1 else "")
            for index, run in enumerate(runs)
            for name in members
            if name in run.curves
        ]
        charts.append(Chart(title, _TITLES.get(title, title), series, note=_not_finite_text(runs, members)))
    return charts


def _wait_label(name: str) -> str:
    """`rank 3`, or `mean` of many ranks."""
    label = name.removeprefix(WAIT_PREFIX)
    return f"rank {label}" if label.isdigit() else label


def _not_finite_text(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """How many values a chart cannot show, and where the first one is."""
    curves = [run.curves[name] for run in runs for name in names if name in run.curves]
    lost = [curve.steps[~np.isfinite(curve.values)] for curve in curves]
    count = sum(map(len, lost))
    if not count:
        return ""
    first = min(int(steps[0]) for steps in lost if len(steps))
    return f"{count:,} of {sum(map(len, curves)):,} values NaN or infinite, the first at step {first:,}"


def find_differences(runs: Sequence[RunData]) -> list[tuple[str, int, Difference]]:
    """For every metric and other run, by its number: how far it is from the first run."""
    first = runs[0]
    names = [name for name in sorted(first.curves, key=_rank_of_name) if not name.startswith(WAIT_PREFIX)]
    return [
        (name, number, difference)
        for name in names
        for number, other in enumerate(runs[1:], 1)
        if name in other.curves and (difference := compare(first.curves[name], other.curves[name])) is not None
    ]


def difference_charts(found: Sequence[tuple[str, int, Difference]]) -> list[Chart]:
    """A chart per metric that differs, with a curve per run."""
    most, series = points_per_curve(2 * len(found)), dict[str, list[dict[str, Any]]]()
    for name, number, difference in found:
        if difference.largest and is_result(name):
            curve = Curve(difference.steps, difference.values, np.zeros(len(difference.steps)))
            points = _points(thin_out(curve, most).points) | {"run": number, "label": ""}
            series.setdefault(name, []).append(points)
    return [
        Chart(f"difference {name}", name, each, logarithmic=True, is_difference=True) for name, each in series.items()
    ]


def usage_charts(run: RunData, number: int = 0, run_name: str = "") -> list[Chart]:
    """What the ranks of a run use, over time; of several runs with the name of the run in the title."""
    charts = list[Chart]()
    for column, (title, unit) in _USAGE.items():
        rows = [(record["time"], record[column]) for record in run.times if record.get(column)]
        if rows:
            series = [{**each, "run": number} for each in _usage_series(rows, unit, run)]
            if column == "memory_bytes" and (forecast := _memory_forecast(run)) is not None:
                begin = _begin(run)
                ends = [round(rows[0][0] - begin, 3), round(rows[-1][0] - begin, 3)]
                line = {"time": ends, "value": [forecast / unit] * 2, "label": "forecast of the plan", "run": number}
                series.append({**line, "isForecast": True})
            shown = f"{run_name}: {title}" if run_name else title
            charts.append(Chart(f"usage {column} {number}", shown, series, x="time"))
    return charts


def _memory_forecast(run: RunData) -> float | None:
    """The memory per GPU that the plan forecasts; None without a plan or without GPUs."""
    plan = planned(run)
    if plan is None or not has_gpus(run):
        return None
    memory = plan["chosen"]["memory"]
    return memory["total"] - memory["overhead"]


def marks(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Where runs started again, for the charts over steps and over time."""
    return [
        {
            "run": index,
            "step": start.first_step,
            "time": round(start.time - run.first.time, 3),
            "text": _mark_text(before, start),
        }
        for index, run in enumerate(runs)
        for before, start in pairwise(run.starts)
    ]


def _mark_text(before: Start, start: Start) -> str:
    """That the run continued, and on how many ranks if that has changed."""
    word = "resumed" if start.named("restored") else "started again"
    ranks = f"{before.ranks} \u2192 {start.ranks} rank{'s' * (start.ranks != 1)}"
    return f"{word}, {ranks}" if start.ranks != before.ranks else word


def points_per_curve(curves: int) -> int:
    """How many points each of so many curves may have."""
    return max(_FEWEST_POINTS, min(_MOST_POINTS, _ALL_POINTS // max(1, curves)))


def _rank_of_name(name: str) -> tuple[int, list[str | int]]:
    """Losses first, then results of evaluations, then the rest, and times of ranks last; numbers in names by size."""
    order = ("train/loss", "loss", "val", "test", "eval", "epoch")
    parts = [int(part) if part.isdecimal() else part for part in re.split(r"(\d{1,18})", name)]
    if name.startswith(WAIT_PREFIX):
        return len(order) + 1, parts
    known = (at for at, part in enumerate(order) if name.startswith(part) or f"/{part}" in name)
    return next(known, len(order)), parts


def _series(curve: Curve, number: int, run: RunData, most: int, label: str) -> dict[str, Any]:
    thin, begin = thin_out(curve, most), _begin(run)
    found = _points(thin.points, begin) | {"run": number, "label": label}
    if thin.means is not None and thin.weights is not None:
        found["means"] = _points(thin.means, begin) | {"weight": thin.weights.tolist()}
    return found


def _points(curve: Curve, begin: float | None = None) -> dict[str, Any]:
    points: dict[str, Any] = {"step": curve.steps.tolist(), "value": _finite(curve.values)}
    if begin is not None:
        points["time"] = np.round(curve.times - begin, 3).tolist()
    infinite = np.flatnonzero(~np.isfinite(curve.values))
    if len(infinite):
        points["notFinite"] = {str(at): repr(float(curve.values[at])) for at in infinite[:50].tolist()}
    return points


def _finite(values: Iterable[float] | np.ndarray) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in np.asarray(values).tolist()]


def _usage_series(rows: Sequence[tuple[float, Any]], unit: float, run: RunData) -> Iterable[dict[str, Any]]:
    begin = _begin(run)
    by_name: dict[str, list[tuple[float, float]]] = {}
    for time, values in rows:
        if isinstance(values, Mapping):
            named = {name: values[name] for name in ("min", "mean", "max")}
        else:
            named = {f"rank {rank}": value for rank, value in enumerate(values)}
        for name, value in named.items():
            by_name.setdefault(name, []).append((time, float("nan") if value is None else value / unit))
    for name, points in by_name.items():
        times, values = (np.array(column) for column in zip(*points, strict=True))
        thin = thin_out(Curve(np.arange(len(times)), values, times), points_per_curve(3 * len(by_name))).points
        yield {"time": np.round(thin.times - begin, 3).tolist(), "value": _finite(thin.values), "label": name}


def _begin(run: RunData) -> float:
    if run.starts:
        return run.first.time
    return min((float(curve.times[0]) for curve in run.curves.values() if len(curve)), default=0.0)
