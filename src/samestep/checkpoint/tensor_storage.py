"""Tensors of a checkpoint: staged in host memory, written as safetensors files, and read back on any world size.

torch.distributed.checkpoint (DCP) plans which rank saves which chunk of a tensor and which chunks a rank needs to load.
DCP's own storage pickles its index and everything that is not a tensor. The two storage classes here do not: chunks are
in safetensors files, one per rank, and the index is JSON.
"""

import json
import os
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from heapq import heapreplace
from itertools import accumulate, groupby
from mmap import PAGESIZE, mmap
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from samestep.checkpoint.manifest import INDEX_FILE
from samestep.distributed.communicator import Communicator
from samestep.distributed.device import pin, unpin
from samestep.errors import CheckpointError

DTYPE_NAMES: Final[dict[torch.dtype, str]] = {
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
"""The dtypes that a checkpoint can store, with their names in safetensors."""
_DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_HEADER_ALIGNMENT: Final = 8  # required by safetensors
_BUCKET_BYTES: Final = 64 << 20  # tensors up to this size are sent together
_ALIGNMENT: Final = 64  # of tensors in host memory, in bytes


@dataclass(frozen=True)
class Chunk:
    """A slice of a tensor in one file."""

    offset: tuple[int, ...]  # its start in each dimension of the full tensor
    shape: tuple[int, ...]
    file: str
    key: str  # its name in the file


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint; its chunks cover it without overlap."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # the full shape
    chunks: tuple[Chunk, ...]


Index = Mapping[str, StoredTensor]
"""All tensors of a checkpoint by name."""


@dataclass(frozen=True)
class FileEntry:
    """A tensor to be written to a safetensors file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]  # returns the values in host memory; called when they are written


class _StorageDefaults:
    """Methods that DCP requires of a storage and that do nothing here."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return DCP's plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Return DCP's plans unchanged."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Reject all ids; they are not used."""
        return False


# Model -> host memory


class HostStaging(_StorageDefaults, StorageWriter):
    """DCP storage that copies the chunks of this rank to host memory, where training does not modify them.

    It keeps the memory and DCP's plan for the next checkpoint, which usually has tensors of the same layout.
    """

    def __init__(self, rank: int) -> None:
        self.file = f"rank-{rank:05}.safetensors"  # the name of the file that the chunks are written to
        self.entries: list[FileEntry] = []  # the chunks of this rank
        self.index: Index = {}  # all tensors of all ranks; on rank 0, empty elsewhere
        self._memory, self._pinned_memory = HostMemory(pinned=False), HostMemory(pinned=True)
        self._layout: list[tuple[object, ...]] | None = None  # of the tensors for which `_plan` and `index` are valid
        self._plan: SavePlan | None = None  # the chunks that DCP has assigned to this rank

    def stage(self, tensors: dict[str, torch.Tensor], single_process: bool) -> None:
        """Let DCP assign every chunk to one rank, and copy this rank's chunks; a collective."""
        self._layout, self._plan, self.index = None, None, {}
        with _translate_errors("the state cannot be saved"):
            dcp.save(tensors, storage_writer=self, planner=_planner(), no_dist=single_process)
        self._layout = _layout(tensors)

    def has_plan(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether the last plan fits these tensors. If it does on every rank, `stage_again` does not need DCP.

        DCP's own cache of plans belongs to the process: two checkpoints, or two runs, would replace each other's plan.
        """
        return self._layout is not None and self._layout == _layout(tensors)

    def stage_again(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy this rank's chunks by the plan of the last checkpoint; not a collective."""
        assert self._plan is not None
        planner = _planner()
        planner.set_up_planner(tensors)
        self.write_data(self._plan, planner)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy the chunks of the plan; from CUDA asynchronously into pinned memory."""
        sources: dict[str, torch.Tensor] = {}
        for item in plan.items:
            source = planner.resolve_data(item)
            assert isinstance(source, torch.Tensor)
            sources[_chunk_key(item)] = source.detach()
        self.entries = []  # before memory is freed that they refer to
        on_gpu = {key: source for key, source in sources.items() if source.is_cuda}
        buffers = self._pinned_memory.views(on_gpu)
        buffers |= self._memory.views({key: source for key, source in sources.items() if key not in on_gpu})
        for key, source in sources.items():
            buffers[key].copy_(source, non_blocking=source.is_cuda)
        for device in {source.device for source in on_gpu.values()}:
            torch.cuda.synchronize(device)
        results: list[WriteResult] = []
        for item, key in zip(plan.items, sources, strict=True):
            buffer = buffers[key]
            self.entries.append(FileEntry(key, buffer.dtype, tuple(buffer.shape), lambda buffer=buffer: buffer))
            results.append(WriteResult(item.index, buffer.nbytes, (self.file, key, tuple(buffer.shape))))
        self._plan = plan
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Build the index from the results of all ranks; DCP calls this on rank 0."""
        chunks: dict[str, list[Chunk]] = defaultdict(list)
        for result in (result for of_rank in results for result in of_rank):
            file, key, shape = result.storage_data
            chunks[result.index.fqn].append(Chunk(tuple(result.index.offset or ()), shape, file, key))
        index: dict[str, StoredTensor] = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            index[name] = StoredTensor(tensor.properties.dtype, tuple(tensor.size), tuple(chunks[name]))
        self.index = index

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing; DCP requires it."""


def _planner() -> DefaultSavePlanner:
    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def _layout(tensors: dict[str, torch.Tensor]) -> list[tuple[object, ...]]:
    """What DCP's plan depends on."""
    return [
        (name, tensor.shape, tensor.dtype, getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None))
        for name, tensor in tensors.items()
    ]


class HostMemory:
    """Host memory for tensors, in one block of exactly the pages that they need; kept until they need another number.

    Torch's pinned memory would take the next power of two of every tensor, up to twice the size of the model.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned, self._memory = pinned, torch.empty(0, dtype=torch.uint8)
        self._unpin: weakref.finalize[..., HostMemory] | None = None  # while the memory is pinned

    def views(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return memory for each of these tensors, contiguous; what was returned before becomes invalid."""
        self._resize(_round_up(_starts(tensors.values())[-1], PAGESIZE))
        return dict(zip(tensors, _split(self._memory, tensors.values()), strict=True))

    def _resize(self, size: int) -> None:
        if size == self._memory.nbytes:
            return
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._memory = torch.empty(0, dtype=torch.uint8)  # first free, then allocate
        if size:  # pages of its own: others may be pinned too, and some drivers pin no memory of malloc
            self._memory = torch.frombuffer(mmap(-1, size), dtype=torch.uint8)
        if self._pinned and size and pin(self._memory):
            self._unpin = weakref.finalize(self, unpin, self._memory)
            self._unpin.atexit = False


def _starts(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Where each of these tensors starts in memory that holds them all, and the size of that memory."""
    return [0, *accumulate(_round_up(tensor.nbytes, _ALIGNMENT) for tensor in tensors)]


def _split(memory: torch.Tensor, tensors: Collection[torch.Tensor]) -> list[torch.Tensor]:
    """Return a part of `memory`, which has bytes, for each of these tensors."""
    return [
        memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(tensors, _starts(tensors), strict=False)
    ]


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _chunk_key(item: WriteItem) -> str:
    """The name of the tensor, followed by the offset of the chunk unless it is the full tensor."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    if chunk.sizes == item.tensor_data.size:
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(str(offset) for offset in chunk.offsets)}"


# Host memory -> file


def safetensors_blocks(entries: Iterable[FileEntry]) -> Iterable[bytes | memoryview]:
    """Yield a safetensors file block by block, so that one tensor at a time needs to be in memory.

    The writer of the safetensors library does not fsync, compute a checksum or report the cause of an OS error.
    """
    entries = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))  # keeps every tensor aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    begin = 0
    for entry in entries:
        end = begin + entry.dtype.itemsize * torch.Size(entry.shape).numel()
        dtype, shape = DTYPE_NAMES[entry.dtype], list(entry.shape)
        header[entry.name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // _HEADER_ALIGNMENT) * _HEADER_ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for entry in entries:
        values = entry.load().contiguous().reshape(-1)
        if values.numel():
            yield memoryview(values.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]  # typed as a buffer from Python 3.12 on


def index_to_json(index: Index) -> dict[str, object]:
    """Return the content of index.json."""
    return {name: {**asdict(tensor), "dtype": DTYPE_NAMES[tensor.dtype]} for name, tensor in index.items()}


# File -> tensor


def read_index(folder: Path, files: Iterable[str]) -> Index:
    """Read index.json; `files` are those of the manifest, and all chunks must be in them."""
    record: dict[str, dict[str, Any]] = json.loads((folder / INDEX_FILE).read_bytes())
    if unknown := {tensor["dtype"] for tensor in record.values()} - _DTYPES.keys():
        raise CheckpointError(
            f"{INDEX_FILE} has tensors of dtype {', '.join(unknown)}, which this version of samestep does not support: "
            "update samestep"
        )
    known_files = set(files)
    index: dict[str, StoredTensor] = {}
    for name, tensor in record.items():
        chunks = [
            Chunk(tuple(chunk["offset"]), tuple(chunk["shape"]), chunk["file"], chunk["key"])
            for chunk in tensor["chunks"]
        ]
        if unlisted := {chunk.file for chunk in chunks} - known_files:
            raise CheckpointError(f"{INDEX_FILE} has chunks of {name} in {unlisted}, which the manifest does not list")
        index[name] = StoredTensor(_DTYPES[tensor["dtype"]], tuple(tensor["shape"]), tuple(chunks))
    return index


class CheckpointReader(_StorageDefaults, StorageReader):
    """DCP storage that reads the slices that this rank needs."""

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder, self._index = folder, index

    def load_into(self, tensors: dict[str, torch.Tensor]) -> None:
        """Fill tensors in place, a sharded one with the slice of this rank; not a collective."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _translate_errors(f"{self._folder} cannot be loaded"):
            dcp.load(tensors, storage_reader=self, planner=planner, no_dist=True)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index as DCP's metadata, from which it plans the reads."""
        tensors = {
            name: TensorStorageMetadata(
                TensorProperties(tensor.dtype),
                torch.Size(tensor.shape),
                [ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape)) for chunk in tensor.chunks],
            )
            for name, tensor in self._index.items()
        }
        return Metadata(tensors)  # pyright: ignore[reportArgumentType]  # dict is invariant

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the slices of the plan, file by file."""
        by_file: dict[str, list[tuple[str, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            offset = tuple(item.storage_index.offset or ())
            chunks = self._index[item.storage_index.fqn].chunks
            chunk = next(chunk for chunk in chunks if chunk.offset == offset and 0 not in chunk.shape)
            by_file[chunk.file].append((chunk.key, item))
        for name, items in by_file.items():
            with safe_open(self._folder / name, framework="pt") as file:
                for key, item in items:
                    target = planner.resolve_tensor(item).detach()
                    part = _slices(item.storage_offsets, item.lengths)
                    target.copy_(file.get_slice(key)[part] if part else file.get_tensor(key))
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing; DCP requires it, and the index is already read."""


