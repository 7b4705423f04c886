"""The files of a cache: rows of outputs that are only ever added, by one writer a file, and read by all ranks.

A row is in the cache when its record stands in the index, which is written after the row itself. A process that is
killed therefore leaves at most bytes that no record names, and the next one begins files of its own; so does one that
could not write, with the next row.
"""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import torch

from samestep.disk import describe_os_error
from samestep.errors import TeacherError
from samestep.teacher.outputs import Form, as_bytes, from_bytes, signature

_RECORD = np.dtype(
    [
        ("shard", "<u4"),  # crc32 of its name
        ("epoch", "<u4"),
        ("index", "<i8"),
        ("digest", "<i8", (2,)),  # of the inputs
        ("start", "<u8"),
        ("length", "<u8"),
        ("sum", "<u4"),  # crc32 of the row
        ("seal", "<u4"),  # of all of the above
    ]
)
_HEAD = 4  # bytes that say how long the head of a row is


@dataclass(frozen=True)
class Entry:
    """One row that is kept."""

    path: Path
    """The file that holds it."""
    epoch: int
    """The epoch in which it was computed."""
    digest: tuple[int, int]
    """Of the inputs that it was computed from."""
    start: int
    """Its first byte."""
    length: int
    """How many bytes it has."""
    sum: int
    """Their checksum."""


class RowWriter:
    """Adds rows to files that are this process's alone; they appear with the first row."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._rows: int | None = None
        self._index: int | None = None
        self._begin_anew()

    def add(self, shard: str, epoch: int, index: int, digest: tuple[int, int], row: bytes) -> Entry:
        """Write one row, then its record."""
        entry = Entry(self._stem.with_suffix(".rows"), epoch, digest, self._end, len(row), crc32(row))
        fields = (crc32(shard.encode()), epoch, index, digest, entry.start, entry.length, entry.sum, 0)
        record = np.array([fields], dtype=_RECORD)
        record["seal"] = _seals(record)
        try:
            self._write(row, record.tobytes())
        except OSError as error:
            raise TeacherError(
                f"the cache {self._folder} cannot be written: {describe_os_error(error)}, or give another folder with "
                "cache=; the rows already there stay good"
            ) from error
        self._end += len(row)
        return entry

    def close(self) -> None:
        """Close the files."""
        files, self._rows, self._index = (self._rows, self._index), None, None
        with ExitStack() as closing:  # the second also where closing the first fails
            for file in files:
                if file is not None:
                    closing.callback(os.close, file)

    def _begin_anew(self) -> None:
        """Let the next row be the first of files that are not there yet."""
        with suppress(OSError):  # what failed before is to be told, not that it fails at closing too
            self.close()
        self._stem = self._folder / f"rank-{self._rank:05}-{secrets.token_hex(4)}"
        self._end = 0

    def _write(self, row: bytes, record: bytes) -> None:
        try:
            rows, records = self._open()
            _write(rows, row)
            _write(records, record)
        except BaseException:
            self._begin_anew()  # half of it may be there: no place behind it is where the next record would say
            raise

    def _open(self) -> tuple[int, int]:
        if self._rows is None or self._index is None:
            kind = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            self._rows = os.open(self._stem.with_suffix(".rows"), kind, 0o644)
            self._index = os.open(self._stem.with_suffix(".index"), kind, 0o644)
        return self._rows, self._index


class RowReader:
    """Finds rows by shard and index in the files of all writers, also of those that still write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._records: dict[int, np.ndarray] = {}
        self._files: dict[Path, int] = {}
        self._paths: list[Path] = []
        self._spoilt: set[tuple[Path, int]] = set()
        self.own: dict[tuple[str, int], Entry] = {}
        """What this process has added itself, and need not look for."""

    def find(self, shard: str, index: int) -> Entry | None:
        """The row of a sample, if there is one that was not found to be damaged."""
        own = self.own.get((shard, index))
        for entry in (*([] if own is None else [own]), *self._listed(shard, index)):
            if (entry.path, entry.start) not in self._spoilt:
                return entry
        return None

    def sound(self, shard: str, index: int) -> bytes | None:
        """The bytes of a sample's row; None where there is none, or none that is what was written.

        A damaged one is passed over from then on, so that a row which is written in its place is found.
        """
        while (entry := self.find(shard, index)) is not None:
            if (row := self._bytes_of(entry)) is not None:
                return row
            self._spoilt.add((entry.path, entry.start))
        return None

    def files(self) -> frozenset[Path]:
        """The files in which rows were found so far."""
        return frozenset(self._paths)

    def refresh(self) -> None:
        """See what all writers have added since the last look."""
        for path in sorted(self._folder.glob("*.index")):
            new = _sound(path, self._read.get(path, 0))
            self._read[path] = self._read.get(path, 0) + len(new)
            if len(new):
                self._take(new, path.with_suffix(".rows"))

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _listed(self, shard: str, index: int) -> Iterator[Entry]:
        """All rows of a sample that the files list: two ranks may have computed it, or one anew what was damaged."""
        records = self._records.get(crc32(shard.encode()))
        if records is None:
            return
        for record in records[slice(*np.searchsorted(records["index"], [index, index + 1]))]:
            digest = (int(record["digest"][0]), int(record["digest"][1]))
            place = int(record["start"]), int(record["length"]), int(record["sum"])
            yield Entry(self._paths[int(record["seal"])], int(record["epoch"]), digest, *place)

    def _bytes_of(self, entry: Entry) -> bytes | None:
        try:
            if entry.path not in self._files:
                self._files[entry.path] = os.open(entry.path, os.O_RDONLY)
            row = os.pread(self._files[entry.path], entry.length, entry.start)
        except OSError:
            return None
        return row if len(row) == entry.length and crc32(row) == entry.sum else None

    def _take(self, records: np.ndarray, rows: Path) -> None:
        if rows not in self._paths:
            self._paths.append(rows)
        records["seal"] = self._paths.index(rows)  # it was checked: from here on the field says which file it is
        for shard in np.unique(records["shard"]):
            parts = [part for part in (self._records.get(int(shard)),) if part is not None]
            whole = np.concatenate([*parts, records[records["shard"] == shard]])
            self._records[int(shard)] = whole[np.argsort(whole["index"], kind="stable")]


