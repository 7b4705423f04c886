"""The timeline of a run: its starts by rank, checkpoints, evaluations, preemptions, hangs and failures, as SVG."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from samestep.messages import format_bytes, format_duration, format_seconds, format_span
from samestep.report.bars import Segment, legend
from samestep.report.markup import Markup, element, join
from samestep.report.run_data import RunData, Start
from samestep.report.run_records import Record

_LANE: Final = 24.0  # pixels of height, in page.css
_CAP: Final = 6.0  # pixels of width of the end of a bar, whose color says how it ended
_MOST_LANES: Final = 16  # of ranks; more share one
_MOST_MARKS: Final = 300  # of one kind; of more, evenly chosen ones are drawn
_TICKS: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400)
_MOST_TICKS: Final = 5
_LAST_TICK: Final = 96.0  # percent of the width, from which on a text would leave the card


@dataclass(frozen=True)
class TimelineMark:
    """Something that happened at a moment, or lasted for some time."""

    kind: str
    time: float  # when it began
    text: str
    seconds: float = 0.0


def marks_of(run: RunData) -> list[TimelineMark]:
    """All that happened, in order."""
    starts = run.starts or run.attempts
    found = [mark for start in starts for mark in _of_start(start, starts[0])]
    found += [mark for event in run.launches if (mark := _of_launch(event)) is not None]
    return sorted(found, key=lambda mark: mark.time)


def draw_timeline(run: RunData) -> Markup | None:
    """The SVG; None if nothing is known but metrics."""
    starts = run.starts or run.attempts
    if not starts:
        return None
    marks = marks_of(run)
    begin = min([starts[0].time, *(mark.time for mark in marks)])
    end = max([starts[-1].until, *(mark.time + mark.seconds for mark in marks)])
    axis = _Axis(begin, max(end - begin, 1e-3))
    ranks = max(start.ranks for start in starts)
    lanes = [f"rank {rank}" for rank in range(ranks)] if ranks <= _MOST_LANES else [f"{ranks} ranks"]
    ended = _ends_of_ranks(run)
    drawn = [
        _lane(name, axis, [_bar(start, lane, ended, axis) for start in starts if lane < start.ranks])
        for lane, name in enumerate(lanes)
    ]
    for kinds, name in _MARK_LANES:
        chosen = [mark for mark in marks if mark.kind in kinds]
        if chosen:
            stride = -(-len(chosen) // _MOST_MARKS)
            drawn.append(_lane(name, axis, [_draw(mark, axis) for mark in chosen[::stride]]))
    title = "Timeline of the run; the list below has the same events"
    shown = element("div", *drawn, _draw_axis(axis), class_="timeline", role="img", aria_label=title)
    statuses = dict.fromkeys(start.status for start in starts)
    ends = legend([Segment(f"end {status}", status, 0.0) for status in statuses], "at the end of a bar:")
    return join([shown, ends])


_MARK_LANES: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (("evaluation",), "evaluations"),
    (("checkpoint",), "checkpoints"),
    (("profile",), "profiles"),
    (("restart", "restored"), "restarts"),
    (("preempted", "stopped"), "preemptions"),
    (("out of memory",), "out of memory"),
    (("hang",), "hangs"),
    (("failure",), "failures"),
    (("warning",), "warnings"),
)


@dataclass(frozen=True)
class _Axis:
    begin: float
    length: float

    def at(self, time: float) -> float:
        """Where a time is on the axis, in percent of its width."""
        return 100 * (time - self.begin) / self.length

    @property
    def ticks(self) -> list[int]:
        """Round numbers of seconds since the begin."""
        step = next((step for step in _TICKS if self.length / step <= _MOST_TICKS), None)
        step = step or 86400 * -(-int(self.length) // (86400 * _MOST_TICKS))
        return [number * step for number in range(int(self.length // step) + 1)]


def _of_start(start: Start, first: Start) -> Iterator[TimelineMark]:
    if start is not first:
        yield TimelineMark("restart", start.time, f"started again on {start.ranks} rank{'s' * (start.ranks != 1)}")
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
    "profile": lambda event: (
        f"profile of steps {event['steps'][0]:,} to {event['steps'][1]:,}: {', '.join(event['files'])}"
    ),
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


def _bar(start: Start, lane: int, ended: Mapping[int, Sequence[tuple[float, str]]], axis: _Axis) -> Markup:
    """The time of a rank in one start, with an end in the color of how it ended."""
    own = [(time, how) for time, how in ended.get(lane, ()) if start.time <= time <= start.until + _LATE_SECONDS]
    until, how = own[0] if own else (start.until, start.status)
    status = "killed" if start.status == "running" and own else start.status
    text = f"{format_span(until - start.time)} on {start.ranks} rank{'s' * (start.ranks != 1)}, {how}"
    size = {"x": _percent(axis.at(start.time)), "width": _percent(axis.at(until) - axis.at(start.time))}
    bar = element("rect", element("title", text), **size, y=4, height=_LANE - 8, rx=3, class_="active")
    cap = {"x": _percent(axis.at(until)), "width": _CAP, "transform": f"translate({-_CAP:g})"}
    return join([bar, element("rect", element("title", text), **cap, y=4, height=_LANE - 8, class_=f"end {status}")])


_LATE_SECONDS: Final = 60.0  # the launcher may notice the end of a rank after the last record of rank 0


def _draw(mark: TimelineMark, axis: _Axis) -> Markup:
    title, classes = element("title", mark.text), f"mark {mark.kind.replace(' ', '-')}"
    if mark.kind == "evaluation":
        size = {"x": _percent(axis.at(mark.time)), "width": _percent(100 * mark.seconds / axis.length)}
        return element("rect", title, **size, y=6, height=_LANE - 12, class_=classes)
    return element("circle", title, cx=_percent(axis.at(mark.time + mark.seconds)), cy=_LANE / 2, r=5, class_=classes)


def _lane(name: str, axis: _Axis, shapes: Sequence[Markup]) -> Markup:
    ticks = [_percent(axis.at(axis.begin + seconds)) for seconds in axis.ticks]
    grid = [element("line", x1=x, x2=x, y1=0, y2=_LANE, class_="grid") for x in ticks]
    return element("div", element("span", name), element("svg", *grid, *shapes), class_="lane")


def _draw_axis(axis: _Axis) -> Markup:
    texts = [
        element(
            "text",
            format_duration(seconds),
            x=_percent(axis.at(axis.begin + seconds)),
            y=14,
            class_="last" if axis.at(axis.begin + seconds) > _LAST_TICK else None if seconds else "first",
        )
        for seconds in axis.ticks
    ]
    return element("div", element("span", "time"), element("svg", *texts), class_="lane")


def _percent(value: float) -> str:
    return f"{value:.2f}%"
