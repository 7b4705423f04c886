"""The ledger: which positions of a shard each rank trained and evaluated, in one binary file per rank.

A run with `ledger=True` writes `FOLDER/ledger/SHARD/shard.json` and `rank-00000.bin`, `rank-00001.bin` and so on.
`samestep audit` reads them (ledger_reader.py) and checks that every sample counted exactly once (audit.py).

Each write ends with a `CHECK` record: a running hash over all records of the file so far. An `END` record says how far
the process came. summary.json and checkpoints name length and hash of every file (`describe_files`), so that the audit
finds records that were changed or removed, also at the end of all files.
"""

import errno
import hashlib
import json
import os
import re
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from samestep.data.content_probe import Probe
from samestep.data.permutation import MAX_SAMPLES
from samestep.disk import describe_os_error, write_atomically
from samestep.errors import LedgerError
from samestep.messages import warn

BUFFER_RECORDS: Final = 4096
"""Records held in memory before they are written."""

RECORD: Final = np.dtype({
    "names": ["kind", "checksum", "generation", "epoch", "step", "first", "count", "weight", "rank"],
    "formats": ["u1", "u1", "<u2", "<u4", "<u8", "<u8", "<u4", "<f2", "<u2"],
})  # fmt: skip
"""The layout of a record; `RecordKind` says what the fields mean."""

RECORD_BYTES: Final = RECORD.itemsize
Records = npt.NDArray[np.void]
"""An array of `RECORD`."""

_STRUCT: Final = struct.Struct("<BBHIQQIeH")  # the same layout as RECORD
_BUFFER_BYTES: Final = BUFFER_RECORDS * RECORD_BYTES
# Odd factors, so that a change of one byte changes the sum; 0 for byte 1, which holds the sum.
_FACTORS: Final = np.arange(1, 2 * RECORD_BYTES, 2, dtype=np.uint8) * (np.arange(RECORD_BYTES) != 1)
MAX_RANKS: Final = 1 << 16  # ranks and generations have 16 bits
_SHARD_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


class RecordKind(IntEnum):
    """What a record means. Every record has the rank that wrote it and its generation, which counts starts of a run."""

    START = 1
    """A process starts at (epoch, step) in a world of `count` ranks, at `first` microseconds since 1970.

    The weight is the version of the ledger that it writes, or 1 for versions 1 and 2.
    """
    TRAINED = 2
    """`count` positions starting at `first` were part of (epoch, step) with this weight.

    It is 1, or 0 for padding and for a step that the script skipped.
    """
    EVALUATED = 3
    """The same for batch number `step` of evaluation number `epoch` of this generation."""
    EVALUATION_END = 4
    """Evaluation number `epoch` of this generation is complete on this rank."""
    END = 5
    """The process ends and has trained up to, not including, (epoch, step); weight 1 on success, 0 on failure.

    `first` is the number of samples that it counted (0 in versions 1 and 2), and `count` is 1 if the run was stopped
    early, by a signal or a time limit.
    """
    OPTION = 6
    """Option number `epoch` (see `OPTIONS`) of this process has the hash `first`."""
    PROBE = 7
    """Sample `step` of this epoch, as this process reads it, has the checksum `count` and the sketch `first`."""
    CHECK = 8
    """The file has `count` records before this one, with the running hash `first`; training is at (epoch, step)."""
    STREAM_END = 9
    """The stream has `first` records in this epoch, in `step` steps."""


VERSION: Final = 3
"""The version of shard.json and of the records next to it."""
_READABLE_VERSIONS: Final = (1, 2, 3)  # version 1 has no options and no probes, version 2 no running hashes
_LIMITS: Final = {
    "n": (1, MAX_SAMPLES), "global_batch": (1, 1 << 62), "seed": (-(1 << 63), (1 << 63) - 1), "starts": (0, 1 << 16),
}  # fmt: skip
_FLAGS: Final = ("shuffle", "weighted", "drop_last")


@dataclass(frozen=True)
class ShardDescription:
    """What the audit must know about a shard, stored in shard.json."""

    n: int | None  # positions in an epoch; None for a stream, whose length is unknown
    seed: int
    shuffle: bool
    global_batch: int
    weighted: bool = False
    """Samples are drawn with sampling weights, which the ledger does not store: the audit then reports positions."""
    drop_last: bool = False


