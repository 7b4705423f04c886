"""Restoring: the newest checkpoint that is sound, agreed on by all ranks, loaded by all of them."""

import json
import time
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path

from torch import nn

from samestep.checkpoint import parts as luck
from samestep.checkpoint import tensor_storage as index_file
from samestep.checkpoint.checkpoint import Checkpoint, Rules
from samestep.checkpoint.checkpoint_folder import hold, newest_first
from samestep.checkpoint.manifest import Damaged, Manifest, check_files, read_manifest
from samestep.checkpoint.parts import Parts, Stateful, explain_state
from samestep.checkpoint.save import STATE
from samestep.checkpoint.tensor_storage import Files, Index
from samestep.context import RunContext
from samestep.distributed.communicator import Communicator
from samestep.errors import CheckpointError, SamestepError
from samestep.messages import warn

_ACT = "run.checkpoint"


def folder_of(given: str | Path) -> Path:
    """Where checkpoints lie, as an absolute path."""
    if not str(given).strip():
        raise CheckpointError(
            f'run.checkpoint({str(given)!r}) names no folder: give one, as in run.checkpoint("out", ...), or "." for the '
            "folder in which the script was started"
        )
    return Path(given).expanduser().absolute()


def restore(
    context: RunContext, folder: Path, keep: int, keep_best: str | None, given: Mapping[str, Stateful]
) -> Checkpoint:
    """Bring all parts to the newest sound checkpoint in `folder`, if there is one, and say which and why."""
    if not isinstance(keep, Integral) or keep < 1:  # pyright: ignore[reportUnnecessaryIsInstance]  # not all check types
        raise CheckpointError(f"keep={keep!r} is no number of checkpoints: keep 1 or more, as in keep=3")
    if any(isinstance(other, Checkpoint) and other.folder == folder for other in context.callbacks):
        raise CheckpointError(
            f"run.checkpoint was given {folder} before in this run: two sets of checkpoints in one folder would hide "
            "each other; give all parts to one run.checkpoint, or each its own folder"
        )
    scale = context.acceleration.loss_scale
    extra: dict[str, Stateful] = {} if scale is None else {"loss_scale": scale}
    taken = sorted(set(given) & set(extra))
    if taken:
        raise CheckpointError(f"run.checkpoint keeps the name {taken[0]!r} for itself: give this part another name")
    parts = Parts({**given, **extra}, lambda module: _inner(context, module))
    _hold(context, folder)
    found, bad = _newest_sound(context, folder)
    token = context.comm.exchange_objects(_ACT, f"{time.time_ns():x}")[0]
    rules = Rules(folder, keep, keep_best, token, tuple(bad))
    if found is None:
        reason = f"none of {len(bad)} is sound" if bad else "there is none yet"
        _check_parts(context.comm, parts)
        context.print(f"checkpoint: {reason} in {folder}: training begins at step 0")
        return Checkpoint(context, rules, parts, ())
    path, manifest = found
    _load_together(context, parts, path, manifest)
    checkpoint = Checkpoint(context, rules, parts, manifest.history)
    checkpoint.restored = path
    if manifest.step != context.progress.steps:
        checkpoint.last_number = manifest.step
    context.print(_tell(path, manifest, bad, context.comm.world.size))
    return checkpoint


def _hold(context: RunContext, folder: Path) -> None:
    """Keep other runs out of the folder until this one ends; the first rank does so for all."""
    told: str | None = None
    if context.comm.world.is_main:
        try:
            held = hold(folder)
        except CheckpointError as error:
            told = str(error)
        else:
            if held is not None:
                context.on_close.append(held.release)
    if (told := context.comm.exchange_objects(_ACT, told)[0]) is not None:
        raise CheckpointError(told)


def _inner(context: RunContext, module: nn.Module) -> nn.Module:
    """The user's own module, so that names are those of its author whatever is wrapped around it."""
    for wrapped in context.models:
        if module in (wrapped.model, wrapped.core, wrapped.inner):
            return wrapped.inner
    return module


