"""The `samestep` command: its subcommands, its standard streams, and how errors are shown."""

import ast
import errno
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib import import_module
from shlex import quote
from textwrap import dedent
from typing import TYPE_CHECKING, Any, TextIO

import click

from samestep.disk import describe_os_error, discard_buffer
from samestep.errors import SamestepError
from samestep.messages import shorten

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_BROKEN_PIPE = 141  # as a shell reports a program that SIGPIPE ended, like `head` ends other programs
_NAMES = ("<stdout>", "<stderr>")  # of Python's own streams
_LONGEST_WORD = 300  # of an error message: a value of thousands of digits would hide the rest

# Each module has a click command named `command`. It is imported when it is used, so that `--help` does not need torch.
COMMANDS = {
    "run": ("samestep.cli.run_command", "Start a script on every GPU of this machine, or as ranks on several nodes."),
    "rerun": ("samestep.cli.rerun_command", "Repeat a run with the same command, options and ranks, in a new folder."),
    "hang": ("samestep.cli.hang_command", "Show what each rank of a live run does, and which one the others wait for."),
    "parity": ("samestep.cli.parity_command", "Run a script on several numbers of ranks and compare what it logs."),
    "verify": ("samestep.cli.verify_command", "Run any script on several ranks and on one, and print what is wrong."),
    "lint": ("samestep.cli.lint_command", "Find faults of distributed training in source files, without running them."),
    "submit": ("samestep.cli.submit_command", "Submit a script to SLURM, as ranks on one or several nodes."),
    "jobs": ("samestep.cli.jobs_command", "List submitted SLURM jobs and their states."),
    "plan": ("samestep.cli.plan_command", "Show what fits on which GPUs, what is fastest, and why."),
    "doctor": ("samestep.cli.doctor_command", "Check this machine for problems, and show how to fix them."),
    "audit": ("samestep.cli.audit_command", "Check that a run has used each sample exactly once per epoch."),
    "checkpoint": ("samestep.cli.checkpoint_command", "Inspect and verify checkpoints, export their weights."),
    "report": (
        "samestep.cli.report_command",
        "Write one HTML page that shows what a run did, or compares several runs.",
    ),
    "runs": ("samestep.cli.runs_command", "List runs with their status, steps, last metrics and duration."),
    "recipe": ("samestep.cli.recipe_command", "List the scripts that come with samestep, run or copy one."),
}


class Group(click.Group):
    """A click group whose error for an unknown command lists the commands and suggests one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command."""
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            hint = f"; did you mean `{suggestion}`?" if (suggestion := self.suggest(ctx, args[0])) else ""
            raise click.UsageError(f"unknown command {args[0]}: use one of {', '.join(known)}{hint}")
        return super().resolve_command(ctx, args)

    def suggest(self, ctx: click.Context, name: str) -> str | None:
        """The command line that was probably meant."""
        near = get_close_matches(name, self.list_commands(ctx), n=1)
        return f"{ctx.command_path} {near[0]}" if near else None