OPTIONS: Final = ("n", "seed", "shuffle", "global_batch", "drop_last", "sampling_weights")
"""The options of a shard that must be the same on all ranks and in all starts, by their number in the records."""


def check_is_file(path: Path) -> None:
    """Raise OSError if a path is a folder, a pipe or a device, from which a read may never return."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file")


def read_description(shard: Path) -> tuple[ShardDescription, int]:
    """Read the description of a shard, and how often the run was started; 0 if shard.json does not say it."""
    path = shard / "shard.json"
    try:
        check_is_file(path)
        fields = json.loads(path.read_bytes())
        version = fields.pop("version")
        if version not in _READABLE_VERSIONS:
            raise LedgerError(
                f"{path} has version {version}, and this samestep reads version {VERSION}: update samestep"
            )
        starts = fields.pop("starts", 0)
        _check_numbers({"n": 1, **fields, "starts": starts})
        description = ShardDescription(**fields)
    except FileNotFoundError as error:
        raise LedgerError(
            f"{path} is missing, and the records next to it cannot be interpreted without it: restore it"
        ) from error
    except OSError as error:
        raise LedgerError(f"{path} cannot be read: {error.strerror}; check the path and its permissions") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LedgerError(f"{path} does not describe a shard ({error}): restore it") from error
    return description, starts


def _check_numbers(fields: Mapping[str, object]) -> None:
    """Raise ValueError if a value is of another type, or a number that no run can have."""
    for name, value in fields.items():
        if name in _FLAGS and type(value) is not bool:
            raise ValueError(f"{name} is {str(value)[:40]}, and must be true or false")
        if name not in _LIMITS or (name == "n" and value is None):
            continue
        least, most = _LIMITS[name]
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{name} is {str(value)[:40]}, and must be an integer from {least} to {most}")


def write_description(shard: Path, description: ShardDescription, starts: int) -> None:
    """Write shard.json, or raise LedgerError if the folder already describes other data."""
    path = shard / "shard.json"
    if path.exists():
        was, now = asdict(read_description(shard)[0]), asdict(description)
        changed = [f"{name} was {was[name]} and is now {now[name]}" for name in now if was[name] != now[name]]
        if changed:
            raise LedgerError(
                f"{path} describes other data: {', '.join(changed)}; use a new folder for the changed run"
            )
    values = {"version": VERSION, "starts": starts, **asdict(description)}
    write_atomically(path, json.dumps(values, indent=2) + "\n")


def hash_option(value: object) -> int:
    """Return the hash of an option as an `OPTION` record has it."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class FileState:
    """How far one rank has written the ledger file of a shard."""

    shard: str
    generation: int
    epoch: int  # up to, not including, (epoch, step) it has trained
    step: int
    records: int
    hash: int  # the running hash of these records
    began: int  # microseconds since 1970, of the first record


Described = dict[str, list[FileState | None]]
"""By shard, the file of each rank, or None if it had none."""


def describe_files(by_rank: Sequence[Sequence[FileState | None]]) -> dict[str, object]:
    """Return what the files of these ranks contain, by shard, for summary.json and checkpoints."""
    by_shard = [[state and asdict(state) for state in states] for states in zip(*by_rank, strict=True)]
    return {str(next(filter(None, states))["shard"]): states for states in by_shard if any(states)}


