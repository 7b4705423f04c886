"""`samestep plan`: what fits on which GPUs, what is fastest, and why; for machines that need not be here."""

import json
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from shlex import quote

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestep.cli.build_function import find_build, script_of
from samestep.environment.world import read_environ
from samestep.errors import PlanError
from samestep.messages import format_bytes
from samestep.planner.calibration import Calibration, save_calibration
from samestep.planner.cluster_discovery import slurm_job_cluster, slurm_nodes
from samestep.planner.cluster_spec import ClusterSpec, parse_cluster_spec
from samestep.planner.layouts import PlanOptions
from samestep.planner.model_profile import CUDA_MARGIN, ModelProfile
from samestep.planner.plan import PRECISIONS, Plan, check_numbers, plan, precision_on
from samestep.planner.plan_report import TITLES, WHAT_IF_TITLES, Segment, bar, gpu_hours, rows, speed_ups, what_if_rows

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
    _say(console, "model", f"{task.model.name}, {format_bytes(task.model.weights)} of weights; {task.model.how}")
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
    _say(console, "model", f"{task.model.name}, {format_bytes(task.model.weights)} of weights; {task.model.how}")
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
    told = [f"{_LETTERS[part.name][0]} {part.name} {format_bytes(part.size)}" for part in segments]
    return Text("  ".join(told))


_KINDS = ("h100", "a100", "a10g")
_COUNTS = (1, 2, 4, 8, 16)
_NODE = 8  # more GPUs than these are several nodes


@dataclass(frozen=True)
class Wish:
    """What was typed."""

    global_batch: int
    """Samples of a step."""
    precision: str
    """auto, fp32, bf16 or fp16."""
    optimizer: str
    """Its class in torch.optim."""
    margin: float
    """The part of a device's memory that stays free."""
    channels_last: bool
    """Whether images lie with their channels last."""
    blocks: tuple[str, ...]
    """Names of the classes of blocks; empty: found."""