# Between ranks


def divide_reads(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Return the rank that reads each tensor, so that all ranks read about the same number of bytes.

    >>> divide_reads({"a": 10, "b": 60, "c": 30, "d": 20}, 2)
    {'b': 0, 'c': 1, 'd': 1, 'a': 1}
    """
    loads = [(0, rank) for rank in range(world_size)]  # a heap: the rank that reads least comes first
    readers: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, readers[name] = loads[0]
        heapreplace(loads, (load + sizes[name], readers[name]))
    return readers


def broadcast_tensors(tensors: Mapping[str, torch.Tensor], readers: Mapping[str, int], comm: Communicator) -> None:
    """Fill each tensor on every rank with the values that its reader has; a collective.

    Names, shapes, dtypes and types of devices must be the same on all ranks. Small tensors are sent together.
    """

    def source(name: str) -> tuple[int, str]:
        return readers[name], tensors[name].device.type

    names = sorted((name for name in tensors if tensors[name].numel()), key=lambda name: (*source(name), name))
    for (reader, _), of_reader in groupby(names, key=source):
        for bucket in _buckets([tensors[name].detach() for name in of_reader]):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                dist.broadcast(bucket[0].view(-1).view(torch.uint8), src=reader, group=comm.group)
                continue
            packed = torch.empty(_starts(bucket)[-1], dtype=torch.uint8, device=bucket[0].device)
            parts = list(zip(bucket, _split(packed, bucket), strict=True))
            for tensor, part in parts if comm.world.rank == reader else ():
                part.copy_(tensor)
            dist.broadcast(packed, src=reader, group=comm.group)
            for tensor, part in parts if comm.world.rank != reader else ():
                tensor.copy_(part)


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group tensors that are sent together, in order."""
    bucket, size = list[torch.Tensor](), 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def read_full_tensor(folder: Path, tensor: StoredTensor) -> torch.Tensor:
    """Assemble a tensor from its chunks, without a process group."""
    full = torch.empty(tensor.shape, dtype=tensor.dtype)
    for chunk in tensor.chunks:
        with safe_open(folder / chunk.file, framework="pt") as file:
            full[_slices(chunk.offset, chunk.shape)] = file.get_tensor(chunk.key)
    return full


def _slices(offsets: Iterable[int], lengths: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))


@contextmanager
def _translate_errors(what: str) -> Generator[None]:
    """Raise CheckpointError if DCP fails, and ignore its warning that there is no process group."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as error:  # not a subclass of Exception
        failures = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items()))
        raise CheckpointError(f"{what}: {failures}") from error