class ShardLedger:
    """Records what this rank does with one shard. The file is opened by the first `begin`.

    `generation` counts the starts of a run and is the same on all ranks; get it from `next_generation`. Rank 0 also
    writes the description, and raises `LedgerError` if the folder has a different one.

    >>> from tempfile import TemporaryDirectory
    >>> description = ShardDescription(n=10, seed=0, shuffle=True, global_batch=10)
    >>> with TemporaryDirectory() as folder:
    ...     ledger = ShardLedger(Path(folder), "train", description, rank=0, world_size=1, generation=0)
    ...     ledger.begin(epoch=0, step=0)
    ...     ledger.record_training(epoch=0, step=0, first=0, count=10)
    ...     ledger.close()
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        description: ShardDescription,
        rank: int,
        world_size: int,
        generation: int,
        weights_hash: str | None = None,
    ) -> None:
        self.name = name
        self._options = {**asdict(description), "sampling_weights": weights_hash}
        self.folder, self.generation = folder, generation
        """The folder of the run; the run may change both before the first `begin`."""
        self._description, self._rank, self._world_size = description, rank, world_size
        self._begun, self._file = False, -1
        self._buffer, self._filled = bytearray(_BUFFER_BYTES + RECORD_BYTES), 0  # the last one is for a CHECK
        self._unwritten = bytearray()
        self._records, self._hash, self._unhashed = 0, 0, b""  # in the file; without a CHECK after them
        self._began = 0
        self._write_error: OSError | None = None
        self._earlier_probes: dict[tuple[int, int], Probe] = {}
        self._epoch = 0
        self._trained_until = (0, 0)
        self._samples = self._evaluations = 0

    def begin(self, epoch: int, step: int) -> None:
        """Record on the first call where training starts; the audit ignores later steps of earlier generations."""
        if self._begun:
            return
        try:
            self._file = self._open()
        except OSError as error:
            raise self._cannot_write(error) from error
        self._begun = True
        self._epoch, self._trained_until = epoch, (epoch, step)
        now = max(1, time.time_ns() // 1000)  # the clock of a machine without a battery may be before 1970
        self._began = self._began or now
        self._append(RecordKind.START, epoch, step, now, self._world_size, float(VERSION))
        self.flush()

    def record_data(self, probes: Iterable[Probe]) -> None:
        """Record which data this rank reads: the options, and the content of some samples."""
        for number, name in enumerate(OPTIONS):
            self._append(RecordKind.OPTION, number, 0, hash_option(self._options[name]), 0, 1.0)
        for probe in probes:
            earlier = self._earlier_probes.get((probe.epoch, probe.index))
            if earlier is not None and not earlier.equals(probe):
                raise LedgerError(
                    f"the ledger {self._path} shows that sample {probe.index} was another one at an earlier start of "
                    "this run: restore the data, or use a new folder for a run on other data"
                )
            (sketch,) = struct.unpack("<Q", struct.pack("<2f", *probe.sketch))
            self._append(RecordKind.PROBE, probe.epoch, probe.index, sketch, probe.checksum, 1.0)
        self.flush()

    def record_training(self, epoch: int, step: int, first: int, count: int, weight: float = 1.0) -> None:
        """Record that `count` positions starting at `first` are part of a training step; call it once per slice.

        A rank without samples in a step records a count of 0, which says that it took part.
        """
        filled = self._filled
        # All ranks write at the end of an epoch, so a file that lacks it while others continue has lost something.
        if filled == _BUFFER_BYTES or epoch != self._epoch:
            self.flush()
            filled, self._epoch = 0, epoch
        # Not by `_append`: this runs in every step, and another call would take a third of its time.
        _STRUCT.pack_into(self._buffer, filled, 2, 0, self.generation, epoch, step, first, count, weight, self._rank)
        self._filled = filled + RECORD_BYTES

    def record_stream_end(self, epoch: int, steps: int, records: int) -> None:
        """Record that a stream was read to its end in this epoch."""
        self._append(RecordKind.STREAM_END, epoch, steps, records, 0, 1.0)

    def begin_evaluation(self, epoch: int, step: int) -> int:
        """Return the number of a new evaluation, which begins while training is at (epoch, step)."""
        self.begin(epoch, step)
        self._evaluations += 1
        return self._evaluations - 1

    def record_evaluation(self, number: int, batch: int, first: int, count: int, weight: float = 1.0) -> None:
        """Record one batch of an evaluation; positions are dataset indices."""
        self._append(RecordKind.EVALUATED, number, batch, first, count, weight)

    def end_evaluation(self, number: int) -> None:
        """Record that this rank has finished an evaluation; one that is left early has no such record."""
        self._append(RecordKind.EVALUATION_END, number, 0, 0, 0, 1.0)

    def flush(self) -> None:
        """Write all records to the file, so that they survive this process (see `sync` for the machine).

        If the disk does not accept them, samestep warns once and tries again with the next call.
        """
        if self._filled and self._file < 0:
            raise LedgerError(f"the ledger {self._path} is closed: no more records can be added")
        if self._filled:
            self._complete_records()
        earlier_error, self._write_error = self._write_error, None
        try:
            while self._unwritten:  # bytes that the disk does not accept stay there for the next attempt
                del self._unwritten[: os.write(self._file, self._unwritten)]
        except OSError as error:
            self._write_error = error
            if earlier_error is None:
                warn(
                    f"the ledger {self._path} cannot be written: {describe_os_error(error)}; training continues, the "
                    "records stay in memory, and no checkpoint is saved before they are on disk"
                )

    def sync(self) -> None:
        """Write all records to disk (fsync). Call it before you save a position from which a run may resume."""
        self.flush()
        if self._file < 0:
            return
        try:
            if self._write_error is not None:
                raise self._write_error
            os.fsync(self._file)
            found = os.fstat(self._file)
        except OSError as error:
            raise self._cannot_write(error) from error
        if not found.st_nlink or found.st_size != self._records * RECORD_BYTES:
            raise LedgerError(
                f"the ledger {self._path} was removed or changed while this run wrote it: let only one run write to a "
                "folder, and start again in a new one"
            )

    def close(self, failed: bool = False, early: bool = False) -> None:
        """Write all records and the end; with `failed` the audit allows ranks to differ by a step.

        `early` says that a signal or a time limit has stopped the run, which is to be resumed.
        """
        if self._file < 0:
            return
        try:
            self.flush()
            self._append(RecordKind.END, *self._trained_until, self._samples, int(early), 0.0 if failed else 1.0)
            self.sync()
        except LedgerError as error:
            if not failed:  # a run must not succeed with an incomplete ledger
                raise
            warn(str(error))  # the error that ended the run is the one to show
        finally:
            os.close(self._file)
            self._file = -1

    def state(self) -> FileState | None:
        """Return how far the file is written, after `sync` or `close`; None before the first `begin`."""
        if not self._begun:
            return None
        return FileState(self.name, self.generation, *self._trained_until, self._records, self._hash, self._began)

    @property
    def _path(self) -> Path:
        return rank_file(shard_folder(self.folder, self.name), self._rank)

    def _open(self) -> int:
        if not 0 <= self._rank < self._world_size <= MAX_RANKS:
            raise LedgerError(
                f"rank {self._rank} in a world of {self._world_size} cannot be recorded: a rank must be below the "
                f"world size and below {MAX_RANKS}"
            )
        if not 0 <= self.generation < MAX_RANKS:
            raise LedgerError(
                f"generation {self.generation} cannot be recorded: a ledger supports {MAX_RANKS} starts of a run; "
                "use a new folder"
            )
        shard = self._path.parent
        shard.mkdir(parents=True, exist_ok=True)
        if self._rank == 0:
            write_description(shard, self._description, self.generation + 1)
        if self._path.exists():
            # Remove a record that a kill left half-written: what is appended must begin at a record boundary.
            size = _last_valid_record(self._path)[0]
            if size < self._path.stat().st_size:
                os.truncate(self._path, size)
            self._records, (self._hash, self._unhashed) = size // RECORD_BYTES, _read_hash(self._path)
            self._read_earlier()
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _read_earlier(self) -> None:
        """Read when the file began, and the probes of earlier starts."""
        if self._records:
            records = np.memmap(self._path, dtype=RECORD, mode="r", shape=(self._records,))
            self._began = int(records["first"][0])
            found = map(read_probe, records[np.flatnonzero(records["kind"] == RecordKind.PROBE)])
            self._earlier_probes = {(probe.epoch, probe.index): probe for probe in found}

    def _append(self, kind: RecordKind, epoch: int, step: int, first: int, count: int, weight: float) -> None:
        if self._filled == _BUFFER_BYTES:
            self.flush()
        values = (kind, 0, self.generation, epoch, step, first, count, weight, self._rank)
        _STRUCT.pack_into(self._buffer, self._filled, *values)
        self._filled += RECORD_BYTES

    def _complete_records(self) -> None:
        """Move the records in the buffer to those to write, and add one with the running hash over the full file."""
        filled = self._filled
        records = np.frombuffer(self._buffer, dtype=RECORD, count=filled // RECORD_BYTES)
        records["checksum"] = checksums(records)
        is_trained = records["kind"] == RecordKind.TRAINED
        if is_trained.any():
            last = records[np.flatnonzero(is_trained)[-1]]
            self._trained_until = int(last["epoch"]), int(last["step"]) + 1
            self._samples += int(records["count"][is_trained & has_weight(records)].sum(dtype=np.int64))
        self._hash = running_hash(self._hash, self._unhashed, memoryview(self._buffer)[:filled])
        self._records, self._unhashed = self._records + len(records) + 1, b""
        fields = *self._trained_until, self._hash, (self._records - 1) % (1 << 32), 1.0, self._rank
        _STRUCT.pack_into(self._buffer, filled, RecordKind.CHECK, 0, self.generation, *fields)
        check = np.frombuffer(self._buffer, dtype=RECORD, count=1, offset=filled)
        check["checksum"] = checksums(check)
        self._unwritten += memoryview(self._buffer)[: filled + RECORD_BYTES]
        self._filled = 0

    def _cannot_write(self, error: OSError) -> LedgerError:
        return LedgerError(
            f"the ledger {self._path} cannot be written: {describe_os_error(error)}, or run with ledger=False"
        )


def shard_folder(folder: Path, name: str) -> Path:
    """Return the folder of one shard's ledger in a run's folder."""
    if not _SHARD_NAME.fullmatch(name):
        raise LedgerError(f"shard name {name!r} cannot be a folder name: use letters, digits, '-', '_' and '.'")
    return folder / "ledger" / name


def rank_file(shard: Path, rank: int) -> Path:
    """Return the file of one rank's records."""
    return shard / f"rank-{rank:05}.bin"


