"""Placement `cached`: the teacher computes each sample once; later epochs and runs read its outputs from disk."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final
from zlib import crc32

import torch

from samestep.context import RunContext
from samestep.data.sample_rng import SampleIds, current_samples, sample_key_tensor
from samestep.disk import describe_os_error, write_atomically
from samestep.distributed.once import run_on_every_rank
from samestep.errors import TeacherError
from samestep.teacher.cache_files import Entry, RowReader, RowWriter, pack_row, unpack_row
from samestep.teacher.frozen_model import FrozenModel
from samestep.teacher.options import PlacedTeacher, TeacherOptions
from samestep.teacher.outputs import TreeSpec, flatten, keep_top_k, to_device, unflatten
from samestep.teacher.placement_choice import choose_placement
from samestep.teacher.teacher import placement_function
from samestep.teacher.teacher_fingerprint import code_fingerprint, weights_fingerprint

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
        context.once(_claim_folder, self._folder, _cache_key(frozen, options))
        self._writer, self._reader = RowWriter(self._folder, context.comm.world.rank), RowReader(self._folder)
        run_on_every_rank(context.comm, "reading the teacher's cache", self._reader.refresh)
        self._files_of_earlier_runs = self._reader.files()
        self._refreshed: set[tuple[str, int]] = set()
        self._inner: PlacedTeacher | None = None
        self._rows_read = self._rows_computed = 0

    @property
    def lockstep(self) -> bool:
        """Whether all ranks must make the same number of calls."""
        return self._inner is None or bool(getattr(self._inner, "lockstep", False))

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Return the outputs for the current samples: read if all of them are cached, computed otherwise."""
        samples = _require_samples()
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

    def describe(self) -> str:
        """Return one line for the log."""
        inner = "not loaded yet" if self._inner is None else self._inner.describe()
        counts = f"{self._rows_read} rows read, {self._rows_computed} computed"
        return f"cached: in {self._folder}, {counts} on this rank; missing outputs are computed by: {inner}"

    def close(self) -> None:
        """Close the files and the inner placement."""
        self._writer.close()
        self._reader.close()
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.close()

    def _open_inner(self) -> PlacedTeacher:
        name = self._options.inner or choose_placement(self._context, self._frozen, self._options).placement
        placed = placement_function(name)(self._context, self._frozen, replace(self._options, inner=None))
        self._context.print(f"teacher: outputs missing in {self._folder} are computed by {placed.describe()}")
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

    def _explain_change(self, samples: SampleIds, index: int, entry: Entry) -> str:
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
        _check_rows(tensors, len(samples.indices))
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
    spec, first = rows[0]
    shapes = [[tensor.shape for tensor in tensors] for _, tensors in rows]
    if any(other != spec for other, _ in rows) or any(shape != shapes[0] for shape in shapes):
        raise TeacherError(
            f"{folder} holds outputs of different shapes for the samples of one micro-batch, {shapes[0]} and others: "
            "the teacher's outputs depend on the other samples in the batch; use another placement"
        )
    columns = [torch.stack([row[1][number] for row in rows]) for number in range(len(first))]
    return unflatten(spec, iter(to_device(columns, device)))


def _require_samples() -> SampleIds:
    samples = current_samples()
    if samples is None:
        raise TeacherError(
            "placement='cached' stores outputs by sample, but no sample is current: call the teacher inside `for "
            "batch in step:` or `for batch in shard:` of a run.shard(...); the samples of a run.stream(...) have no "
            "permanent numbers"
        )
    return samples


def _check_rows(tensors: list[torch.Tensor], rows: int) -> None:
    for tensor in tensors:
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            raise TeacherError(
                f"the teacher returns a tensor of shape {tuple(tensor.shape)} for {rows} samples, but a cache stores "
                "one row for each: let its module return only tensors of shape (rows, ...)"
            )


def _cache_key(frozen: FrozenModel, options: TeacherOptions) -> dict[str, object]:
    """Return what outputs depend on besides the inputs."""
    return {
        "format": _FORMAT,
        "teacher": weights_fingerprint(frozen),
        "dtype": str(options.dtype),
        "top_k": options.top_k,
        "temperature": None if options.top_k is None else options.temperature,
        **code_fingerprint(frozen),
    }


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
