"""`samestep report`: write one HTML page that shows what one or several runs did."""

import json
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import Progress

from samestep.messages import format_bytes, plain_text

if TYPE_CHECKING:
    from samestep.report.run_data import RunData

_PAGE = "report.html"


@click.command("report")
@click.argument("folders", nargs=-1, required=True, metavar="RUN_DIR...", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write; default: report.html in RUN_DIR, or in the current folder for several runs.",
)
@click.option("--open", "show", is_flag=True, help="Open the page in the browser.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with the numbers of the page instead.")
def command(folders: tuple[Path, ...], out: Path | None, show: bool, as_json: bool) -> None:
    """Write one HTML page that shows what a run did, or compares several runs with the first one.

    It shows the verdict, curves, what the time was spent on, memory, data, a timeline, checkpoints and failures. The
    run may be finished, failed or running. The page needs no network: open it from disk, or send it by mail.
    """
    from samestep.report.page import run_names, write_report
    from samestep.report.run_data import find_run_folder
    from samestep.report.run_table import describe_runs_json
    from samestep.report.verdict import describe_run

    runs = _read(folders)
    if as_json:
        click.echo(json.dumps(describe_runs_json(runs), indent=2))
        if out is None:
            return
    path = write_report(runs, out or (find_run_folder(folders[0]) if len(folders) == 1 else Path()) / _PAGE)
    if not as_json:
        for name, run in zip(run_names(runs), runs, strict=True):
            click.echo(f"{name}: {plain_text(describe_run(run).text)}")
        click.echo(f"report: {path} ({format_bytes(path.stat().st_size)}); open it with a browser")
    if show and not webbrowser.open(path.as_uri()):
        click.echo(f"samestep: no browser was found: open {path.as_uri()} yourself", err=True)


def _read(folders: tuple[Path, ...]) -> "list[RunData]":
    """Read the folders, with a bar on a terminal, since a long run has millions of records."""
    from samestep.report.run_data import RunData, read_run

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("reading", total=len(folders))
        runs = list[RunData]()
        for folder in folders:
            progress.update(task, description=f"reading {folder}")
            runs.append(read_run(folder))
            progress.advance(task)
        return runs
