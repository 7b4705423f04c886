"""`samestep parity`: run a script on several numbers of ranks and compare what it logs."""

import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from samestep.cli.main import NumberRange, accept_underscores
from samestep.environment.world import COMPARISON, LAST_STEP, MAX_LOCAL_RANKS, read_environ
from samestep.errors import LaunchError
from samestep.launch.job import check_target
from samestep.loggers.run_files import WAIT_PREFIX, read_metrics
from samestep.messages import read_integer, shorten

Record = Mapping[str, float]
_echo = partial(click.echo, err=True)
_SHUTDOWN_SECONDS = 20.0  # in which a launcher ends after Ctrl-C
_AXES = ("step", "epoch", "time")
_MEASURED = ("train/samples_per_s", "train/memory_bytes")  # they differ between two runs on the same number of ranks


@dataclass(frozen=True)
class Difference:
    """One logged value in two runs; `relative` to the largest finite value of the metric, inf if one run lacks it."""

    relative: float
    metric: str
    step: int
    values: tuple[float, float]


@click.command(context_settings={"allow_interspersed_args": False, "token_normalize_func": accept_underscores})
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as in `python -m`.")
@click.option("--ranks", default="1,2", show_default=True, metavar="N,N,...", help="Numbers of ranks to compare.")
@click.option("--precision", type=click.Choice(["fp64", "fp32", "bf16", "fp16"]), default="fp64", show_default=True,
              help="Replaces the precision of the script.")  # fmt: skip
@click.option("--steps", type=NumberRange(1, 1_000_000_000), default=20, show_default=True, metavar="N",
              help="Optimizer steps to compare.")  # fmt: skip
@click.option("--tolerance", type=NumberRange(0.0, 1.0), default=1e-9, show_default=True, metavar="X",
              help="Largest relative difference that counts as the same.")  # fmt: skip
@click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
def command(script: tuple[str, ...], module: bool, ranks: str, precision: str, steps: int, tolerance: float) -> int:
    """Run SCRIPT on several numbers of ranks, in float64, and compare the metrics that it logs.

    In float64 rounding is a billion times smaller than in fp32, so a difference that remains is not rounding. Logs and
    checkpoints go to a temporary folder: the script starts from the beginning, and its own folders are not touched.
    The exit status is 0 if all values are the same within the tolerance, and 1 if not.
    """
    counts = _read_counts(ranks)
    check_target(script[0], module)
    target = [*(["-m"] if module else []), *script]
    with tempfile.TemporaryDirectory(prefix="samestep-parity-") as folder:
        runs = [_run(count, Path(folder) / f"{count}-ranks", precision, steps, target) for count in counts]
    click.echo(f"{'ranks':>5}  {'steps':>5}  largest difference from {counts[0]} rank(s)")
    click.echo(f"{counts[0]:5}  {len(runs[0]):5}")
    differences = [compare(runs[0], records) for records in runs[1:]]
    for count, records, found in zip(counts[1:], runs[1:], differences, strict=True):
        difference = max(found, key=lambda each: each.relative)
        click.echo(
            f"{count:5}  {len(records):5}  {difference.relative:.1e} ({difference.metric}, step {difference.step})"
        )
    for count, found in zip(counts[1:], differences, strict=True):
        first = next((difference for difference in found if difference.relative > tolerance), None)
        if first is not None:
            click.echo(
                f"different from step {first.step} on: {first.metric} is {first.values[0]!r} on {counts[0]} rank(s) "
                f"and {first.values[1]!r} on {count}; 'If a script differs' in docs/parity.md lists the "
                "causes and what to write instead"
            )
            return 1
    click.echo(f"the same: every logged value agrees within {tolerance:g} in {precision}")
    return 0


def compare(one: Sequence[Record], other: Sequence[Record]) -> list[Difference]:
    """The differences between all values of two runs, in the order of their steps."""
    steps = [[record["step"] for record in records] for records in (one, other)]
    if steps[0] != steps[1]:
        raise LaunchError(
            f"the runs logged different steps, {len(one)} and {len(other)} records: the script must take the same "
            "steps on any number of ranks, for example not stop after a time"
        )
    names = [name for name in dict.fromkeys(name for record in (*one, *other) for name in record) if _is_compared(name)]
    if not names:
        raise LaunchError(
            "the script logged no metric: it must train inside `with Run(...)` with step.mean, or call run.log; "
            "scripts that train with a Lightning Trainer are not supported"
        )
    largest = {name: _largest(record.get(name, 0.0) for record in one) for name in names}
    return [
        Difference(
            math.inf if name not in a or name not in b else _distance(a[name], b[name]) / largest[name],
            name,
            int(a["step"]),
            (a.get(name, math.nan), b.get(name, math.nan)),
        )
        for a, b in zip(one, other, strict=True)
        for name in names
        if name in a or name in b
    ]


def _largest(values: Iterable[float]) -> float:
    """The largest finite absolute value, or 1 if there is none but 0."""
    return max((abs(value) for value in values if math.isfinite(value)), default=0.0) or 1.0


def _distance(one: float, other: float) -> float:
    """The distance of two numbers; 0 for two that are not finite in the same way."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    distance = abs(one - other)
    return math.inf if math.isnan(distance) else distance


def _is_compared(name: str) -> bool:
    return name not in (*_AXES, *_MEASURED) and not name.startswith(WAIT_PREFIX)


def _run(count: int, folder: Path, precision: str, steps: int, target: Sequence[str]) -> list[dict[str, float]]:
    """Run the script on `count` ranks; returns what it logged."""
    _echo(f"samestep: {' '.join(target)} on {count} rank(s) in {precision}, {steps} steps")
    launch = ["-m", "samestep", "run", "--nproc-per-node", str(count), "--precision", precision]
    environment = {**read_environ(), COMPARISON: str(folder), LAST_STEP: str(steps)}
    command = [sys.executable, *launch, "--folder", str(folder), *target]
    with subprocess.Popen(command, env=environment, stdout=sys.stderr) as launcher:
        try:
            code = launcher.wait()
        except KeyboardInterrupt:  # Ctrl-C reaches the launcher too, which ends its ranks; subprocess.run would kill it
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(_SHUTDOWN_SECONDS)
            launcher.terminate()
            raise
    if code:
        raise LaunchError(
            f"the script ended with exit code {code} on {count} rank(s): its report is above; if a folder "
            "is missing, write files below run.folder, since parity replaces the folder that the script passes to Run"
        )
    path = folder / "metrics.jsonl"
    return read_metrics(path, by_step=True) if path.is_file() else []


def _read_counts(ranks: str) -> list[int]:
    """The numbers of ranks, at least two different ones."""
    parts = [part.strip() for part in ranks.split(",")]
    counts = [count for part in parts if (count := read_integer(part)) is not None]
    if len(counts) != len(parts) or len(set(counts)) < 2 or not 1 <= min(counts) <= max(counts) <= MAX_LOCAL_RANKS:
        raise LaunchError(
            f"--ranks={ranks and shorten(ranks)} must be at least two different numbers, for example --ranks 1,2,3, "
            f"and at most {MAX_LOCAL_RANKS}"
        )
    return counts
