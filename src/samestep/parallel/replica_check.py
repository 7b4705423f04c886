"""What must hold the same bits on every rank while a run trains."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from samestep.distributed.communicator import Communicator
from samestep.errors import ReplicasDiffer
from samestep.parallel.batchnorm import unsynced_batchnorms
from samestep.parallel.wrapped_model import WrappedModel

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """For each tensor the sum of its bits read as whole numbers: one pass over memory, no copy, exact.

    Sharded tensors differ between ranks by design and are left out.
    """
    whole = {name: t for name, t in tensors.items() if not isinstance(t, DTensor) and t.numel()}
    sums = {name: _bits(tensor).sum(dtype=torch.int64) for name, tensor in whole.items()}
    by_device: dict[torch.device, list[str]] = {}
    for name, value in sums.items():
        by_device.setdefault(value.device, []).append(name)
    found: dict[str, int] = {}
    for names in by_device.values():  # one transfer for each device
        found.update(zip(names, torch.stack([sums[name] for name in names]).tolist(), strict=True))
    return {name: found[name] for name in whole}


def check_replicas(link: Communicator, tensors: Mapping[str, torch.Tensor], when: str) -> None:
    """Compare one number of all ranks; only if it differs, look for the first tensor that does, and name it."""
    if link.alone:
        return
    marks = fingerprints(tensors)
    total = float(sum(value * (2 * at + 1) for at, value in enumerate(marks.values())) % (1 << 52))
    if len({float(part[0]) for part in link.exchange("comparing replicas", [total])}) == 1:
        return
    everyone = link.exchange_objects("comparing replicas in full", marks)
    name, by_rank = _first_difference(everyone)
    groups: dict[int | None, list[int]] = {}
    for rank, value in enumerate(by_rank):
        groups.setdefault(value, []).append(rank)
    told = " differ from ranks ".join(str(ranks) for ranks in groups.values())
    raise ReplicasDiffer(
        f"{when}, ranks hold different bits in {name!r}: ranks {told}. Something changed it on some ranks only: a step "
        "under a rank "
        "condition, an update outside the optimizer, or a fault of a device; the run stops, since its ranks no longer "
        "train one model"
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous()
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    return real.view(torch.uint8 if real.dtype == torch.bool else _WORDS[real.element_size()])


def _first_difference(everyone: list[dict[str, int]]) -> tuple[str, list[int | None]]:
    names = list(dict.fromkeys(name for marks in everyone for name in marks))
    for name in names:
        values = [marks.get(name) for marks in everyone]
        if len(set(values)) > 1:
            return name, values
    return "an order of tensors", [len(marks) for marks in everyone]


def replicated(models: Sequence[WrappedModel], optimizers: Sequence[Optimizer]) -> dict[str, torch.Tensor]:
    """Weights, buffers that no rank keeps for itself, and optimizer state, by name."""
    found: dict[str, torch.Tensor] = {}
    for at, model in enumerate(models):
        own = {id(b) for norm in unsynced_batchnorms(model.inner) for b in norm.buffers()}
        named = (*model.inner.named_parameters(), *model.inner.named_buffers())
        found.update({name if at == 0 else f"model {at}: {name}": t for name, t in named if id(t) not in own})
        for which, optimizer in enumerate(optimizers):
            prefix = "" if at == 0 else f"model {at}: "
            suffix = "" if which == 0 else f", optimizer {which}"
            found.update({f"{prefix}{name}{suffix}": value for name, value in _state(model, optimizer)})
    return found


def _state(model: WrappedModel, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.inner.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if torch.is_tensor(value):
                yield f"{name} ({key} of {type(optimizer).__name__})", value
