"""`samestep audit`: did every sample of a run count exactly once?"""

import json
import sys
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestep.data.audit import AuditReport, ShardReport, audit

_PIPED_WIDTH = 120


@click.command("audit")
@click.argument("folder", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.pass_context
def command(context: click.Context, folder: Path, as_json: bool) -> None:
    """Check from the ledger of a run that every sample counted exactly once.

    The exit status is 0 if so, 1 if there are faults (with samples, ranks and steps), and 2 if RUN_DIR has no ledger.
    """
    report = audit(folder)
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2))
    else:
        # rich would squeeze a piped table into 80 columns.
        show(report, Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH))
    context.exit(0 if report.exactly_once else 1)


def show(report: AuditReport, console: Console) -> None:
    """Print a table with one row per shard, then the faults and notes."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("shard", "epochs", "samples", "evaluations", "restarts", "ranks", "verdict"):
        table.add_column(title, no_wrap=True)
    for shard in report.shards:
        table.add_row(*_row(shard))
    console.print(table)
    for shard in report.shards:
        for fault in shard.faults:
            console.print(Text.assemble(("fault: ", "bold red"), f"{shard.name}: {fault.text}"), soft_wrap=True)
        for note in shard.notes:
            console.print(Text.assemble(("note: ", "bold"), f"{shard.name}: {note}"), soft_wrap=True)


def _row(shard: ShardReport) -> tuple[str | Text, ...]:
    complete = sum(epoch.complete for epoch in shard.epochs)
    partial = [f" and {epoch.steps:,} steps" for epoch in shard.epochs if not epoch.complete]
    evaluations = sum(evaluation.complete for evaluation in shard.evaluations)
    unfinished = len(shard.evaluations) - evaluations
    world_sizes = list(dict.fromkeys(generation.world_size for generation in shard.generations))
    faults = len(shard.faults)
    return (
        shard.name,
        f"{complete}{''.join(partial)}",
        f"{sum(epoch.samples for epoch in shard.epochs):,}",
        f"{evaluations} and {unfinished} unfinished" if unfinished else str(evaluations),
        str(max(0, len(shard.generations) - 1)),
        ", ".join(map(str, world_sizes)) or "none",
        Text(f"{faults} fault{'s' * (faults > 1)}", "bold red") if faults else Text("exactly once", "green"),
    )
