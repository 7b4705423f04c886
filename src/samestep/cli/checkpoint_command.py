"""`samestep checkpoint`: what is inside a checkpoint, whether it is sound, and its weights as one plain file."""

import json
import sys
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from samestep.checkpoint import checkpoint_folder as catalog
from samestep.checkpoint.manifest import Manifest
from samestep.cli.main import Group
from samestep.errors import CheckpointError
from samestep.messages import format_bytes

_PIPED_WIDTH = 120
_FOLDER = click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


@click.group("checkpoint", cls=Group)
def command() -> None:
    """Look into checkpoints: FOLDER is what run.checkpoint was given, or one checkpoint in it."""


@command.command()
@_FOLDER
@_JSON
def inspect(folder: Path, as_json: bool) -> None:
    """Say what is inside: step, parts, history, tensors. Of several checkpoints the newest sound one is shown."""
    path, manifest = catalog.newest_sound(folder)
    tensors = json.loads((path / "index.json").read_bytes())
    if as_json:
        click.echo(json.dumps({"checkpoint": str(path), **manifest.as_record(), "tensors": tensors}, indent=2))
    else:
        _show(path, manifest, tensors)


@command.command()
@_FOLDER
@_JSON
@click.pass_context
def verify(context: click.Context, folder: Path, as_json: bool) -> None:
    """Read every byte and compare checksums. Ends with 0 if all is sound, with 1 if not; it then says what is wrong."""
    catalog.check_folder(folder)
    paths = [folder] if catalog.is_one(folder) else [found.path for found in catalog.find(folder)]
    wrong = _look_at(paths)
    if not wrong:
        raise CheckpointError(f"{folder} holds no checkpoint: give the folder that run.checkpoint was given")
    sound = not any(wrong.values())
    if as_json:
        found = [{"checkpoint": path, "sound": told is None, "wrong": told} for path, told in wrong.items()]
        click.echo(json.dumps({"sound": sound, "checkpoints": found}, indent=2))
    else:
        click.echo("\n".join(f"wrong: {told}" if told else f"sound: {path}" for path, told in wrong.items()))
    context.exit(0 if sound else 1)


@command.command(short_help="Write the whole weights to one plain file.")
@_FOLDER
@click.option(
    "--to",
    "target",
    type=click.Path(path_type=Path),
    default=Path("model.safetensors"),
    show_default=True,
    help="The file to write.",
)
@click.option("--part", default=None, help="Which model, where the checkpoint holds several.")
@_JSON
def export(folder: Path, target: Path, part: str | None, as_json: bool) -> None:
    """Write the whole weights to one file that torch and transformers load, names as in the module."""
    from samestep.checkpoint.export import export as write  # loads torch

    told = write(folder, target, part)
    if as_json:
        click.echo(json.dumps(told, indent=2))
    else:
        size = format_bytes(float(str(told["bytes"])))
        click.echo(f"{told['file']}: {told['tensors']} tensors, {size}, of step {told['step']} ({told['checkpoint']})")


def _look_at(paths: list[Path]) -> dict[str, str | None]:
    """What is wrong with each, or nothing; what a live run has removed meanwhile, since it was too old, is left out."""
    told = {path: _wrong_with(path) for path in paths}
    return {str(path): text for path, text in told.items() if text is None or path.exists()}


def _wrong_with(path: Path) -> str | None:
    try:
        catalog.check_whole(path)
    except CheckpointError as error:
        return str(error)
    return None


def _show(path: Path, manifest: Manifest, tensors: dict[str, dict[str, list[object]]]) -> None:
    # Piped on, a table is not squeezed into the 80 columns that rich takes for granted there.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    console.print(f"{path}: step {manifest.step:,}, {manifest.samples:,} samples, {format_bytes(manifest.size)}, saved "
                  f"{manifest.saved_at}", soft_wrap=True)  # fmt: skip
    console.print(f"parts: {', '.join(f'{name} ({kind})' for name, kind in manifest.parts.items())}", soft_wrap=True)
    for stage in manifest.history:
        versions = ", ".join(f"{name} {version}" for name, version in stage.versions.items())
        console.print(f"steps {stage.first_step:,} to {stage.last_step:,} on {stage.world_size} rank(s), {versions}")
    if manifest.metric is not None:
        console.print(f"{manifest.metric[0]}: {manifest.metric[1]:g}")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("tensor", "dtype", "shape", "pieces"):
        table.add_column(title, overflow="fold")
    for name, told in tensors.items():
        table.add_row(name, str(told["dtype"]), str(tuple(told["shape"])), str(len(told["pieces"])))
    console.print(table)
