"""Placement `cached`: the teacher computes each sample once; later epochs and runs read its outputs from disk.

Rows of outputs are appended to files, with one writer per file, and read by all ranks. A row is in the cache once its
record is in the index, which is written after the row itself. A killed process therefore leaves at most bytes that no
record names. The next process starts new files; so does a writer after a failed write.
"""

import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from zlib import crc32

import numpy as np
import torch

from samestep.context import RunContext
from samestep.data.sample_rng import SampleIds, current_samples, sample_key_tensor
from samestep.disk import describe_os_error, write_atomically
from samestep.distributed.once import run_on_every_rank
from samestep.errors import TeacherError
from samestep.teacher.frozen_model import FrozenModel, code_fingerprint, weights_fingerprint
from samestep.teacher.options import PlacedTeacher, TeacherOptions
from samestep.teacher.outputs import (
    TreeSpec,
    encode_parts,
    flatten,
    keep_top_k,
    tensor_from_bytes,
    to_device,
    unflatten,
)
from samestep.teacher.placement_choice import choose_placement
from samestep.teacher.teacher import placement_function

_FOLDER: Final = "teacher-cache"
_KEY_FILE: Final = "teacher.json"
_DRAFTS: Final = f".{_KEY_FILE}.*"
_FORMAT: Final = 3
_STALE_SECONDS: Final = 60.0  # no process still writes a draft that is older
_STRIDE: Final = 0x3C6EF372FE94F82B  # odd and below 2**63: gives equal words at different positions different keys


