"""The weights of a checkpoint as one plain file of safetensors, whole and with the names of the user's module."""

import json
from functools import partial
from pathlib import Path

from samestep.checkpoint import tensor_storage as index_file
from samestep.checkpoint.checkpoint_folder import newest_sound
from samestep.checkpoint.manifest import explain, write_checked
from samestep.checkpoint.save import STATE
from samestep.checkpoint.state_encoding import tensor_names
from samestep.checkpoint.tensor_storage import Entry, tensor_blocks
from samestep.disk import fsync_folder
from samestep.errors import CheckpointError


def export(folder: Path, target: Path, part: str | None = None) -> dict[str, object]:
    """Write the model of the newest sound checkpoint to `target`, one tensor in memory at a time; what was written."""
    path, manifest = newest_sound(folder)
    models = [name for name, kind in manifest.parts.items() if kind == "model"]
    chosen = part or (models[0] if len(models) == 1 else None)
    if chosen not in models:
        what = f"no model {part!r}" if part else f"{len(models)} models"
        raise CheckpointError(f"{path} holds {what}: choose one with --part, of {', '.join(models) or 'none'}")
    _check_target(target)
    values = json.loads((path / STATE).read_bytes())[chosen]
    index = index_file.from_record(json.loads((path / index_file.NAME).read_bytes()), manifest.files)
    entries: list[Entry] = []
    for name in tensor_names(values):
        whole = index[name]
        get = partial(index_file.read_whole, path, whole)
        entries.append(Entry(name.removeprefix(f"{chosen}/"), whole.dtype, whole.shape, get))
    beside = target.with_name(f"{target.name}.part")
    try:
        beside.unlink(missing_ok=True)
        size = write_checked(beside, tensor_blocks(entries)).bytes
        beside.rename(target)
        fsync_folder(target.parent)
    except OSError as error:
        raise explain(error, f"writing {target}") from error
    return {"checkpoint": str(path), "step": manifest.step, "file": str(target), "tensors": len(entries), "bytes": size}


def _check_target(target: Path) -> None:
    if target.exists():
        raise CheckpointError(f"{target} is there already: choose another file with --to, or remove it")
    if not target.parent.is_dir():
        raise CheckpointError(f"there is no folder {target.parent} to write {target.name} to: make it, or choose --to")
