"""`samestep runs`: a table of the runs in a folder."""

import json
import math
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from samestep.errors import ReportError
from samestep.loggers.run_files import format_number, is_learning_rate
from samestep.messages import format_duration, format_list, plain_text

_PIPED_WIDTH = 160
_STYLES = {"finished": "green", "running": "cyan", "preempted": "yellow", "stopped": "yellow"}
_COLUMNS = ("name", "status", "started", "duration", "ranks", "steps")
_SHOWN = 3  # metrics
_WIDTHS: Final = {"started": 100, "duration": 70, "ranks": 60}
"""Columns that are left out on a narrower terminal."""


@click.command("runs")
@click.argument("folder", default="runs", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--sort",
    default="started",
    show_default=True,
    metavar="COLUMN",
    help=f"A column ({', '.join(_COLUMNS)}) or the name of a metric; with a minus in front the largest comes first.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list instead of a table.")
def command(folder: Path, sort: str, as_json: bool) -> None:
    """List the runs in FOLDER and below, with status, ranks, steps, last metrics and duration."""
    from samestep.report.run_data import read_last_values, reading
    from samestep.report.run_table import describe_row, find_runs

    if not folder.is_dir():
        raise click.UsageError(f"{folder} does not exist: pass a folder with runs")
    paths, terminal = find_runs(folder), Console(stderr=True)
    paths = track(paths, "reading", console=terminal, transient=True, disable=not sys.stderr.isatty())
    rows = list[dict[str, Any]]()
    for path in paths:
        try:
            with reading(path):
                rows.append(describe_row(read_last_values(path)))
        except ReportError as error:  # another file of this name
            click.echo(f"samestep: {error}", err=True)
    rows = _sorted(rows, sort)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif rows:
        _print(rows, folder, Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH))
    else:
        click.echo(f"no runs in {folder}: `samestep run train.py` makes one")


def _sorted(rows: list[dict[str, Any]], sort: str) -> list[dict[str, Any]]:
    """By a column or a metric; runs that lack it come last."""
    name, backwards = sort.removeprefix("-"), sort.startswith("-")
    field = {"duration": "seconds"}.get(name, name)
    known = {metric for row in rows for metric in row["metrics"]}
    if name not in _COLUMNS and name not in known:
        metrics = f" or a metric of these runs: {format_list(sorted(known), 8)}" if known else ""
        raise click.UsageError(f"--sort {name} is not a column ({', '.join(_COLUMNS)}){metrics}")
    values = [(row["metrics"].get(name) if name in known else row[field], row) for row in rows]
    have = [(value, row) for value, row in values if value is not None]
    have.sort(key=lambda item: (str(item[0]), 0.0) if isinstance(item[0], str) else ("", item[0]), reverse=backwards)
    return [row for _, row in have] + [row for value, row in values if value is None]


def _print(rows: Sequence[dict[str, Any]], folder: Path, console: Console) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    shown = [title for title in _COLUMNS if console.width >= _WIDTHS.get(title, 0)]
    for title in (*shown, "last metrics"):
        is_text = title in ("name", "last metrics")
        right = "right" if title in _COLUMNS[3:] else "left"
        table.add_column(title, overflow="fold", justify=right, no_wrap=not is_text)
    for row in rows:
        started = row["started"]
        cells = {
            "name": Text(plain_text(_name(Path(row["folder"]), folder))),
            "status": Text(row["status"], _STYLES.get(row["status"], "red")),
            "started": f"{datetime.fromtimestamp(started):%Y-%m-%d %H:%M}" if started is not None else "",
            "duration": format_duration(row["seconds"]),
            "ranks": str(row["ranks"] or ""),
            "steps": f"{row['steps']:,}",
        }
        table.add_row(*(cells[title] for title in shown), Text(_metrics(row["metrics"])))
    console.print(table)


def _name(path: Path, folder: Path) -> str:
    """The path of a run, relative to the folder that is listed or else to the current one, which is often above it."""
    for base in (folder.resolve(), Path.cwd()):
        if path.is_relative_to(base):
            return str(path.relative_to(base)) if path != base else path.name
    return str(path)


def _metrics(metrics: dict[str, float | None]) -> str:
    """The metrics that matter most: results of evaluations, then the loss."""
    others = (name for name in metrics if not name.startswith("train/") and not is_learning_rate(name))
    names = [*others, "train/loss"]
    shown = [(name, metrics.get(name)) for name in names[-_SHOWN:]]
    return ", ".join(
        f"{name} {format_number(value)}" for name, value in shown if value is not None and math.isfinite(value)
    )
