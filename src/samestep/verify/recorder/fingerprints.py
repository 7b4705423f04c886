"""Fingerprints of tensors: hashes that tell samples and weights apart, and sketches that add up like gradients."""

import ctypes
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

_MAX_ROWS: Final = 1024
_MAX_LEAF_BYTES: Final = 64 * 2**20
_SKETCHES: Final = 4
_MAX_ELEMENTS: Final = 2**16  # of a tensor in a sketch; of a larger one, evenly spaced elements
_MAX_LEAVES: Final = 8
_MAPS: Final = Path("/proc/self/maps")  # Linux: a line per range of addresses, with the file that it is mapped from

_projections: dict[int, Tensor] = {}


def leaves(value: Any, depth: int = 6) -> Iterator[Any]:
    """The tensors and arrays inside of a batch, in a fixed order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module) or depth == 0:
        return
    elif isinstance(value, Mapping):
        for key in value:  # pyright: ignore[reportUnknownVariableType]
            yield from leaves(value[key], depth - 1)
    elif isinstance(value, list | tuple):
        for each in value:  # pyright: ignore[reportUnknownVariableType]
            yield from leaves(each, depth - 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from leaves(getattr(value, each.name, None), depth - 1)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        yield torch.from_numpy(np.ascontiguousarray(value))  # pyright: ignore[reportUnknownMemberType]


def count_rows(value: Any) -> int:
    """The length of the first dimension of the first tensor that has one; 0 if there is none."""
    return next((each.shape[0] for each in leaves(value) if isinstance(each, Tensor) and each.dim()), 0)


def hash_rows(value: Any) -> list[list[str]]:
    """For each tensor of a batch, a hash of each of its rows."""
    found = list[list[str]]()
    rows = count_rows(value)
    for leaf in leaves(value):
        if len(found) == _MAX_LEAVES:
            break
        if (
            leaf.dim()
            and leaf.shape[0] == rows
            and has_values(leaf)
            and leaf.numel() * leaf.element_size() <= _MAX_LEAF_BYTES
        ):
            kept = to_strided(leaf[:_MAX_ROWS])
            size = kept.element_size() * kept[:1].numel()
            data = raw_bytes(kept)
            found.append([_digest(data[begin * size : (begin + 1) * size]) for begin in range(kept.shape[0])])
    return found


def hash_tensor(tensor: Tensor) -> str:
    """A hash of the values of a tensor, or of this rank's part of a sharded one; empty for one without values."""
    if not has_values(tensor):
        return ""
    kept = to_strided(local_part(tensor))
    return _digest(raw_bytes(kept))


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values, unlike those on the meta device and those that a compiler traces."""
    return (tensor.device.type != "meta" and type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)) or hasattr(
        tensor, "_local_tensor"
    )


def is_tracing() -> bool:
    """Whether new tensors have no values: torch computes shapes only, under FakeTensorMode or on the meta device."""
    return not has_values(torch.empty(0))


def mapped_bytes(tensors: Sequence[Tensor]) -> int:
    """The bytes of tensors in memory that processes share: shared memory, or mapped from a file; 0 if it is unknown."""
    on_cpu = [each for each in tensors if each.device.type == "cpu" and has_values(each)]
    if not on_cpu or not _MAPS.exists():
        return 0
    ranges = list[tuple[int, int]]()
    for line in _MAPS.read_text().splitlines():
        addresses, permissions, *_, name = line.split(maxsplit=5) if line.count("/") else (*line.split()[:2], "")
        if permissions.endswith("s") or name.startswith("/"):
            first, _, last = addresses.partition("-")
            ranges.append((int(first, 16), int(last, 16)))
    parts = [local_part(each) for each in on_cpu]
    return sum(
        part.numel() * part.element_size()
        for part in parts
        if any(first <= part.data_ptr() < last for first, last in ranges)
    )


def shapes(value: Any) -> list[list[int]]:
    """The shapes of the tensors of a batch."""
    return [list(leaf.shape) for leaf in leaves(value)][:_MAX_LEAVES]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; another tensor itself, also if it is sparse."""
    part: Any = getattr(tensor, "_local_tensor", tensor)
    return (part if part.layout is torch.strided else part.to_dense()).detach()


