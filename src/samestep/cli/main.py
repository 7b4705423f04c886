"""The `samestep` command: which commands there are, and how mistakes are told."""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from shlex import quote

import click

from samestep.errors import SamestepError


class Group(click.Group):
    """Where the word typed is none of its commands, it says which there are and which may have been meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that was typed."""
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            meant = f"; did you mean `{near}`?" if (near := self.meant(ctx, args[0])) else ""
            raise click.UsageError(f"there is no command {args[0]}: there are {', '.join(known)}{meant}")
        return super().resolve_command(ctx, args)

    def meant(self, ctx: click.Context, typed: str) -> str | None:
        """What somebody who typed this may have wanted to type."""
        near = get_close_matches(typed, self.list_commands(ctx), n=1)
        return f"{ctx.command_path} {near[0]}" if near else None


# Each module holds a click command named `command`; it is imported when asked for, so that `--help` needs no torch.
COMMANDS = {
    "run": ("samestep.cli.run_command", "Start a script on every GPU of this machine, or as ranks on several nodes."),
    "submit": ("samestep.cli.submit_command", "Submit a script to SLURM, as ranks on one node or several."),
    "jobs": ("samestep.cli.jobs_command", "List what was submitted to SLURM, and how each job ended."),
    "plan": ("samestep.cli.plan_command", "Say what fits on which GPUs, what is fastest, and why."),
    "doctor": ("samestep.cli.doctor_command", "Look at this machine and say what would go wrong, and what to do."),
    "audit": ("samestep.cli.audit_command", "Count which samples a run has seen: each exactly once?"),
    "checkpoint": ("samestep.cli.checkpoint_command", "Look into checkpoints, verify them, export their weights."),
    "recipe": ("samestep.cli.recipe_command", "List scripts that come with samestep, run one, copy one to start from."),
}


class Commands(Group):
    """The commands of the table above."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one of them."""
        if cmd_name not in COMMANDS:
            return None
        command = import_module(COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List them in the help without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, told) for name, (_, told) in COMMANDS.items()])

    def meant(self, ctx: click.Context, typed: str) -> str | None:
        """A script that is typed where a command should stand is to be run."""
        return f"samestep run {quote(typed)}" if typed.endswith(".py") else super().meant(ctx, typed)


@click.group(cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="samestep", message="%(package)s %(version)s")
@click.pass_context
def samestep(ctx: click.Context) -> None:
    """N GPUs, the same step: train on any number of processes with the same result."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is its own, 2 after a mistake that one line explains, or 130 after Ctrl-C."""
    try:
        code = samestep.main(arguments, prog_name="samestep", standalone_mode=False)
    except SamestepError as error:
        return _complain(str(error))
    except click.exceptions.NoArgsIsHelpError as error:  # a group without a command, as `samestep` itself
        click.echo(error.ctx.get_help())
        return 0
    except click.MissingParameter as error:
        return _complain(_missing(error))
    except click.NoSuchOption as error:
        return _complain(_no_such_option(error))
    except click.ClickException as error:
        return _complain(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        return 130
    return code if isinstance(code, int) else 0


def _complain(text: str) -> int:
    print(f"samestep: {text}", file=sys.stderr)
    return 2


def _missing(error: click.MissingParameter) -> str:
    """What a command cannot do without, and where its meaning is told."""
    if error.ctx is None or not isinstance(error.param, click.Argument):
        return error.format_message()
    typed, name = error.ctx.command_path, error.param.human_readable_name
    return f"{name} is missing: type `{typed} {name}`; `{typed} --help` says what it is"


def _no_such_option(error: click.NoSuchOption) -> str:
    """Which options there are, which one may have been meant, and where those of a script belong."""
    known = _options(error.ctx)
    near = [name for name in known if name.startswith(error.option_name)]
    near = near or get_close_matches(error.option_name, known, n=1, cutoff=0.75)  # all begin with dashes
    own = "".join(f"; options of the {what} follow `--`" for what in _with_options_of_its_own(error.ctx))
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"there is no option {error.option_name}: there are {', '.join(known)}{own}{meant}"


def _with_options_of_its_own(ctx: click.Context | None) -> list[str]:
    """Whose options may have been typed among ours: those of the script of `submit`, of the function of `plan`."""
    if ctx is None or not ctx.allow_interspersed_args:
        return []
    names = [parameter.name for parameter in ctx.command.params]
    return [what for what, name in (("script", "script"), ("function", "arguments")) if name in names]


def _options(ctx: click.Context | None) -> list[str]:
    if ctx is None:
        return []
    parameters = [each for each in ctx.command.get_params(ctx) if isinstance(each, click.Option) and not each.hidden]
    return sorted(name for each in parameters for name in each.opts if name.startswith("--"))
