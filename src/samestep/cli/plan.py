"""`samestep plan`: what fits on which GPUs, what is fastest, and why; for machines that need not be here."""

import json
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestep.cli.building import find_function
from samestep.errors import PlanError
from samestep.facts.calibration import keep_calibration
from samestep.facts.machine_live import machines_of_slurm, slurm_nodes
from samestep.facts.machine_words import machines_of
from samestep.facts.machines import Machines
from samestep.facts.model import CUDA_MARGIN, ModelFacts
from samestep.facts.world import environment
from samestep.plan.choose import PRECISIONS, Plan, plan, precision_on
from samestep.plan.explain import TITLES, WHAT_IF_TITLES, Segment, bar, gpu_hours, rows, what_if_rows
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
}
_KINDS = ("h100", "a100", "a10g")
_COUNTS = (1, 2, 4, 8, 16)
_NODE = 8  # more GPUs than these are several nodes


@dataclass(frozen=True)
class Wish:
    """What was typed."""

    target: str
    """The function that builds the model."""
    global_batch: int
    """Samples of a step."""
    precision: str
    """auto, fp32, bf16 or fp16."""
    optimizer: str
    """Its class in torch.optim."""
    margin: float
    """The part of a device's memory that stays free."""


@click.command("plan")
@click.argument("target", metavar="MODULE:FUNCTION", required=False)
@click.option("--global-batch", type=int, help="Samples of one optimizer step, over all ranks.")
@click.option("--gpus", default="local", show_default=True, help="NAME:COUNT in a node (h100:4), g5, p3, or JSON.")
@click.option("--nodes", type=int, help="How many such nodes; those of the SLURM job, or 1.")
@click.option("--precision", default="auto", show_default=True, type=click.Choice(PRECISIONS), help="As in Run(...).")
@click.option("--optimizer", default="AdamW", show_default=True, help="Its class in torch.optim.")
@click.option("--margin", default=CUDA_MARGIN, show_default=True, help="Part of a device's memory to leave free.")
@click.option("--what-if", is_flag=True, help="The choice on 1 to 16 GPUs of several kinds, with speed-up and cost.")
@click.option("--samples", default=1_000_000, show_default=True, help="For --what-if: samples that GPU-hours are for.")
@click.option("--calibrate", is_flag=True, help="Measure this machine first, and keep that for later estimates.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.pass_context
def command(
    context: click.Context,
    target: str | None,
    global_batch: int | None,
    gpus: str,
    nodes: int | None,
    what_if: bool,
    samples: int,
    calibrate: bool,
    as_json: bool,
    **rest: object,
) -> None:
    """Say how to train a model on given GPUs: what fits, what is fastest, and why.

    MODULE:FUNCTION, or FILE.py:FUNCTION, takes nothing and returns a model and an example batch, both without a device.
    Nothing is computed and no GPU is needed. Ends with 1 where nothing fits.
    """
    measured = _calibrate() if calibrate else None
    if target is None or global_batch is None:
        _tell_measured(measured)
        return
    wish = Wish(target, global_batch, **rest)  # pyright: ignore[reportArgumentType]  # click checks the options
    traces = Traces(wish)
    machines = _what_if_machines(gpus, nodes) if what_if else [_machines(gpus, nodes)]
    plans = [_plan(traces, each) for each in machines]
    _print(plans, samples if what_if else None, as_json)
    context.exit(0 if any(found.chosen for found in plans) else 1)


class Traces:
    """The model's facts, traced once for each precision and kind of device that is asked for."""

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self._known: dict[tuple[str, str], ModelFacts] = {}

    def facts(self, machines: Machines) -> ModelFacts:
        """What the model needs on these machines."""
        precision = precision_on(machines, self.wish.precision)
        kind = "cuda" if machines.device.kind == "cuda" else "cpu"
        if (precision, kind) not in self._known:
            with _patience(f"tracing {self.wish.target} in {precision}: shapes only, no memory"):
                from samestep.measure.trace import trace_model

                self._known[precision, kind] = trace_model(
                    find_function(self.wish.target), optimizer=self.wish.optimizer, precision=precision, target=kind
                )
        return self._known[precision, kind]


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
    _table(console, WHAT_IF_TITLES, what_if_rows(plans, samples))
    console.print(f"speed-up against the first row that fits; GPU-hours for {samples:,} samples, idle GPUs included")


def _plan(traces: Traces, machines: Machines) -> Plan:
    wish = traces.wish
    return plan(machines, traces.facts(machines), wish.global_batch, wish.precision, wish.margin)


def _machines(words: str, nodes: int | None) -> Machines:
    """As typed, or what is here, in the SLURM job if there is one; with what a calibration kept."""
    environ = environment()
    if words.strip() != "local":
        return machines_of(words, 1 if nodes is None else nodes)
    count = slurm_nodes(environ) if nodes is None else nodes
    with _patience("looking at this machine"):
        from samestep.run.machines import machines_seen

        found = machines_seen(max(1, count))
    asked = machines_of_slurm(environ) if found.device.kind != "cuda" else None
    return asked or found


def _what_if_machines(words: str, nodes: int | None) -> Iterator[Machines]:
    """So many of the GPUs that were typed, if any, and of the usual ones."""
    if nodes is not None:
        raise PlanError("--what-if tries several numbers of nodes by itself: leave --nodes out")
    asked = [] if words.strip() == "local" else [machines_of(words)]
    known = {kind: machines_of(kind) for kind in _KINDS}
    for kind in ({each.device.name: each for each in asked} | known).values():
        for count in _COUNTS:
            yield kind.of_size(min(count, _NODE), -(-count // _NODE))


def _calibrate() -> str:
    with _patience("measuring this machine, for less than a minute"):
        import torch

        from samestep.measure.calibrate import calibrate

        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        found = calibrate(torch.device(kind))
    path = keep_calibration(found, environment())
    best = ", ".join(f"{name} {points[-1][1] / 1e12:.3g}" for name, points in found.products.items())
    reduced = "" if found.all_reduce is None else f", all-reduce {found.all_reduce / 1e9:.3g} GB/s"
    return (
        f"{found.device}: TFLOP/s in products {best}; copies {found.copy / 1e9:.3g} GB/s, from the host "
        f"{found.host_link / 1e9:.3g} GB/s{reduced}; {found.launch * 1e6:.3g} us to start an operation; kept in {path}"
    )


def _tell_measured(measured: str | None) -> None:
    """Without a model, a calibration is all that there is to tell."""
    if measured is None:
        raise PlanError(
            "a plan needs a function that builds the model, and a global batch: type `samestep plan mylab:build "
            "--global-batch 256 --gpus h100:4`"
        )
    click.echo(measured)


def _print(plans: list[Plan], samples: int | None, as_json: bool) -> None:
    """Print one plan, or where there are `samples` to count several of them beside each other."""
    if as_json:
        click.echo(json.dumps(plans[0].to_json() if samples is None else _records(plans, samples), indent=2))
        return
    # Piped on, a table is not squeezed into the 80 columns that rich takes for granted there.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    if samples is None:
        show(plans[0], console)
    else:
        show_what_if(plans, samples, console)


def _records(plans: list[Plan], samples: int) -> list[Mapping[str, object]]:
    return [{**found.to_json(), "samples": samples, "gpu_hours": gpu_hours(found, samples)} for found in plans]


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


@contextmanager
def _patience(text: str) -> Generator[None]:
    """Show on the terminal that something is going on, beside what is printed."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield
