"""`samestep jobs`: list the submitted SLURM jobs and their states."""

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

from samestep.cli.main import NumberRange
from samestep.environment.world import read_environ
from samestep.launch.sbatch import log_path
from samestep.launch.slurm import JobState, StateQuery, SubmittedJob, job_list_path, read_job_list

_COLORS = {"COMPLETED": "green", "RUNNING": "cyan", "PENDING": "yellow"}


@click.command("jobs")
@click.option(
    "--last", type=NumberRange(1, 1_000_000), default=20, show_default=True, metavar="N", help="Number of jobs."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list instead of a table.")
def command(last: int, as_json: bool) -> None:
    """List the jobs that `samestep submit` has submitted, the newest last, with their states."""
    path, query = job_list_path(read_environ()), StateQuery()
    listed, skipped = read_job_list(path)
    if skipped:
        click.echo(f"samestep: skipped {skipped} line(s) of {path} that are not jobs: remove them", err=True)
    jobs = [(job, query.state(job)) for job in listed[-last:]]
    if as_json:
        click.echo(json.dumps([_record(job, state) for job, state in jobs], indent=2))
    elif jobs:
        # In a pipe rich would wrap the table to 80 columns.
        _print_table(jobs, Console(highlight=False, width=None if sys.stdout.isatty() else 160))
    else:
        click.echo(f"no jobs submitted yet: submit one with `samestep submit train.py` (jobs are listed in {path})")


def _record(job: SubmittedJob, state: JobState) -> dict[str, object]:
    return {
        **asdict(job),
        "log": str(log_path(Path(job.folder), job.job_id)),
        "state": state.state,
        "reason": state.reason,
        "restarts": state.restarts,
        "ended": state.ended,
        "exit_code": state.exit_code if state.ended else None,
    }


def _print_table(jobs: list[tuple[SubmittedJob, JobState]], console: Console) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("job", "name", "submitted", "nodes", "state", "code", "requeued", "folder"):
        table.add_column(title, overflow="fold")
    for job, state in jobs:
        table.add_row(
            Text(job.job_id),
            Text(job.name),
            f"{datetime.fromisoformat(job.submitted_at):%Y-%m-%d %H:%M}",
            str(job.nodes),
            Text(f"{state.state}{f' ({state.reason})' if state.reason else ''}", _COLORS.get(state.state, "red")),
            str(state.exit_code) if state.ended else "",
            str(state.restarts),
            Text(job.folder),
        )
    console.print(table)
