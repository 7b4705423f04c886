"""The ledger of one shard in a live run: opened when its first sample counts, flushed with the pulse."""

import json
import os
import re
import struct
import time
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from samestep.disk import describe_os_error, write_atomically
from samestep.errors import LedgerError
from samestep.messages import warn

CAPACITY: Final = 4096
"""Records held in memory before they are written."""

RECORD: Final = np.dtype(
    [
        ("kind", "u1"),
        ("check", "u1"),
        ("generation", "<u2"),
        ("epoch", "<u4"),
        ("step", "<u8"),
        ("first", "<u8"),
        ("count", "<u4"),
        ("weight", "<f2"),
        ("rank", "<u2"),
    ]
)
"""What each field holds for each kind of record is told at `Kind`."""

SIZE: Final = RECORD.itemsize
Records = npt.NDArray[np.void]
"""Records as an array of `RECORD`."""

_STRUCT: Final = struct.Struct("<BBHIQQIeH")
_FULL: Final = CAPACITY * SIZE
_FACTORS: Final = np.arange(1, 2 * SIZE, 2, dtype=np.uint32) * (np.arange(SIZE, dtype=np.uint32) != 1)
"""Odd, so that a change of one byte changes the sum; 0 for byte 1, which holds the sum."""

_ROWS_AT_ONCE: Final = 1 << 16
_MOST: Final = 1 << 16
"""Ranks and generations are kept in 16 bits."""

_VERSION: Final = 1
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


class Kind(IntEnum):
    """What a record says; every record has the generation and the rank that wrote it."""

    START = 1
    """A process begins at (epoch, step) in a world of `count` ranks, at `first` microseconds since 1970."""
    TRAINED = 2
    """`count` positions from `first` on were part of (epoch, step) with this weight: 1, or 0 for padding."""
    EVALUATED = 3
    """The same for batch number `step` of evaluation number `epoch` of this generation."""
    PASSED = 4
    """Evaluation number `epoch` of this generation is over on this rank."""
    END = 5
    """The process ends and has trained up to, not including, (epoch, step); weight 1 if all went well, else 0."""


@dataclass(frozen=True)
class ShardDescription:
    """What the audit must know of a shard: how long an epoch is, and which sample stands at which position."""

    n: int | None
    """Positions in an epoch; None for a stream, whose length nobody knows."""
    seed: int
    shuffle: bool
    global_batch: int
    weighted: bool = False
    """Samples are drawn by weights, which the ledger does not keep: the audit then speaks of positions only."""
    drop_last: bool = False


