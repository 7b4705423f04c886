"""The sections of the page: curves, values, differences, data, timeline, checkpoints, failures and warnings."""

import os
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

import numpy as np

from samestep.loggers.run_files import WAIT_PREFIX
from samestep.messages import format_bytes, format_duration, format_list, format_seconds
from samestep.report.chart_data import Chart
from samestep.report.curves import Curve, Difference
from samestep.report.facts import is_result
from samestep.report.head import swatch
from samestep.report.markup import Content, Markup, Section, element, join, section, table
from samestep.report.run_data import RunData, SavedCheckpoint, best_checkpoints
from samestep.report.run_records import Record
from samestep.report.timeline import draw_timeline, marks_of
from samestep.report.verdict import FailureRecord, failures, steps_done

_LISTED: Final = 200  # events and warnings; the files have all of them
_SHOWN_NAMES: Final = 8
_FILTERED: Final = 8  # charts; if there are more, they can be filtered by name


def curves(charts: Sequence[Chart], runs: Sequence[RunData], names: Sequence[str]) -> Section | None:
    """The curves of all metrics, with controls."""
    skipped = [_skipped_text(run, name) for run, name in zip(runs, names, strict=True) if run.skipped]
    warnings = [element("p", text, class_="differs") for text in skipped]
    if not charts:
        is_live = any(run.starts and run.last.status == "running" for run in runs)
        text = "Nothing was logged" + (" yet: curves appear about a second after the first step." if is_live else ".")
        return section("curves", "Curves", *warnings, element("p", text, class_="note")) if runs[0].starts else None
    legend = [element("span", swatch(number), " ", name) for number, name in enumerate(names)] if names[1:] else []
    controls = element(
        "form",
        _radio("step", "steps", checked=True),
        _radio("time", "time", checked=False),
        element("label", element("input", type="checkbox", id="log"), " log scale"),
        element("label", "smoothing ", element("input", type="range", id="smoothing", min=0, max=99, value=0)),
        element("button", "reset zoom", type="button", id="reset"),
        element("input", type="search", id="filter", placeholder="filter metrics", aria_label="filter metrics")
        if len(charts) > _FILTERED
        else None,
        element("span", *legend, class_="legend") if legend else None,
        class_="controls", aria_label="Controls of the charts",
    )  # fmt: skip
    note = "Drag over a chart to zoom in, double-click to zoom out. Point at a curve, or tap it, to read its values."
    values = values_table(runs, names)
    without = element("noscript", element("p", "The charts need JavaScript. The tables do not.", class_="differs"))
    content = (
        *warnings,
        without,
        controls,
        element("p", note, class_="note"),
        *_groups(charts),
        values,
    )
    return section("curves", "Curves", *content)


def _groups(charts: Sequence[Chart]) -> Iterator[Markup]:
    """One grid of charts, or, of many charts, one per first part of their names, which can be folded."""
    if len(charts) <= _FILTERED:
        yield chart_grid(charts, is_first_wide=True)
        return
    groups = dict[str, list[Chart]]()
    for chart in charts:
        groups.setdefault(chart.key.partition("/")[0] if "/" in chart.key else "others", []).append(chart)
    for index, (name, members) in enumerate(groups.items()):
        grid = chart_grid(members, is_first_wide=not index)
        yield element("details", element("summary", f"{name} ({len(members)})"), grid, class_="group", open=True)


def _skipped_text(run: RunData, name: str) -> str:
    count = len(run.skipped)
    lines = f"line {run.skipped[0]} is not a record" if count == 1 else f"{count:,} lines are not records"
    first = f", the first is line {run.skipped[0]}" if count > 1 else ""
    return f"{name}/metrics.jsonl: {lines}{first}; the page leaves out what they contain."


def chart_grid(charts: Sequence[Chart], *, is_first_wide: bool = False) -> Markup:
    """Places for charts, which the script of the page draws."""
    figures = [
        element(
            "figure",
            element("figcaption", chart.title, element("span", chart.note, class_="note") if chart.note else None),
            element("div", class_="chart", data_chart=chart.key),
            class_="wide" if is_first_wide and not index else None,
        )
        for index, chart in enumerate(charts)
    ]
    return element("div", *figures, class_="charts small" if len(charts) > _FILTERED else "charts")


