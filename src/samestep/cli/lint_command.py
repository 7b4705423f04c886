"""`samestep lint`: find faults of distributed training by reading scripts; nothing is run."""

import json
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Any, Final

import click

from samestep.cli.main import accept_underscores
from samestep.errors import LaunchError
from samestep.findings import TEXT_WIDTH, Finding, Segment, count_findings, finding_lines, relative_path
from samestep.launch.job import check_target
from samestep.messages import shorten

if TYPE_CHECKING:
    from samestep.lint.fixes import EditResult
    from samestep.lint.lint_settings import LintSettings
    from samestep.lint.linter import LintResult
    from samestep.lint.rule import Rule

FORMATS: Final = ("text", "json", "sarif", "github")
_MAX_ROUNDS: Final = 10  # of --fix: a repair may make another finding visible
_MIN_BAR: Final = 100  # scripts, for which a progress bar is shown


@click.command(
    context_settings={"allow_interspersed_args": True, "token_normalize_func": accept_underscores},
    epilog="Examples: samestep lint; samestep lint train.py --fix; samestep lint --format sarif --output lint.sarif; "
    "samestep lint --confirm -- train.py --epochs 2; samestep lint --explain SS301",
)
@click.option(
    "--select", multiple=True, metavar="CODES", help="Apply only these rules: codes, families (SS1) or names."
)
@click.option("--ignore", multiple=True, metavar="CODES", help="Do not apply these rules.")
@click.option("--strict", is_flag=True, help="Also report notes: what lint is not sure of, and legitimate choices.")
@click.option("--fix", is_flag=True, help="Repair what can be repaired safely, and print the rest.")
@click.option("--diff", is_flag=True, help="Print what --fix would change, and change nothing.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True,
              help="sarif: for code hosts; github: annotations of a workflow.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write to this file instead of standard output.")  # fmt: skip
@click.option("--no-cache", is_flag=True, help="Read all files again, and keep no results.")
@click.option("--confirm", is_flag=True,
              help="Run the script after `--` with `samestep verify`. Findings that lint is not sure of are kept only "
              "if verify confirms them.")  # fmt: skip
@click.option("--explain", metavar="CODE", help="Print what a rule finds, why it matters, and how to repair it.")
@click.option("--list", "is_list", is_flag=True, help="List all rules.")
@click.argument("paths", nargs=-1, type=click.UNPROCESSED, metavar="[PATH]...")
def command(
    paths: tuple[str, ...],
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    strict: bool,
    explain: str | None,
    is_list: bool,
    confirm: bool,
    **options: Any,
) -> int:
    """Read Python files, notebooks and folders (the current one by default), and print faults of distributed training.

    Lint reads plain PyTorch, Lightning, Fabric, Accelerate and samestep. It runs nothing and does not need torch. The
    exit status is 0 if nothing was found, 1 if something was, and 2 if the command line or a file cannot be read.
    """
    if options["as_json"]:
        options["form"] = "json"
    if explain is not None or is_list:
        if paths:
            raise LaunchError(f"--{'list' if is_list else 'explain'} reads no file: leave out {shorten(paths[0])}")
        click.echo(_describe_rules(find_rule(explain) if explain is not None else None, options["form"] == "json"))
        return 0
    script = _script_to_confirm(paths) if confirm else ()
    targets = [Path(script[0])] if script else [Path(path) for path in paths] or [Path()]
    _check_options(targets, options)
    from samestep.lint.lint_settings import find_settings

    settings = find_settings(targets[0]).with_options(select, ignore, strict or confirm)
    result = _lint(targets, settings, use_cache=not options["no_cache"])
    if options["diff"]:
        return _show_diff(result)
    if options["fix"]:
        result = _fix(result, targets, settings)
    if confirm:
        result = _confirm(result, script, settings)
    _write(result, settings, options)
    for text in result.warnings:
        click.echo(f"samestep: {text}", err=True)
    return _exit_code(result)


def _script_to_confirm(paths: tuple[str, ...]) -> tuple[str, ...]:
    if not paths:
        raise LaunchError("--confirm needs a script: run `samestep lint --confirm -- train.py --epochs 2`")
    check_target(paths[0], False)
    return paths


