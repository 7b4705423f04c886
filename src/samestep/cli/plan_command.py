"""`samestep plan`: which layouts fit on which GPUs, which is the fastest, and why; the GPUs need not be available."""

import json
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from shlex import quote
from typing import TYPE_CHECKING, Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestep.cli.build_function import find_build, script_of
from samestep.cli.main import NumberRange
from samestep.environment.world import MAX_RANKS, read_environ
from samestep.errors import PlanError
from samestep.messages import format_bytes, format_seconds
from samestep.planner.cluster_spec import ClusterSpec, parse_cluster_spec
from samestep.planner.layouts import PlanOptions
from samestep.planner.model_profile import CUDA_MARGIN, ModelProfile
from samestep.planner.plan import PRECISIONS, Plan, make_plan, resolve_precision

if TYPE_CHECKING:  # modules that import torch are loaded when they are needed, so that --help is fast
    from samestep.planner.calibration import Calibration

PLAN_COLUMNS = ("strategy", "ranks", "micro-batch", "memory", "step time", "reason")
"""Column titles of `plan_rows`."""
WHAT_IF_COLUMNS = ("GPUs", "precision", "strategy", "micro-batch", "memory", "step time", "speed-up", "GPU-hours")
"""Column titles of `what_if_rows`."""

_PIPED_WIDTH = 120
_MAX_ROWS = 12
_BAR_WIDTH = 80
_BAR_STYLES = {
    "weights": ("W", "blue"),
    "gradients": ("G", "magenta"),
    "optimizer": ("O", "yellow"),
    "activations": ("A", "green"),
    "buckets": ("B", "cyan"),
    "gathered": ("S", "bright_blue"),
    "overhead": ("c", "red"),
    "free": (".", "dim"),
    "margin": ("-", "dim"),
    "other processes": ("x", "bright_red"),
}
_WHAT_IF_DEVICES = ("h100", "a100", "a10g")
_WHAT_IF_COUNTS = (1, 2, 4, 8, 16)
_MAX_DEVICES_PER_NODE = 8


@click.command("plan")
@click.argument("target", metavar="MODULE:FUNCTION|RECIPE", required=False)
@click.argument("arguments", metavar="[-- OPTIONS OF THE FUNCTION]...", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--global-batch",
    type=NumberRange(1, 1_000_000_000),
    metavar="N",
    help="Samples per optimizer step, over all ranks.",
)
@click.option(
    "--gpus",
    default="local",
    show_default=True,
    metavar="CLUSTER",
    help="NAME:COUNT per node, for example h100:4; g5 or p3; JSON or a .json file; `local`: this machine.",
)
@click.option(
    "--nodes",
    type=NumberRange(1, MAX_RANKS),
    metavar="N",
    help="Number of nodes. Default: 1; with `local`, those of the SLURM job.",
)
@click.option("--precision", default="auto", show_default=True, type=click.Choice(PRECISIONS), help="As in Run(...).")
@click.option("--optimizer", default="AdamW", show_default=True, metavar="NAME", help="Name of a class in torch.optim.")
@click.option("--channels-last", is_flag=True, help="As in run.wrap(channels_last=True).")
@click.option(
    "--blocks", multiple=True, metavar="CLASS", help="Class name of a block, as in run.wrap(blocks=...). Repeatable."
)
@click.option(
    "--margin",
    type=NumberRange(0.0, 0.99),
    default=CUDA_MARGIN,
    show_default=True,
    metavar="FRACTION",
    help="Fraction of a device's memory to leave free.",
)
@click.option("--what-if", is_flag=True, help="Compare 1 to 16 GPUs of several kinds, with speed-up and GPU-hours.")
@click.option(
    "--samples",
    type=NumberRange(1, 10**18),
    default=1_000_000,
    show_default=True,
    metavar="N",
    help="With --what-if: number of samples to compute GPU-hours for.",
)
@click.option("--calibrate", is_flag=True, help="Measure this machine first, and save the result for later plans.")
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
    global_batch: int | None,
    margin: float,
    **options: Any,
) -> None:
    """Plan how to train a model on given GPUs: what fits, what is fastest, and why.

    MODULE:FUNCTION, or FILE.py:FUNCTION, returns a model and an example batch, both without a device; RECIPE is a name
    from `samestep recipe list`. Pass parameters of the function after `--`. No GPU is needed. If GPUs of this machine
    are planned for (--gpus local), the operations of a step are timed on one of them. The exit code is 1 if nothing
    fits.
    """
    if target is None and global_batch is None and calibrate:
        _print_calibration(*_calibrate(), as_json)
        return
    _check_arguments(target, global_batch)
    if calibrate:
        _calibrate()
    clusters = list(_what_if_clusters(gpus, nodes)) if what_if else [_find_cluster(gpus, nodes)]
    with redirect_stdout(sys.stderr):  # what the user's module prints is not part of the plan or of its JSON
        with _status(f"importing {target}"):
            build = find_build(str(target), arguments)
        planner = _Planner(str(target), build, global_batch=global_batch or 0, margin=margin, **options)
        plans = [planner.plan(cluster, available=available) for cluster, available in clusters]
    _print_plans(plans, samples if what_if else None, as_json)
    context.exit(0 if any(plan.chosen for plan in plans) else 1)