def values_table(runs: Sequence[RunData], names: Sequence[str]) -> Markup | None:
    """The values of all metrics that need no picture: the last, smallest and largest ones."""
    metrics = dict.fromkeys(name for run in runs for name, curve in run.curves.items() if len(curve))
    shown = [name for name in metrics if not name.startswith(WAIT_PREFIX)]
    headings = ["values", "last", "smallest", "at step", "largest", "at step "]
    rows = [
        [metric, *([name] if names[1:] else []), *_value_cells(run.curves[metric])]
        for metric in shown
        for run, name in zip(runs, names, strict=True)
        if metric in run.curves and len(run.curves[metric])
    ]
    if not rows:
        return None
    columns = ["metric", *(["run"] if names[1:] else []), *headings]
    whole = table("Values of all metrics", columns, rows, numbers=headings)
    return element("details", element("summary", "Values as a table"), whole)


def _value_cells(curve: Curve) -> list[str]:
    """How many values a curve has, the last one, and the extremes with their steps."""
    finite = np.flatnonzero(np.isfinite(curve.values))
    cells = [f"{len(curve):,}", f"{curve.values[-1]:.7g}"]
    if not len(finite):
        return [*cells, "", "", "", ""]
    ends = finite[curve.values[finite].argmin()], finite[curve.values[finite].argmax()]
    return [*cells, *(text for at in ends for text in (f"{curve.values[at]:.7g}", f"{curve.steps[at]:,}"))]


def differences(
    found: Sequence[tuple[str, int, Difference]], charts: Sequence[Chart], runs: Sequence[RunData], names: Sequence[str]
) -> Section | None:
    """How far the runs are from the first one."""
    if len(runs) == 1:
        return None
    lone = _lone_metrics(runs, names)
    if not found:
        text = "The runs have no metric at the same step in common, so nothing can be compared."
        return section("difference", "Differences", element("p", text), *lone)
    compared = [(name, number, each) for name, number, each in found if is_result(name)]
    sentences = [element("p", _difference_text(compared, names)), *_shorter_runs(runs, names), *lone]
    numbers = ["common steps", "equal", "largest difference", "at step", "largest relative", "at step "]
    several = bool(names[2:])
    rows = [[name, *([names[number]] if several else []), *_difference_cells(each)] for name, number, each in found]
    caption = f"Differences of {names[1]} from {names[0]}" if not several else f"Differences from {names[0]}"
    shown = table(caption, ["metric", *(["run"] if several else []), *numbers], rows, numbers=numbers)
    text = "Absolute differences at the steps that both runs have, with a ring around the largest."
    note = element("p", text, class_="note") if charts else None
    return section("difference", "Differences", *sentences, shown, note, chart_grid(charts))


def _difference_text(compared: Sequence[tuple[str, int, Difference]], names: Sequence[str]) -> str:
    """The largest relative difference of all metrics that training determines, and where it is."""
    if not compared:
        return "The runs have no results in common."
    name, number, each = max(compared, key=lambda item: item[2].relative)
    steps = sum(len(difference.steps) for *_, difference in compared)
    if not any(difference.largest for *_, difference in compared):
        return f"All {steps:,} values at common steps are equal to those of {names[0]}, bit by bit."
    return (
        f"Compared with {names[0]}, the largest relative difference is {each.relative:.1e}: {name} of {names[number]} "
        f"at step {each.relative_step:,} ({each.pair[0]:.9g} and {each.pair[1]:.9g}), among {steps:,} values at common "
        "steps."
    )


def _shorter_runs(runs: Sequence[RunData], names: Sequence[str]) -> Iterator[Markup]:
    done = [steps_done(run) for run in runs]
    if len(set(done)) > 1:
        listed = ", ".join(f"{name} {count:,}" for name, count in zip(names, done, strict=True))
        yield element("p", f"The runs have different numbers of steps: {listed}. Only common steps are compared.")


def _lone_metrics(runs: Sequence[RunData], names: Sequence[str]) -> Iterator[Markup]:
    """Metrics that cannot be compared since the first or the other run lacks them."""
    for run, name in zip(runs[1:], names[1:], strict=True):
        pairs = ((runs[0], names[0], run), (run, name, runs[0]))
        for one, its_name, other in pairs:
            lone = [each for each in one.curves if each not in other.curves and not each.startswith(WAIT_PREFIX)]
            if lone:
                text = f"Only {its_name} has, compared with {name if one is runs[0] else names[0]}: "
                yield element("p", text, format_list(lone, _SHOWN_NAMES), ".", class_="note")


