"""Read checkpoints: restore the newest valid one on any world size.

Every rank reads its slices of sharded tensors from the files of all ranks. Tensors that all ranks hold in full are
divided: each is read by one rank. The RNG states are restored only on the world size on which they were saved.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from numbers import Integral
from pathlib import Path

from samestep.checkpoint.checkpoint import Checkpoint, gather_states
from samestep.checkpoint.checkpoint_folder import Retention, check_latest, list_newest_first
from samestep.checkpoint.folder_lock import acquire
from samestep.checkpoint.manifest import (
    STATE_FILE,
    CorruptCheckpoint,
    Manifest,
    read_manifest,
    verify_files,
)
from samestep.checkpoint.parts import (
    Parts,
    Stateful,
    Tensors,
    check_frozen,
    describe_state_error,
    rng_tensor_name,
    set_rng_state,
)
from samestep.checkpoint.tensor_storage import (
    CheckpointReader,
    Index,
    broadcast_tensors,
    divide_reads,
    read_full_tensor,
    read_index,
)
from samestep.context import RunContext
from samestep.distributed.once import run_on_every_rank
from samestep.environment.world import World
from samestep.errors import CheckpointError, SamestepError
from samestep.messages import warn
from samestep.torch_private import is_dtensor

_OPERATION = "run.checkpoint"


def resolve_folder(folder: str | Path) -> Path:
    """Return the folder as an absolute path."""
    if not str(folder).strip():
        raise CheckpointError(
            f'run.checkpoint({str(folder)!r}) has no folder: pass one, for example run.checkpoint("out", ...), or "." '
            "for the current folder"
        )
    return Path(folder).expanduser().absolute()


def restore(
    context: RunContext,
    folder: Path,
    keep: int,
    keep_best: str | None,
    trainable_only: bool,
    given: Mapping[str, Stateful],
) -> Checkpoint:
    """Load the newest valid checkpoint in `folder` into the parts, if there is one; a collective."""
    if not isinstance(keep, Integral) or keep < 1:  # pyright: ignore[reportUnnecessaryIsInstance]  # scripts are not type-checked
        raise CheckpointError(f"keep must be an integer of at least 1, got {keep!r}: pass for example keep=3")
    if any(isinstance(other, Checkpoint) and other.folder == folder for other in context.callbacks):
        raise CheckpointError(
            f"this run already has checkpoints in {folder}: pass all parts to one run.checkpoint, or use a separate "
            "folder for each"
        )
    scale = context.acceleration.loss_scale
    own: dict[str, Stateful] = {} if scale is None else {"loss_scale": scale}
    if reserved := sorted(set(given) & set(own)):
        raise CheckpointError(f"run.checkpoint uses the name {reserved[0]!r} itself: pass this part under another name")
    parts = Parts(
        {**given, **own},
        lambda module: wrapped.inner if (wrapped := context.find_wrapped(module)) else module,
        trainable_only,
    )
    if trainable_only and not any(map(len, parts.frozen.values())):
        context.warn_once(
            "trainable_only=True of run.checkpoint has no effect: no model that it received has both trainable and "
            "frozen parameters"
        )
    context.once(_lock, context, folder)
    gather_states(context, parts, _OPERATION)
    found, corrupt = _find_newest_valid(context, folder)
    if found is None:
        reason = f"none of {len(corrupt)} checkpoint(s) in {folder} is valid" if corrupt else f"none in {folder} yet"
        parts.describe_frozen()
        # raise before training, and not at the first save, if the state cannot be saved
        run_on_every_rank(context.comm, _OPERATION, CheckpointError, parts.state, describe=describe_state_error)
        message = f"checkpoint: {reason}, training starts at step 0"
    else:
        _load(context, parts, *found)
        message = _describe(*found, len(corrupt), context.world.size)
        context.record("restored", checkpoint=str(found[0]), step=found[1].step, corrupt=corrupt)
    token = context.comm.exchange_objects(_OPERATION, f"{time.time_ns():x}")[0]
    checkpoint = Checkpoint(context, parts, Retention(folder, keep, keep_best, tuple(corrupt)), token, found)
    context.print(message)
    return checkpoint


def _lock(context: RunContext, folder: Path) -> None:
    """On rank 0: lock the folder until the run ends."""
    check_latest(folder)
    lock = acquire(folder)
    if lock is not None:
        context.on_close.append(lock.release)


def _find_newest_valid(context: RunContext, folder: Path) -> tuple[tuple[Path, Manifest] | None, list[str]]:
    """Return the newest valid checkpoint, and the names of newer ones that are corrupt."""
    corrupt: list[str] = []
    for path in (found.path for found in context.once(list_newest_first, folder)):
        problem, manifest = run_on_every_rank(
            context.comm, _OPERATION, CheckpointError, _verify, context.world, path, describe=str
        )
        problems = [each for each in context.comm.exchange_objects(_OPERATION, problem) if each is not None]
        if not problems:
            assert manifest is not None
            return (path, manifest), corrupt
        corrupt.append(path.name)
        if context.world.is_main:
            warn(f"checkpoint {path} is corrupt: {problems[0]}; loading the previous one instead, if there is one")
    return None, corrupt


def _verify(world: World, path: Path) -> tuple[str | None, Manifest | None]:
    """Return why a checkpoint is corrupt, or its manifest; each rank reads a part of the files completely."""
    try:
        manifest = read_manifest(path)
        verify_files(path, manifest, sorted(manifest.files)[world.rank :: world.size])
    except CorruptCheckpoint as error:
        return str(error), None
    return None, manifest


def _load(context: RunContext, parts: Parts, path: Path, manifest: Manifest) -> None:
    """Load on all ranks, and check that all ranks are at the same step.

    A tensor that every rank holds in full is read by one rank, which sends it to the others.
    """
    comm, rank = context.comm, context.world.rank

    def describe(error: Exception) -> str:
        kind = "" if isinstance(error, SamestepError) else f"{type(error).__name__}: "
        return f"{path} cannot be restored: {kind}{error}"

    index, targets, load = run_on_every_rank(
        comm, _OPERATION, CheckpointError, _prepare, parts, path, manifest, describe=describe
    )
    differences, remedy = parts.frozen_differences(), "build the model from the same weights and in the same dtype"
    run_on_every_rank(comm, _OPERATION, CheckpointError, check_frozen, differences, remedy, describe=describe)
    in_full = {name: tensor for name, tensor in targets.items() if not is_dtensor(tensor)}
    readers: dict[str, int] = {}
    if len(set(comm.exchange_objects(_OPERATION, _digest(manifest, in_full)))) == 1:  # all see the same files
        readers = divide_reads({name: tensor.nbytes for name, tensor in in_full.items()}, comm.world.size)
    own = {name: tensor for name, tensor in targets.items() if readers.get(name, rank) == rank}
    run_on_every_rank(
        comm, _OPERATION, CheckpointError, CheckpointReader(path, index).load_into, own, describe=describe
    )
    if readers and not comm.alone:
        with comm.collective(_OPERATION):
            broadcast_tensors(in_full, readers, comm)
    run_on_every_rank(
        comm, _OPERATION, CheckpointError, _set_state, context, load, path, manifest, index, describe=describe
    )
    parts.describe_frozen()
    steps = comm.exchange_objects(_OPERATION, context.progress.steps)
    if len(set(steps)) > 1:
        raise CheckpointError(
            f"the ranks restored different steps from {path}: {steps}; make sure that {path.parent} is the same folder "
            "on all nodes"
        )
    if context.world.is_main and (unused := [name for name in manifest.parts if name not in parts.kinds]):
        warn(f"{path} also has {', '.join(unused)}, which run.checkpoint did not receive: not restored")


def _prepare(parts: Parts, path: Path, manifest: Manifest) -> tuple[Index, Tensors, Callable[[], None]]:
    values = json.loads((path / STATE_FILE).read_bytes())
    index = read_index(path, manifest.files)
    return index, *parts.prepare_load(values, index)


def _digest(manifest: Manifest, tensors: Tensors) -> str:
    """A text that is the same on all ranks if they see the same checkpoint and have the same tensors to fill."""
    layout = [(name, list(tensor.shape), str(tensor.dtype), tensor.device.type) for name, tensor in tensors.items()]
    return hashlib.sha256(json.dumps([manifest.to_json(), sorted(layout)]).encode()).hexdigest()


def _set_state(context: RunContext, load: Callable[[], None], path: Path, manifest: Manifest, index: Index) -> None:
    """Load what was read into the parts, and restore progress and generators."""
    load()
    last = manifest.history[-1]
    context.progress.steps, context.progress.samples = last.last_step, manifest.samples
    own = context.world.rank if last.world_size == context.world.size else 0  # usually the same state on all ranks
    set_rng_state(read_full_tensor(path, index[rng_tensor_name(own)]), context.device)


def _describe(path: Path, manifest: Manifest, corrupt: int, world_size: int) -> str:
    newer = f"; {corrupt} newer {'is' if corrupt == 1 else 'are'} corrupt" if corrupt else ""
    saved = manifest.history[-1].world_size
    ranks = f"{saved} rank(s)" if saved == world_size else f"{saved} rank(s), now {world_size}"
    return f"checkpoint: restored step {manifest.step} from {path} (the newest{newer}; saved on {ranks})"
