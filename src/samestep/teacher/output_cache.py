"""A teacher that is asked once for each sample: its outputs are kept on disk and read from there in later epochs."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final
from zlib import crc32

import torch

from samestep.data.sample_rng import SampleIds, current_samples, sample_key_tensor
from samestep.disk import describe_os_error, write_atomically
from samestep.distributed.once import run_on_every_rank
from samestep.errors import TeacherError
from samestep.teacher.cache_files import Entry, RowReader, RowWriter, pack_row, unpack_row
from samestep.teacher.frozen_model import FrozenModel
from samestep.teacher.options import Ground, PlacedTeacher, TeacherOptions
from samestep.teacher.outputs import compressed, put_together, take_apart
from samestep.teacher.placement_choice import choose_placement
from samestep.teacher.teacher import place_function
from samestep.teacher.teacher_fingerprint import fingerprint, recipe
from samestep.teacher.transfer import carry

_STRIDE = 0x3C6EF372FE94F82B  # odd and below 2**63: a word has another value at each place


def row_digests(args: tuple[object, ...], kwargs: Mapping[str, object], rows: int) -> torch.Tensor:
    """128 bits for each row, int64 of shape (rows, 2) on the CPU, equal bit for bit on every device.

    Every tensor whose first dimension is that of the rows counts row by row; whatever else there is (a mask for all, a
    flag) counts for each of them. Two inputs that differ by chance share a digest once in 2**64 pairs at most; it is no
    defence against those who wish for it.
    """
    form, tensors = take_apart((args, dict(kwargs)), "the teacher's input")
    if not any(tensor.dim() > 0 and tensor.shape[0] == rows for tensor in tensors):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise TeacherError(
            f"the teacher got tensors of shapes {shapes} for the {rows} samples of this batch, and a cache keeps "
            "outputs by sample: give one row for each, in their order"
        )
    total = torch.zeros(rows, 2, dtype=torch.int64)
    for at, tensor in enumerate(tensors):
        by_row = tensor.dim() > 0 and tensor.shape[0] == rows
        words = _words(tensor.detach().reshape(rows if by_row else 1, -1))
        salt = crc32(f"{at} {tensor.dtype} {tuple(tensor.shape[by_row:])}".encode())
        total += _sums(words, salt).cpu()
    return total + crc32(str(form).encode())


def _sums(words: torch.Tensor, salt: int) -> torch.Tensor:
    """Two sums over a row of its words, each scrambled together with its place; int64 wraps, as it should."""
    places = torch.arange(words.shape[1], dtype=torch.int64, device=words.device)
    scrambled = sample_key_tensor(salt, 0, words + places * _STRIDE)
    return torch.stack([scrambled.sum(dim=1), (scrambled * (2 * places + 1)).sum(dim=1)], dim=1) + salt


def _words(rows: torch.Tensor) -> torch.Tensor:
    """The bytes of each row as 64-bit words, the last one filled up with zeros."""
    flat = rows.contiguous().view(torch.uint8) if rows.numel() else rows.new_empty((len(rows), 0), dtype=torch.uint8)
    missing = -flat.shape[1] % 8
    if missing:
        flat = torch.cat([flat, flat.new_zeros(len(flat), missing)], dim=1)
    return flat.contiguous().view(torch.int64)


_FOLDER: Final = "teacher-cache"
_ABOUT: Final = "teacher.json"
_DRAFTS: Final = f".{_ABOUT}.*"
_FORMAT: Final = 3
_STALE_SECONDS: Final = 60.0  # a draft that is older than this belongs to nobody any more


class Cached:
    """Outputs by sample, in one folder for all ranks; a placement inside computes what is not there yet.

    The teacher is loaded when the first row is missing, by all ranks together. Until then, and with a placement that
    needs all ranks, a call is one of all ranks. A row is kept with a digest of its inputs, so that inputs which change
    from epoch to epoch are noticed and refused, never answered with what belonged to others.
    """

    def __init__(self, ground: Ground, frozen: FrozenModel, wish: TeacherOptions) -> None:
        self._ground, self._frozen, self._wish = ground, frozen, wish
        self._folder = Path(str(ground.once(Path(wish.cache or ground.folder / _FOLDER).expanduser().absolute)))
        ground.once(_claim, self._folder, _about(frozen, wish))
        self._writer, self._reader = RowWriter(self._folder, ground.link.world.rank), RowReader(self._folder)
        run_on_every_rank(ground.link, "reading the teacher's cache", self._reader.refresh)
        self._earlier = self._reader.files()
        self._seen: set[tuple[str, int]] = set()
        self._inner: PlacedTeacher | None = None
        self._read = self._computed = 0

    @property
    def lockstep(self) -> bool:
        """Whether all ranks must call equally often."""
        return self._inner is None or bool(getattr(self._inner, "lockstep", False))

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The outputs for the current samples: read where all of them are kept, computed otherwise."""
        samples = _current()
        digests = [(int(a), int(b)) for a, b in row_digests(args, kwargs, len(samples.indices)).tolist()]
        kept = self._look_up(samples, digests)
        missing = kept is None
        if self.lockstep:
            missing = any(bool(part[0]) for part in self._ground.link.exchange("teacher(...)", [float(missing)]))
            if missing and self._inner is None:
                self._inner = self._open()
        if kept is not None and not (missing and self.lockstep):
            self._read += samples.real
            return kept
        assert self._inner is not None
        return self._keep(self._inner(*args, **kwargs), samples, digests)

    def describe(self) -> str:
        """One line for the log."""
        inner = "not loaded yet" if self._inner is None else self._inner.describe()
        counts = f"{self._read} rows read, {self._computed} computed"
        return f"cached: in {self._folder}, {counts} on this rank; what is missing is computed by: {inner}"

    def close(self) -> None:
        """Close the files, and what computes."""
        self._writer.close()
        self._reader.close()
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.close()

    def _open(self) -> PlacedTeacher:
        name = self._wish.inner or choose_placement(self._ground, self._frozen, self._wish).placement
        placed = place_function(name)(self._ground, self._frozen, replace(self._wish, inner=None))
        self._ground.say(f"teacher: outputs that {self._folder} lacks are computed by {placed.describe()}")
        return placed

    def _look_up(self, samples: SampleIds, digests: list[tuple[int, int]]) -> object | None:
        """The outputs of all rows, or None where one is not kept; raises where inputs are not those of its outputs."""
        rows = self._rows(samples, digests)
        if None in rows and (samples.shard, samples.epoch) not in self._seen:
            # What other ranks computed in earlier epochs is all there: every step has waited for them.
            self._seen.add((samples.shard, samples.epoch))
            self._reader.refresh()
            rows = self._rows(samples, digests)
        if None in rows:
            return None
        return _joined([unpack_row(row) for row in rows if row is not None], self._folder, self._ground.device)

    def _rows(self, samples: SampleIds, digests: list[tuple[int, int]]) -> list[bytes | None]:
        for digest, index in zip(digests, samples.indices, strict=True):
            entry = self._reader.find(samples.shard, index)
            if entry is not None and entry.digest != digest:
                raise TeacherError(self._changed(samples, index, entry))
        return [self._reader.sound(samples.shard, index) for index in samples.indices]

    def _changed(self, samples: SampleIds, index: int, entry: Entry) -> str:
        """What is to be said of a sample whose inputs are not those of its outputs."""
        now, then = f"epoch {samples.epoch}", f"epoch {entry.epoch}"
        here = f"sample {index} of {samples.shard} has other inputs in {now} than in {then}"
        if entry.path in self._earlier:
            return (
                f"{here} of the earlier run from which {self._folder} keeps the teacher's outputs: a cache is for "
                "inputs that stay the same. Where the data, its order, its tokenizer or the names of the shards have "
                "changed since, give another folder with cache=, or remove this one; where inputs are augmented at "
                "random, or padded to the longest of their micro-batch, use another placement"
            )
        return (
            f"{here}, from which {self._folder} keeps the teacher's outputs: a cache is for inputs that stay the same. "
            "Where they are augmented at random, or padded to the longest of their micro-batch, use another placement, "
            "or give the teacher the inputs before that; where the data has changed, remove the folder, or give "
            "another one with cache="
        )

    def _keep(self, outputs: object, samples: SampleIds, digests: list[tuple[int, int]]) -> object:
        outputs = compressed(outputs, self._wish.top_k, self._wish.temperature)
        form, tensors = take_apart(outputs, "the teacher's output")
        _check_rows(tensors, len(samples.indices))
        there = [tensor.detach().cpu() for tensor in tensors]
        for at, index in enumerate(samples.indices[: samples.real]):  # padding is a copy of a sample of another rank
            if self._reader.find(samples.shard, index) is None:
                row = pack_row(form, [tensor[at] for tensor in there])
                entry = self._writer.add(samples.shard, samples.epoch, index, digests[at], row)
                self._reader.own[samples.shard, index] = entry
                self._computed += 1
        return put_together(form, iter(tensors))  # of the classes that it will be read as


