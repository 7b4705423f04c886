"""The one copy of a teacher that all ranks of a node share in host memory."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import torch

from samestep.errors import TeacherError
from samestep.facts.cgroup import read_limits
from samestep.ranks.link import Link
from samestep.teacher.frozen import Frozen
from samestep.teacher.ground import Ground
from samestep.teacher.together import together
from samestep.units import bytes_text

_ALIGNMENT: Final = 64  # what vector instructions and DMA like
_BREATH: Final = 1 << 30  # bytes of source that are converted before their mapping is given back
_COPYING: Final = "copying the teacher into shared memory"


@dataclass(frozen=True)
class Copy:
    """Tensors in host memory that all ranks of a node see."""

    get: Callable[[str], torch.Tensor]
    """Gives a tensor by its name in the files."""
    memory: torch.Tensor | None
    """All of it as bytes, where it lies in memory of its own; None where the files themselves are mapped."""
    told: str
    """Where it lies, in words."""


def map_files(frozen: Frozen) -> Copy:
    """The files themselves, mapped: the system keeps one copy of their pages for all processes."""
    return Copy(frozen.weights.tensor, None, "mapped from its files")


def share_memory(ground: Ground, frozen: Frozen, dtype: torch.dtype | None, writable: bool = False) -> Copy:
    """A copy in shared memory that the ranks of a node fill, each its part, and all map; a common act of all ranks.

    The memory has no name in any folder, so that nothing is left of it when the last process ends, however it ends.
    With `writable` it can be pinned for a GPU; without, what a rank writes by mistake stays its own.
    """
    layout, total = _lay_out(frozen, dtype)
    link, keep = ground.link, list[Callable[[], None]]()  # what the first rank of a node holds until all have mapped

    def reserve() -> str:
        """Make the memory; where others find it."""
        _refuse_too_large(total)
        path, close = _make_room(total)
        keep.append(close)
        return path

    try:
        path = str(ground.once(reserve, per="node"))
        mine = _part(layout, total, *_turn(link))
        together(link, _COPYING, _fill, frozen, dtype, mine, path, total)
        memory = together(link, "mapping the shared teacher", _map, path, total, writable)
    finally:
        for close in keep:
            close()
    frozen.weights.release()

    def get(name: str) -> torch.Tensor:
        """A view of the shared memory."""
        return _view(memory, layout[name], frozen.weights.shape(name), frozen.dtype(name, dtype))

    return Copy(get, memory, "in shared memory")


def aligned(length: int) -> int:
    """Bytes that a tensor takes among others, so that the next begins where it should."""
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def host_room() -> int:
    """Bytes of host memory that can still be taken, by this machine's count and by its control group's."""
    left = read_limits().memory_left
    free = int(psutil.virtual_memory().available)
    return free if left is None else min(free, left)


def _lay_out(frozen: Frozen, dtype: torch.dtype | None) -> tuple[dict[str, int], int]:
    at, starts = 0, dict[str, int]()
    for name in frozen.names():
        starts[name] = at
        at += aligned(frozen.bytes_of(name, dtype))
    return starts, max(at, 1)


def _turn(link: Link) -> tuple[int, int]:
    """Which this rank is of how many on its node; a common act of all ranks.

    Its local rank would not do: that is 0 on each of them where every rank is given a GPU of its own by hand.
    """
    nodes = [int(part[0]) for part in link.exchange(_COPYING, [float(link.world.node)])]
    return nodes[: link.world.rank].count(link.world.node), nodes.count(link.world.node)


def _part(layout: dict[str, int], total: int, rank: int, ranks: int) -> dict[str, int]:
    """The tensors that one of so many ranks copies: those that begin in its stretch of the memory.

    >>> [_part({"a": 0, "b": 64, "c": 128}, 192, rank, 2) for rank in (0, 1)]
    [{'a': 0, 'b': 64}, {'c': 128}]
    """
    return {name: start for name, start in layout.items() if start * ranks // total == rank}


def _refuse_too_large(total: int) -> None:
    room = host_room()
    if total > room:
        raise TeacherError(
            f"the teacher takes {bytes_text(total)} in the memory of each node and {bytes_text(room)} are free: use "
            "placement='disk' or 'sharded', a smaller dtype=, or a node with more memory"
        )


def _make_room(total: int) -> tuple[str, Callable[[], None]]:
    """Memory under a path that the other ranks of this node can open, and what takes the path away again."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("samestep-teacher")
        try:
            os.posix_fallocate(number, 0, total)  # all of it now: a page that is missing later would kill the process
        except BaseException:
            os.close(number)
            raise
        return f"/proc/{os.getpid()}/fd/{number}", lambda: os.close(number)
    number, path = tempfile.mkstemp(prefix="samestep-teacher-")
    os.truncate(number, total)
    os.close(number)
    return path, lambda: Path(path).unlink()


def _fill(frozen: Frozen, dtype: torch.dtype | None, layout: dict[str, int], path: str, total: int) -> None:
    memory, since = _map(path, total, True), 0
    for name, start in layout.items():
        source = frozen.weights.tensor(name)
        _view(memory, start, tuple(source.shape), frozen.dtype(name, dtype)).copy_(source)
        since += source.nbytes
        del source
        if since > _BREATH:
            frozen.weights.release()
            since = 0


def _map(path: str, total: int, writable: bool) -> torch.Tensor:
    storage = torch.UntypedStorage.from_file(path, writable, total)
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (total,))  # pyright: ignore[reportCallIssue, reportArgumentType]  # the stub knows no storage


def _view(memory: torch.Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    length = torch.Size(shape).numel() * dtype.itemsize
    return memory[start : start + length].view(dtype).view(shape)
