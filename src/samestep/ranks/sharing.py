"""Ranks that share a device: each has a part of what is free there."""

import zlib
from collections import Counter

import torch

from samestep.ranks.link import Link


def tightest_share(link: Link, act: str, device: torch.device, free: float) -> float:
    """The least that any rank has of what is `free` on its device, which ranks may share; a common act of all."""
    told = [part.tolist() for part in link.exchange(act, [free, float(link.world.node), _mark(device)])]
    sharing = Counter((node, mark) for _, node, mark in told)
    return min(room / sharing[node, mark] for room, node, mark in told)


def _mark(device: torch.device) -> float:
    """A number for a device of a node; by its own name, as each rank may see its GPU as the first one."""
    name = getattr(torch.cuda.get_device_properties(device), "uuid", device) if device.type == "cuda" else device
    return float(zlib.crc32(str(name).encode()))
