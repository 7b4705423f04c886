"""`samestep jobs`: what was submitted from here, and how each of it ended."""

import json
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestep.environment.world import read_environ
from samestep.launch.sbatch import log_of
from samestep.launch.slurm import JobState, Submitted, how_are, read_record, record_path

_PIPED_WIDTH = 160
_COLOURS = {"COMPLETED": "green", "RUNNING": "cyan", "PENDING": "yellow"}


@click.command("jobs", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--last", type=click.IntRange(min=1), default=20, show_default=True, metavar="N", help="How many to list."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list instead of a table.")
def command(last: int, as_json: bool) -> None:
    """List the jobs that `samestep submit` has submitted, the newest last, and how each ended."""
    path = record_path(read_environ())
    listed = read_record(path)[-last:]
    jobs = list(zip(listed, how_are(listed), strict=True))
    if as_json:
        click.echo(json.dumps([_entry(submitted, state) for submitted, state in jobs], indent=2))
    elif jobs:
        # Piped on, a table is not squeezed into the 80 columns that rich takes for granted there.
        _show(jobs, Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH))
    else:
        click.echo(f"no job was submitted yet: `samestep submit train.py` does, and keeps its record in {path}")


def _entry(submitted: Submitted, state: JobState) -> dict[str, object]:
    ended = {"ended": state.ended, "exit_code": state.exit_code if state.ended else None}
    log = str(log_of(Path(submitted.folder), submitted.job))
    return {
        **asdict(submitted),
        "log": log,
        "state": state.state,
        "reason": state.reason,
        "restarts": state.restarts,
        **ended,
    }


def _show(jobs: list[tuple[Submitted, JobState]], console: Console) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("job", "name", "submitted", "nodes", "state", "code", "requeued", "folder"):
        table.add_column(title, overflow="fold")
    for submitted, state in jobs:
        table.add_row(
            Text(submitted.job),
            Text(submitted.name),
            f"{datetime.fromisoformat(submitted.submitted):%Y-%m-%d %H:%M}",
            str(submitted.nodes),
            Text(f"{state.state}{f' ({state.reason})' if state.reason else ''}", _COLOURS.get(state.state, "red")),
            str(state.exit_code) if state.ended else "",
            str(state.restarts),
            Text(submitted.folder),
        )
    console.print(table)
