"""Export the weights of a checkpoint as one safetensors file, unsharded, with the parameter names of your module."""

import json
from functools import partial
from pathlib import Path

from samestep.checkpoint.checkpoint_folder import find_newest_valid
from samestep.checkpoint.manifest import STATE_FILE, disk_error, write_verified
from samestep.checkpoint.state_encoding import tensor_names
from samestep.checkpoint.tensor_storage import FileEntry, read_full_tensor, read_index, safetensors_blocks
from samestep.disk import fsync_folder
from samestep.errors import CheckpointError


def export_model(folder: Path, target: Path, part: str | None = None) -> dict[str, object]:
    """Write a model of the newest valid checkpoint to `target`, and return a summary of it.

    `part` is the name of the model, if the checkpoint has several. One full tensor is in memory at a time.
    """
    path, manifest = find_newest_valid(folder)
    models = [name for name, kind in manifest.parts.items() if kind == "model"]
    name = part or (models[0] if len(models) == 1 else None)
    if name not in models:
        found = f"no model {part!r}" if part else f"{len(models)} models"
        raise CheckpointError(f"{path} has {found}: choose one with --part, of {', '.join(models) or 'none'}")
    if target.exists():
        raise CheckpointError(f"{target} already exists: choose another file with --to, or remove it")
    if not target.parent.is_dir():
        raise CheckpointError(f"the folder {target.parent} of --to does not exist: create it, or choose another --to")
    state = json.loads((path / STATE_FILE).read_bytes())[name]
    index = read_index(path, manifest.files)
    entries: list[FileEntry] = []
    for tensor_name in tensor_names(state):
        tensor = index[tensor_name]
        load = partial(read_full_tensor, path, tensor)
        entries.append(FileEntry(tensor_name.removeprefix(f"{name}/"), tensor.dtype, tensor.shape, load))
    size = _write(target, entries)
    return {"checkpoint": str(path), "step": manifest.step, "file": str(target), "tensors": len(entries), "bytes": size}


def _write(target: Path, entries: list[FileEntry]) -> int:
    temporary = target.with_name(f"{target.name}.part")
    try:
        temporary.unlink(missing_ok=True)
        size = write_verified(temporary, safetensors_blocks(entries)).bytes
        temporary.rename(target)
        fsync_folder(target.parent)
    except OSError as error:
        raise disk_error(error, f"writing {target}") from error
    return size
