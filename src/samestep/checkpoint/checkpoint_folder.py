"""A folder of checkpoints: their names and order, the newest valid one, retention, and leftovers of killed writers."""

import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from samestep.checkpoint.manifest import MANIFEST_FILE, Manifest, disk_error, read_manifest, verify_checkpoint
from samestep.disk import write_atomically
from samestep.errors import CheckpointError
from samestep.messages import format_bytes

LATEST_FILE: Final = "latest"
NUMBERED_ON_PREEMPTION: Final = "numbered_on_preemption"
"""Marks in Manifest.run that the number is the steps done, although the script may number checkpoints otherwise."""
_PUBLISHED: Final = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_LEFTOVER: Final = re.compile(r"\.(writing|deleting)-step-.*")
_REMEDY: Final = "pass the folder that run.checkpoint received, or one checkpoint in it"


@dataclass(frozen=True, order=True)
class PublishedCheckpoint:
    """A checkpoint as far as its name tells; a later one of the same step has a higher `copy`."""

    step: int
    copy: int
    path: Path


def checkpoint_name(step: int, copy: int = 1) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08}" if copy == 1 else f"step-{step:08}-{copy}"


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a published checkpoint, valid or not."""
    return (folder / MANIFEST_FILE).exists() or _PUBLISHED.fullmatch(folder.name) is not None


# Finding


def list_by_name(folder: Path) -> list[PublishedCheckpoint]:
    """Return all published checkpoints, highest number first."""
    try:
        matches = [(path, _PUBLISHED.fullmatch(path.name)) for path in folder.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise disk_error(error, f"reading the checkpoint folder {folder}") from error
    return sorted((PublishedCheckpoint(int(m[1]), int(m[2] or 1), path) for path, m in matches if m), reverse=True)


def list_newest_first(folder: Path) -> list[PublishedCheckpoint]:
    """Return all published checkpoints, newest first: by number, those saved on preemption by the steps done."""
    by_name = list_by_name(folder)
    manifests = _read_manifests(by_name, ())
    steps_done = {found: manifest.history[-1].last_step for found, manifest in manifests.items()}
    preempted = [found for found, manifest in manifests.items() if NUMBERED_ON_PREEMPTION in manifest.run]
    ordered = [found for found in by_name if found not in preempted]
    for found in reversed(preempted):
        older = (
            at for at, other in enumerate(ordered) if other in steps_done and steps_done[other] <= steps_done[found]
        )
        ordered.insert(next(older, len(ordered)), found)
    return ordered


def find_newest_valid(folder: Path) -> tuple[Path, Manifest]:
    """Return the checkpoint at `folder`, or the newest valid one in it."""
    check_is_folder(folder)
    if is_checkpoint(folder):
        return folder, verify_checkpoint(folder)
    errors: list[str] = []
    for found in list_newest_first(folder):
        try:
            return found.path, verify_checkpoint(found.path)
        except CheckpointError as error:
            errors.append(str(error))
    raise CheckpointError(f"{folder} has no valid checkpoint: {'; '.join(errors) or _REMEDY}")


def check_latest(folder: Path) -> None:
    """Raise CheckpointError if the file `latest` cannot be written because something else has its name."""
    if (folder / LATEST_FILE).is_dir():
        raise CheckpointError(
            f"{folder / LATEST_FILE} is a folder, and samestep writes the name of the newest checkpoint to a file of "
            "this name: remove it, or pass another folder to run.checkpoint"
        )


def check_is_folder(folder: Path) -> None:
    """Raise CheckpointError if the path is not a folder."""
    if folder.is_dir():
        return
    if not folder.exists():
        raise CheckpointError(f"the folder {folder} does not exist: {_REMEDY}")
    here = f", here {folder.parent}" if is_checkpoint(folder.parent) else ""
    raise CheckpointError(f"{folder} is a file: {_REMEDY}{here}")


def _read_manifests(
    checkpoints: list[PublishedCheckpoint], corrupt: Collection[str]
) -> dict[PublishedCheckpoint, Manifest]:
    """Read the manifests; omit those that cannot be read, for example because a newer samestep wrote them."""
    manifests: dict[PublishedCheckpoint, Manifest] = {}
    for found in checkpoints:
        try:
            if found.path.name not in corrupt:
                manifests[found] = read_manifest(found.path)
        except (CheckpointError, OSError):
            continue
    return manifests


# Writing


def writing_folder(folder: Path, step: int, token: str) -> Path:
    """Return the hidden folder in which a checkpoint is written before it is published; `token` is of the run."""
    return folder / f".writing-{checkpoint_name(step)}-{token}"


def unused_name(folder: Path, step: int) -> str:
    """Return a name that nothing has; a second checkpoint of a step does not replace the first."""
    copy = max((found.copy for found in list_by_name(folder) if found.step == step), default=0) + 1
    while os.path.lexists(folder / checkpoint_name(step, copy)):  # a file or a broken link of the user
        copy += 1
    return checkpoint_name(step, copy)


def check_number(folder: Path, step: int, corrupt: Collection[str]) -> None:
    """Raise CheckpointError if a checkpoint with a higher number exists, because it would count as the newer one."""
    manifests = _read_manifests(list_by_name(folder), corrupt)
    newest = next((found for found, manifest in manifests.items() if NUMBERED_ON_PREEMPTION not in manifest.run), None)
    if newest is not None and step < newest.step:
        raise CheckpointError(
            f"checkpoint step {step} is below the step of {newest.path}: run.checkpoint resumes from the highest "
            "number, so this training would be lost; number checkpoints upwards, for example "
            f"checkpoint.save(step={newest.step + 1}), or always use the steps done with checkpoint.save(), or pass "
            "another folder to run.checkpoint"
        )


def check_free_space(folder: Path, needed: int) -> None:
    """Raise CheckpointError if `needed` bytes do not fit on the disk."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{folder} has {format_bytes(free)} free and this checkpoint needs {format_bytes(needed)}: free some "
            "space, or keep fewer with keep=; the checkpoints already published are unchanged"
        )