def sketch(tensor: Tensor) -> list[float]:
    """A few sums of the elements with fixed random signs: the sketch of a sum is the sum of the sketches.

    The sketches of the parts of a tensor that is sharded by rows add up to that of the whole tensor.
    """
    flat = local_part(tensor).flatten()
    total, offset = (tensor.numel(), _offset(tensor)) if is_row_sharded(tensor) else (flat.numel(), 0)
    stride = max(1, -(-total // _MAX_ELEMENTS))
    skipped = -offset % stride
    flat, begin = flat[skipped::stride], (offset + skipped) // stride
    signs = _projection(-(-total // stride))[:, begin : begin + flat.numel()]
    return (signs @ flat.cpu().double()).tolist()


def is_row_sharded(tensor: Any) -> bool:
    """Whether each rank has some rows of a tensor, as FSDP2 divides it on one dimension of ranks."""
    placements = getattr(tensor, "placements", ())
    return len(placements) == 1 and placements[0].is_shard(0) and tensor.is_contiguous()


def is_sharded(tensor: Any) -> bool:
    """Whether a parameter belongs to FSDP2, or is a flat one of FSDP1, of which each rank has a part."""
    return hasattr(tensor, "_local_tensor") or getattr(tensor, "_fsdp_flattened", False)


def is_part(tensor: Any) -> bool:
    """Whether this rank has a part of a tensor, and other ranks the rest."""
    has_shards = any(placement.is_shard() for placement in getattr(tensor, "placements", ()))
    return has_shards and tensor.device_mesh.size() > 1


def _offset(tensor: Any) -> int:
    """The position of the first element of this rank's rows."""
    rows = tensor.shape[0]
    chunk = -(-rows // tensor.device_mesh.size())
    return min(rows, chunk * tensor.device_mesh.get_local_rank()) * (tensor.numel() // max(1, rows))


def rng_state() -> str:
    """A hash of the state of torch's generator on the CPU."""
    return hash_tensor(torch.get_rng_state())


def is_zero(tensor: Tensor | None) -> bool:
    """Whether there is no gradient: none at all, or one of zeros."""
    return tensor is None or not bool(local_part(tensor).any())


def norm(sketches: Sequence[float]) -> float:
    """An estimate of the size of what was sketched."""
    return (sum(value * value for value in sketches) / max(1, len(sketches))) ** 0.5


def small_values(tensor: Any, most: int = 16) -> list[float] | None:
    """The numbers of a small tensor; None for a larger one, and for what is not a tensor of numbers."""
    if not isinstance(tensor, Tensor) or tensor.numel() > most or tensor.is_complex() or not has_values(tensor):
        return None
    return local_part(tensor).flatten().to("cpu", torch.float64).tolist()


def _projection(length: int) -> Tensor:
    found = _projections.get(length)
    if found is None:
        generator = torch.Generator().manual_seed(length)  # the script's own generator is not touched
        signs = torch.randint(0, 2, (_SKETCHES, length), generator=generator, dtype=torch.int8)
        found = _projections[length] = signs.to(torch.float64).mul_(2).sub_(1)
    return found


def to_strided(tensor: Tensor) -> Tensor:
    """The values of a tensor on the CPU, without gaps; the tensor itself if it is so."""
    tensor = tensor.detach().cpu()
    if tensor.is_sparse or tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.contiguous()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a tensor of `to_strided`, as long as the caller keeps the tensor.

    After `Tensor.numpy()` torch does not resize the storage of a tensor any more, as FSDP does with its parameters.
    """
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")


def _digest(data: Any) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()[:16]  # current CPUs have instructions for it