def pack_row(form: Form, tensors: list[torch.Tensor]) -> bytes:
    """One sample's outputs as bytes: form, dtypes and shapes, then the tensors."""
    head = json.dumps({"form": form, "tensors": [signature(tensor) for tensor in tensors]}).encode()
    return b"".join([len(head).to_bytes(_HEAD, "little"), head, *(as_bytes(tensor) for tensor in tensors)])


def unpack_row(row: bytes) -> tuple[Form, list[torch.Tensor]]:
    """What `pack_row` packed."""
    at = _HEAD + int.from_bytes(row[:_HEAD], "little")
    head = json.loads(row[_HEAD:at])
    data = torch.frombuffer(bytearray(row[at:]), dtype=torch.uint8) if at < len(row) else torch.empty(0).byte()
    tensors: list[torch.Tensor] = []
    start = 0
    for dtype, shape in head["tensors"]:
        size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        tensors.append(from_bytes(data[start : start + size].clone(), dtype, shape))  # aligned for its dtype
        start += size
    return head["form"], tensors


def _sound(path: Path, known: int) -> np.ndarray:
    """The records of an index behind the first `known`, up to one that is torn: its writer was killed there."""
    with path.open("rb") as file:
        file.seek(known * _RECORD.itemsize)
        data = file.read()
    records = np.frombuffer(data[: len(data) // _RECORD.itemsize * _RECORD.itemsize], dtype=_RECORD).copy()
    torn = np.flatnonzero(_seals(records) != records["seal"])
    return records[: torn[0]] if len(torn) else records


def _seals(records: np.ndarray) -> np.ndarray:
    """A number for each record that tells whether all of its bytes arrived; nothing but zeros has another than zero."""
    words = records.view(np.uint32).reshape(len(records), _RECORD.itemsize // 4)[:, :-1]
    factors = 2 * np.arange(words.shape[1], dtype=np.uint32) + 3
    return (words * factors).sum(axis=1, dtype=np.uint32) + np.uint32(0x5EED)


def _write(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