class CachedTeacher:
    """Outputs by sample, in one folder for all ranks; an inner placement computes those that are missing.

    All ranks load the teacher together when the first row is missing. Until then, and with an inner placement that
    needs all ranks, a call is a collective. Each row is stored with a digest of its inputs, so that inputs that change
    between epochs raise an error instead of returning the outputs of other inputs.
    """

    def __init__(self, context: RunContext, frozen: FrozenModel, options: TeacherOptions) -> None:
        self._context, self._frozen, self._options = context, frozen, options
        folder = Path(options.cache or context.folder / _FOLDER).expanduser()
        self._folder = context.once(folder.absolute)
        key = {  # what outputs depend on besides the inputs
            "format": _FORMAT,
            "teacher": weights_fingerprint(frozen),
            "dtype": str(options.dtype),
            "top_k": options.top_k,
            "temperature": None if options.top_k is None else options.temperature,
            **code_fingerprint(frozen),
        }
        context.once(_claim_folder, self._folder, key)
        self._writer, self._reader = RowWriter(self._folder, context.comm.world.rank), RowReader(self._folder)
        run_on_every_rank(context.comm, "reading the teacher's cache", TeacherError, self._reader.refresh)
        self._files_of_earlier_runs = self._reader.files()
        self._refreshed: set[tuple[str, int]] = set()
        self._inner: PlacedTeacher | None = None
        self._rows_read = self._rows_computed = 0

    @property
    def lockstep(self) -> bool:
        """Whether all ranks must make the same number of calls."""
        return self._inner is None or bool(getattr(self._inner, "lockstep", False))

    @property
    def description(self) -> str:
        """One line for the log."""
        inner = "not loaded yet" if self._inner is None else self._inner.description
        counts = f"{self._rows_read} rows read, {self._rows_computed} computed"
        return f"cached: in {self._folder}, {counts} on this rank; missing outputs are computed by: {inner}"

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Return the outputs for the current samples: read if all of them are cached, computed otherwise."""
        if (samples := current_samples()) is None:
            raise TeacherError(
                "placement='cached' stores outputs by sample, but no sample is current: call the teacher inside `for "
                "batch in step:` or `for batch in shard:` of a run.shard(...); the samples of a run.stream(...) have "
                "no permanent numbers"
            )
        digests = [(int(a), int(b)) for a, b in row_digests(args, kwargs, len(samples.indices)).tolist()]
        cached = self._look_up(samples, digests)
        missing = cached is None
        if self.lockstep:
            missing = any(bool(part[0]) for part in self._context.comm.exchange("teacher(...)", [float(missing)]))
            if missing and self._inner is None:
                self._inner = self._open_inner()
        if cached is not None and not (missing and self.lockstep):
            self._rows_read += samples.real
            return cached
        assert self._inner is not None
        return self._store(self._inner(*args, **kwargs), samples, digests)

    def close(self) -> None:
        """Close the files and the inner placement."""
        self._writer.close()
        self._reader.close()
        if self._inner is not None:
            self._inner.close()
            self._inner = None

    def _open_inner(self) -> PlacedTeacher:
        name = self._options.inner or choose_placement(self._context, self._frozen, self._options).placement
        placed = placement_function(name)(self._context, self._frozen, replace(self._options, inner=None))
        self._context.print(f"teacher: outputs missing in {self._folder} are computed by {placed.description}")
        return placed

    def _look_up(self, samples: SampleIds, digests: list[tuple[int, int]]) -> object | None:
        """Return the outputs of all rows, or None if one is missing; raise if the inputs have changed."""
        rows = self._read_rows(samples, digests)
        if None in rows and (samples.shard, samples.epoch) not in self._refreshed:
            # The rows that other ranks computed in earlier epochs are complete: every step has waited for them.
            self._refreshed.add((samples.shard, samples.epoch))
            self._reader.refresh()
            rows = self._read_rows(samples, digests)
        if None in rows:
            return None
        return join_rows([unpack_row(row) for row in rows if row is not None], self._folder, self._context.device)

    def _read_rows(self, samples: SampleIds, digests: list[tuple[int, int]]) -> list[bytes | None]:
        for digest, index in zip(digests, samples.indices, strict=True):
            entry = self._reader.find(samples.shard, index)
            if entry is not None and entry.digest != digest:
                raise TeacherError(self._explain_change(samples, index, entry))
        return [self._reader.read(samples.shard, index) for index in samples.indices]

    def _explain_change(self, samples: SampleIds, index: int, entry: "Entry") -> str:
        changed = (
            f"sample {index} of {samples.shard} has other inputs in epoch {samples.epoch} than in epoch {entry.epoch}"
        )
        if entry.path in self._files_of_earlier_runs:
            return (
                f"{changed} of the earlier run that wrote the cache {self._folder}: a cache needs inputs that stay the "
                "same. If the data, its order, its tokenizer or the names of the shards have changed, pass another "
                "folder as cache=, or delete this one; if inputs are augmented at random, or padded to the longest of "
                "their micro-batch, use another placement"
            )
        return (
            f"{changed}, whose outputs are in the cache {self._folder}: a cache needs inputs that stay the same. If "
            "they are augmented at random, or padded to the longest of their micro-batch, use another placement, or "
            "pass the teacher the inputs before that; if the data has changed, delete the folder, or pass another one "
            "as cache="
        )

    def _store(self, outputs: object, samples: SampleIds, digests: list[tuple[int, int]]) -> object:
        outputs = keep_top_k(outputs, self._options.top_k, self._options.temperature)
        spec, tensors = flatten(outputs, "the teacher's output")
        rows = len(samples.indices)
        for tensor in tensors:
            if tensor.dim() == 0 or tensor.shape[0] != rows:
                raise TeacherError(
                    f"the teacher returns a tensor of shape {tuple(tensor.shape)} for {rows} samples, but a cache "
                    "stores one row for each: let its module return only tensors of shape (rows, ...)"
                )
        on_host = [tensor.detach().cpu() for tensor in tensors]
        for row, index in enumerate(samples.indices[: samples.real]):  # padding is a copy of another rank's sample
            if self._reader.find(samples.shard, index) is None:
                packed = pack_row(spec, [tensor[row] for tensor in on_host])
                entry = self._writer.add(samples.shard, samples.epoch, index, digests[row], packed)
                self._reader.own[samples.shard, index] = entry
                self._rows_computed += 1
        return unflatten(spec, iter(tensors))  # with the same classes as when it is read from the cache


def row_digests(args: tuple[object, ...], kwargs: Mapping[str, object], rows: int) -> torch.Tensor:
    """Return a 128-bit digest of each row's inputs: int64 of shape (rows, 2) on the CPU, the same on every device.

    A tensor whose first dimension is `rows` counts row by row; everything else (a shared mask, a flag) counts for every
    row. Two different inputs collide with a probability of at most 2**-64. The digest is not cryptographic.
    """
    spec, tensors = flatten((args, dict(kwargs)), "the teacher's input")
    if not any(tensor.dim() > 0 and tensor.shape[0] == rows for tensor in tensors):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise TeacherError(
            f"the teacher got tensors of shapes {shapes} for the {rows} samples of this batch, but a cache stores "
            "outputs by sample: pass one row for each sample, in their order"
        )
    total = torch.zeros(rows, 2, dtype=torch.int64)
    for number, tensor in enumerate(tensors):
        by_row = tensor.dim() > 0 and tensor.shape[0] == rows
        words = _as_words(tensor.detach().reshape(rows if by_row else 1, -1))
        salt = crc32(f"{number} {tensor.dtype} {tuple(tensor.shape[by_row:])}".encode())
        positions = torch.arange(words.shape[1], dtype=torch.int64, device=words.device)
        keys = sample_key_tensor(salt, 0, words + positions * _STRIDE)  # int64 overflow wraps around, as intended
        total += (torch.stack([keys.sum(dim=1), (keys * (2 * positions + 1)).sum(dim=1)], dim=1) + salt).cpu()
    return total + crc32(str(spec).encode())


def _as_words(rows: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each row as 64-bit words, the last one padded with zeros."""
    flat = rows.contiguous().view(torch.uint8) if rows.numel() else rows.new_empty((len(rows), 0), dtype=torch.uint8)
    padding = -flat.shape[1] % 8
    if padding:
        flat = torch.cat([flat, flat.new_zeros(len(flat), padding)], dim=1)
    return flat.contiguous().view(torch.int64)


