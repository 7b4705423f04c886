"""Which placement a teacher gets where the user names none."""

from dataclasses import dataclass

import torch

from samestep.teacher.frozen import Frozen
from samestep.teacher.ground import Ground, Wish
from samestep.teacher.shared import host_room
from samestep.teacher.whole import device_room
from samestep.units import bytes_text

_SHARE = 0.5  # of a GPU's free memory: what trains is to come there as well


@dataclass(frozen=True)
class Choice:
    """A placement and why."""

    placement: str
    """Its name."""
    reason: str
    """Why, in words for a person."""


def choose_placement(ground: Ground, frozen: Frozen, wish: Wish) -> Choice:
    """The fastest placement that fits the tightest rank; all ranks come to the same."""
    size = frozen.bytes_in(wish.dtype)
    rooms = ground.link.exchange("choosing the teacher's placement", _rooms(ground))
    device, host = int(min(room[0] for room in rooms)), int(min(room[1] for room in rooms))
    told = f"the teacher has {bytes_text(size)}"
    if ground.device.type != "cuda":
        return Choice("cpu", f"{told} and the ranks compute on the CPU: one copy a node will do")
    if size <= _SHARE * device:
        return Choice("gpu", f"{told} and the tightest GPU has {bytes_text(device)} free for each rank")
    if ground.link.world.size > 1 and size / ground.link.world.size <= _SHARE * device:
        return Choice("sharded", f"{told}, too much for one GPU with {bytes_text(device)} free: each rank holds a part")
    if size <= host:
        return Choice("offload", f"{told}, too much for the GPUs, and the node has {bytes_text(host)} of memory free")
    return Choice("disk", f"{told}, more than the GPUs and the {bytes_text(host)} of free memory of a node hold")


def _rooms(ground: Ground) -> list[float]:
    local, seats = ground.link.world.local_size, max(1, torch.cuda.device_count())
    return [device_room(ground.device) / -(-local // seats), float(host_room())]