class LedgerWriter:
    """Appends one rank's records for one shard.

    `generation` counts the starts of a run and is the same on all its ranks; `next_generation` gives it. The first rank
    also writes the description, and complains if the folder has another.

    >>> from tempfile import TemporaryDirectory
    >>> whole = Description(n=10, seed=0, shuffle=True, global_batch=10)
    >>> with TemporaryDirectory() as folder:
    ...     writer = LedgerWriter(Path(folder), "train", whole, rank=0, size=1, generation=0)
    ...     writer.add(epoch=0, step=0, first=0, count=10)
    ...     writer.close()
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        description: ShardDescription,
        *,
        rank: int,
        size: int,
        generation: int,
        start: tuple[int, int] = (0, 0),
    ) -> None:
        _check_numbers(rank, size, generation)
        shard = shard_folder(folder, name)
        self._path = rank_file(shard, rank)
        try:
            self._file = _open(shard, self._path, description if rank == 0 else None)
        except OSError as error:
            raise _cannot_write(self._path, error) from error
        self._buffer, self._filled = bytearray(_FULL), 0
        self._waiting = bytearray()
        self._refused: OSError | None = None
        self._generation, self._rank = generation, rank
        self._epoch, self._reached = start[0], start
        self._put(Kind.START, *start, time.time_ns() // 1000, size, 1.0)
        self.flush()

    def add(self, epoch: int, step: int, first: int, count: int, weight: float = 1.0) -> None:
        """Record that `count` positions from `first` on are part of a training step; call it once a step and slice.

        A rank without samples in a step records a count of 0, which says that it was there.
        """
        filled = self._filled
        # All ranks write at the end of an epoch, so a file that lacks it while others go on has lost something.
        if filled == _FULL or epoch != self._epoch:
            self.flush()
            filled, self._epoch = 0, epoch
        # Not by `_put`: this runs every step, and a call more is a third of its time.
        _STRUCT.pack_into(self._buffer, filled, 2, 0, self._generation, epoch, step, first, count, weight, self._rank)
        self._filled = filled + SIZE

    def evaluated(self, number: int, batch: int, first: int, count: int, weight: float = 1.0) -> None:
        """Record one batch of evaluation `number`, counted from 0 in each generation; positions are dataset indices."""
        self._put(Kind.EVALUATED, number, batch, first, count, weight)

    def passed(self, number: int) -> None:
        """Record that this rank has finished evaluation `number`; one that is left early has no such record."""
        self._put(Kind.PASSED, number, 0, 0, 0, 1.0)

    def flush(self) -> None:
        """Hand all records to the operating system: they outlive this process, not the machine.

        Where the disk does not take them they wait for the next time, with one warning.
        """
        if self._file < 0 and self._filled:
            raise LedgerError(f"the ledger {self._path} is closed: no record can be added to it any more")
        if self._filled:
            records = np.frombuffer(self._buffer, dtype=RECORD, count=self._filled // SIZE)
            records["check"] = check_bytes(records)
            trained = np.flatnonzero(records["kind"] == Kind.TRAINED)
            if trained.size:
                last = records[trained[-1]]
                self._reached = int(last["epoch"]), int(last["step"]) + 1
            self._waiting += memoryview(self._buffer)[: self._filled]
            self._filled = 0
        refused, self._refused = self._refused, self._write()
        if self._refused is not None and refused is None:
            warn(
                f"the ledger {self._path} cannot be written: {describe_os_error(self._refused)}; training goes on, its records "
                "wait in memory, and no checkpoint is saved before they are on the disk"
            )

    def sync(self) -> None:
        """Hand all records to the disk; do so before a position is saved from which a run may continue."""
        self.flush()
        try:
            if self._refused is not None:
                raise self._refused
            os.fsync(self._file)
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def close(self, failed: bool = False) -> None:
        """Write all records and the end; `failed` says that an error ends the run, so ranks may differ by a step."""
        if self._file < 0:
            return
        try:
            self.flush()
            self._put(Kind.END, *self._reached, 0, 0, 0.0 if failed else 1.0)
            self.sync()
        except LedgerError as error:
            if not failed:  # a proof that is not whole must not end like one that is
                raise
            warn(str(error))  # the run's own error is what is to be seen
        finally:
            os.close(self._file)
            self._file = -1

    def _put(self, kind: Kind, epoch: int, step: int, first: int, count: int, weight: float) -> None:
        if self._filled == _FULL:
            self.flush()
        _STRUCT.pack_into(
            self._buffer, self._filled, kind, 0, self._generation, epoch, step, first, count, weight, self._rank
        )
        self._filled += SIZE

    def _write(self) -> OSError | None:
        """Write what waits; what the disk does not take goes on waiting, from the byte on that it did not take."""
        try:
            while self._waiting:
                del self._waiting[: os.write(self._file, self._waiting)]
        except OSError as error:
            return error
        return None


def _cannot_write(path: Path, error: OSError) -> LedgerError:
    return LedgerError(f"the ledger {path} cannot be written: {describe_os_error(error)}, or run with ledger=False")


def shard_folder(folder: Path, name: str) -> Path:
    """Where the records of one shard lie."""
    if not _NAME.fullmatch(name):
        raise LedgerError(f"a shard named {name!r} cannot be a folder: use letters, digits, '-', '_' and '.'")
    return folder / "ledger" / name


def rank_file(shard: Path, rank: int) -> Path:
    """Where the records of one rank lie."""
    return shard / f"rank-{rank:05}.bin"


def next_generation(folder: Path, name: str) -> int:
    """The number for a new start: one more than any in the files. For the first rank, which tells the others."""
    newest = [_last_sound(path)[1] for path in sorted(shard_folder(folder, name).glob("rank-*.bin"))]
    return max(newest, default=-1) + 1


def read_description(shard: Path) -> ShardDescription:
    """What shard.json says."""
    path = shard / "shard.json"
    try:
        fields = json.loads(path.read_bytes())
        version = fields.pop("version")
        if version != _VERSION:
            raise LedgerError(f"{path} is of version {version} and this samestep reads version {_VERSION}: update it")
        return ShardDescription(**fields)
    except FileNotFoundError as error:
        raise LedgerError(f"{path} is missing, without which the records beside it mean nothing: restore it") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LedgerError(f"{path} does not describe a shard ({error}): restore it") from error


def check_bytes(records: Records) -> npt.NDArray[np.uint8]:
    """The check byte that each record should have: a change of any one byte changes it."""
    rows = records.view(np.uint8).reshape(-1, SIZE)
    checks = np.empty(len(rows), dtype=np.uint8)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        block = slice(start, start + _ROWS_AT_ONCE)
        checks[block] = (rows[block].astype(np.uint32) @ _FACTORS) & 0xFF
    return checks


def sound(records: Records) -> npt.NDArray[np.bool_]:
    """Which records are as they were written; all zeros, as a crash may leave them, are not."""
    return (records["check"] == check_bytes(records)) & (records["kind"] >= Kind.START) & (records["kind"] <= Kind.END)


def _check_numbers(rank: int, size: int, generation: int) -> None:
    if not 0 <= rank < size <= _MOST:
        raise LedgerError(
            f"rank {rank} in a world of {size}: a ledger keeps ranks 0 to {_MOST - 1}, below the world size"
        )
    if not 0 <= generation < _MOST:
        raise LedgerError(f"generation {generation} cannot be written: a ledger keeps {_MOST} starts; use a new folder")


def _open(shard: Path, path: Path, description: ShardDescription | None) -> int:
    shard.mkdir(parents=True, exist_ok=True)
    if description is not None:
        _describe(shard, description)
    _cut_torn_end(path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _describe(shard: Path, description: ShardDescription) -> None:
    path = shard / "shard.json"
    if path.exists():
        was, now = asdict(read_description(shard)), asdict(description)
        changed = [f"{name} was {was[name]} and is {now[name]}" for name in now if was[name] != now[name]]
        if changed:
            raise LedgerError(f"{path} is of other data: {', '.join(changed)}; use a new folder for the changed run")
        return
    write_atomically(path, json.dumps({"version": _VERSION, **asdict(description)}, indent=2) + "\n")


def _cut_torn_end(path: Path) -> None:
    """Remove what a kill left half-written at the end, since what is appended must begin at a whole record."""
    if path.exists():
        size = _last_sound(path)[0]
        if size < path.stat().st_size:
            os.truncate(path, size)


def _last_sound(path: Path) -> tuple[int, int]:
    """Up to which byte a file is sound at its end, and the generation of the record there; (0, -1) if there is none."""
    with path.open("rb") as file:
        stop = file.seek(0, os.SEEK_END) // SIZE
        while stop:
            start = max(0, stop - CAPACITY)
            file.seek(start * SIZE)
            records = np.frombuffer(file.read((stop - start) * SIZE), dtype=RECORD)
            whole = np.flatnonzero(sound(records))
            if whole.size:
                return (start + int(whole[-1]) + 1) * SIZE, int(records["generation"][whole[-1]])
            stop = start
    return 0, -1


@dataclass
class ShardLedger:
    """What this rank writes down of one shard."""

    folder: Path
    """The run's folder."""
    name: str
    """The shard's name in it."""
    description: ShardDescription
    """What the shard is."""
    rank: int
    """This rank."""
    size: int
    """The world size."""
    generation: int
    """Which start of the run this is."""
    _writer: LedgerWriter | None = None
    _passes: int = 0

    def begin(self, epoch: int, step: int) -> None:
        """Write down where training begins; what earlier starts recorded from there on no longer counts."""
        if self._writer is None:
            self._writer = LedgerWriter(
                self.folder,
                self.name,
                self.description,
                rank=self.rank,
                size=self.size,
                generation=self.generation,
                start=(epoch, step),
            )

    def record_training(self, epoch: int, step: int, first: int, count: int) -> None:
        """Write down this rank's slice of a step that counted."""
        assert self._writer is not None
        self._writer.add(epoch, step, first, count)

    def begin_evaluation(self, epoch: int, step: int) -> int:
        """The number of an evaluation that begins while training stands at (epoch, step)."""
        self.begin(epoch, step)
        self._passes += 1
        return self._passes - 1

    def record_evaluation(self, number: int, batch: int, first: int, count: int) -> None:
        """Write down one batch of an evaluation."""
        assert self._writer is not None
        self._writer.evaluated(number, batch, first, count)

    def end_evaluation(self, number: int) -> None:
        """Write down that an evaluation is over."""
        assert self._writer is not None
        self._writer.passed(number)

    def flush(self) -> None:
        """Hand all records to the operating system."""
        if self._writer is not None:
            self._writer.flush()

    def sync(self) -> None:
        """Hand all records to the disk, before a position is saved from which a run may continue."""
        if self._writer is not None:
            self._writer.sync()

    def close(self, failed: bool) -> None:
        """Write down the end."""
        if self._writer is not None:
            self._writer.close(failed)