class Commands(Group):
    """The commands of COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one of them."""
        if cmd_name not in COMMANDS:
            return None
        command = import_module(COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        _restore_help(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List them in the help without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def suggest(self, ctx: click.Context, name: str) -> str | None:
        """Suggest `samestep run` for a script."""
        return f"samestep run {quote(name)}" if name.endswith(".py") else super().suggest(ctx, name)


@click.group(cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="samestep", message="%(package)s %(version)s")
@click.pass_context
def samestep(ctx: click.Context) -> None:
    """N GPUs, the same step: train on any number of processes with the same result."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
    else:
        from samestep.environment.processes import check_current_folder  # imports psutil, which --help does not need

        check_current_folder()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code.

    2 after an error that one line explains, 130 after Ctrl-C. If the command succeeded but its output was lost: 141
    after a closed pipe, as in `samestep plan ... | head -1`, and 1 after another failure.
    """
    with _standard_streams() as output:
        code = _run_command(arguments)
        _flush()
        failure = output.failure
        if failure is None or code != 0 or not output.is_required:
            return code
        if failure.errno == errno.EPIPE:
            return _BROKEN_PIPE
        _print_error(f"the output is incomplete, since standard output failed: {describe_os_error(failure)}")
        return 1


def _restore_help(command: click.Command) -> None:
    """Read the help texts from the source if `python -OO` has removed the docstrings that click takes them from."""
    if command.help is None and command.callback is not None:
        with suppress(OSError):  # installed without its source
            source = ast.parse(dedent(inspect.getsource(command.callback))).body[0]
            command.help = ast.get_docstring(source) if isinstance(source, ast.FunctionDef) else None
    for each in command.commands.values() if isinstance(command, click.Group) else ():
        _restore_help(each)


def _run_command(arguments: Sequence[str] | None) -> int:
    _restore_help(samestep)
    try:
        code = samestep.main(arguments, prog_name="samestep", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:  # a group without a command
        click.echo(error.ctx.get_help())
        return 0
    except (SamestepError, click.ClickException) as error:
        _print_error(_describe(error))
        return 2
    except OSError as error:  # a file or folder that the command needs; a bug of samestep is hardly ever an OSError
        names = ": ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        _print_error(f"{names or type(error).__name__}: {describe_os_error(error)}")
        return 2
    except MemoryError:
        _print_error("not enough memory: free some, or raise the limit of this process (ulimit -v)")
        return 2
    except (click.Abort, KeyboardInterrupt):
        return 130
    return code if isinstance(code, int) else 0


class OutputStream(io.BufferedWriter):
    """Standard output or standard error of a command.

    It never raises: the reader of a pipe may be gone, or a disk full, while the command has more to do than to print.
    What cannot be written is lost, so that nothing is left that could fail at exit.
    """

    def __init__(self, number: int) -> None:
        super().__init__(io.FileIO(number, "w", closefd=False))
        os.set_blocking(number, True)  # another program on the same terminal may have changed it
        self.failure: OSError | None = None  # the first one
        self.is_required = True  # whether the exit code reports a failure

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write or discard all of `data`."""
        self._try(super().write, data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Write or discard what is buffered."""
        self._try(super().flush)

    def _try(self, act: Callable[..., object], *arguments: object) -> None:
        try:
            act(*arguments)
        except OSError as error:
            self.failure = self.failure or error
            discard_buffer(self)


def output_failure(required: bool = True) -> OSError | None:
    """Why standard output was lost; None if all was printed. If it is not `required`, the exit code ignores a loss."""
    stream = getattr(sys.stdout, "buffer", None)
    if not isinstance(stream, OutputStream):
        return None
    stream.is_required = required
    return stream.failure


@contextmanager
def _standard_streams() -> Generator[OutputStream]:
    r"""Print to streams that never raise, and connect closed ones to /dev/null; yields standard output.

    What the encoding of a terminal cannot express is printed as an escape such as `\u2192`.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed with `>&-`; otherwise the next file would get this number
            os.open(os.devnull, os.O_RDWR)  # uses the lowest free number
    before, output, errors = (sys.stdin, sys.stdout, sys.stderr), OutputStream(1), OutputStream(2)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = _text_stream(sys.stdout, output), _text_stream(sys.stderr, errors)
    try:
        yield output
    finally:
        _flush()
        sys.stdin, sys.stdout, sys.stderr = before


def _text_stream(stream: TextIO | None, writer: OutputStream) -> TextIO:
    """The text stream on `writer` like `stream`; `stream` itself if it is another one, such as that of a test."""
    if stream is not None and not (isinstance(stream, io.TextIOWrapper) and getattr(stream, "name", "") in _NAMES):
        return stream
    encoding, errors = (stream.encoding, stream.errors) if stream else ("utf-8", None)
    return io.TextIOWrapper(
        writer,
        encoding,
        "backslashreplace" if errors in ("strict", "surrogateescape", None) else errors,
        line_buffering=stream is not None and (stream.line_buffering or stream.write_through),
    )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(ValueError):  # closed by the user's code
            stream.flush()


def _print_error(text: str) -> None:
    shortened = re.sub(rf"\S{{{_LONGEST_WORD},}}", lambda word: f"{word[0][: _LONGEST_WORD // 10]}...", text)
    print(f"samestep: {shortened}", file=sys.stderr)


class NumberRange(click.types.FloatParamType):
    """The numbers from `first` to `last`, integers if both are; an error names the option and its range."""

    def __init__(self, first: float, last: float) -> None:
        self._first, self._last = first, last

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert and check; nan is in no range, and int refuses thousands of digits."""
        kind = int if isinstance(self._first, int) else float
        with suppress(ValueError):
            if self._first <= kind(value) <= self._last:
                return kind(value)
        name, what = param.opts[-1] if param else "the value", "an integer" if kind is int else "a number"
        text = f"{name} must be {what} from {self._first} to {self._last}, got {shorten(str(value))}"
        raise click.UsageError(text, ctx)


def accept_underscores(name: str) -> str:
    """Normalize `--nproc_per_node` to `--nproc-per-node`, as torchrun does."""
    return name.replace("_", "-")


def _describe(error: SamestepError | click.ClickException) -> str:
    if isinstance(error, click.MissingParameter) and error.ctx and isinstance(error.param, click.Argument):
        path, name = error.ctx.command_path, error.param.human_readable_name
        return f"argument {name} is missing: run `{path} {name}`; `{path} --help` explains it"
    if isinstance(error, click.NoSuchOption) and error.ctx:
        return _unknown_option(error, error.ctx)
    return error.format_message() if isinstance(error, click.ClickException) else str(error)


def _unknown_option(error: click.NoSuchOption, ctx: click.Context) -> str:
    options = [each for each in ctx.command.get_params(ctx) if isinstance(each, click.Option) and not each.hidden]
    known = sorted(name for each in options for name in each.opts if name.startswith("--"))
    near = [name for name in known if name.startswith(error.option_name)]
    near = near or get_close_matches(error.option_name, known, n=1, cutoff=0.75)  # all begin with dashes
    hint = f"; did you mean {near[0]}?" if near else ""
    # For `submit` and `plan`: options of the user's script or function come after `--`.
    names = [parameter.name for parameter in ctx.command.params] if ctx.allow_interspersed_args else []
    own = [
        what for what, name in (("script", "script"), ("function", "arguments"), ("script", "added")) if name in names
    ]
    dashes = "".join(f"; put options of the {what} after `--`" for what in own)
    return f"unknown option {error.option_name}: use one of {', '.join(known)}{dashes}{hint}"
