"""The timeline of a run: its starts by rank, checkpoints, evaluations, preemptions, hangs and failures, as SVG."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from samestep.messages import format_bytes, format_duration, format_seconds
from samestep.report.markup import Markup, element, join
from samestep.report.run_data import Record, RunData, Start

_WIDTH, _LEFT, _RIGHT, _LANE = 1000.0, 110.0, 16.0, 22.0
_MOST_LANES: Final = 16  # of ranks; more share one
_MOST_MARKS: Final = 300  # of one kind; of more, evenly chosen ones are drawn
_TICKS: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400)
_MOST_TICKS: Final = 8


@dataclass(frozen=True)
class TimelineMark:
    """Something that happened at a moment, or lasted for some time."""

    kind: str
    time: float  # when it began
    text: str
    seconds: float = 0.0


def marks_of(run: RunData) -> list[TimelineMark]:
    """All that happened, in order."""
    found = [mark for start in run.starts for mark in _of_start(start, run.starts[0])]
    found += [mark for event in run.launches if (mark := _of_launch(event)) is not None]
    return sorted(found, key=lambda mark: mark.time)


def draw_timeline(run: RunData) -> Markup | None:
    """The SVG; None if nothing is known but metrics."""
    if not run.starts:
        return None
    marks = marks_of(run)
    begin = min([run.starts[0].time, *(mark.time for mark in marks)])
    end = max([run.last.until, *(mark.time + mark.seconds for mark in marks)])
    axis = _Axis(begin, max(end - begin, 1e-3))
    ranks = max(start.ranks for start in run.starts)
    lanes = [f"rank {rank}" for rank in range(ranks)] if ranks <= _MOST_LANES else [f"{ranks} ranks"]
    ended = _ends_of_ranks(run)
    drawn, top = [], 8.0
    for lane, name in enumerate(lanes):
        bars = [_bar(start, lane, ended, axis, top) for start in run.starts if lane < start.ranks]
        drawn.append(_lane(name, top, bars))
        top += _LANE
    for kinds, name in _MARK_LANES:
        chosen = [mark for mark in marks if mark.kind in kinds]
        if chosen:
            stride = -(-len(chosen) // _MOST_MARKS)
            drawn.append(_lane(name, top, [_draw(mark, axis, top) for mark in chosen[::stride]]))
            top += _LANE
    drawn.append(_draw_axis(axis, top))
    picture = element(
        "svg", *drawn, viewBox=f"0 0 {_WIDTH:g} {top + 26:g}", role="img", class_="timeline",
        aria_label="Timeline of the run; the list below has the same events",
    )  # fmt: skip
    return element("div", picture, class_="scroll", tabindex=0, role="region", aria_label="Timeline")


_MARK_LANES: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (("evaluation",), "evaluations"),
    (("checkpoint", "restored"), "checkpoints"),
    (("warning",), "warnings"),
    (("preempted", "hang", "failure", "out of memory", "restart", "stopped"), "events"),
)


@dataclass(frozen=True)
class _Axis:
    begin: float
    length: float

    def at(self, time: float) -> float:
        """Where a time is on the axis, in pixels."""
        return round(_LEFT + (time - self.begin) / self.length * (_WIDTH - _LEFT - _RIGHT), 2)


def _of_start(start: Start, first: Start) -> Iterator[TimelineMark]:
    if start is not first:
        yield TimelineMark("restart", start.time, f"started again on {start.ranks} rank(s)")
    for event in start.events:
        describe = _DESCRIPTIONS.get(event["event"])
        if describe is not None:
            seconds = float(event.get("seconds") or 0.0)
            yield TimelineMark(event["event"], event["time"] - seconds, describe(event), seconds)


def _describe_checkpoint(event: Record) -> str:
    name = Path(event["checkpoint"]).name
    if event.get("error"):
        return f"{name} failed: {event['error']}"
    waited = format_seconds(event["waited_seconds"])
    return f"{name}: {format_bytes(event['bytes'])} in {format_seconds(event['seconds'])}, training waited {waited}"


_DESCRIPTIONS: Final[Mapping[str, Callable[[Record], str]]] = {
    "checkpoint": _describe_checkpoint,
    "restored": lambda event: f"resumed from {Path(event['checkpoint']).name}, step {event['step']:,}",
    "evaluation": lambda event: f"evaluation at step {event['step']:,}: {format_seconds(event['seconds'])}",
    "preempted": lambda event: f"preempted: {event['cause']}",
    "warning": lambda event: f"{event['category']}: {event['text']}",
}


def _of_launch(event: Record) -> TimelineMark | None:
    match event["event"]:
        case "hang":
            return TimelineMark("hang", event["time"], event["summary"])
        case "failure":
            return TimelineMark("failure", event["time"], event["cause"])
        case "out_of_memory":
            return TimelineMark("out of memory", event["time"], "out of memory: restarted with half the micro-batch")
        case "stopped":
            return TimelineMark("stopped", event["time"], event["text"])
        case _:
            return None


def _ends_of_ranks(run: RunData) -> dict[int, list[tuple[float, str]]]:
    """When each rank ended by a failure, and how."""
    found: dict[int, list[tuple[float, str]]] = {}
    for event in run.launches:
        for rank in event.get("ranks_ended", ()):
            found.setdefault(rank["rank"], []).append((rank["time"], rank["how"]))
    return found


def _bar(start: Start, lane: int, ended: Mapping[int, Sequence[tuple[float, str]]], axis: _Axis, top: float) -> Markup:
    """The life of a rank in one start."""
    own = [(time, how) for time, how in ended.get(lane, ()) if start.time <= time <= start.until + _LATE_SECONDS]
    until, how = own[0] if own else (start.until, start.status)
    x, width = axis.at(start.time), max(1.0, axis.at(until) - axis.at(start.time))
    text = f"{format_duration(until - start.time)} on {start.ranks} rank(s), {how}"
    status = start.status if start.status in ("finished", "running", "preempted") else "failed"
    return element(
        "rect", element("title", text), x=x, y=top + 4, width=round(width, 2), height=_LANE - 8, rx=2, class_=status
    )


_LATE_SECONDS = 60.0  # by which the launcher may notice the end of a rank after rank 0 has written its last record


def _draw(mark: TimelineMark, axis: _Axis, top: float) -> Markup:
    x, title = axis.at(mark.time), element("title", mark.text)
    classes = f"mark {mark.kind.replace(' ', '-')}"
    if mark.kind == "evaluation":
        width = max(1.5, axis.at(mark.time + mark.seconds) - x)
        return element("rect", title, x=x, y=top + 5, width=round(width, 2), height=_LANE - 10, class_=classes)
    return element("circle", title, cx=axis.at(mark.time + mark.seconds), cy=top + _LANE / 2, r=4.5, class_=classes)


def _lane(name: str, top: float, shapes: Sequence[Markup]) -> Markup:
    label = element("text", name, x=_LEFT - 8, y=top + _LANE / 2 + 4, class_="lane")
    line = element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=top + _LANE / 2, y2=top + _LANE / 2, class_="grid")
    return element("g", line, label, *shapes)


def _draw_axis(axis: _Axis, top: float) -> Markup:
    step = next((step for step in _TICKS if axis.length / step <= _MOST_TICKS), None)
    step = step or 86400 * -(-axis.length // (86400 * _MOST_TICKS))
    ticks = []
    for number in range(int(axis.length // step) + 1):
        x = axis.at(axis.begin + number * step)
        ticks.append(element("line", x1=x, x2=x, y1=4, y2=top, class_="grid"))
        ticks.append(element("text", format_duration(number * step), x=x, y=top + 16, class_="tick"))
    return element("g", join(ticks))
