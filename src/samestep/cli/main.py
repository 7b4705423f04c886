"""The `samestep` command: its subcommands, and how errors are shown."""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from shlex import quote

import click

from samestep.errors import SamestepError

# Each module has a click command named `command`. It is imported when it is used, so that `--help` does not need torch.
COMMANDS = {
    "run": ("samestep.cli.run_command", "Start a script on every GPU of this machine, or as ranks on several nodes."),
    "parity": ("samestep.cli.parity_command", "Run a script on several numbers of ranks and compare what it logs."),
    "submit": ("samestep.cli.submit_command", "Submit a script to SLURM, as ranks on one or several nodes."),
    "jobs": ("samestep.cli.jobs_command", "List submitted SLURM jobs and their states."),
    "plan": ("samestep.cli.plan_command", "Show what fits on which GPUs, what is fastest, and why."),
    "doctor": ("samestep.cli.doctor_command", "Check this machine for problems, and show how to fix them."),
    "audit": ("samestep.cli.audit_command", "Check that a run has used each sample exactly once per epoch."),
    "checkpoint": ("samestep.cli.checkpoint_command", "Inspect and verify checkpoints, export their weights."),
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code, 2 after an error that one line explains, or 130 after Ctrl-C."""
    try:
        code = samestep.main(arguments, prog_name="samestep", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:  # a group without a command
        click.echo(error.ctx.get_help())
        return 0
    except (SamestepError, click.ClickException) as error:
        print(f"samestep: {_describe(error)}", file=sys.stderr)
        return 2
    except (click.Abort, KeyboardInterrupt):
        return 130
    return code if isinstance(code, int) else 0


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
    own = [what for what, name in (("script", "script"), ("function", "arguments")) if name in names]
    dashes = "".join(f"; put options of the {what} after `--`" for what in own)
    return f"unknown option {error.option_name}: use one of {', '.join(known)}{dashes}{hint}"