def next_generation(folder: Path, name: str) -> int:
    """Return the generation of a new start, one more than the newest in the files; rank 0 sends it to the others."""
    newest = [_last_valid_record(path)[1] for path in sorted(shard_folder(folder, name).glob("rank-*.bin"))]
    return max(newest, default=-1) + 1


def _last_valid_record(path: Path) -> tuple[int, int]:
    """Return where the last valid record of a file ends, in bytes, and its generation; (0, -1) if there is none."""
    for start, records in _read_backwards(path):
        valid = np.flatnonzero(valid_mask(records))
        if valid.size:
            return (start + int(valid[-1]) + 1) * RECORD_BYTES, int(records["generation"][valid[-1]])
    return 0, -1


def _read_backwards(path: Path) -> Iterator[tuple[int, Records]]:
    """Yield blocks of records from the last to the first, each with the number of its first record."""
    with path.open("rb") as file:
        stop = file.seek(0, os.SEEK_END) // RECORD_BYTES
        while stop:
            start = max(0, stop - BUFFER_RECORDS)
            file.seek(start * RECORD_BYTES)
            yield start, np.frombuffer(file.read((stop - start) * RECORD_BYTES), dtype=RECORD)
            stop = start


def valid_mask(records: Records) -> npt.NDArray[np.bool_]:
    """Return which records are as they were written; all zeros, as a crash may leave them, are not valid."""
    known = (records["kind"] >= RecordKind.START) & (records["kind"] <= max(RecordKind))
    return known & (records["checksum"] == checksums(records))


