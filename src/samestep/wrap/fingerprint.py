"""Cheap fingerprints of tensors, by which ranks see that they hold the same bits."""

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from samestep.errors import ReplicasDiffer
from samestep.ranks.link import Link

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


def check_alike(link: Link, tensors: Mapping[str, torch.Tensor], when: str) -> None:
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
