"""The files of an output cache: append-only rows of outputs, one writer per file, read by all ranks.

A row is in the cache once its record is in the index, which is written after the row itself. A killed process therefore
leaves at most bytes that no record names. The next process starts new files; so does a writer after a failed write.
"""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from zlib import crc32

import numpy as np
import torch

from samestep.disk import describe_os_error
from samestep.errors import TeacherError
from samestep.teacher.outputs import TreeSpec, encode_parts, tensor_from_bytes

_RECORD: Final = np.dtype(
    [
        ("shard", "<u4"),  # crc32 of its name
        ("epoch", "<u4"),
        ("index", "<i8"),
        ("digest", "<i8", (2,)),  # of the inputs
        ("start", "<u8"),
        ("length", "<u8"),
        ("row_crc", "<u4"),
        ("checksum", "<u4"),  # of all fields above
    ]
)
_HEADER_BYTES: Final = 4  # of the length of a row's header


@dataclass(frozen=True)
class Entry:
    """One row of the cache."""

    path: Path
    epoch: int
    """The epoch in which it was computed."""
    digest: tuple[int, int]
    """The digest of the inputs it was computed from."""
    start: int
    length: int
    crc: int


class RowWriter:
    """Appends rows to files that only this process writes; they are created with the first row."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._rows: int | None = None
        self._index: int | None = None
        self._start_new_files()

    def add(self, shard: str, epoch: int, index: int, digest: tuple[int, int], row: bytes) -> Entry:
        """Write one row, then its record."""
        entry = Entry(self._stem.with_suffix(".rows"), epoch, digest, self._end, len(row), crc32(row))
        fields = (crc32(shard.encode()), epoch, index, digest, entry.start, entry.length, entry.crc, 0)
        record = np.array([fields], dtype=_RECORD)
        record["checksum"] = _checksums(record)
        try:
            self._write(row, record.tobytes())
        except OSError as error:
            raise TeacherError(
                f"cannot write to the cache {self._folder}: {describe_os_error(error)}, or pass another folder as "
                "cache=; the rows written so far stay valid"
            ) from error
        self._end += len(row)
        return entry

    def close(self) -> None:
        """Close the files."""
        files, self._rows, self._index = (self._rows, self._index), None, None
        with ExitStack() as stack:  # closes the second also if closing the first fails
            for file in files:
                if file is not None:
                    stack.callback(os.close, file)

    def _start_new_files(self) -> None:
        with suppress(OSError):  # the earlier failure is reported, not that of closing
            self.close()
        self._stem = self._folder / f"rank-{self._rank:05}-{secrets.token_hex(4)}"
        self._end = 0

    def _write(self, row: bytes, record: bytes) -> None:
        try:
            if self._rows is None or self._index is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                self._rows = os.open(self._stem.with_suffix(".rows"), flags, 0o644)
                self._index = os.open(self._stem.with_suffix(".index"), flags, 0o644)
            _write_all(self._rows, row)
            _write_all(self._index, record)
        except BaseException:
            self._start_new_files()  # a part may have been written: the next row would not start where expected
            raise


class RowReader:
    """Finds rows by shard and index in the files of all writers, also of those that are still writing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records_read: dict[Path, int] = {}
        self._records: dict[int, np.ndarray] = {}
        self._files: dict[Path, int] = {}
        self._paths: list[Path] = []
        self._corrupt: set[tuple[Path, int]] = set()
        self.own: dict[tuple[str, int], Entry] = {}
        """Rows that this process has written itself."""

    def find(self, shard: str, index: int) -> Entry | None:
        """Return the row of a sample, skipping rows that are known to be corrupt."""
        own = self.own.get((shard, index))
        for entry in (*([] if own is None else [own]), *self._entries(shard, index)):
            if (entry.path, entry.start) not in self._corrupt:
                return entry
        return None

    def read(self, shard: str, index: int) -> bytes | None:
        """Return the bytes of a sample's row; None if there is none, or only corrupt ones.

        A corrupt row is skipped from then on, so that a row written in its place is found.
        """
        while (entry := self.find(shard, index)) is not None:
            if (row := self._read_entry(entry)) is not None:
                return row
            self._corrupt.add((entry.path, entry.start))
        return None

    def files(self) -> frozenset[Path]:
        """Return the files in which rows were found so far."""
        return frozenset(self._paths)

    def refresh(self) -> None:
        """Read the records that all writers have added since the last refresh."""
        for path in sorted(self._folder.glob("*.index")):
            new = _read_records(path, self._records_read.get(path, 0))
            self._records_read[path] = self._records_read.get(path, 0) + len(new)
            if len(new):
                self._add_records(new, path.with_suffix(".rows"))

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _entries(self, shard: str, index: int) -> Iterator[Entry]:
        """Yield all rows of a sample; there are several if two ranks computed it, or if one replaces a corrupt row."""
        records = self._records.get(crc32(shard.encode()))
        if records is None:
            return
        for record in records[slice(*np.searchsorted(records["index"], [index, index + 1]))]:
            digest = (int(record["digest"][0]), int(record["digest"][1]))
            position = int(record["start"]), int(record["length"]), int(record["row_crc"])
            yield Entry(self._paths[int(record["checksum"])], int(record["epoch"]), digest, *position)

    def _read_entry(self, entry: Entry) -> bytes | None:
        try:
            if entry.path not in self._files:
                self._files[entry.path] = os.open(entry.path, os.O_RDONLY)
            row = os.pread(self._files[entry.path], entry.length, entry.start)
        except OSError:
            return None
        return row if len(row) == entry.length and crc32(row) == entry.crc else None

    def _add_records(self, records: np.ndarray, rows: Path) -> None:
        if rows not in self._paths:
            self._paths.append(rows)
        records["checksum"] = self._paths.index(rows)  # it was verified: in memory the field is the number of the file
        for shard in np.unique(records["shard"]):
            earlier = self._records.get(int(shard))
            parts = [*([] if earlier is None else [earlier]), records[records["shard"] == shard]]
            merged = np.concatenate(parts)
            self._records[int(shard)] = merged[np.argsort(merged["index"], kind="stable")]