def place(ground: Ground, frozen: FrozenModel, wish: TeacherOptions) -> Cached:
    """The teacher's outputs on disk, in the folder `wish.cache` or that of the run."""
    return Cached(ground, frozen, wish)


def _current() -> SampleIds:
    samples = current_samples()
    if samples is None:
        raise TeacherError(
            "placement='cached' keeps outputs by sample and was called where there is none: call the teacher inside "
            "`for batch in step:` or `for batch in shard:`, of a run.shard(...); a run.stream(...) does not number its "
            "samples for good"
        )
    return samples


def _joined(rows: list[tuple[list[object], list[torch.Tensor]]], folder: Path, device: torch.device) -> object:
    form, first = rows[0]
    shapes = [[tensor.shape for tensor in tensors] for _, tensors in rows]
    if any(other != form for other, _ in rows) or any(shape != shapes[0] for shape in shapes):
        raise TeacherError(
            f"{folder} keeps outputs of different shapes for the samples of one micro-batch, {shapes[0]} and others: "
            "the teacher's outputs depend on what shares a batch; use another placement"
        )
    columns = [torch.stack([row[1][at] for row in rows]) for at in range(len(first))]
    return put_together(form, iter(carry(columns, device)))


def _check_rows(tensors: list[torch.Tensor], rows: int) -> None:
    for tensor in tensors:
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            raise TeacherError(
                f"the teacher gives a tensor of shape {tuple(tensor.shape)} for {rows} samples, and a cache keeps one "
                "row for each: let its module give tensors of shape (rows, ...) only"
            )