def write_latest(path: Path) -> None:
    """Write the name of the checkpoint to the file `latest`, for people and scripts."""
    write_atomically(path.parent / LATEST_FILE, path.name + "\n")


# Removing


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of a folder stay: the `keep` newest, and the best one by the metric `keep_best`."""

    folder: Path
    keep: int
    keep_best: str | None
    corrupt: tuple[str, ...]
    """Names of checkpoints found corrupt: they do not count, and are removed when they are older than all that stay."""

    def apply(self, published: Path) -> str | None:
        """Remove old checkpoints after one was published, which always stays; return a message or None."""
        try:
            best = self._remove_old(published)
        except OSError as error:  # does not end training: the state is saved
            return f"an old checkpoint in {self.folder} could not be removed ({error}): remove it by hand"
        if best != published or self.keep_best is None:
            return None
        order = "lower" if is_lower_better(self.keep_best) else "higher"
        return f"best checkpoint so far: {published.name} by {self.keep_best} ({order} is better)"

    def _remove_old(self, published: Path) -> Path | None:
        """Remove old checkpoints and return the best one."""
        existing = list_by_name(self.folder)
        current = next(found for found in existing if found.path == published)
        manifests = _read_manifests(existing, self.corrupt)
        best = _best(manifests, self.keep_best) if self.keep_best is not None else None
        # A preempted run numbered its checkpoint by the steps done, unlike the script: it is older than this one.
        outdated = [
            found for found, manifest in manifests.items() if found > current and NUMBERED_ON_PREEMPTION in manifest.run
        ]
        valid = [found for found in manifests if found not in outdated]
        for found in [*outdated, *self._too_old(existing, valid, current)]:
            if found != best:
                remove_folder(found.path)
        return None if best is None else best.path

    def _too_old(
        self, existing: list[PublishedCheckpoint], valid: list[PublishedCheckpoint], current: PublishedCheckpoint
    ) -> list[PublishedCheckpoint]:
        """Return those before the `keep` newest steps, and those with a later copy of the same step."""
        last_copy: dict[int, PublishedCheckpoint] = {}
        for found in sorted(valid, reverse=True):
            last_copy.setdefault(found.step, found)
        oldest = min([*list(last_copy.values())[: self.keep], current])
        return [
            found
            for found in existing
            if found != current and (found < oldest or found < last_copy.get(found.step, found))
        ]


def _best(manifests: dict[PublishedCheckpoint, Manifest], metric: str) -> PublishedCheckpoint | None:
    """Return the checkpoint with the best value, the oldest if several have it."""
    sign = 1.0 if is_lower_better(metric) else -1.0
    values = [
        (sign * manifest.metric[1], found)
        for found, manifest in manifests.items()
        if manifest.metric is not None and manifest.metric[0] == metric
    ]
    return min(values)[1] if values else None


def is_lower_better(metric: str) -> bool:
    """Whether `keep_best` takes the smallest value of a metric as the best one: it does if the metric is a loss."""
    return metric.endswith("loss")


def remove_folder(folder: Path) -> None:
    """Remove a folder in such a way that a kill leaves nothing that looks like a checkpoint.

    Of a symbolic link only the link is removed: what it points to may belong to somebody else.
    """
    if not folder.name.startswith("."):
        aside = folder.with_name(f".deleting-{folder.name}")
        _remove(aside)  # a killed process left it half removed
        folder = folder.rename(aside)
    _remove(folder)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path, token: str) -> list[str]:
    """Remove what killed processes left behind, but not what the run with `token` writes; return the names."""
    leftovers = [path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name) and not path.name.endswith(token)]
    for path in leftovers:
        remove_folder(path)
    return [path.name for path in leftovers]