def _check_options(targets: Sequence[Path], options: dict[str, Any]) -> None:
    for path in targets:
        if not path.exists():
            raise LaunchError(f"{shorten(str(path))} does not exist: pass files and folders to read")
        if path.is_file() and path.suffix not in (".py", ".ipynb"):
            raise LaunchError(f"{shorten(str(path))} is neither a Python file nor a notebook")
    if options["fix"] and options["diff"]:
        raise LaunchError("--diff changes nothing, --fix does: pass one of them")


def _lint(targets: Sequence[Path], settings: "LintSettings", use_cache: bool) -> "LintResult":
    from samestep.lint.linter import lint

    cache = settings.root if use_cache else None
    with _progress() as report:
        result = lint(targets, settings.rules, cache_folder=cache, is_excluded=settings.is_excluded, report=report)
    result.findings = [finding for finding in result.findings if settings.is_reported(finding)]
    return result


@contextmanager
def _progress() -> Generator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal if there are many scripts."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=total >= _MIN_BAR)


def _fix(result: "LintResult", targets: Sequence[Path], settings: "LintSettings") -> "LintResult":
    """Apply repairs until none is left; returns what lint finds then."""
    from samestep.lint.fixes import apply_edits
    from samestep.lint.source_files import read_text, write_text

    count = 0
    for _ in range(_MAX_ROUNDS):
        edits = apply_edits(result.findings)
        if not edits.changed:
            _warn_of_left_out(edits)
            break
        before = len(result.findings)
        for path, text in edits.changed.items():
            try:
                write_text(path, text, read_text(path)[1])
            except OSError as error:
                raise LaunchError(f"{relative_path(str(path))} cannot be repaired: {error}") from error
        result = _lint(targets, settings, use_cache=False)
        count += max(0, before - len(result.findings))
        if len(result.findings) >= before:
            break
    if count:
        click.echo(f"samestep: repaired {count} finding{'s' * (count > 1)}", err=True)
    return result


def _warn_of_left_out(edits: "EditResult") -> None:
    for finding, reason in edits.left_out:
        click.echo(f"samestep: did not repair {finding.code} at {finding.location}: {reason}", err=True)


def _show_diff(result: "LintResult") -> int:
    from difflib import unified_diff

    from samestep.lint.fixes import apply_edits
    from samestep.lint.notebooks import split_lines
    from samestep.lint.source_files import read_text

    edits = apply_edits(result.findings)
    for path, text in sorted(edits.changed.items()):
        name = relative_path(str(path))
        before, after = split_lines(read_text(path)[0], with_ends=True), split_lines(text, with_ends=True)
        click.echo("".join(unified_diff(before, after, f"a/{name}", f"b/{name}")), nl=False)
    _warn_of_left_out(edits)
    return 1 if edits.changed else 0


def _confirm(result: "LintResult", script: tuple[str, ...], settings: "LintSettings") -> "LintResult":
    """Run the script with verify; drop findings that need a run to be sure and that it does not confirm."""
    from samestep.verify import verify

    click.echo(f"samestep: running {join(script)} with `samestep verify`", err=True)
    with tempfile.TemporaryDirectory(prefix="samestep-verify-") as folder:
        verdict = verify(script[0], script[1:], strict=True, keep=Path(folder))
    if verdict.failure:
        raise LaunchError(f"could not verify {join(script)}: {verdict.failure}")
    uncertain = {rule.code for rule in settings.rules if not rule.is_sure}
    kept = list[Finding]()
    for finding in result.findings:
        proof = next((each for each in verdict.findings if _is_same_fault(finding, each)), None)
        if proof is not None:
            text = f"confirmed by `samestep verify`: {proof.code} {proof.name}: {proof.summary}"
            kept.append(replace(finding, evidence=(*finding.evidence, text)))
        elif finding.code not in uncertain:
            kept.append(finding)
    dropped = len(result.findings) - len(kept)
    if dropped:
        click.echo(f"samestep: verify did not confirm {dropped} finding{'s' * (dropped != 1)}", err=True)
    return replace(result, findings=kept)


