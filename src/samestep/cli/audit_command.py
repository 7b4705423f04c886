"""`samestep audit`: did every sample of a run count exactly once?"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestep.data.audit import AuditReport, ShardReport, Verdict, audit
from samestep.messages import format_list

_PIPED_WIDTH = 120
_SHOWN = 5  # names of checkpoints
_EXIT_CODES: dict[Verdict, int] = {"sound": 0, "faulty": 1, "incomplete": 3}
_STYLES: dict[Verdict, str] = {"sound": "green", "faulty": "bold red", "incomplete": "bold yellow"}


@click.command("audit")
@click.argument("folder", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.pass_context
def command(context: click.Context, folder: Path, as_json: bool) -> None:
    """Check from the ledger of a run that every sample counted exactly once.

    The verdict is sound (exit status 0), faulty (1, with samples, ranks and steps), or incomplete (3, with what the
    ledger lacks for a proof, for example the end of a run that still trains). The exit status is 2 if RUN_DIR has no
    ledger, or one that cannot be read.
    """
    report = audit(folder)
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2))
    else:
        # rich would squeeze a piped table into 80 columns.
        show(report, Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH))
    context.exit(_EXIT_CODES[report.verdict])


def show(report: AuditReport, console: Console) -> None:
    """Print a table with one row per shard, then faults, what is missing, and notes."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("shard", "epochs", "samples", "evaluations", "restarts", "ranks", "verdict"):
        table.add_column(title, no_wrap=True)
    for shard in report.shards:
        table.add_row(*_row(shard))
    console.print(table)
    for label, style, text in _lines(report):
        console.print(Text.assemble((f"{label}: ", style), text), soft_wrap=True)


def _lines(report: AuditReport) -> Iterator[tuple[str, str, str]]:
    """Each line below the table: its label, the style of the label, and its text."""
    for shard in report.shards:
        yield from (("fault", "bold red", f"{shard.name}: {fault.text}") for fault in shard.faults)
        yield from (("missing", "bold yellow", f"{shard.name}: {each.text}") for each in shard.missing)
        yield from (("note", "bold", f"{shard.name}: {note}") for note in shard.notes)
    yield from (("missing", "bold yellow", each.text) for each in report.missing)
    yield (
        "compared with",
        "bold",
        format_list(report.compared, _SHOWN) or "nothing, since there is no summary.json and no checkpoint",
    )
    if report.not_compared:
        yield "not compared with", "bold", format_list(report.not_compared, _SHOWN)


def _row(shard: ShardReport) -> tuple[str | Text, ...]:
    complete = sum(epoch.complete for epoch in shard.epochs)
    partial = [f" and {epoch.steps:,} steps" for epoch in shard.epochs if not epoch.complete]
    evaluations = sum(evaluation.complete for evaluation in shard.evaluations)
    unfinished = len(shard.evaluations) - evaluations
    world_sizes = list(dict.fromkeys(generation.world_size for generation in shard.generations))
    return (
        shard.name,
        f"{complete}{''.join(partial)}",
        f"{sum(epoch.samples for epoch in shard.epochs):,}",
        f"{evaluations} and {unfinished} unfinished" if unfinished else str(evaluations),
        str(max(0, len(shard.generations) - 1)),
        ", ".join(map(str, world_sizes)) or "none",
        Text(shard.verdict, _STYLES[shard.verdict]),
    )