def pack_row(spec: TreeSpec, tensors: list[torch.Tensor]) -> bytes:
    """Return one sample's outputs as bytes: a header with spec, dtypes and shapes, then the tensors."""
    header, contents = encode_parts(spec, tensors)
    return b"".join([len(header).to_bytes(_HEADER_BYTES, "little"), header, *contents])


def unpack_row(row: bytes) -> tuple[TreeSpec, list[torch.Tensor]]:
    """Undo `pack_row`."""
    end = _HEADER_BYTES + int.from_bytes(row[:_HEADER_BYTES], "little")
    header = json.loads(row[_HEADER_BYTES:end])
    data = torch.frombuffer(bytearray(row[end:]), dtype=torch.uint8) if end < len(row) else torch.empty(0).byte()
    tensors: list[torch.Tensor] = []
    start = 0
    for dtype, shape in header["tensors"]:
        size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        tensors.append(tensor_from_bytes(data[start : start + size].clone(), dtype, shape))  # aligned for its dtype
        start += size
    return header["form"], tensors


def _read_records(path: Path, skip: int) -> np.ndarray:
    """Read the records of an index after the first `skip`, up to an incomplete one: its writer was killed there."""
    with path.open("rb") as file:
        file.seek(skip * _RECORD.itemsize)
        data = file.read()
    records = np.frombuffer(data[: len(data) // _RECORD.itemsize * _RECORD.itemsize], dtype=_RECORD).copy()
    invalid = np.flatnonzero(_checksums(records) != records["checksum"])
    return records[: invalid[0]] if len(invalid) else records


def _checksums(records: np.ndarray) -> np.ndarray:
    """Return a checksum of each record, not zero for a record of zeros."""
    words = records.view(np.uint32).reshape(len(records), _RECORD.itemsize // 4)[:, :-1]
    factors = 2 * np.arange(words.shape[1], dtype=np.uint32) + 3
    return (words * factors).sum(axis=1, dtype=np.uint32) + np.uint32(0x5EED)


def _write_all(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