@click.command("plan")
@click.argument("target", metavar="MODULE:FUNCTION|RECIPE", required=False)
@click.argument("arguments", metavar="[-- OPTIONS OF THE FUNCTION]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--global-batch", type=int, metavar="N", help="Samples of one optimizer step, over all ranks.")
@click.option(
    "--gpus",
    default="local",
    show_default=True,
    metavar="MACHINES",
    help="NAME:COUNT in a node, as in h100:4; g5, p3; JSON or a file of it; `local`: what is here.",
)
@click.option(
    "--nodes", type=int, metavar="N", help="How many such nodes; default: 1, or for `local` those of the SLURM job."
)
@click.option("--precision", default="auto", show_default=True, type=click.Choice(PRECISIONS), help="As in Run(...).")
@click.option("--optimizer", default="AdamW", show_default=True, metavar="NAME", help="Its class in torch.optim.")
@click.option("--channels-last", is_flag=True, help="As in run.wrap(channels_last=True).")
@click.option(
    "--blocks", multiple=True, metavar="CLASS", help="As in run.wrap(blocks=...), by name; again for another."
)
@click.option(
    "--margin", default=CUDA_MARGIN, show_default=True, metavar="PART", help="Part of a device's memory to leave free."
)
@click.option("--what-if", is_flag=True, help="The choice on 1 to 16 GPUs of several kinds, with speed-up and cost.")
@click.option(
    "--samples",
    default=1_000_000,
    show_default=True,
    metavar="N",
    help="For --what-if: samples that GPU-hours are for.",
)
@click.option("--calibrate", is_flag=True, help="Measure this machine first, and keep that for later estimates.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.pass_context
def command(
    context: click.Context,
    target: str | None,
    arguments: tuple[str, ...],
    gpus: str,
    nodes: int | None,
    what_if: bool,
    samples: int,
    calibrate: bool,
    as_json: bool,
    **rest: object,
) -> None:
    """Say how to train a model on given GPUs: what fits, what is fastest, and why.

    MODULE:FUNCTION, or FILE.py:FUNCTION, returns a model and an example batch, both without a device; RECIPE is a name
    of `samestep recipe list`. Parameters of the function are typed after `--`. No GPU is needed; on one that is here
    (--gpus local) operations are run to see how long they take. Ends with 1 where nothing fits.
    """
    if target is None and rest["global_batch"] is None and calibrate:
        _tell_measured(*_calibrate(), as_json)
        return
    wish = _wish(target, samples, rest)
    if calibrate:
        _calibrate()
    asked = list(_what_if_machines(gpus, nodes)) if what_if else [_machines(gpus, nodes)]
    with redirect_stdout(sys.stderr):  # what the user's own module prints is no part of the plan, nor of its JSON
        traces = Traces(wish, str(target), _find(str(target), arguments))
        plans = [traces.plan(each, here=here) for each, here in asked]
    _print(plans, samples if what_if else None, as_json)
    context.exit(0 if any(found.chosen for found in plans) else 1)


class Traces:
    """The model's facts, traced once for each precision and kind of device that is asked for."""

    def __init__(self, wish: Wish, name: str, build: Callable[[], object]) -> None:
        self._wish, self._name, self._build = wish, name, build
        self._known: dict[tuple[str, str], ModelProfile] = {}

    def plan(self, machines: ClusterSpec, *, here: bool) -> Plan:
        """The choice on these machines; where one of them is here, times are measured on its GPU."""
        made = self._planned(machines, self.facts(machines))
        if made.chosen is None or machines.device.kind != "cuda" or not here:
            return made
        with _patience(f"running operations of {self._name} on this GPU, one by one"):
            from samestep.planner.step_timing import time_here

            facts = time_here(
                made.task.model,
                self._build,
                machines,
                made.chosen.micro_batch,
                self._wish.precision,
                channels_last=self._wish.channels_last,
            )
        return self._planned(machines, facts)

    def _planned(self, machines: ClusterSpec, facts: ModelProfile) -> Plan:
        wish = self._wish
        asked = PlanOptions(script_of(self._name), wish.channels_last, bool(wish.blocks))
        return plan(machines, facts, wish.global_batch, wish.precision, wish.margin, asked)

    def facts(self, machines: ClusterSpec) -> ModelProfile:
        """What the model needs on these machines."""
        precision = precision_on(machines, self._wish.precision)
        kind = "cuda" if machines.device.kind == "cuda" else "cpu"
        if (precision, kind) not in self._known:
            with _patience(f"tracing {self._name} in {precision}: shapes only, no memory"):
                from samestep.planner.trace import trace_model

                self._known[precision, kind] = trace_model(
                    self._build,
                    optimizer=self._wish.optimizer,
                    precision=precision,
                    blocks=self._wish.blocks,
                    target=kind,
                    channels_last=self._wish.channels_last,
                )
        return self._known[precision, kind]


def _wish(target: str | None, samples: int, typed: dict[str, object]) -> Wish:
    """Check what can be checked before anything is looked at."""
    if target is None or typed["global_batch"] is None:
        without = "a function that builds the model, and a global batch" if target is None else "a global batch"
        typed_again = quote(target or "mylab:build")
        raise PlanError(f"a plan needs {without}: type `samestep plan {typed_again} --global-batch 256 --gpus h100:4`")
    wish = Wish(**typed)  # pyright: ignore[reportArgumentType]  # click checks the options
    check_numbers(wish.global_batch, wish.margin)
    if samples < 1:
        raise PlanError(f"--samples {samples} is nothing to count GPU-hours for: give 1 or more")
    return wish


def _find(target: str, arguments: tuple[str, ...]) -> Callable[[], object]:
    with _patience(f"importing {target}"):
        return find_build(target, arguments)


def _machines(words: str, nodes: int | None) -> tuple[ClusterSpec, bool]:
    """As typed, or what is here and in the SLURM job if there is one; and whether their device is at hand."""
    environ = read_environ()
    if words.strip() != "local":
        return parse_cluster_spec(words, 1 if nodes is None else nodes), False
    count = slurm_nodes(environ) if nodes is None else nodes
    if count < 1:
        raise PlanError(f"{count} nodes are no machines: give --nodes 1 or more")
    with _patience("looking at this machine"):
        from samestep.planner.cluster_discovery import detect_cluster

        seen = detect_cluster(count)
        found = slurm_job_cluster(seen, environ, count)
        return found, found.device == seen.device


def _what_if_machines(words: str, nodes: int | None) -> Iterator[tuple[ClusterSpec, bool]]:
    """So many of the GPUs that were typed, if any, and of the usual ones; none of them counts as at hand."""
    if nodes is not None:
        raise PlanError("--what-if tries several numbers of nodes by itself: leave --nodes out")
    asked = [] if words.strip() == "local" else [parse_cluster_spec(words)]
    known = {kind: parse_cluster_spec(kind) for kind in _KINDS}
    for kind in ({each.device.name: each for each in asked} | known).values():
        for count in _COUNTS if kind.device.kind != "mps" else (1,):
            yield kind.of_size(min(count, _NODE), -(-count // _NODE)), False


def _calibrate() -> tuple[Calibration, str]:
    text = "measuring this machine, for less than a minute"
    with _patience(text) as say:
        import torch

        from samestep.planner.calibration import calibrate

        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        found = calibrate(torch.device(kind), lambda part: say(f"{text}: {part}"))
    return found, str(save_calibration(found, read_environ()))


def _tell_measured(found: Calibration, path: str, as_json: bool) -> None:
    """Without a model, a calibration is all that there is to tell."""
    if as_json:
        click.echo(json.dumps({**asdict(found), "path": path}, indent=2))
        return
    best = ", ".join(f"{name} {points[-1][1] / 1e12:.3g}" for name, points in found.products.items())
    reduced = "" if found.all_reduce is None else f", all-reduce {found.all_reduce / 1e9:.3g} GB/s"
    click.echo(
        f"{found.device}: TFLOP/s in products {best}; copies {found.copy / 1e9:.3g} GB/s, from the host "
        f"{found.host_link / 1e9:.3g} GB/s{reduced}; {found.launch * 1e6:.3g} us to start an operation; kept in {path}"
    )


def _print(plans: list[Plan], samples: int | None, as_json: bool) -> None:
    """Print one plan, or where there are `samples` to count several of them beside each other."""
    if as_json:
        click.echo(json.dumps(plans[0].to_json() if samples is None else _records(plans, samples), indent=2))
    elif samples is None:
        show(plans[0], open_terminal())
    else:
        show_what_if(plans, samples, open_terminal())


def _records(plans: list[Plan], samples: int) -> list[dict[str, object]]:
    return [
        {**found.to_json(), "samples": samples, "speed_up": speed_up, "gpu_hours": gpu_hours(found, samples)}
        for found, speed_up in zip(plans, speed_ups(plans), strict=True)
    ]


@contextmanager
def _patience(text: str) -> Generator[Callable[[str], None]]:
    """Show on the terminal that something is going on, beside what is printed; what it gives shows another text."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(text) as shown:
        yield shown.update
