"""`samestep verify`: run any script on several ranks and on one, compare what happened, and print what is wrong."""

import ast
import inspect
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from pathlib import Path
from shlex import join
from textwrap import dedent
from typing import TYPE_CHECKING, Any, Final

import click

from samestep.cli.main import NumberRange, accept_underscores
from samestep.environment.world import MAX_LOCAL_RANKS
from samestep.errors import LaunchError
from samestep.findings import TEXT_WIDTH, Segment, count_findings, finding_lines, labeled_lines
from samestep.launch.job import check_target
from samestep.messages import shorten

if TYPE_CHECKING:
    from samestep.verify import Verdict
    from samestep.verify.check import Check
    from samestep.verify.worlds import Progress

DEFAULT_STEPS: Final = 100
DEFAULT_SECONDS: Final = 300
FAMILIES: Final = {
    "1": ("Data", "which samples each rank reads, in which order, and with which content and random numbers"),
    "2": ("Weights and gradients", "weights and gradients of the ranks in every step"),
    "3": ("Collectives", "the order of the collectives, their shapes, and the lines that call them"),
    "4": ("Metrics", "which samples the ranks evaluate, if any, and the numbers that they reduce and log"),
    "5": ("Files", "the files that the ranks read and write, if any"),
    "6": ("Optimizer and accumulation", "the parameters and steps of the optimizers, and accumulated losses"),
    "7": ("Memory and devices", "frozen models and device maps, if any"),
    "9": ("Failures", "how each rank ends"),
}
"""By the first digit of a code, the title of a family of checks, and what its checks compare."""
_SCOPE_COLUMN: Final = 14  # in which texts begin beside their labels
_PROGRESS_SECONDS: Final = 10.0  # between two lines in a pipe
_OWN_FRAME: Final = re.compile(
    r"^  File \"[^\"\n]*(?:samestep/verify/recorder/\w+\.py|<frozen runpy>)\".*\n(?:    .*\n)*", re.M
)


@click.command(
    context_settings={"allow_interspersed_args": False, "token_normalize_func": accept_underscores},
    epilog="Everything after the script is passed to it unchanged. Examples: samestep verify train.py --epochs 2; "
    "samestep verify --nproc 4 --strict -- train.py --lr 0.1; samestep verify -m lab.train; "
    "samestep verify --explain SS101",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as in `python -m`.")
@click.option("--nproc", type=NumberRange(2, MAX_LOCAL_RANKS), default=2, show_default=True, metavar="N",
              help="Number of ranks to compare with one.")  # fmt: skip
@click.option("--steps", type=NumberRange(1, 1_000_000_000), default=DEFAULT_STEPS, show_default=True, metavar="N",
              help="Optimizer steps after which to stop the script, at the end of an epoch.")  # fmt: skip
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
              help="cpu: map GPUs to the CPU and NCCL to gloo; cuda: leave both to the script.")  # fmt: skip