def _check_arguments(target: str | None, global_batch: int | None) -> None:
    if target is None or global_batch is None:
        missing = "a function that builds the model, and a global batch" if target is None else "a global batch"
        example = quote(target or "train.py:build")
        raise PlanError(f"A plan needs {missing}: `samestep plan {example} --global-batch 256 --gpus h100:4`")


@dataclass
class _Planner:
    """Plans for several clusters; the model is traced once per precision and device type."""

    target: str
    build: Callable[[], object]
    global_batch: int
    precision: str
    optimizer: str
    margin: float
    channels_last: bool
    blocks: tuple[str, ...]
    profiles: dict[tuple[str, str], ModelProfile] = field(default_factory=dict)

    def plan(self, cluster: ClusterSpec, *, available: bool) -> Plan:
        """The plan for a cluster; if its GPU is available here, step times are measured on it."""
        plan = self._make_plan(cluster, self._profile(cluster))
        if plan.chosen is None or cluster.device.kind != "cuda" or not available:
            return plan
        with _status(f"timing operations of {self.target} on this GPU"):
            from samestep.planner.step_timing import time_on_gpu

            model, micro_batch = plan.request.model, plan.chosen.micro_batch
            profile = time_on_gpu(
                model, self.build, cluster, micro_batch, self.precision, channels_last=self.channels_last
            )
        return self._make_plan(cluster, profile)

    def _make_plan(self, cluster: ClusterSpec, profile: ModelProfile) -> Plan:
        options = PlanOptions(script_of(self.target), self.channels_last, bool(self.blocks))
        return make_plan(cluster, profile, self.global_batch, self.precision, self.margin, options)

    def _profile(self, cluster: ClusterSpec) -> ModelProfile:
        precision = resolve_precision(cluster, self.precision)
        kind = "cuda" if cluster.device.kind == "cuda" else "cpu"
        if (precision, kind) not in self.profiles:
            with _status(f"tracing {self.target} in {precision} without memory"):
                from samestep.planner.trace import trace_model

                self.profiles[precision, kind] = trace_model(
                    self.build,
                    optimizer=self.optimizer,
                    precision=precision,
                    blocks=self.blocks,
                    target=kind,
                    channels_last=self.channels_last,
                )
        return self.profiles[precision, kind]


def _find_cluster(gpus: str, nodes: int | None) -> tuple[ClusterSpec, bool]:
    """The cluster of --gpus and --nodes, and whether its device is available on this machine."""
    environ = read_environ()
    if gpus.strip() != "local":
        return parse_cluster_spec(gpus, 1 if nodes is None else nodes), False
    with _status("detecting the hardware of this machine"):
        from samestep.planner.cluster_discovery import detect_cluster, slurm_job_cluster, slurm_nodes

        nodes = slurm_nodes(environ) if nodes is None else nodes
        here = detect_cluster(nodes)
        cluster = slurm_job_cluster(here, environ, nodes)
        return cluster, cluster.device == here.device


