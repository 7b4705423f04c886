"""The sections of the page about time and memory: shares of the time by rank, what ranks use, the plan's forecast."""

from collections.abc import Iterator, Mapping, Sequence

from samestep.messages import format_bytes, format_seconds
from samestep.report.bars import Bar, Segment, draw_bars, legend
from samestep.report.chart_data import Chart
from samestep.report.facts import planned
from samestep.report.markup import Content, Markup, Section, element, join, section, table
from samestep.report.run_data import RunData
from samestep.report.run_records import Record
from samestep.report.sections import chart_grid, unique_warnings
from samestep.report.time_shares import MEANINGS, PARTS, TimeShares, peak, slowest_rank, sum_times
from samestep.report.verdict import has_gpus

_COLORS = 6  # of parts of the memory, in page.css
_NOT_PARTS = ("total", "overhead", "host", "wrap")  # of the forecast: sums, and what is not in the memory of a step


def time_section(runs: Sequence[RunData], names: Sequence[str], charts: Sequence[Chart]) -> Section | None:
    """What the time was spent on, by rank, and what the ranks used."""
    shares = [sum_times(run.times) for run in runs]
    known = [(name, share) for name, share in zip(names, shares, strict=True) if share is not None]
    if not known:
        return None
    bars = [_share_bars(name, share, alone=len(known) == 1) for name, share in known]
    rows = [
        [
            _named(join([_part_swatch(part), " ", part]), MEANINGS[part]),
            *(_percent(share.share(part)) for _, share in known),
        ]
        for part in PARTS
        if any(share.share(part) for _, share in known)
    ]
    mean_step = _named("mean step", "from one step to the next")
    rows.append([mean_step, *(format_seconds(share.step_seconds) for _, share in known)])
    columns = [name for name, _ in known] if names[1:] else ["share"]
    whole = table("Shares of the time of all ranks", ["part", *columns], rows, numbers=columns)
    by_rank = [_rank_table(name, share) for name, share in known if len(share.by_rank) > 1]
    return section("time", "Time", *_slow_ranks(runs), *bars, whole, *by_rank, chart_grid(charts))


def plan_section(runs: Sequence[RunData], names: Sequence[str]) -> Section | None:
    """The plan's forecast of memory and time, beside what was measured."""
    shown = [part for run, name in zip(runs, names, strict=True) if (part := _plan_table(run, name)) is not None]
    return section("plan", "Plan", *shown) if shown else None


def _share_bars(name: str, share: TimeShares, alone: bool) -> Markup:
    """A bar of the parts for all ranks, and one per rank if there are several, per step."""
    bars = {"all ranks": _time_bar({part: share.mean[part] / share.steps for part in PARTS})}
    if len(share.by_rank) > 1:
        bars |= {f"rank {rank}": _time_bar(share.of_rank(rank)) for rank in sorted(share.by_rank)}
    title = f"Time per step of {name}; the tables below have the numbers"
    note = element("p", "Time per step; point at a bar to read its parts.", class_="note")
    slowest = slowest_rank(share)
    named = element("p", _slowest_text(*slowest), class_="differs") if slowest is not None else None
    return element("div", None if alone else element("h3", name), named, note, draw_bars(bars, title))


def _time_bar(parts: Mapping[str, float]) -> Bar:
    total = sum(parts.values())
    segments = [
        Segment(f"part-{part}", f"{part} {format_seconds(seconds)}, {_percent(seconds / total)}", seconds)
        for part, seconds in parts.items()
        if seconds
    ]
    return Bar(segments, format_seconds(total))


def _slowest_text(rank: int, later: float, part: str) -> str:
    return (
        f"Rank {rank} is the slowest: without communication it needs {format_seconds(later)} per step more than the "
        f"median of the ranks, most of it in {part}."
    )


def _rank_table(name: str, share: TimeShares) -> Markup:
    parts = [part for part in PARTS if any(each[part] for each in share.by_rank.values())]
    rows = [
        [f"rank {rank}", *(format_seconds(share.of_rank(rank)[part]) for part in parts)]
        for rank in sorted(share.by_rank)
    ]
    shown = table(f"Time per step by rank, {name}", ["", *parts], rows, numbers=parts)
    return element("details", element("summary", f"Time per step by rank, {name}"), shown)


def _slow_ranks(runs: Sequence[RunData]) -> Iterator[Markup]:
    """What samestep has warned of while the runs were running."""
    texts = dict.fromkeys(each["text"] for run in runs for each in unique_warnings(run))
    yield from (element("p", f"Slow: {text}", class_="differs") for text in texts if "makes the others wait" in text)


def _plan_table(run: RunData, name: str) -> Markup | None:
    plan, share = planned(run), sum_times(run.times)
    if plan is None:
        return None
    memory, planned_seconds = plan["chosen"]["memory"], plan["chosen"]["seconds"]["total"]
    forecast, used = memory["total"] - memory["overhead"], peak(run.times, "memory_bytes")
    measured, seconds = used if has_gpus(run) else None, share.step_seconds if share is not None else None
    used_text = format_bytes(measured) if measured is not None else "not measured on CPUs"
    seconds_text = format_seconds(seconds) if seconds is not None else ""
    rows: list[Sequence[Content]] = [
        ["memory per GPU", format_bytes(forecast), used_text, _signed_percent(measured, forecast)],
        ["time per step", format_seconds(planned_seconds), seconds_text, _signed_percent(seconds, planned_seconds)],
    ]
    reason = element("p", f"{name}: {plan['chosen']['name']}, {plan['chosen']['reason']}")
    compared = table(f"Plan of {name}", ["", "forecast", "measured", "difference"], rows)
    return element("div", reason, _memory_bars(memory, measured), compared)


def _memory_bars(memory: Record, measured: float | None) -> Markup:
    """What the forecast consists of, above what was measured."""
    parts = [(part, size) for part, size in memory.items() if part not in _NOT_PARTS and size]
    forecast = [
        Segment(f"memory-{index % _COLORS}", f"{part} {format_bytes(size)}", size)
        for index, (part, size) in enumerate(parts)
    ]
    bars = {"forecast": Bar(forecast, format_bytes(sum(each.size for each in forecast)))}
    if measured is not None:
        bars["measured"] = Bar([Segment("measured", format_bytes(measured), measured)], format_bytes(measured))
    title = "Memory per GPU: the parts of the forecast, above what was measured"
    return element("div", draw_bars(bars, title), legend(forecast))


def _named(name: str, meaning: str) -> Markup:
    return element("div", element("span", name), " ", element("span", meaning, class_="meaning"), class_="named")


def _part_swatch(part: str) -> Markup:
    return element("span", class_=f"swatch part-{part}", aria_hidden="true")


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.0005 or not share else "< 0.1%"


def _signed_percent(measured: float | None, forecast: float) -> str:
    return f"{measured / forecast - 1:+.1%}" if measured and forecast else ""