def data_section(runs: Sequence[RunData], names: Sequence[str]) -> Section | None:
    """Datasets, and whether every sample counted exactly once."""
    shown = [part for run, name in zip(runs, names, strict=True) for part in _data_parts(run, name, bool(names[1:]))]
    return section("data", "Data", *shown) if shown else None


def timeline_section(runs: Sequence[RunData], names: Sequence[str]) -> Section | None:
    """What happened when."""
    parts = list[Content]()
    for run, name in zip(runs, names, strict=True):
        picture = draw_timeline(run)
        if picture is None:
            continue
        begin, listed = (run.starts or run.attempts)[0].time, marks_of(run)
        some = listed if len(listed) <= _LISTED else [*listed[: _LISTED // 2], *listed[-_LISTED // 2 :]]
        rows = [[format_duration(max(0.0, mark.time - begin)), mark.kind, mark.text] for mark in some]
        more = f": the first and the last {_LISTED // 2}" if len(listed) > _LISTED else ""
        count = f"{len(listed):,} event{'s' * (len(listed) != 1)} as a list{more}"
        whole = element("details", element("summary", count), table("Events", ["after", "event", "what"], rows))
        parts += [element("h3", name) if names[1:] else None, picture, whole if rows else None]
    return section("timeline", "Timeline", *parts) if parts else None


def checkpoint_section(runs: Sequence[RunData], names: Sequence[str]) -> Section | None:
    """All checkpoints."""
    parts = [part for run, name in zip(runs, names, strict=True) if (part := _checkpoint_table(run, name)) is not None]
    return section("checkpoints", "Checkpoints", *parts) if parts else None


def failure_section(runs: Sequence[RunData], names: Sequence[str], out: Path) -> Section | None:
    """Each failure with its cause, the report of the launcher, and a link to the logs."""
    parts = [
        _failure(each, f"{name}: " if names[1:] else "", run, out)
        for run, name in zip(runs, names, strict=True)
        for each in failures(run)
    ]
    hangs = [
        element("article", element("h3", "Hang, ", _clock(event["time"])), element("pre", event["summary"]))
        for run in runs
        for event in run.launches
        if event["event"] == "hang"
    ]
    return section("failures", "Failures", *hangs, *parts) if parts or hangs else None


def warning_section(runs: Sequence[RunData], names: Sequence[str]) -> Section | None:
    """Each warning once."""
    rows = [
        [
            *([name] if names[1:] else []),
            each["category"],
            each["text"],
            f"{_short_path(each['file'], run)}:{each['line']}",
        ]
        for run, name in zip(runs, names, strict=True)
        for each in unique_warnings(run)
    ]
    headings = [*(["run"] if names[1:] else []), "category", "warning", "line"]
    return section("warnings", "Warnings", table("Warnings of rank 0", headings, rows[:_LISTED])) if rows else None


def _radio(value: str, text: str, checked: bool) -> Markup:
    return element("label", element("input", type="radio", name="x", value=value, checked=checked), f" {text}")


def _difference_cells(each: Difference) -> list[Content]:
    equal = int((each.values == 0).sum())
    differs = bool(each.largest)
    return [
        f"{len(each.steps):,}", f"{equal:,}", f"{each.largest:.3g}", f"{each.step:,}" if differs else "",
        f"{each.relative:.1e}" if differs else "0", f"{each.relative_step:,}" if differs else "",
    ]  # fmt: skip


def _data_parts(run: RunData, name: str, several: bool) -> Iterator[Content]:
    sets = run.last.named("data") if run.starts else []
    report = run.audit
    if not sets and report is None:
        return
    if several:
        yield element("h3", name)
    yield _audit_text(report)
    headings = ["name", "dataset", "samples", "steps per epoch", "shuffled", "padding rows per epoch", "data workers"]
    rows = [_data_row(each) for each in sets]
    if rows:
        yield table("Datasets", headings, rows, numbers=headings[2:4] + headings[5:])
    if report is not None and not isinstance(report, str):
        headings = ["shard", "epochs", "samples", "evaluations", "ranks", "verdict"]
        rows = [
            [
                shard.name, str(len(shard.epochs)), f"{sum(epoch.samples for epoch in shard.epochs):,}",
                str(len(shard.evaluations)),
                ", ".join(str(size) for size in dict.fromkeys(each.world_size for each in shard.generations)),
                shard.verdict,
            ]
            for shard in report.shards
        ]  # fmt: skip
        yield table("Audit of the ledger", headings, rows, numbers=headings[1:4])
        found = [each.text for shard in report.shards for each in (*shard.faults, *shard.missing)]
        found += [each.text for each in report.missing]
        yield element("ul", *(element("li", text) for text in found[:_LISTED])) if found else None


def _audit_text(report: object) -> Markup:
    if report is None:
        text = "No ledger was kept, so this page cannot prove that every sample counted once: pass Run(ledger=True)."
        return element("p", text, class_="note")
    if isinstance(report, str):
        return element("p", f"The ledger cannot be read: {report}", class_="differs")
    verdict = getattr(report, "verdict", "")
    texts = {
        "sound": "The ledger proves that every sample counted exactly once.",
        "incomplete": "The ledger lacks something to prove that every sample counted exactly once.",
        "faulty": "The ledger shows samples that did not count exactly once.",
    }
    classes = {"sound": "status finished", "incomplete": "status preempted", "faulty": "status failed"}
    return element("p", element("span", verdict, class_=classes[verdict]), " ", texts[verdict])


def _data_row(each: Record) -> list[Content]:
    samples, steps = each.get("samples"), each.get("steps_per_epoch")
    padding, workers = each.get("padding_per_epoch"), each.get("num_workers")
    return [
        each["name"], each["dataset"], f"{samples:,}" if samples is not None else "a stream",
        f"{steps:,}" if steps is not None else "", "yes" if each.get("shuffle") else "no",
        f"{padding:,}" if padding is not None else "", str(workers) if workers is not None else "",
    ]  # fmt: skip


def _checkpoint_table(run: RunData, name: str) -> Markup | None:
    """The checkpoints that exist, those that failed and the best ones; the others can be unfolded."""
    found = run.checkpoints
    if not found:
        return None
    best = best_checkpoints(found)
    first = [each for each in found if each.exists or each.error or each in best]
    removed = [each for each in found if each not in first]
    more = f": the last {_LISTED}" if len(removed) > _LISTED else ""
    text = f"{len(removed):,} removed checkpoint{'s' * (len(removed) != 1)}{more}"
    parts = [_checkpoint_rows(f"Checkpoints of {name}", first, best)] if first else []
    if removed:
        rows = _checkpoint_rows(f"Removed checkpoints of {name}", removed[-_LISTED:], best)
        parts.append(element("details", element("summary", text), rows))
    return join(parts)


def _checkpoint_rows(caption: str, found: Sequence[SavedCheckpoint], best: Collection[SavedCheckpoint]) -> Markup:
    headings = ["name", "step", "size", "time to save", "training waited", "metric", "state"]
    rows = [
        [
            each.name, f"{each.step:,}", format_bytes(each.size) if each.size is not None else "",
            format_seconds(each.seconds) if each.seconds is not None else "",
            format_seconds(each.waited) if each.waited is not None else "",
            f"{each.metric[0]} {each.metric[1]:.6g}" if each.metric is not None else "",
            _checkpoint_state(each, best),
        ]
        for each in found
    ]  # fmt: skip
    return table(caption, headings, rows, numbers=headings[1:5])


def _checkpoint_state(each: SavedCheckpoint, best: Collection[SavedCheckpoint]) -> Content:
    if each.error:
        return element("span", f"failed: {each.error}", class_="differs")
    kept = "kept" if each.exists else "removed"
    return element("strong", f"best, {kept}") if each in best else kept


def _failure(each: FailureRecord, prefix: str, run: RunData, out: Path) -> Markup:
    parts: list[Content] = [element("h3", prefix, _clock(each.time)), element("p", each.cause, class_="differs")]
    if each.report:
        parts.append(element("pre", each.report))
    if each.logs:
        own = run.folder / "logs"  # of a copy, if the folder was copied
        logs = own if own.is_dir() else Path(each.logs)
        link = os.path.relpath(logs, out.parent)
        parts.append(element("p", "Logs of all ranks: ", element("a", str(logs), href=link)))
    return element("article", *parts)


def unique_warnings(run: RunData) -> list[Record]:
    """The warnings of all starts, each once."""
    found = {
        (each["text"], each["file"], each["line"]): each for start in run.starts for each in start.named("warning")
    }
    return list(found.values())


def _short_path(file: str, run: RunData) -> str:
    folder = run.last.fields["folder"] if run.starts else ""
    return file.removeprefix(f"{folder}/")


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