def checksums(records: Records) -> npt.NDArray[np.uint8]:
    """Return the checksum byte that each record should have: a change of any one byte changes it."""
    return np.einsum("ij,j->i", records.view(np.uint8).reshape(-1, RECORD_BYTES), _FACTORS)


def running_hash(previous: int, *records: bytes | memoryview) -> int:
    """Return the hash of a `CHECK` record: of the one before it in the file, and of all records between them."""
    digest = hashlib.sha256(previous.to_bytes(8, "little"))
    for part in records:
        digest.update(part)
    return int.from_bytes(digest.digest()[:8], "little")


def _read_hash(path: Path) -> tuple[int, bytes]:
    """Return the last running hash of a file, and the records after it; (0, all records) if an old version wrote it."""
    after = b""
    for _, records in _read_backwards(path):
        found = np.flatnonzero(records["kind"] == RecordKind.CHECK)
        if found.size:
            return int(records["first"][found[-1]]), records[found[-1] + 1 :].tobytes() + after
        after = records.tobytes() + after
    return 0, after


def has_weight(records: Records) -> npt.NDArray[np.bool_]:
    """Return where the weight is above 0; 20 times as fast as a comparison of float16, whose bits it compares."""
    return records["weight"].view("<u2") - np.uint16(1) < np.uint16(0x7C00)


def read_probe(record: np.void) -> Probe:
    """Return the probe in a record."""
    first, second = struct.unpack("<2f", struct.pack("<Q", int(record["first"])))
    return Probe(int(record["epoch"]), int(record["step"]), int(record["count"]), (first, second))
