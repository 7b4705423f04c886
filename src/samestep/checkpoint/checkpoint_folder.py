"""A folder of checkpoints: which there are, which stay, and what killed writers left behind."""

import json
import os
import re
import socket
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import psutil

from samestep.checkpoint.manifest import NAME, Damaged, Manifest, check_files, explain, read_manifest, remove_folder
from samestep.disk import write_atomically
from samestep.environment.world import launch_name
from samestep.errors import CheckpointError
from samestep.launch.processes import process_is_gone, process_namespace

LOCK_NAME: Final = "run.lock"
_BEAT_SECONDS: Final = 2.0
# Ranks whose launcher was killed need a second to end, and a shared disk shows a beat late.
_PATIENCE_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 0.2
_CLOCK_SECONDS: Final = 5.0  # when a process began is told a little otherwise after the clock was set


@dataclass(frozen=True)
class Holder:
    """Who writes to a folder."""

    host: str
    """The name of his machine."""
    namespace: str
    """In which numbering of processes `pid` counts."""
    pid: int
    """His process."""
    began: float
    """When that began, since numbers are given again."""
    launch: str
    """What his launcher calls this launch; empty without one."""
    since: str
    """When he took the folder."""
    token: str
    """Tells him from all others."""


class Lock:
    """Held from run.checkpoint to the end of the run; a process that was killed leaves the file, which then ages."""

    def __init__(self, path: Path, holder: Holder) -> None:
        self._path, self._holder = path, holder
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="samestep lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let others write here."""
        self._stopped.set()
        self._thread.join()
        with suppress(OSError):  # gone with its disk, or removed by hand
            if _read(self._path)[0] == self._holder:
                self._path.unlink()

    def _beat(self) -> None:
        while not self._stopped.wait(_BEAT_SECONDS):
            try:
                if _read(self._path)[0] != self._holder:  # taken over by another start of this job, or of this process
                    return
                os.utime(self._path)
            except FileNotFoundError:
                return
            except OSError:  # the disk is away for a while: it is no reason to end a training
                continue


def hold(folder: Path) -> Lock | None:
    """Take the folder, or raise where a live run has it; None where nobody may write, so that nothing can be lost."""
    path, mine = folder / LOCK_NAME, _describe()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while not _create(path, mine):
            with suppress(FileNotFoundError):  # its holder has let go of it just now
                _take_away(path, _wait_for_end(path, mine), mine.token)
    except OSError:
        return None
    return Lock(path, mine)


def _describe() -> Holder:
    began, since = psutil.Process().create_time(), datetime.now().astimezone().isoformat(timespec="seconds")
    host, token = socket.gethostname(), f"{time.time_ns():x}-{os.getpid():x}"
    return Holder(host, process_namespace(), os.getpid(), began, launch_name(), since, token)


def _create(path: Path, mine: Holder) -> bool:
    try:
        file = path.open("x")  # of several, one succeeds, on a shared disk too
    except FileExistsError:
        return False
    try:
        with file:
            file.write(json.dumps(asdict(mine)))
    except OSError:  # a full disk: an empty file would keep the next start waiting
        path.unlink()
        raise
    return True


def _read(path: Path) -> tuple[Holder | None, int]:
    """Who holds it, None where that cannot be read, and when he last said that he lives."""
    with path.open() as file:  # opened anew each time, or a shared disk would answer from its memory
        text, beat = file.read(), os.fstat(file.fileno()).st_mtime_ns
    try:
        return Holder(**json.loads(text)), beat
    except (ValueError, TypeError):  # its holder is about to write it, or was killed then
        return None, beat


def _wait_for_end(path: Path, mine: Holder) -> Holder | None:
    """The holder, once he is known to be gone; raise where he lives on."""
    began = changed = time.monotonic()
    first, beat = _read(path)
    while not _is_over(first, mine) and time.monotonic() < began + _PATIENCE_SECONDS:
        time.sleep(_LOOK_SECONDS)
        holder, last = _read(path)
        if holder != first:
            return _wait_for_end(path, mine)
        if last != beat:
            beat, changed = last, time.monotonic()
    if first is None or _is_over(first, mine):
        return first
    # On another machine one who was killed is silent for all of the time, or for its second half.
    if _is_here(first, mine) or time.monotonic() - changed < _PATIENCE_SECONDS / 2:
        raise CheckpointError(
            f"{path.parent} is in use by another run, process {first.pid} on {first.host} since {first.since}: two "
            "runs in one folder lose each other's checkpoints; wait until it has ended, or end it (on "
            f"{first.host}: kill {first.pid}), or give run.checkpoint another folder"
        )
    return first


def _is_here(holder: Holder, mine: Holder) -> bool:
    return (holder.host, holder.namespace) == (mine.host, mine.namespace)


def _is_over(holder: Holder | None, mine: Holder) -> bool:
    """Whether he is known to write no more: an earlier start of this job or process, or a process that has ended."""
    if holder is None:
        return False
    if holder.launch and holder.launch == mine.launch:
        return True
    if not _is_here(holder, mine):
        return False
    try:
        process = psutil.Process(holder.pid)
        other = abs(process.create_time() - holder.began) > _CLOCK_SECONDS
    except psutil.NoSuchProcess:
        return True
    return other or holder.pid == mine.pid or process_is_gone(process)


def _take_away(path: Path, holder: Holder | None, token: str) -> None:
    """Remove the file of a holder who is gone, but not that of one who took the folder meanwhile."""
    aside = path.with_name(f".{LOCK_NAME}-{token}")
    path.rename(aside)
    if _read(aside)[0] == holder:
        aside.unlink()
    else:
        aside.rename(path)


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
    remedy = "give the folder that run.checkpoint was given, or one checkpoint in it"
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
    told = (
        f": {'; '.join(wrong)}" if wrong else ": give the folder that run.checkpoint was given, or one checkpoint in it"
    )
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
    write_atomically(path.parent / LATEST, path.name + "\n")


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
    """Refuse a number below that of a checkpoint which is there: run.checkpoint would take that one for the newer."""
    there = _readable(find(folder), bad)
    newest = next((found for found, manifest in there.items() if EARLY not in manifest.run), None)
    if newest is not None and step < newest.step:
        raise CheckpointError(
            f"this checkpoint would be of step {step}, and {newest.path} is there: run.checkpoint takes the highest "
            "number, so what was trained since would be lost; number checkpoints upwards, as in "
            f"checkpoint.save(step={newest.step + 1}), or always by the steps done with checkpoint.save(), or give "
            "run.checkpoint another folder"
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