def join_rows(rows: list[tuple[TreeSpec, list[torch.Tensor]]], folder: Path, device: torch.device) -> object:
    """Stack cached rows into the outputs of a micro-batch."""
    spec = rows[0][0]
    shapes = [[tensor.shape for tensor in tensors] for _, tensors in rows]
    if any(other != spec for other, _ in rows) or any(shape != shapes[0] for shape in shapes):
        raise TeacherError(
            f"{folder} holds outputs of different shapes for the samples of one micro-batch, {shapes[0]} and others: "
            "the teacher's outputs depend on the other samples in the batch; use another placement"
        )
    columns = [torch.stack(column) for column in zip(*(tensors for _, tensors in rows), strict=True)]
    return unflatten(spec, iter(to_device(columns, device)))


def _claim_folder(folder: Path, key: dict[str, object]) -> None:
    """Make the folder the cache of this teacher, or check that it is."""
    path = folder / _KEY_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            if any(not entry.match(_DRAFTS) for entry in folder.iterdir()):
                raise TeacherError(
                    f"{folder} holds files but no {_KEY_FILE}, so it is not a teacher's cache: pass an empty folder as "
                    "cache="
                )
            write_atomically(path, json.dumps(key, indent=1))
        _remove_stale_drafts(folder)
        held = json.loads(path.read_text())
    except OSError as error:
        raise TeacherError(
            f"cannot open the cache {folder}: {describe_os_error(error)}; pass a folder that can be written as cache="
        ) from error
    except ValueError as error:
        raise TeacherError(
            f"{path} was not written by samestep ({error}): delete {folder}, or pass another folder as cache="
        ) from error
    for name, value in key.items():
        if held.get(name) != value:
            raise TeacherError(
                f"the cache {folder} belongs to another teacher: its {name} is {_shorten(held.get(name))}, that of "
                f"this teacher is {_shorten(value)}; pass another folder as cache=, or delete this one"
            )


def _remove_stale_drafts(folder: Path) -> None:
    """Remove what a run left that was killed while it claimed the folder, but not what another run is writing now."""
    for path in folder.glob(_DRAFTS):
        with suppress(OSError):  # the process that wrote it was faster
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()


def _shorten(value: object) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 20 else str(value)


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
    epoch: int  # in which it was computed
    digest: tuple[int, int]  # of the inputs it was computed from
    start: int
    length: int
    crc: int


class RowWriter:
    """Appends rows to files that only this process writes; they are created with the first row."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._files: tuple[int, ...] = ()  # of the rows and of the index
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
        files, self._files = self._files, ()
        with ExitStack() as stack:  # closes the second also if closing the first fails
            for file in files:
                stack.callback(os.close, file)

    def _start_new_files(self) -> None:
        with suppress(OSError):  # the earlier failure is reported, not that of closing
            self.close()
        self._stem = self._folder / f"rank-{self._rank:05}-{secrets.token_hex(4)}"
        self._end = 0

    def _write(self, row: bytes, record: bytes) -> None:
        try:
            if not self._files:
                for suffix in (".rows", ".index"):
                    path = self._stem.with_suffix(suffix)
                    self._files += (os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644),)
            for file, data in zip(self._files, (row, record), strict=True):
                left = memoryview(data)
                while left:
                    left = left[os.write(file, left) :]
        except BaseException:
            self._start_new_files()  # a part may have been written: the next row would not start where expected
            raise


class RowReader:
    """Finds rows by shard and index in the files of all writers, also of those that are still writing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records_read = Counter[Path]()
        self._records: dict[int, np.ndarray] = {}
        self._files: dict[Path, int] = {}
        self._paths: list[Path] = []
        self._corrupt: set[tuple[Path, int]] = set()
        self.own: dict[tuple[str, int], Entry] = {}  # rows that this process has written itself

    def find(self, shard: str, index: int) -> Entry | None:
        """Return the row of a sample, skipping rows that are known to be corrupt."""
        entries = (self.own.get((shard, index)), *self._entries(shard, index))
        return next((entry for entry in entries if entry and (entry.path, entry.start) not in self._corrupt), None)

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
            new = _read_records(path, self._records_read[path])
            self._records_read[path] += len(new)
            if len(new):
                self._add_records(new, path.with_suffix(".rows"))

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _entries(self, shard: str, index: int) -> Iterator[Entry]:
        """Yield all rows of a sample; there are several if two ranks computed it, or if one replaces a corrupt row."""
        records = self._records.get(crc32(shard.encode()), np.empty(0, _RECORD))
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
            merged = np.concatenate([self._records.get(int(shard), records[:0]), records[records["shard"] == shard]])
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