@click.option(
    "--strict", is_flag=True, help="Also report choices that are legitimate but depend on the number of ranks."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
@click.option("--keep", type=click.Path(path_type=Path), metavar="FOLDER",
              help="Keep traces, output and written files of all ranks in this folder.")  # fmt: skip
@click.option("--timeout", type=NumberRange(1, 86_400), default=DEFAULT_SECONDS, show_default=True, metavar="SECONDS",
              help="Time for everything; ranks that still run are ended.")  # fmt: skip
@click.option("--explain", metavar="CODE", help="Print what a check compares, an example of the fault, and the repair.")
@click.option("--list", "is_list", is_flag=True, help="List all checks.")
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
def command(
    script: tuple[str, ...],
    module: bool,
    as_json: bool,
    keep: Path | None,
    explain: str | None,
    is_list: bool,
    **options: Any,
) -> int:
    """Run SCRIPT on several ranks and on one, compare what happened, and print what is wrong with it.

    The script can be any PyTorch script: DDP, FSDP or plain collectives, Lightning, Accelerate, or samestep. It is not
    changed, and it writes to a copy of the current folder. The exit status is 0 if nothing was found, 1 if
    something was, and 2 if the script could not be run.
    """
    if explain is not None or is_list:
        if script:
            raise LaunchError(f"--{'list' if is_list else 'explain'} runs no script: leave out {shorten(script[0])}")
        click.echo(_describe_checks([find_check(explain)] if explain is not None else all_checks(), as_json, is_list))
        return 0
    if not script:
        raise LaunchError("no script given: run `samestep verify train.py`, or `samestep verify -m package.module`")
    if not module and Path(script[0]).is_dir():
        hint = "pass a file in it, or `samestep verify -m PACKAGE` for a package"
        raise LaunchError(f"{shorten(script[0])} is a folder, not a script: {hint}")
    check_target(script[0], module)
    if keep is not None:
        _check_keep(keep)
    verdict, folder = _verify(script, module, keep, options)
    target = f"{'-m ' if module else ''}{join(script)}"
    if as_json:
        about = {"script": script[0], "module": module, "arguments": script[1:], "options": options}
        result = {"exit_code": verdict.exit_code, **verdict.to_json(), "output": script_error(verdict.output, folder)}
        click.echo(json.dumps({**about, **result}, indent=2))
    else:
        _show(verdict, target, folder, options)
    return verdict.exit_code


def _check_keep(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "is not empty" if folder.is_dir() else "is not a folder"
        raise LaunchError(f"--keep={shorten(str(folder))} {what}: pass a new folder, or remove what is there")


def _verify(script: Sequence[str], module: bool, keep: Path | None, options: dict[str, Any]) -> "tuple[Verdict, Path]":
    """Verify, and show the progress; returns the folder of the traces, too."""
    from samestep.verify import verify

    temporary = tempfile.TemporaryDirectory(prefix="samestep-verify-") if keep is None else nullcontext(str(keep))
    with _stop_on_signals(), temporary as name, _progress(script[0], options["nproc"]) as report:
        folder = Path(name).absolute()
        return verify(script[0], script[1:], module=module, keep=folder, report=report, **options), folder


@contextmanager
def _stop_on_signals() -> Generator[None]:
    """Let SIGTERM and SIGHUP end what was started, as Ctrl-C does: CI sends SIGTERM to a canceled job."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(script: str, nproc: int) -> "Generator[Callable[[Progress], None]]":
    """Show on standard error what runs: a status line on a terminal, a line per world in a pipe."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _ProgressLines(script, nproc)
        return
    with console.status("starting Python and torch") as status:
        yield lambda progress: status.update(
            Text(f"{script} on {_describe_world(progress, nproc)}: step {progress.step}")
        )


class _ProgressLines:
    """Prints a line when a world starts, and then one from time to time."""

    def __init__(self, script: str, nproc: int) -> None:
        self._script, self._nproc = script, nproc
        self._world, self._step, self._printed = "", 0, 0.0
        click.echo("samestep: starting Python and torch", err=True)

    def __call__(self, progress: "Progress") -> None:
        is_new = progress.world != self._world or progress.step < self._step
        self._world, self._step = progress.world, progress.step
        if is_new or time.monotonic() - self._printed > _PROGRESS_SECONDS:
            self._printed = time.monotonic()
            step = "" if is_new else f": step {progress.step}"
            click.echo(f"samestep: {self._script} on {_describe_world(progress, self._nproc)}{step}", err=True)


def _describe_world(progress: "Progress", nproc: int) -> str:
    return describe_worlds({progress.world: progress.size}, nproc)[0]


def describe_worlds(worlds: dict[str, int], nproc: int) -> list[str]:
    """Each world that was run."""
    texts = {
        "many": "{} ranks",
        "one": f"1 rank with the global batch of {nproc} ranks",
        "nodes": "{} ranks, each on a separate node",
    }
    found = [texts.get(world, "{} ranks (" + world + ")").format(size) for world, size in worlds.items()]
    return [re.sub(r"^1 ranks\b", "1 rank", text) for text in found]


def _show(verdict: "Verdict", target: str, folder: Path, options: dict[str, Any]) -> None:
    """Print findings and scope, or on standard error why the script could not be verified."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, stderr=bool(verdict.failure))
    width = min(console.width, TEXT_WIDTH) if console.is_terminal else TEXT_WIDTH
    lines = list[Sequence[Segment]]()
    for finding in verdict.findings:
        lines += [*finding_lines(finding, width), ()]
    if verdict.failure:
        lines.append((("samestep: ", ""), ("could not verify ", "bold red"), (f"{target}: {verdict.failure}", "")))
        lines += [((text, ""),) for text in script_error(verdict.output, folder).rstrip().split("\n")]
    else:
        style = "bold red" if verdict.findings else "bold green"
        lines.append(((f"{count_findings(verdict.findings)} found in {target}", style),))
    for label, text in scope_rows(verdict, options):
        lines += labeled_lines(label, text, width, _SCOPE_COLUMN)
    for line in lines:
        console.print(Text.assemble(*line), soft_wrap=True)


def scope_rows(verdict: "Verdict", options: dict[str, Any]) -> list[tuple[str, str]]:
    """What was run and compared, and what was not, each with its label."""
    checks = [check for check in all_checks() if options["strict"] or not check.is_strict]
    left_out = len(all_checks()) - len(checks)
    rows = [("ran", "; ".join(describe_worlds(verdict.worlds, options["nproc"])) or "nothing")]
    if not verdict.failure:
        is_limit = verdict.steps >= options["steps"]
        rows.append(
            (
                "steps",
                f"{verdict.steps} optimizer step{'s' * (verdict.steps != 1)}"
                f"{', then verify stopped the script (--steps)' * is_limit}",
            )
        )
        families = list(dict.fromkeys(check.code[2] for check in checks))
        if verdict.findings:
            rows.append(("compared", ", ".join(FAMILIES[each][0].lower() for each in families)))
        else:
            with_one = ["samples, gradients and metrics of the ranks with those of 1 rank"] * ("one" in verdict.worlds)
            rows += _in_column("compared", [*(FAMILIES[each][1] for each in families), *with_one])
        if left_out:
            text = f"{left_out} checks for choices that are legitimate but depend on the number of ranks: add --strict"
            rows.append(("not compared", text))
    return [*rows, *_in_column("note", verdict.scope), ("time", f"{verdict.seconds:.1f} s")]


def _in_column(label: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    return [(label if number == 0 else "", text) for number, text in enumerate(texts)]


def script_error(output: str, folder: Path) -> str:
    """The error of the script as Python prints it: without the frames of verify, and with the user's paths."""
    text = re.sub(rf"{re.escape(str(folder))}/[\w-]+/files", str(Path.cwd()), output)
    return _OWN_FRAME.sub("", text)


def all_checks() -> "list[Check]":
    """All checks by their codes."""
    from samestep.verify.checks import CHECKS

    return sorted(CHECKS, key=lambda check: check.code)


def find_check(name: str) -> "Check":
    """A check by its code or its name."""
    known = {key.lower(): check for check in all_checks() for key in (check.code, check.name)}
    if name.lower() not in known:
        near = get_close_matches(name.lower(), known, n=1)
        hint = f"; did you mean {known[near[0]].code} {known[near[0]].name}?" if near else ""
        raise LaunchError(f"unknown check {shorten(name)}: `samestep verify --list` shows all checks{hint}")
    return known[name.lower()]


def page_of(check: "Check") -> str:
    """The page of a check: the docstring of its module, from the source, since `python -OO` removes docstrings."""
    module = sys.modules[check.find.__module__]
    return dedent(ast.get_docstring(ast.parse(inspect.getsource(module))) or "")


def _describe_checks(checks: "Sequence[Check]", as_json: bool, is_list: bool) -> str:
    """A table of all checks, or the page of one."""
    if as_json:
        values = [
            {
                "code": each.code,
                "name": each.name,
                "severity": each.severity,
                "strict": each.is_strict,
                "page": page_of(each),
            }
            for each in checks
        ]
        return json.dumps({"checks": values} if is_list else values[0], indent=2)
    if not is_list:
        (check,) = checks
        return f"{title_of(check)}\n\n{page_of(check)}"
    width = max(len(each.name) for each in checks)
    rows = [
        f"{each.code}  {each.name:{width}}  {each.severity}{', only with --strict' * each.is_strict}" for each in checks
    ]
    return "\n".join(rows)


def title_of(check: "Check") -> str:
    """Code, name and severity."""
    return f"{check.code} {check.name} ({check.severity}{', only with --strict' * check.is_strict})"
