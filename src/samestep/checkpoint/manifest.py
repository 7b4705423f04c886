"""The manifest of a checkpoint: what it is, of which files it is made, and how each of them must be."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from samestep.disk import DISK_FULL, describe_os_error
from samestep.errors import CheckpointError
from samestep.messages import format_bytes

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
    fewer = ", or keep fewer with keep=" if error.errno in DISK_FULL else ""
    return CheckpointError(
        f"{doing} failed: {describe_os_error(error)}{fewer}; the checkpoints already published are untouched"
    )


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
            f"{folder} has {format_bytes(free)} free and this checkpoint needs {format_bytes(needed)}: free some space, or keep "
            "fewer with keep=; the checkpoints already published are untouched"
        )


def _write_all(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data) :]


NAME: Final = "manifest.json"
FORMAT: Final = "samestep checkpoint"
VERSION: Final = 1


class Damaged(Exception):
    """A checkpoint that is not as it was written; the text says what is wrong with it."""


@dataclass(frozen=True)
class Stage:
    """A stretch of training on one world size."""

    world_size: int
    """How many ranks there were."""
    first_step: int
    """Steps done when it began."""
    last_step: int
    """Steps done when the checkpoint was saved."""
    versions: dict[str, str]
    """What software ran."""


@dataclass(frozen=True)
class Manifest:
    """All that is known of a checkpoint without opening its tensors."""

    step: int
    """Optimizer steps done."""
    samples: int
    """Samples that counted in them."""
    saved_at: str
    """When, in local time with its offset."""
    history: list[Stage]
    """On which world sizes it was trained, oldest first."""
    parts: dict[str, str]
    """What was saved: the name that run.checkpoint was given, and its kind."""
    run: dict[str, object]
    """What the run knew of itself: global batch, seed, choices, versions."""
    metric: tuple[str, float] | None
    """The value by which keep_best judges it."""
    files: dict[str, Written] = field(default_factory=dict[str, Written])
    """Every other file of the checkpoint, by name."""

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(file.bytes for file in self.files.values())

    def as_record(self) -> dict[str, object]:
        """The manifest as JSON has it."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, sealed with a checksum of its own."""
    write_checked(folder / NAME, [_sealed(manifest.as_record())])


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest and see that it is whole and that the files have their sizes."""
    try:
        data = (folder / NAME).read_bytes()
    except FileNotFoundError as error:
        raise Damaged(f"it has no {NAME}") from error
    try:
        record = json.loads(data)
        seal, kind, version = record.pop("seal"), record["format"], int(record["version"])
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Damaged(f"{NAME} is not one of samestep ({type(error).__name__}: {error})") from error
    if kind != FORMAT or not seal or _sealed(record) != data:  # every version keeps this seal: it comes before all else
        raise Damaged(f"{NAME} was changed after it was written (its seal does not fit)")
    if version > VERSION:
        raise CheckpointError(
            f"{folder} is of format version {version} and this samestep reads up to {VERSION}: update samestep; "
            "nothing was changed"
        )
    manifest = _from_record(record)
    for name, file in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise Damaged(f"{name} is missing")
        if (size := path.stat().st_size) != file.bytes:
            raise Damaged(f"{name} has {size} bytes and should have {file.bytes}")
    return manifest


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read whole files and compare them with the manifest."""
    for name in names:
        try:
            found = checksum(folder / name)
        except OSError as error:
            raise Damaged(f"{name} cannot be read ({error.strerror})") from error
        if found != manifest.files[name]:
            raise Damaged(f"{name} was changed after it was written (its checksum does not fit)")


def _sealed(record: dict[str, object]) -> bytes:
    text = json.dumps(record, indent=1, allow_nan=False)
    record = {**record, "seal": hashlib.sha256(text.encode()).hexdigest()}
    return (json.dumps(record, indent=1, allow_nan=False) + "\n").encode()


def _from_record(record: dict[str, object]) -> Manifest:
    try:
        fields = {key: value for key, value in record.items() if key not in ("format", "version")}
        files: dict[str, Written] = {}
        for name, file in fields.pop("files").items():  # pyright: ignore[reportAttributeAccessIssue]  # KeyError below
            if Path(name).name != name:
                raise Damaged(f"{NAME} names a file outside of the checkpoint: {name!r}")
            files[name] = Written(**file)
        history = [Stage(**stage) for stage in fields.pop("history")]  # pyright: ignore[reportGeneralTypeIssues]  # likewise
        metric = fields.pop("metric")
        return Manifest(**fields, history=history, files=files, metric=tuple(metric) if metric else None)  # pyright: ignore[reportArgumentType]  # TypeError below
    except (KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{NAME} is not one of samestep ({error})") from error
