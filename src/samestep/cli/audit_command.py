"""`samestep audit`: did every sample of a run count exactly once?"""

import json
import sys
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestep.data.audit import Report, ShardReport, audit

_PIPED_WIDTH = 120


@click.command("audit")
@click.argument("folder", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.pass_context
def command(context: click.Context, folder: Path, as_json: bool) -> None:
    """Prove from the ledger of a run that every sample counted exactly once.

    Ends with 0 if so, with 1 if not (it then says which samples, ranks and steps), with 2 if RUN_DIR has no ledger.
    """
    report = audit(folder)
    if as_json:
        click.echo(json.dumps(report.as_record(), indent=2))
    else:
        # Piped on, a table is not squeezed into the 80 columns that rich takes for granted there.
        show(report, Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH))
    context.exit(0 if report.exactly_once else 1)


def show(report: Report, console: Console) -> None:
    """Print one row a shard, and beneath the table what is wrong or worth knowing."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("shard", "epochs", "samples", "evaluations", "restarts", "ranks", "verdict"):
        table.add_column(title, no_wrap=True)
    for shard in report.shards:
        table.add_row(*_row(shard))
    console.print(table)
    for shard in report.shards:
        for fault in shard.faults:
            console.print(Text.assemble(("wrong: ", "bold red"), f"{shard.name}: {fault.text}"), soft_wrap=True)
        for note in shard.notes:
            console.print(Text.assemble(("note: ", "bold"), f"{shard.name}: {note}"), soft_wrap=True)


def _row(shard: ShardReport) -> tuple[str | Text, ...]:
    samples = sum(epoch.samples for epoch in shard.epochs)
    sizes = list(dict.fromkeys(start.world_size for start in shard.starts))
    faults = len(shard.faults)
    verdict = (
        Text("exactly once", "green") if shard.exactly_once else Text(f"{faults} fault{'s' * (faults > 1)}", "bold red")
    )
    return (
        shard.name,
        _epochs(shard),
        f"{samples:,}",
        _evaluations(shard),
        str(max(0, len(shard.starts) - 1)),
        ", ".join(map(str, sizes)) or "none",
        verdict,
    )


def _epochs(shard: ShardReport) -> str:
    whole = sum(epoch.complete for epoch in shard.epochs)
    begun = [f" and {epoch.steps:,} steps" for epoch in shard.epochs if not epoch.complete]
    return f"{whole}{''.join(begun)}"


def _evaluations(shard: ShardReport) -> str:
    whole = sum(evaluation.complete for evaluation in shard.evaluations)
    left = len(shard.evaluations) - whole
    return f"{whole} and {left} unfinished" if left else str(whole)
