"""A folder of checkpoints: which there are, which stay, and what killed writers left behind."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from samestep.checkpoint.files import explain, remove_folder
from samestep.checkpoint.manifest import NAME, Damaged, Manifest, check_files, read_manifest
from samestep.disk import replace_text
from samestep.errors import CheckpointError

LATEST: Final = "latest"
EARLY: Final = "numbered_by_early_end"
"""Marks, among what the run knew of itself, a number that was chosen without knowing how the script counts."""
_PUBLISHED: Final = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_LEFTOVER: Final = re.compile(r"\.(writing|deleting)-step-.*")


@dataclass(frozen=True, order=True)
class Found:
    """A published checkpoint, by its name alone; a later one of the same step has a higher `again`."""

    step: int
    again: int
    path: Path


def is_one(folder: Path) -> bool:
    """Whether a folder is, or by its name was, a published checkpoint."""
    return (folder / NAME).exists() or _PUBLISHED.fullmatch(folder.name) is not None


def name_of(step: int, again: int = 1) -> str:
    """The folder's name."""
    return f"step-{step:08}" if again == 1 else f"step-{step:08}-{again}"


def find(folder: Path) -> list[Found]:
    """All published checkpoints, newest first."""
    try:
        names = [(path, _PUBLISHED.fullmatch(path.name)) for path in folder.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise explain(error, f"reading the folder of checkpoints {folder}") from error
    return sorted((Found(int(m[1]), int(m[2] or 1), path) for path, m in names if m), reverse=True)


def newest_first(folder: Path) -> list[Found]:
    """All published checkpoints, newest first: by number, and one whose number says little by the steps done."""
    there = find(folder)
    known = _readable(there, ())
    done = {found: manifest.history[-1].last_step for found, manifest in known.items()}
    early = [found for found, manifest in known.items() if EARLY in manifest.run]
    ordered = [found for found in there if found not in early]
    for found in reversed(early):
        before = (at for at, other in enumerate(ordered) if other in done and done[other] <= done[found])
        ordered.insert(next(before, len(ordered)), found)
    return ordered


def check_folder(folder: Path) -> None:
    """Refuse what is no folder, before anything is looked for in it."""
    if folder.is_dir():
        return
    remedy = "give the folder that run.restore was given, or one checkpoint in it"
    if not folder.exists():
        raise CheckpointError(f"there is no folder {folder}: {remedy}")
    here = f", here {folder.parent}" if is_one(folder.parent) else ""
    raise CheckpointError(f"{folder} is a file: {remedy}{here}")


def free_name(folder: Path, step: int) -> str:
    """A name that no checkpoint has: a second one of a step never takes the place of the first by force."""
    taken = [found.again for found in find(folder) if found.step == step]
    return name_of(step, max(taken, default=0) + 1)


def newest_sound(folder: Path) -> tuple[Path, Manifest]:
    """The checkpoint that `folder` is, or the newest sound one in it."""
    check_folder(folder)
    if is_one(folder):
        return folder, check_whole(folder)
    wrong: list[str] = []
    for found in newest_first(folder):
        try:
            return found.path, check_whole(found.path)
        except CheckpointError as error:
            wrong.append(str(error))
    told = f": {'; '.join(wrong)}" if wrong else ": give the folder that run.restore was given, or one checkpoint in it"
    raise CheckpointError(f"{folder} holds no sound checkpoint{told}")


def check_whole(path: Path) -> Manifest:
    """Read every byte of a checkpoint; raise where one is not as it was written."""
    try:
        manifest = read_manifest(path)
        check_files(path, manifest, manifest.files)
    except Damaged as damage:
        raise CheckpointError(f"{path} is damaged: {damage}") from damage
    return manifest


def point_to(path: Path) -> None:
    """Let `latest`, for people and scripts, name the checkpoint."""
    replace_text(path.parent / LATEST, path.name + "\n")


def clean(folder: Path, token: str) -> list[str]:
    """Remove what writers and deleters that were killed have left, but not what `token` writes now."""
    left = [path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name) and not path.name.endswith(token)]
    for path in left:
        remove_folder(path)
    return [path.name for path in left]


def is_lower_better(metric: str) -> bool:
    """Whether keep_best takes the lowest value: for losses; anything else is the better the higher."""
    return metric.endswith("loss")


def best(known: dict[Found, Manifest], metric: str) -> Found | None:
    """The checkpoint with the best value; of equals the oldest, which was there first."""
    sign = 1.0 if is_lower_better(metric) else -1.0
    rated = [
        (sign * manifest.metric[1], found)
        for found, manifest in known.items()
        if manifest.metric is not None and manifest.metric[0] == metric
    ]
    return min(rated)[1] if rated else None


def check_order(folder: Path, step: int, bad: Collection[str]) -> None:
    """Refuse a number below that of a checkpoint which is there: run.restore would take that one for the newer."""
    there = _readable(find(folder), bad)
    newest = next((found for found, manifest in there.items() if EARLY not in manifest.run), None)
    if newest is not None and step < newest.step:
        raise CheckpointError(
            f"this checkpoint would be of step {step}, and {newest.path} is there: run.restore takes the highest "
            "number, so what was trained since would be lost; number checkpoints upwards, as in "
            f"checkpoint.save(step={newest.step + 1}), or always by the steps done with checkpoint.save(), or give "
            "run.restore another folder"
        )


def retire(folder: Path, published: Path, keep: int, metric: str | None, bad: Collection[str]) -> Path | None:
    """Remove what is too old, and say which one is the best.

    The one just published, whose every byte was read again, always stays. `bad` names those that proved damaged: they
    do not count, and go when they are older than all that stay.
    """
    there = find(folder)
    now = next(found for found in there if found.path == published)
    known = _readable(there, bad)
    # An early end took the steps done for its number, and the script counts otherwise: training is beyond it.
    passed = [found for found, manifest in known.items() if found > now and EARLY in manifest.run]
    top = best(known, metric) if metric is not None else None
    known = {found: manifest for found, manifest in known.items() if found not in passed}
    for found in [*passed, *_too_old(there, known, now, keep)]:
        if found != top:
            remove_folder(found.path)
    return None if top is None else top.path


def _too_old(there: list[Found], known: Collection[Found], now: Found, keep: int) -> list[Found]:
    """Those before the `keep` newest, of which each step counts once, and those whose step was saved anew."""
    last: dict[int, Found] = {}
    for found in sorted(known, reverse=True):
        last.setdefault(found.step, found)
    oldest = min([*list(last.values())[:keep], now])
    return [found for found in there if found != now and (found < oldest or found < last.get(found.step, found))]


def _readable(there: list[Found], bad: Collection[str]) -> dict[Found, Manifest]:
    known: dict[Found, Manifest] = {}
    for found in there:
        try:
            if found.path.name not in bad:
                known[found] = read_manifest(found.path)
        except (Damaged, CheckpointError, OSError):  # of a newer format perhaps: it counts for nothing here
            continue
    return known