def _is_same_fault(finding: Finding, proof: Finding) -> bool:
    """Whether verify has seen what lint suspects: the same code, or another one of the same family at the same line."""
    explained = [proof, *proof.follows]
    is_same_line = any(
        finding.location is not None
        and each.location is not None
        and Path(each.location.file).name == Path(finding.location.file).name
        and each.location.line == finding.location.line
        for each in explained
    )
    return any(each.code == finding.code for each in explained) or (is_same_line and proof.code[2] == finding.code[2])


def _write(result: "LintResult", settings: "LintSettings", options: dict[str, Any]) -> None:
    from samestep.lint.report_formats import to_github, to_json, to_sarif

    output: Path | None = options["output"]
    texts = {
        "json": lambda: to_json(result),
        "sarif": lambda: to_sarif(result, settings.rules),
        "github": lambda: to_github(result.findings),
    }
    if options["form"] == "text" and output is None:
        _show(result)
        return
    text = texts[options["form"]]() if options["form"] in texts else "\n".join(_plain_lines(result))
    if output is not None:
        output.write_text(f"{text}\n", encoding="utf-8")
    elif text:
        click.echo(text)


def _plain_lines(result: "LintResult") -> list[str]:
    return ["".join(text for text, _ in line) for line in _lines(result, TEXT_WIDTH)]


def _show(result: "LintResult") -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    width = min(console.width, TEXT_WIDTH) if console.is_terminal else TEXT_WIDTH
    for line in _lines(result, width):
        console.print(Text.assemble(*line), soft_wrap=True)


def _lines(result: "LintResult", width: int) -> list[Sequence[Segment]]:
    """The findings, files that could not be read, and a summary."""
    lines = list[Sequence[Segment]]()
    for finding in result.findings:
        lines += [*finding_lines(finding, width), ()]
    for file, text in sorted(result.problems.items()):
        lines.append(((f"{relative_path(file)}: ", "bold"), ("could not be read: ", "bold red"), (text, "")))
    for file in result.shortened:
        lines.append(
            (
                (f"{relative_path(file)}: ", "bold"),
                ("too large to follow all of it", ""),
            )
        )
    fixable = sum(bool(finding.edits) for finding in result.findings)
    style = "bold red" if result.findings else "bold green"
    count = f"{count_findings(result.findings)} found in {result.files} file{'s' * (result.files != 1)}"
    hint = f"; --fix repairs {fixable} of them" if fixable else ""
    if result.problems:
        hint += f"; {len(result.problems)} file{'s' * (len(result.problems) > 1)} could not be read"
    return [*lines, ((count, style), (hint, ""))]


def _exit_code(result: "LintResult") -> int:
    if result.problems:
        return 2
    return 1 if result.findings else 0


def all_rules() -> "tuple[Rule, ...]":
    """All rules by their codes."""
    from samestep.lint.rules import RULES

    return RULES


def find_rule(name: str) -> "Rule":
    """A rule by its code or its name."""
    from samestep.lint.lint_settings import check_codes

    known = {key.lower(): rule for rule in all_rules() for key in (rule.code, rule.name)}
    if name.lower() not in known:
        check_codes([name], "--explain")
        raise LaunchError(
            f"{shorten(name)} is a family of rules: pass the code of one, `samestep lint --list` shows them"
        )
    return known[name.lower()]


def _describe_rules(rule: "Rule | None", as_json: bool) -> str:
    """A table of all rules, or the page of one."""
    from samestep.lint.rule import page_of

    rules = all_rules() if rule is None else (rule,)
    if as_json:
        values = [
            {
                "code": each.code,
                "name": each.name,
                "severity": each.severity,
                "sure": each.is_sure,
                "page": page_of(each),
            }
            for each in rules
        ]
        return json.dumps({"rules": values} if rule is None else values[0], indent=2)
    if rule is not None:
        return f"{rule.code} {rule.name} ({rule.severity})\n\n{page_of(rule)}"
    width = max(len(each.name) for each in rules)
    return "\n".join(f"{each.code}  {each.name:{width}}  {each.severity}" for each in rules)