def _about(frozen: FrozenModel, wish: TeacherOptions) -> dict[str, object]:
    """What outputs depend on beside the inputs."""
    return {
        "format": _FORMAT,
        "teacher": fingerprint(frozen),
        "dtype": str(wish.dtype),
        "top_k": wish.top_k,
        "temperature": None if wish.top_k is None else wish.temperature,
        **recipe(frozen),
    }


def _claim(folder: Path, about: dict[str, object]) -> None:
    """Make the folder the cache of this teacher, or see that it is."""
    place = folder / _ABOUT
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            _refuse_strange(folder)
            write_atomically(place, json.dumps(about, indent=1))
        _clear_drafts(folder)
        held = json.loads(place.read_text())
    except OSError as error:
        raise TeacherError(
            f"the cache {folder} cannot be opened: {describe_os_error(error)}; give a folder that can be written with cache="
        ) from error
    except ValueError as error:
        raise TeacherError(f"{place} is not one of samestep ({error}): remove {folder}, or give another one") from error
    for name, ours in about.items():
        if held.get(name) != ours:
            raise TeacherError(
                f"the cache {folder} keeps outputs of another teacher: its {name} is {_short(held.get(name))} and this "
                f"one's is {_short(ours)}; give another folder with cache=, or remove this one"
            )


def _refuse_strange(folder: Path) -> None:
    if any(not path.match(_DRAFTS) for path in folder.iterdir()):
        raise TeacherError(
            f"{folder} holds files and no {_ABOUT}, so it is no cache of a teacher: give an empty folder with cache="
        )


def _clear_drafts(folder: Path) -> None:
    """Remove what a run left that was killed while it claimed the folder; never what another is writing just now."""
    for path in folder.glob(_DRAFTS):
        with suppress(OSError):  # its own process was quicker
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()


def _short(value: object) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 20 else str(value)
