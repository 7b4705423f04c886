"""The curves of a run: read from metrics.jsonl, thinned out without losing a peak, and compared between runs."""

from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from samestep.errors import ReportError
from samestep.loggers.run_files import iterate_metrics

Numbers = npt.NDArray[np.float64]
_POSITION: Final = {"step", "epoch", "time"}  # fields of a record that are not metrics
_PER_BUCKET: Final = 4  # points that a bucket keeps: the first, the smallest, the largest and the last


@dataclass(frozen=True)
class Curve:
    """The values of a metric, by step; of a step that was logged again after a restart, the last value."""

    steps: npt.NDArray[np.int64]
    values: Numbers  # may be NaN or infinite
    times: Numbers  # seconds since 1970

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class ThinCurve:
    """A curve with at most so many points that a page can hold it, and the means of what was left out."""

    points: Curve
    means: Curve | None  # of each bucket, for smoothing; None if every point was kept
    weights: npt.NDArray[np.int64] | None  # how many points each mean has


@dataclass(frozen=True)
class Difference:
    """How far apart a metric of two runs is."""

    steps: npt.NDArray[np.int64]  # that both have
    values: Numbers  # absolute differences; NaN where either is not finite and they are not equal
    largest: float
    step: int  # where it is largest
    relative: float  # the largest difference relative to the larger of the two values, over all steps
    relative_step: int  # where that is
    pair: tuple[float, float]  # the values there


@dataclass
class _Column:
    steps: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))
    times: "array[float]" = field(default_factory=lambda: array("d"))


@dataclass(frozen=True)
class Curves:
    """What a metrics.jsonl has."""

    by_name: dict[str, Curve]  # in the order in which the metrics were first logged
    epochs: int  # that have begun
    skipped: Sequence[int]  # numbers of lines that are not records


def read_curves(path: Path) -> Curves:
    """The curve of each metric in a metrics.jsonl; nothing without the file. Raises ReportError if no line is a record.

    A crash of the machine or a full disk may leave lines that are not records; the others are still worth reading.
    """
    columns, epochs, skipped = dict[str, _Column](), -1, list[int]()
    for record in iterate_metrics(path, skipped) if path.is_file() else ():
        if (position := _read_position(record)) is None:
            continue
        step, epoch, time = position
        epochs = max(epochs, epoch)
        for name, value in record.items():
            if name in _POSITION:
                continue
            if (column := columns.get(name)) is None:
                column = columns[name] = _Column()
            with suppress(TypeError, OverflowError):  # not a number: another program may have written it
                column.values.append(value)
                column.steps.append(step)
                column.times.append(time)
    if skipped and not columns:
        example = '{"step": 12, "train/loss": 0.43}'
        raise ReportError(f"{path}, line {skipped[0]} is not a record like {example}: pass the folder of a run")
    found = {name: _last_of_each_step(column) for name, column in columns.items() if column.values}
    return Curves(found, epochs + 1, skipped)


def _read_position(record: Mapping[str, float]) -> tuple[int, int, float] | None:
    """Step, epoch and time of a record; None if they are not numbers."""
    try:
        step, epoch = int(record["step"]), int(record.get("epoch", -1))
        return (step, epoch, float(record.get("time", 0.0))) if abs(step) < 2**62 else None
    except (TypeError, ValueError, OverflowError):
        return None


def _last_of_each_step(column: _Column) -> Curve:
    steps = np.frombuffer(column.steps, dtype=np.int64)
    values, times = np.frombuffer(column.values), np.frombuffer(column.times)
    _, from_end = np.unique(steps[::-1], return_index=True)
    kept = len(steps) - 1 - from_end
    return Curve(steps[kept], values[kept], times[kept])


def thin_out(curve: Curve, most: int) -> ThinCurve:
    """At most about `most` points: all of them, or of each bucket the first, smallest, largest and last one.

    A peak of a single step survives. Values that are not finite survive too, as the smallest or largest of a bucket.

    >>> steps = np.arange(100_000)
    >>> values = np.zeros(100_000)
    >>> values[77_777] = 5.0
    >>> thin = thin_out(Curve(steps, values, values), 400)
    >>> len(thin.points), float(thin.points.values.max()), int(thin.points.steps[thin.points.values.argmax()])
    (201, 5.0, 77777)
    """
    if len(curve) <= most:
        return ThinCurve(curve, None, None)
    edges = np.linspace(0, len(curve), max(2, most // _PER_BUCKET) + 1).astype(np.int64)
    kept, means = set[int](), list[float]()
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = curve.values[start:stop]
        finite = np.isfinite(part)
        kept.update((start, stop - 1))
        if not finite.all():
            kept.add(start + int((~finite).argmax()))
        if finite.any():
            low, high = np.where(finite, part, np.inf), np.where(finite, part, -np.inf)
            kept.update((start + int(low.argmin()), start + int(high.argmax())))
        means.append(float(part[finite].mean()) if finite.any() else float("nan"))
    chosen = np.fromiter(sorted(kept), dtype=np.int64)
    middle = (edges[:-1] + edges[1:] - 1) // 2
    points = Curve(curve.steps[chosen], curve.values[chosen], curve.times[chosen])
    return ThinCurve(points, Curve(curve.steps[middle], np.array(means), curve.times[middle]), np.diff(edges))


def compare(one: Curve, other: Curve) -> Difference | None:
    """How far apart two curves are at the steps that both have; None if there is none.

    Two values that are both NaN, or the same infinity, do not differ.
    """
    steps, first, second = np.intersect1d(one.steps, other.steps, assume_unique=True, return_indices=True)
    if not len(steps):
        return None
    a, b = one.values[first], other.values[second]
    with np.errstate(invalid="ignore"):
        values = np.abs(a - b)
    values[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    known = np.where(np.isnan(values), np.inf, values)  # only one of them is finite
    scale = np.maximum(np.abs(a), np.abs(b))
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.where(known == 0.0, 0.0, np.where(np.isfinite(scale), known / scale, np.inf))
    at, farthest = int(known.argmax()), int(relative.argmax())
    pair = float(a[farthest]), float(b[farthest])
    return Difference(
        steps, values, float(known[at]), int(steps[at]), float(relative[farthest]), int(steps[farthest]), pair
    )


def largest_step(curves: Sequence[Curve]) -> int | None:
    """The last step of any of the curves."""
    return max((int(curve.steps[-1]) for curve in curves if len(curve)), default=None)
