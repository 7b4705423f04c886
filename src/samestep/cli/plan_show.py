"""A plan on the terminal: its candidates as a table, the choice and its reason, a device's memory as a bar."""

import sys

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestep.plan.choose import Plan
from samestep.plan.explain import TITLES, WHAT_IF_TITLES, Segment, bar, rows, what_if_rows
from samestep.units import bytes_text

_PIPED_WIDTH = 120
_SHOWN = 12
_BAR = 80
_LETTERS = {
    "weights": ("W", "blue"),
    "gradients": ("G", "magenta"),
    "optimizer": ("O", "yellow"),
    "working": ("A", "green"),
    "buckets": ("B", "cyan"),
    "gathered": ("S", "bright_blue"),
    "overhead": ("c", "red"),
    "free": (".", "dim"),
    "margin": ("-", "dim"),
    "others": ("x", "bright_red"),
}


def open_terminal() -> Console:
    """Where to print: piped on, a table is not squeezed into the 80 columns that rich takes for granted there."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)


def show(found: Plan, console: Console) -> None:
    """Print the candidates as a table, then the choice: its reason, what to write, its memory as a bar."""
    task, chosen = found.task, found.chosen
    _say(console, "model", f"{task.model.name}, {bytes_text(task.model.weights)} of weights; {task.model.how}")
    _say(console, "machines", f"{task.machines.words} ({task.machines.source}; {task.machines.device.source})")
    _say(console, "step", f"global batch {task.global_batch}, {task.precision}, {task.model.optimizer}")
    _table(console, TITLES, rows(found)[:_SHOWN])
    if len(found.candidates) > _SHOWN:
        console.print(f"and {len(found.candidates) - _SHOWN} more that are slower or do not fit: --json has all")
    if chosen is None:
        console.print(Text("nothing fits", style="bold red"))
        for advice in found.advice:
            _say(console, "do", advice)
        return
    cut = f"{chosen.layout.ranks} rank(s) x {chosen.micro_batch} sample(s) x {chosen.accumulation} micro-batch(es)"
    _say(console, "chosen", f"{chosen.layout.name}: {cut}")
    _say(console, "because", chosen.reason)
    for call in found.script:
        _say(console, "write", call)
    _say(console, "type", str(found.start))
    console.print(_drawn(bar(found, _BAR)))
    console.print(_legend(bar(found, _BAR)), soft_wrap=True)


def show_what_if(plans: list[Plan], samples: int, console: Console) -> None:
    """Print the choice on each of several machines."""
    task = plans[0].task
    _say(console, "model", f"{task.model.name}, {bytes_text(task.model.weights)} of weights; {task.model.how}")
    _say(console, "step", f"global batch {task.global_batch}, {task.model.optimizer}")
    _table(console, WHAT_IF_TITLES, what_if_rows(plans, samples))
    console.print(f"speed-up against the first row that fits; GPU-hours for {samples:,} samples, idle GPUs included")


def _table(console: Console, titles: tuple[str, ...], cells: list[tuple[str, ...]]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in titles:
        table.add_column(title, no_wrap=title not in ("verdict", "strategy"), overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _say(console: Console, label: str, text: str) -> None:
    console.print(Text.assemble((f"{label:<9}", "bold"), text), soft_wrap=True)


def _drawn(segments: list[Segment]) -> Text:
    return Text.assemble(*((_LETTERS[part.name][0] * part.cells, _LETTERS[part.name][1]) for part in segments))


def _legend(segments: list[Segment]) -> Text:
    told = [f"{_LETTERS[part.name][0]} {part.name} {bytes_text(part.size)}" for part in segments]
    return Text("  ".join(told))
