"""A mkdocs hook that writes the help of every `samestep` command into docs/cli.md while the site is built.

The page has the marker `<!-- commands -->`. Options come from the commands themselves, so they are never outdated.
"""

from collections.abc import Iterator
from typing import Any

import click

from samestep.cli.main import samestep

MARKER = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marker of a page by one section per command; mkdocs calls this for every page."""
    return markdown.replace(MARKER, "\n\n".join(sections(samestep, "samestep"))) if MARKER in markdown else markdown


def sections(group: click.Group, name: str) -> Iterator[str]:
    """Describe every command of a group, and the commands of its groups."""
    context = click.Context(group, info_name=name)
    for command_name in group.list_commands(context):
        command = group.get_command(context, command_name)
        full_name = f"{name} {command_name}"
        if isinstance(command, click.Group):
            yield f"## {full_name}\n\n{paragraphs(command.help)}"
            yield from sections(command, full_name)
        elif command is not None:
            yield section(command, full_name)


def section(command: click.Command, name: str) -> str:
    """Describe one command: usage, help and a table of its options."""
    context = click.Context(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    options = [parameter.get_help_record(context) for parameter in command.params]
    rows = [f"| <code>{cell(record[0])}</code> | {cell(record[1])} |" for record in options if record and record[1]]
    table = "\n".join(["| option | meaning |", "|---|---|", *rows])
    return f"## {name}\n\n```text\n{usage}\n```\n\n{paragraphs(command.help)}\n\n{table}"


def cell(text: str) -> str:
    """Escape what would end the cell of a table or begin a tag."""
    return " ".join(text.split()).replace("<", "&lt;").replace("|", "&#124;")


def paragraphs(text: str | None) -> str:
    """Turn a help text into Markdown: click's marker for unwrapped paragraphs becomes a code block."""
    blocks = [block for block in (text or "").split("\n\n") if block.strip()]
    return "\n\n".join(
        f"```text\n{block.strip().removeprefix(chr(8)).strip()}\n```" if "\b" in block else " ".join(block.split())
        for block in blocks
    )
