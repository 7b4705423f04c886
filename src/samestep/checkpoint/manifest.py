"""The manifest of a checkpoint, with the size and the checksum of every other file.

step-00000400/
manifest.json            step, samples, world sizes, parts, metric, and the files below
index.json               dtype, shape and chunks of every tensor
state.json               everything that is not a tensor
rank-00000.safetensors   the chunks that rank 0 saved; one file per rank
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from samestep.disk import DISK_FULL, describe_os_error
from samestep.errors import CheckpointError
from samestep.messages import format_bytes

MANIFEST_FILE: Final = "manifest.json"
INDEX_FILE: Final = "index.json"
STATE_FILE: Final = "state.json"
FORMAT: Final = "samestep checkpoint"
VERSION: Final = 1
_BLOCK_BYTES: Final = 8 << 20
_MAX_MANIFEST_BYTES: Final = 64 << 20


class CorruptCheckpoint(CheckpointError):
    """A checkpoint differs from what was written; the message says in which file and how."""


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class HistoryEntry:
    """A period of training on one world size."""

    world_size: int
    first_step: int  # steps done at its start
    last_step: int  # steps done when the checkpoint was saved
    versions: dict[str, str]  # versions of samestep and torch


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint except the values of its state."""

    step: int  # the number in its name: optimizer steps done, or the number that the script passed
    samples: int  # samples trained on so far
    saved_at: str  # local time with UTC offset
    history: list[HistoryEntry]  # the world sizes on which the state was trained, oldest first
    parts: dict[str, str]  # the kind (model, optimizer, state) of each part, by the name that run.checkpoint received
    run: dict[str, object]  # the summary of the run: global batch, seed, precision, plan, versions
    metric: tuple[str, float] | None  # name and value that `keep_best` compares
    files: dict[str, FileRecord] = field(default_factory=dict[str, FileRecord])
    """Every other file of the checkpoint, by name."""

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(file.bytes for file in self.files.values())

    def to_json(self) -> dict[str, object]:
        """Return the content of manifest.json without its checksum."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json with its own checksum."""
    write_verified(folder / MANIFEST_FILE, [_with_checksum(manifest.to_json())])


def read_manifest(folder: Path) -> Manifest:
    """Read manifest.json; raise CorruptCheckpoint if it was changed or if a file is missing or has another size."""
    try:
        size, is_file = (folder / MANIFEST_FILE).stat().st_size, (folder / MANIFEST_FILE).is_file()
        if not is_file or size > _MAX_MANIFEST_BYTES:  # reading a named pipe would never end
            found = f"has {format_bytes(size)}" if is_file else "is not a file"
            raise CorruptCheckpoint(f"{MANIFEST_FILE} {found}, so samestep did not write it")
        data = (folder / MANIFEST_FILE).read_bytes()
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"it has no {MANIFEST_FILE}") from error
    except OSError as error:
        raise CorruptCheckpoint(f"{MANIFEST_FILE} cannot be read ({error.strerror})") from error
    try:
        record = json.loads(data)
        checksum, kind, version = record.pop("checksum"), record["format"], int(record["version"])
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, OverflowError) as error:
        raise CorruptCheckpoint(f"{MANIFEST_FILE} cannot be parsed ({type(error).__name__}: {error})") from error
    # Before the version: the checksum is computed in the same way in all versions.
    if kind != FORMAT or not checksum or _with_checksum(record) != data:
        raise CorruptCheckpoint(f"{MANIFEST_FILE} was changed after it was written (checksum mismatch)")
    if version > VERSION:
        raise CheckpointError(
            f"{folder} has format version {version} and this version of samestep reads up to {VERSION}: update "
            "samestep; nothing was changed"
        )
    manifest = _from_json(record)
    for name, file in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CorruptCheckpoint(f"{name} is missing")
        if (size := path.stat().st_size) != file.bytes:
            raise CorruptCheckpoint(f"{name} has {size} bytes and should have {file.bytes}")
    return manifest


def verify_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read the files completely; raise CorruptCheckpoint if a checksum differs from the manifest."""
    for name in names:
        try:
            found = hash_file(folder / name)
        except OSError as error:
            raise CorruptCheckpoint(f"{name} cannot be read ({error.strerror})") from error
        if found != manifest.files[name]:
            raise CorruptCheckpoint(f"{name} was changed after it was written (checksum mismatch)")


def verify_checkpoint(folder: Path) -> Manifest:
    """Read every byte of a checkpoint; raise CheckpointError if it is corrupt."""
    try:
        manifest = read_manifest(folder)
        verify_files(folder, manifest, manifest.files)
    except CorruptCheckpoint as error:
        raise CheckpointError(f"{folder} is corrupt: {error}") from error
    return manifest


def write_verified(path: Path, blocks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file, fsync it, read it again and compare the checksums."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for block in blocks:
            for start in range(0, len(block), _BLOCK_BYTES):
                part = block[start : start + _BLOCK_BYTES]
                digest.update(part)
                size += file.write(part)
        file.flush()
        os.fsync(file.fileno())
    written = FileRecord(size, digest.hexdigest())
    if hash_file(path) != written:
        raise CheckpointError(
            f"{path} does not contain what was written to it: the disk or the memory of this machine is faulty; use "
            "another folder"
        )
    return written


def hash_file(path: Path) -> FileRecord:
    """Return size and checksum of a file, read from the disk and not from the page cache if possible."""
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        digest = hashlib.file_digest(file, "sha256")
        return FileRecord(file.tell(), digest.hexdigest())


def disk_error(error: OSError, action: str) -> CheckpointError:
    """Return a CheckpointError that says why `action` failed and what to do."""
    if error.errno in (errno.ENOENT, errno.EEXIST):
        return CheckpointError(
            f"{action} failed: the folder was removed or replaced during the run, or it is a link to a folder that "
            "does not exist; leave it in place until the run ends"
        )
    fewer = ", or keep fewer with keep=" if error.errno in DISK_FULL else ""
    return CheckpointError(
        f"{action} failed: {describe_os_error(error)}{fewer}; the checkpoints already published are unchanged"
    )


def _with_checksum(record: dict[str, object]) -> bytes:
    text = json.dumps(record, indent=1, allow_nan=False)
    record = {**record, "checksum": hashlib.sha256(text.encode()).hexdigest()}
    return (json.dumps(record, indent=1, allow_nan=False) + "\n").encode()


def _from_json(record: dict[str, object]) -> Manifest:
    try:
        fields = {key: value for key, value in record.items() if key not in ("format", "version")}
        files: dict[str, FileRecord] = {}
        for name, file in fields.pop("files").items():  # pyright: ignore[reportAttributeAccessIssue]  # caught below
            if Path(name).name != name:
                raise CorruptCheckpoint(f"{MANIFEST_FILE} lists a file outside of the checkpoint: {name!r}")
            files[name] = FileRecord(**file)
        history = [HistoryEntry(**entry) for entry in fields.pop("history")]  # pyright: ignore[reportGeneralTypeIssues]  # caught below
        metric = fields.pop("metric")
        return Manifest(**fields, history=history, files=files, metric=tuple(metric) if metric else None)  # pyright: ignore[reportArgumentType]  # caught below
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"{MANIFEST_FILE} is not a manifest of samestep ({error})") from error
