"""Ranks that share a device: each has a part of it."""

import zlib
from collections import Counter
from dataclasses import dataclass

import torch

from samestep.ranks.link import Link


@dataclass(frozen=True)
class Share:
    """What one rank has of a device."""

    free: int
    """Bytes, of those that are free there."""
    ranks: int
    """How many ranks compute on the device, itself among them."""


def shares(link: Link, act: str, device: torch.device, free: float) -> list[Share]:
    """What each rank has of what is `free` on its device, by rank; a common act of all."""
    told = [part.tolist() for part in link.exchange(act, [free, float(link.world.node), _mark(device)])]
    sharing = Counter((node, mark) for _, node, mark in told)
    return [Share(int(room / sharing[node, mark]), sharing[node, mark]) for room, node, mark in told]


def tightest_share(link: Link, act: str, device: torch.device, free: float) -> Share:
    """What the rank has that has least; a common act of all."""
    return min(shares(link, act, device, free), key=lambda share: (share.free, share.ranks))


def _mark(device: torch.device) -> float:
    """A number for a device of a node; by its own name, as each rank may see its GPU as the first one."""
    name = getattr(torch.cuda.get_device_properties(device), "uuid", device) if device.type == "cuda" else device
    return float(zlib.crc32(str(name).encode()))