def _what_if_clusters(gpus: str, nodes: int | None) -> Iterator[tuple[ClusterSpec, bool]]:
    """Several numbers of the GPUs of --gpus, if any, and of common ones; none counts as available here."""
    if nodes is not None:
        raise PlanError("--what-if compares several numbers of nodes itself and cannot be combined with --nodes.")
    requested = [] if gpus.strip() == "local" else [parse_cluster_spec(gpus)]
    common = {name: parse_cluster_spec(name) for name in _WHAT_IF_DEVICES}
    for cluster in ({each.device.name: each for each in requested} | common).values():
        for count in _WHAT_IF_COUNTS if cluster.device.kind != "mps" else (1,):
            yield cluster.resized(min(count, _MAX_DEVICES_PER_NODE), -(-count // _MAX_DEVICES_PER_NODE)), False


def _calibrate() -> "tuple[Calibration, str]":
    """Measure this machine and save the result; returns it and its path."""
    text = "measuring this machine, takes less than a minute"
    with _status(text) as update:
        import torch

        from samestep.planner.calibration import calibrate, create_calibration_folder, save_calibration

        create_calibration_folder(read_environ())
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        calibration = calibrate(torch.device(kind), lambda part: update(f"{text}: {part}"))
        return calibration, str(save_calibration(calibration, read_environ()))


@contextmanager
def _status(text: str) -> Generator[Callable[[str], None]]:
    """Show a status line on the terminal; the yielded function replaces its text."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(text) as status:
        yield status.update


def _print_calibration(calibration: "Calibration", path: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({**asdict(calibration), "path": path}, indent=2))
        return
    flops = ", ".join(f"{name} {points[-1][1] / 1e12:.3g}" for name, points in calibration.matmul_flops.items())
    reduced = calibration.all_reduce_bandwidth
    all_reduce = "" if reduced is None else f", all-reduce {reduced / 1e9:.3g} GB/s"
    click.echo(
        f"{calibration.device}: matrix products in TFLOP/s: {flops}; copies {calibration.copy_bandwidth / 1e9:.3g} "
        f"GB/s, host to device {calibration.host_bandwidth / 1e9:.3g} GB/s{all_reduce}; "
        f"{calibration.launch_seconds * 1e6:.3g} us to launch an operation; saved to {path}"
    )


def _print_plans(plans: list[Plan], samples: int | None, as_json: bool) -> None:
    """Print one plan, or with `samples` a comparison of several."""
    if as_json:
        click.echo(json.dumps(plans[0].to_json() if samples is None else _what_if_json(plans, samples), indent=2))
        return
    # piped output is not squeezed into the 80 columns that rich assumes
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    if samples is None:
        print_plan(plans[0], console)
    else:
        print_what_if(plans, samples, console)


def _what_if_json(plans: list[Plan], samples: int) -> list[dict[str, object]]:
    return [
        {**plan.to_json(), "samples": samples, "speed_up": speed_up, "gpu_hours": gpu_hours(plan, samples)}
        for plan, speed_up in zip(plans, speed_ups(plans), strict=True)
    ]


def print_plan(plan: Plan, console: Console) -> None:
    """Print the candidates as a table, then the chosen one: its reason, code, command, and a bar of its memory."""
    request, chosen = plan.request, plan.chosen
    model, cluster = request.model, request.cluster
    _print_line(console, "model", f"{model.name}, {format_bytes(model.weights)} of weights; {model.method}")
    _print_line(console, "cluster", f"{cluster.label} ({cluster.source}; {cluster.device.source})")
    _print_line(console, "step", f"global batch {request.global_batch}, {request.precision}, {model.optimizer}")
    _print_table(console, PLAN_COLUMNS, plan_rows(plan)[:_MAX_ROWS])
    if len(plan.candidates) > _MAX_ROWS:
        console.print(f"{len(plan.candidates) - _MAX_ROWS} more are slower or do not fit; --json lists all")
    if chosen is None:
        console.print(Text("nothing fits", style="bold red"))
        for advice in plan.advice:
            _print_line(console, "advice", advice)
        return
    shape = f"{chosen.layout.ranks} rank(s) x {chosen.micro_batch} sample(s) x {chosen.accumulation} micro-batch(es)"
    _print_line(console, "chosen", f"{chosen.layout.name}: {shape}")
    _print_line(console, "reason", chosen.reason)
    for line in plan.code:
        _print_line(console, "code", line)
    _print_line(console, "command", str(plan.command))
    segments = [(segment, *_BAR_STYLES[segment.name]) for segment in memory_bar(plan, _BAR_WIDTH)]
    console.print(Text.assemble(*((letter * segment.cells, style) for segment, letter, style in segments)))
    legend = [f"{letter} {segment.name} {format_bytes(segment.size)}" for segment, letter, _ in segments]
    console.print(Text("  ".join(legend)), soft_wrap=True)


def print_what_if(plans: list[Plan], samples: int, console: Console) -> None:
    """Print the chosen layout of several clusters as a table."""
    request = plans[0].request
    model = request.model
    _print_line(console, "model", f"{model.name}, {format_bytes(model.weights)} of weights; {model.method}")
    _print_line(console, "step", f"global batch {request.global_batch}, {model.optimizer}")
    _print_table(console, WHAT_IF_COLUMNS, what_if_rows(plans, samples))
    console.print(f"speed-up over the first row that fits; GPU-hours for {samples:,} samples, including idle GPUs")


def _print_table(console: Console, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column not in ("reason", "strategy"), overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _print_line(console: Console, label: str, text: str) -> None:
    console.print(Text.assemble((f"{label:<9}", "bold"), text), soft_wrap=True)


def plan_rows(plan: Plan) -> list[tuple[str, ...]]:
    """One row per candidate, in the order of the plan."""
    return [
        (
            candidate.layout.name,
            str(candidate.layout.ranks),
            f"{candidate.micro_batch} x {candidate.accumulation}" if candidate.fits else "-",
            format_bytes(candidate.memory.total),
            format_seconds(candidate.time.total) if candidate.fits else "-",
            "chosen" if candidate is plan.chosen else candidate.reason,
        )
        for candidate in plan.candidates
    ]


@dataclass(frozen=True)
class Segment:
    """One segment of a memory bar."""

    name: str  # component of the memory
    size: int  # bytes
    cells: int  # width in characters


def memory_bar(plan: Plan, width: int) -> list[Segment]:
    """A device's memory as segments of `width` characters: the chosen candidate's, free, margin, other processes."""
    assert plan.chosen is not None
    device, usable, memory = plan.request.cluster.device, plan.request.usable_memory, plan.chosen.memory
    sizes = {
        **memory.components(),
        "free": usable - memory.total,
        "margin": device.memory_free - usable,
        "other processes": device.memory - device.memory_free,
    }
    sizes = {name: size for name, size in sizes.items() if size > 0}
    cells = _divide(list(sizes.values()), width)
    return [Segment(name, size, count) for (name, size), count in zip(sizes.items(), cells, strict=True)]


def _divide(sizes: Sequence[int], width: int) -> list[int]:
    """`width` cells in proportion to the sizes; the largest remainders get the cells that rounding leaves."""
    total = sum(sizes) or 1
    exact = [size * width / total for size in sizes]
    cells = [int(part) for part in exact]
    order = sorted(range(len(sizes)), key=lambda at: cells[at] - exact[at])
    for at in order[: width - sum(cells)]:
        cells[at] += 1
    return cells


def what_if_rows(plans: Sequence[Plan], samples: int) -> list[tuple[str, ...]]:
    """One row per cluster, with the speed-up over the first that fits and the GPU-hours for `samples` samples."""
    return [_what_if_row(plan, speed_up, samples) for plan, speed_up in zip(plans, speed_ups(plans), strict=True)]


def _what_if_row(plan: Plan, speed_up: float | None, samples: int) -> tuple[str, ...]:
    chosen, hours, request = plan.chosen, gpu_hours(plan, samples), plan.request
    if chosen is None or hours is None or speed_up is None:
        return request.cluster.label, request.precision, "nothing fits", "-", "-", "-", "-", "-"
    return (
        request.cluster.label,
        request.precision,
        chosen.layout.name,
        f"{chosen.micro_batch} x {chosen.accumulation}",
        format_bytes(chosen.memory.total),
        format_seconds(chosen.time.total),
        f"{speed_up:.2f}",
        f"{hours:.3g}",
    )


def speed_ups(plans: Sequence[Plan]) -> list[float | None]:
    """Speed of each plan relative to the first that fits; None if nothing fits."""
    first = next((plan.chosen.time.total for plan in plans if plan.chosen), 0.0)
    return [first / plan.chosen.time.total if plan.chosen else None for plan in plans]


def gpu_hours(plan: Plan, samples: int) -> float | None:
    """Device hours for `samples` samples, including devices that are idle; None if nothing fits."""
    if plan.chosen is None:
        return None
    steps = -(-samples // plan.request.global_batch)
    return steps * plan.chosen.time.total * plan.request.cluster.devices / 3600
