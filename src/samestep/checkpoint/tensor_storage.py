"""Both ends of torch.distributed.checkpoint: tensors staged in host memory, and read from files of safetensors.

torch's own writers and readers keep their index, and all that is no tensor, pickled. These keep both in JSON.
"""

import json
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from samestep.errors import CheckpointError

NAMES: Final[dict[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What stands in the header of a file, for each dtype of torch."""

BY_NAME: Final[dict[str, torch.dtype]] = {name: dtype for dtype, name in NAMES.items()}
"""The other way round."""


NAME: Final = "index.json"


@dataclass(frozen=True)
class Piece:
    """A part of a tensor."""

    offset: tuple[int, ...]
    """Where in the tensor it begins."""
    shape: tuple[int, ...]
    """Its shape."""
    file: str
    """The file that holds it."""
    key: str
    """Its name in that file."""


@dataclass(frozen=True)
class Whole:
    """A tensor, all its parts together."""

    dtype: torch.dtype
    """What its elements are."""
    shape: tuple[int, ...]
    """Its shape."""
    pieces: tuple[Piece, ...]
    """Parts that cover it without overlap."""

    @property
    def bytes(self) -> int:
        """How much it holds."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


Index = Mapping[str, Whole]


def to_record(index: Index) -> dict[str, object]:
    """The index as JSON has it."""
    return {
        name: {
            "dtype": NAMES[whole.dtype],
            "shape": list(whole.shape),
            "pieces": [[list(p.offset), list(p.shape), p.file, p.key] for p in whole.pieces],
        }
        for name, whole in index.items()
    }


def from_record(record: dict[str, dict[str, list[object]]], files: Iterable[str]) -> Index:
    """Read it back; a piece in a file that the checkpoint does not have is no piece of it."""
    known = set(files)
    index: dict[str, Whole] = {}
    if strange := {str(told["dtype"]) for told in record.values()} - BY_NAME.keys():
        raise CheckpointError(
            f"the index holds tensors of {', '.join(strange)}, which this samestep does not know: update it"
        )
    for name, told in record.items():
        pieces = [Piece(tuple(o), tuple(s), file, key) for o, s, file, key in told["pieces"]]  # pyright: ignore[reportGeneralTypeIssues, reportUnknownArgumentType]  # its checksum was compared
        if elsewhere := {piece.file for piece in pieces} - known:
            raise CheckpointError(f"the index looks for {name} in {elsewhere}, which is no file of the checkpoint")
        index[name] = Whole(BY_NAME[str(told["dtype"])], tuple(told["shape"]), tuple(pieces))  # pyright: ignore[reportArgumentType]  # likewise
    return index


def read_whole(folder: Path, whole: Whole) -> torch.Tensor:
    """One tensor put together from its pieces, without any process group."""
    from safetensors import safe_open

    made = torch.empty(whole.shape, dtype=whole.dtype)
    for piece in whole.pieces:
        with safe_open(folder / piece.file, framework="pt") as file:
            where = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
            made[where] = file.get_tensor(piece.key)
    return made


_ALIGNMENT: Final = 8  # as the format asks for


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    name: str
    """Its name in the file."""
    dtype: torch.dtype
    """What its elements are."""
    shape: tuple[int, ...]
    """Its shape."""
    get: Callable[[], torch.Tensor]
    """Gives its values, in host memory; asked for when they are written."""


def tensor_blocks(entries: Iterable[Entry]) -> Iterable[bytes | memoryview]:
    """A file in the format of safetensors, block by block: no more than one tensor need be in memory.

    The library's own writer neither flushes, nor tells why it failed, nor hashes on the way; its reader reads these.
    """
    entries = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))  # keeps every tensor aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    at = 0
    for entry in entries:
        size = entry.dtype.itemsize * torch.Size(entry.shape).numel()
        header[entry.name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for entry in entries:
        values = entry.get().contiguous().reshape(-1)
        if values.numel():
            yield memoryview(values.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]  # a buffer, from Python 3.12 on also by name


@dataclass(frozen=True)
class Staged:
    """This rank's part of the tensors, in host memory where training cannot reach it."""

    file: str
    """The file that it goes to."""
    entries: list[Entry]
    """What goes there."""
    index: Index
    """All tensors of all ranks; on the first rank, elsewhere empty."""


class HostMemory(StorageWriter):
    """Copies to host memory what torch's plan gives to this rank; nothing is written here.

    The memory is kept for the next time: to ask the system for it takes longer than to fill it.
    """

    def __init__(self, rank: int) -> None:
        self._file = f"rank-{rank:05}.safetensors"
        self._held: dict[str, torch.Tensor] = {}
        self._entries: list[Entry] = []
        self._index: Index = {}

    def stage(self, tensors: dict[str, torch.Tensor], alone: bool) -> Staged:
        """Agree with all ranks on who keeps which part, and copy this rank's parts."""
        self._entries, self._index = [], {}
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            with _without_advice():
                dcp.save(tensors, storage_writer=self, planner=planner, no_dist=alone)
        except CheckpointException as error:  # which is no Exception, and must not pass where one is expected
            raise CheckpointError(f"the state cannot be saved: {_tell(error)}") from error
        return Staged(self._file, self._entries, self._index)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy; on CUDA into pinned memory, all copies under way at once."""
        results: list[WriteResult] = []
        devices: set[torch.device] = set()
        held: dict[str, torch.Tensor] = {}
        for item in plan.items:
            source = planner.resolve_data(item)
            assert isinstance(source, torch.Tensor)
            key = _key(item)
            kept = held[key] = self._room(key, source)
            kept.copy_(source.detach(), non_blocking=source.is_cuda)
            devices |= {source.device} if source.is_cuda else set()
            self._entries.append(Entry(key, kept.dtype, tuple(kept.shape), lambda kept=kept: kept))
            results.append(WriteResult(item.index, kept.nbytes, (self._file, key, tuple(kept.shape))))
        self._held = held
        for device in devices:
            torch.cuda.synchronize(device)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank: who kept what."""
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for result in (result for part in results for result in part):
            file, key, shape = result.storage_data
            pieces[result.index.fqn].append(Piece(tuple(result.index.offset or ()), shape, file, key))
        index: dict[str, Whole] = {}
        for name, known in metadata.state_dict_metadata.items():
            assert isinstance(known, TensorStorageMetadata)
            index[name] = Whole(known.properties.dtype, tuple(known.size), tuple(pieces[name]))
        self._index = index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget between two checkpoints."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Every rank does the same."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Torch's plan is taken as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Torch's plans are taken as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Checkpoints have no other name here than their folder."""
        return False

    def _room(self, key: str, source: torch.Tensor) -> torch.Tensor:
        held = self._held.get(key)
        if held is not None and held.shape == source.shape and held.dtype == source.dtype:
            return held
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)


class Files(StorageReader):
    """Reads the parts that this rank needs out of the files of a checkpoint."""

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder, self._index = folder, index

    def load_into(self, tensors: dict[str, torch.Tensor]) -> None:
        """Fill tensors in place, sharded ones with their own part; ranks need not do it together."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            with _without_advice():
                dcp.load(tensors, storage_reader=self, planner=planner, no_dist=True)
        except CheckpointException as error:
            raise CheckpointError(f"{self._folder} cannot be loaded: {_tell(error)}") from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index in torch's own words."""
        described = {
            name: TensorStorageMetadata(
                TensorProperties(whole.dtype),
                torch.Size(whole.shape),
                [ChunkStorageMetadata(torch.Size(p.offset), torch.Size(p.shape)) for p in whole.pieces],
            )
            for name, whole in self._index.items()
        }
        return Metadata(described)  # pyright: ignore[reportArgumentType]  # a dict of one of the two kinds it takes

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan asks for, file by file."""
        by_file: dict[str, list[tuple[str, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            piece = self._piece(item.storage_index)
            by_file[piece.file].append((piece.key, item))
        for name, items in by_file.items():
            with safe_open(self._folder / name, framework="pt") as file:
                for key, item in items:
                    target = planner.resolve_tensor(item).detach()
                    where = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                    target.copy_(file.get_slice(key)[where] if where else file.get_tensor(key))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget between two checkpoints."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The index is known already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Torch's plan is taken as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Torch's plans are taken as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Checkpoints have no other name here than their folder."""
        return False

    def _piece(self, wanted: MetadataIndex) -> Piece:
        pieces = self._index[wanted.fqn].pieces
        offset = tuple(wanted.offset or ())
        return next(piece for piece in pieces if piece.offset == offset and 0 not in piece.shape)


@contextmanager
def _without_advice() -> Generator[None]:
    """Torch warns whoever asks for no process group that there will be none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _key(item: WriteItem) -> str:
    """The tensor's name, and where this part begins unless it is the whole."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    if chunk.sizes == item.tensor_data.size:
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(str(offset) for offset in chunk.offsets)}"


def _tell(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items()))
