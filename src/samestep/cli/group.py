"""A group of commands that names all of them where another word is typed."""

from difflib import get_close_matches

import click


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
