"""The replica check: whether all ranks hold the same bits in weights, buffers and optimizer state."""

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.optim.optimizer import Optimizer

from samestep.distributed.communicator import Communicator
from samestep.errors import ReplicasDiffer
from samestep.parallel.batchnorm import unsynced_batchnorms
from samestep.parallel.fsdp import local_tensor
from samestep.parallel.wrapped_model import WrappedModel
from samestep.torch_private import is_dtensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaCheck:
    """The replica checks of a run: every so many steps, before each checkpoint, and when training ends."""

    def __init__(self, comm: Communicator, models: Sequence[WrappedModel], every: int) -> None:
        self.optimizers: list[Optimizer] = []  # those that have stepped, in the order of their first step
        self._comm, self._models, self._every = comm, models, every
        self._checked = 0  # steps of this process at the last check

    def after_step(self, number: int, steps: int) -> None:
        """Check after every `replica_check_every`-th step."""
        if self._every and (number + 1) % self._every == 0:
            self.check(f"after step {number}", steps)

    def check(self, when: str, steps: int) -> None:
        """Check, unless checks are turned off or there was no step since the last one; a collective.

        `steps` are the steps of this process, the same number on all ranks.
        """
        if not self._every or steps == self._checked or self._comm.alone:
            return
        check_replicas(self._comm, replicated_tensors(self._models, self.optimizers), when)
        self._checked = steps


@dataclass(frozen=True)
class Fingerprint:
    """What ranks compare of a tensor: its layout, and the sum of its bits if other ranks hold the same part of it."""

    layout: int  # a checksum of its name, shape, dtype and of how it is sharded
    part: str  # the part that this rank holds; empty for a tensor in full
    bits: int  # 0 if no other rank holds this part


def check_replicas(comm: Communicator, tensors: Mapping[str, torch.Tensor], when: str) -> None:
    """Compare a few numbers per rank; only if they differ, find and name the first tensor that differs."""
    if comm.alone:
        return
    found = fingerprints(tensors)
    parts = zlib.crc32(repr(sorted({each.part for each in found.values()})).encode())
    layouts = _total(each.layout for each in found.values())
    full = _total(each.bits for each in found.values() if not each.part)
    sharded = _total(each.bits for each in found.values() if each.part)
    by_rank = [part.tolist() for part in comm.exchange("comparing replicas", [layouts, full, parts, sharded])]
    same_in_full = len({(layout, bits) for layout, bits, _, _ in by_rank}) == 1
    held = {(held_parts, bits) for _, _, held_parts, bits in by_rank}
    same_in_parts = len(held) == len({held_parts for held_parts, _ in held})  # the same bits for the same parts
    if same_in_full and same_in_parts:
        return
    name, groups = _first_difference(comm.exchange_objects("comparing replicas in full", found))
    ranks = " differ from ranks ".join(map(str, groups))
    raise ReplicasDiffer(
        f"{when}, ranks hold different bits in {name!r}: ranks {ranks}. Something changed it on some ranks only: an "
        "optimizer step under a rank condition, a decision by one rank's step.loss (decide by run.mean(step.loss)), a "
        "buffer computed from this rank's rows (average it with run.all_reduce), an update outside the optimizer, or a "
        "hardware fault. samestep stops the run, since its ranks no longer train the same model"
    )


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, Fingerprint]:
    """For each tensor the sum of its bits read as integers: one pass over memory, no copy, exact.

    The values of a tensor that is sharded over all ranks differ between them: only its layout is compared.
    """
    parts = {name: _part_of(tensor) for name, tensor in tensors.items()}
    compared = {name: local_tensor(tensor) for name, tensor in tensors.items() if parts[name] is not None}
    sums = {name: _as_integers(t).sum(dtype=torch.int64) for name, t in compared.items() if t.numel()}
    by_device: dict[torch.device, list[str]] = {}
    for name, value in sums.items():
        by_device.setdefault(value.device, []).append(name)
    values: dict[str, int] = {}
    for names in by_device.values():  # one transfer per device
        values.update(zip(names, torch.stack([sums[name] for name in names]).tolist(), strict=True))
    return {
        name: Fingerprint(_layout_of(name, tensor), parts[name] or "", values.get(name, 0))
        for name, tensor in tensors.items()
    }


def _part_of(tensor: torch.Tensor) -> str | None:
    """The part of a sharded tensor that this rank holds; empty if it holds all, None if no other rank holds it too."""
    if not is_dtensor(tensor):
        return ""
    mesh, placements = tensor.device_mesh, tensor.placements
    copies = math.prod(size for size, placed in zip(mesh.shape, placements, strict=True) if placed.is_replicate())
    position = mesh.get_coordinate() or ()
    part = [str(i) for i, placed in zip(position, placements, strict=True) if not placed.is_replicate()]
    return ", ".join(part) if copies > 1 else None


def _layout_of(name: str, tensor: torch.Tensor) -> int:
    sharded = (tensor.placements, tuple(tensor.device_mesh.shape)) if is_dtensor(tensor) else None
    return zlib.crc32(repr((name, tuple(tensor.shape), tensor.dtype, sharded)).encode())


def _total(values: Iterable[int]) -> float:
    """One number for values in an order, exact in float64."""
    return float(sum(value * (2 * index + 1) for index, value in enumerate(values)) % (1 << 52))


def replicated_tensors(models: Sequence[WrappedModel], optimizers: Sequence[Optimizer]) -> dict[str, torch.Tensor]:
    """Weights, buffers and optimizer state that must be equal on all ranks, by name."""
    found: dict[str, torch.Tensor] = {}
    for index, model in enumerate(models):
        prefix = "" if index == 0 else f"model {index}: "
        per_rank = {id(b) for norm in unsynced_batchnorms(model.inner) for b in norm.buffers()}
        named = (*model.inner.named_parameters(), *model.inner.named_buffers())
        found.update({f"{prefix}{name}": t for name, t in named if id(t) not in per_rank})
        for which, optimizer in enumerate(optimizers):
            suffix = "" if which == 0 else f", optimizer {which}"
            found.update({f"{prefix}{name}{suffix}": value for name, value in _optimizer_state(model, optimizer)})
    return found


def _optimizer_state(model: WrappedModel, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.inner.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if torch.is_tensor(value):
                yield f"{name} ({key} of {type(optimizer).__name__})", value


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous()
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    return real.view(torch.uint8 if real.dtype == torch.bool else _INTEGERS[real.element_size()])


def _first_difference(by_rank: list[dict[str, Fingerprint]]) -> tuple[str, list[list[int]]]:
    """The first tensor that differs, and the ranks that agree on it."""
    for name in dict.fromkeys(name for found in by_rank for name in found):
        layouts: dict[int | None, list[int]] = {}
        bits: dict[str, dict[int, list[int]]] = {}
        for rank, found in enumerate(by_rank):
            each = found.get(name)
            layouts.setdefault(None if each is None else each.layout, []).append(rank)
            if each is not None:
                bits.setdefault(each.part, {}).setdefault(each.bits, []).append(rank)
        for groups in (layouts, *bits.values()):
            if len(groups) > 1:
                return name, list(groups.values())
    return "the order of tensors", [[rank] for rank in range(len(by_rank))]
