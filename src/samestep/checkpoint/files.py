"""Files that are on the disk when we say so: flushed, read again, and put in place by one rename."""

import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from samestep.disk import NO_ROOM, in_words
from samestep.errors import CheckpointError
from samestep.units import bytes_text

_CHUNK: Final = 8 << 20


@dataclass(frozen=True)
class Written:
    """A file as it should be."""

    bytes: int
    """Its size."""
    sha256: str
    """Its checksum."""


def explain(error: OSError, doing: str) -> CheckpointError:
    """The error of the operating system in words that say what to do."""
    fewer = ", or keep fewer with keep=" if error.errno in NO_ROOM else ""
    return CheckpointError(f"{doing} failed: {in_words(error)}{fewer}; the checkpoints already published are untouched")


def checksum(path: Path) -> Written:
    """Size and checksum of a file as it stands, past the operating system's memory where that can be had."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := file.read(_CHUNK):
            digest.update(block)
            size += len(block)
    return Written(size, digest.hexdigest())


def write_checked(path: Path, blocks: Iterable[bytes | memoryview]) -> Written:
    """Write a new file, flush it to the disk, read it again and compare."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for block in blocks:
            rest = memoryview(block)
            for at in range(0, len(rest), _CHUNK):
                part = rest[at : at + _CHUNK]
                digest.update(part)
                size += len(part)
                _write_all(file.fileno(), part)
        os.fsync(file.fileno())
    made = Written(size, digest.hexdigest())
    if checksum(path) != made:
        raise CheckpointError(
            f"{path} does not hold what was written to it: the disk or the memory of this machine is at fault; use "
            "another folder"
        )
    return made


def remove_folder(folder: Path) -> None:
    """Remove a folder so that no half of it can be taken for a checkpoint."""
    if not folder.name.startswith("."):  # else its name is none of a checkpoint, and is found again if we are killed
        aside = folder.with_name(f".deleting-{folder.name}")
        if aside.exists():  # an older one of this name, half removed by a process that was killed
            shutil.rmtree(aside)
        folder = folder.rename(aside)
    shutil.rmtree(folder)


def check_room(folder: Path, needed: int) -> None:
    """Raise before anything is written where the disk cannot take it."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{folder} has {bytes_text(free)} free and this checkpoint needs {bytes_text(needed)}: make room, or keep "
            "fewer with keep=; the checkpoints already published are untouched"
        )


def _write_all(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data) :]
