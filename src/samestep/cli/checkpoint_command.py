"""`samestep checkpoint`: inspect, verify and export checkpoints."""

import json
import sys
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from samestep.checkpoint import checkpoint_folder
from samestep.checkpoint import manifest as manifest_module
from samestep.checkpoint.manifest import INDEX_FILE, Manifest
from samestep.cli.main import Group
from samestep.errors import CheckpointError
from samestep.messages import format_bytes

_PIPE_WIDTH = 120  # rich would format a table for 80 columns
_FOLDER = click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


@click.group("checkpoint", cls=Group)
def command() -> None:
    """Inspect, verify and export checkpoints.

    FOLDER is the folder that run.checkpoint received, or one checkpoint in it.
    """


@command.command()
@_FOLDER
@_JSON
def inspect(folder: Path, as_json: bool) -> None:
    """Show step, parts, history and tensors of the newest checkpoint."""
    path, manifest = checkpoint_folder.find_newest_valid(folder)
    tensors = json.loads((path / INDEX_FILE).read_bytes())
    if as_json:
        click.echo(json.dumps({"checkpoint": str(path), **manifest.to_json(), "tensors": tensors}, indent=2))
    else:
        _show(path, manifest, tensors)


@command.command()
@_FOLDER
@_JSON
@click.pass_context
def verify(context: click.Context, folder: Path, as_json: bool) -> None:
    """Read every byte and compare checksums. Exits with 0 if all checkpoints are valid, with 1 if one is corrupt."""
    checkpoint_folder.check_is_folder(folder)
    is_single = checkpoint_folder.is_checkpoint(folder)
    paths = [folder] if is_single else [found.path for found in checkpoint_folder.list_by_name(folder)]
    errors = _verify(paths)
    if not errors:
        raise CheckpointError(f"{folder} has no checkpoint: pass the folder that run.checkpoint received")
    valid = not any(errors.values())
    if as_json:
        rows = [{"checkpoint": str(path), "valid": error is None, "error": error} for path, error in errors.items()]
        click.echo(json.dumps({"valid": valid, "checkpoints": rows}, indent=2))
    else:
        click.echo("\n".join(f"corrupt: {error}" if error else f"valid: {path}" for path, error in errors.items()))
    context.exit(0 if valid else 1)


@command.command(short_help="Write the unsharded weights to one safetensors file, or a Hugging Face folder.")
@_FOLDER
@click.option(
    "--to",
    "target",
    type=click.Path(path_type=Path),
    default=None,
    help="The file or folder to write.  [default: model.safetensors, or the folder model]",
)
@click.option("--part", default=None, help="The name of the model, if the checkpoint has several.")
@click.option("--pretrained", is_flag=True, help="Write a Hugging Face folder, with configuration and tokenizer.")
@click.option("--merge", is_flag=True, help="Write a Hugging Face folder with peft adapters added to the weights.")
@click.option(
    "--base",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=None,
    help="The Hugging Face folder that training started from, with the tokenizer and the frozen weights.  [default: "
    "the one that the checkpoint names]",
)
@_JSON
def export(
    folder: Path, target: Path | None, part: str | None, pretrained: bool, merge: bool, base: Path | None, as_json: bool
) -> None:
    """Write the unsharded weights to one safetensors file that torch and transformers load.

    With --pretrained, write a folder as `save_pretrained` does. An adapter of peft is written without the base model,
    or with --merge as whole weights.
    """
    from samestep.checkpoint.export import export_model, export_pretrained  # imports torch

    if pretrained or merge or base is not None:
        summary = export_pretrained(folder, target or Path("model"), part, base, merge)
    else:
        summary = export_model(folder, target or Path("model.safetensors"), part)
    source = f"step {summary['step']} ({summary['checkpoint']})"
    if as_json:
        click.echo(json.dumps(summary, indent=2))
    elif "folder" in summary:
        click.echo(f"{summary['folder']}: {summary['files']}, of {source}")
    else:
        size = format_bytes(float(str(summary["bytes"])))
        click.echo(f"{summary['file']}: {summary['tensors']} tensors, {size}, of {source}")
        if summary["frozen"]:
            left_out = f"The checkpoint does not contain {summary['frozen']} frozen tensors"
            click.echo(f"{left_out}: add --pretrained or --merge for a whole model of transformers")


def _verify(paths: list[Path]) -> dict[Path, str | None]:
    """Return the error of each checkpoint, or None; omit those that a live run removed in the meantime."""
    errors: dict[Path, str | None] = {}
    for path in paths:
        try:
            manifest_module.verify_checkpoint(path)
            errors[path] = None
        except CheckpointError as error:
            if path.exists():
                errors[path] = str(error)
    return errors


def _show(path: Path, manifest: Manifest, tensors: dict[str, dict[str, list[object]]]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    console.print(f"{path}: step {manifest.step:,}, {manifest.samples:,} samples, {format_bytes(manifest.size)}, saved "
                  f"{manifest.saved_at}", soft_wrap=True)  # fmt: skip
    console.print(f"parts: {', '.join(f'{name} ({kind})' for name, kind in manifest.parts.items())}", soft_wrap=True)
    for entry in manifest.history:
        versions = ", ".join(f"{name} {version}" for name, version in entry.versions.items())
        console.print(f"steps {entry.first_step:,} to {entry.last_step:,} on {entry.world_size} rank(s), {versions}")
    if manifest.metric is not None:
        console.print(f"{manifest.metric[0]}: {manifest.metric[1]:g}")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("tensor", "dtype", "shape", "chunks"):
        table.add_column(title, overflow="fold")
    for name, tensor in tensors.items():
        table.add_row(name, str(tensor["dtype"]), str(tuple(tensor["shape"])), str(len(tensor["chunks"])))
    console.print(table)