def _newest_sound(context: RunContext, folder: Path) -> tuple[tuple[Path, Manifest] | None, list[str]]:
    bad: list[str] = []
    for path in (each.path for each in context.once(newest_first, folder)):
        problem, manifest = _look_at(context.comm, path)
        if problem is None:
            assert manifest is not None
            return (path, manifest), bad
        bad.append(path.name)
        if context.comm.world.is_main:
            warn(f"checkpoint {path} is passed over: {problem}; the one before it is used, if there is one")
    return None, bad


def _check_parts(comm: Communicator, parts: Parts) -> None:
    """Find out before training whether the state can be saved at all; what fails on one rank is raised on all."""
    error, cause = None, None
    try:
        parts.take()
    except Exception as failure:  # noqa: BLE001  # a state_dict of the user's may raise anything
        error, cause = explain_state(failure), failure
    for rank, text in enumerate(comm.exchange_objects(_ACT, error)):
        if text is not None:
            raise CheckpointError(text if comm.alone else f"rank {rank}: {text}") from cause


def _look_at(comm: Communicator, path: Path) -> tuple[str | None, Manifest | None]:
    """What is wrong with a checkpoint, or nothing; each rank reads its share of the files to the last byte."""
    manifest, problem, fatal = None, None, None
    try:
        manifest = read_manifest(path)
        check_files(path, manifest, sorted(manifest.files)[comm.world.rank :: comm.world.size])
    except Damaged as damage:
        problem = str(damage)
    except (CheckpointError, OSError) as error:
        fatal = str(error)
    answers = comm.exchange_objects(_ACT, (problem, fatal))
    for rank, (_, text) in enumerate(answers):
        if text is not None:
            raise CheckpointError(text if comm.alone else f"rank {rank}: {text}")
    return next((told for told, _ in answers if told is not None), None), manifest


def _load_together(context: RunContext, parts: Parts, path: Path, manifest: Manifest) -> None:
    """Load on every rank; what fails on one is raised on all, and the step is the same everywhere."""
    comm, error, cause = context.comm, None, None
    try:
        _load(context, parts, path, manifest)
    except Exception as failure:  # noqa: BLE001  # a load_state_dict of the user's may raise anything
        kind = "" if isinstance(failure, SamestepError) else f"{type(failure).__name__}: "
        error, cause = f"{path} cannot be restored: {kind}{failure}", failure
    for rank, text in enumerate(comm.exchange_objects(_ACT, error)):
        if text is not None:
            raise CheckpointError(text if comm.alone else f"rank {rank}: {text}") from cause
    steps = [int(part[0]) for part in comm.exchange(_ACT, [float(context.progress.steps)])]
    if len(set(steps)) > 1:
        raise CheckpointError(
            f"ranks restored different steps from {path}: {steps}; is {path.parent} the same folder on all?"
        )


def _load(context: RunContext, parts: Parts, path: Path, manifest: Manifest) -> None:
    values = json.loads((path / STATE).read_bytes())
    index = index_file.from_record(json.loads((path / index_file.NAME).read_bytes()), manifest.files)
    room, put_back = parts.prepare(values, index)
    Files(path, index).load_into(dict(room))
    put_back()
    context.progress.steps, context.progress.samples = manifest.history[-1].last_step, manifest.samples
    _load_luck(context, path, manifest, index)
    if context.comm.world.is_main and (unasked := [name for name in manifest.parts if name not in parts.kinds]):
        warn(f"{path} also holds {', '.join(unasked)}, which run.checkpoint was not given: it is not restored")


def _load_luck(context: RunContext, path: Path, manifest: Manifest, index: Index) -> None:
    """Each rank goes on drawing where it was; on another number of ranks all begin anew, but not with old numbers."""
    world = context.comm.world
    name = luck.name_of(world.rank)
    if manifest.history[-1].world_size == world.size and name in index:
        luck.give_back(index_file.read_whole(path, index[name]), context.device)
    else:
        context.reseed(manifest.step)


def _tell(path: Path, manifest: Manifest, bad: Sequence[str], size: int) -> str:
    passed = f"; {len(bad)} newer {'is' if len(bad) == 1 else 'are'} damaged" if bad else ""
    was = manifest.history[-1].world_size
    ranks = f"{was} rank(s)" if was == size else f"{was} rank(s), now {size}"
    return f"checkpoint: restored step {manifest.step} from {path} (the newest{passed}; saved on {ranks})"
