"""Placements `offload` and `disk`: blocks come to the device one by one, the next while this one computes."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import nn

from samestep.distributed.once import run_on_every_rank
from samestep.errors import TeacherError
from samestep.messages import format_bytes
from samestep.teacher.frozen_model import FrozenModel, blocks, inside, settle
from samestep.teacher.options import Ground, PlacedTeacher, TeacherOptions
from samestep.teacher.single_device import Copy, aligned, device_room, map_files, share_memory
from samestep.teacher.transfer import Feed, Piece, Read, Slot, carry
from samestep.teacher.weight_files import Span

_PORTABLE = 1  # for every GPU that this process uses


def pin(memory: torch.Tensor) -> bool:
    """Let GPUs read host memory without help of the CPU; False where the driver refuses, and copies need a detour.

    Works for memory that is shared and writable; the pages of one copy can be pinned by every rank of a node.
    """
    runtime = torch.cuda.cudart()
    if runtime is not None and int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)) == 0:
        return True
    with suppress(RuntimeError):  # CUDA tells of the refusal once more, to whoever starts the next kernel: this one
        torch.zeros(1, device="cuda")
    return False


def unpin(memory: torch.Tensor) -> None:
    """End what `pin` began; call it before the memory goes."""
    if (runtime := torch.cuda.cudart()) is not None:
        runtime.cudaHostUnregister(memory.data_ptr())


def open_reader(frozen: FrozenModel) -> Read:
    """A function that reads one piece into host memory, turned into the piece's dtype.

    Files of safetensors are read, so that no more of them is in this process's memory than what was asked for. A torch
    file does not tell where a tensor lies and is mapped: its pages count for this process until the system wants them.
    """
    scratch: dict[int, torch.Tensor] = {}  # one, as large as the largest tensor that is turned into another dtype

    def read(piece: Piece, into: torch.Tensor) -> None:
        """Read one piece, by way of another place where it must change."""
        span, has = frozen.weights.span(piece.name), frozen.weights.dtype(piece.name)
        if span is None:
            copy_mapped(frozen.weights.tensor, piece, into)
        elif has == piece.dtype:
            _read_into(span, into)
        else:
            if scratch.get(0) is None or scratch[0].numel() < span.length:
                scratch[0] = torch.empty(span.length, dtype=torch.uint8)
            raw = scratch[0][: span.length]
            _read_into(span, raw)
            into.view(piece.dtype).copy_(raw.view(has))

    return read


def copy_mapped(get: Callable[[str], torch.Tensor], piece: Piece, into: torch.Tensor) -> None:
    """Copy a piece from a tensor in host memory."""
    into.view(piece.dtype).view(piece.shape).copy_(get(piece.name))


def _read_into(span: Span, into: torch.Tensor) -> None:
    target = memoryview(into.numpy())  # pyright: ignore[reportArgumentType]  # a buffer, from Python 3.12 on also by name
    with Path(span.path).open("rb", buffering=0) as file:
        got = 0
        while got < span.length:
            count = os.preadv(file.fileno(), [target[got:]], span.start + got)
            if not count:
                raise TeacherError(
                    f"{span.path} ended {span.length - got} bytes too early: it has changed since the teacher was "
                    "made; keep its files as they are while the run lasts"
                )
            got += count


_SLOTS: Final = 2  # one computes, one is filled: a third would not make the copies any earlier


@dataclass(eq=False)
class Block:
    """A layer that streams."""

    name: str
    """Its name in the teacher."""
    module: nn.Module
    """The layer; outside of its calls it has no weights, so that no one can compute with what is not there."""
    pieces: list[Piece]
    """What it is made of."""
    slot: Slot
    """Where it comes to lie."""
    weights: list[tuple[nn.Module, str, torch.Tensor]]
    """For each of its weights the module that owns it, its name there, and a view of the slot."""

    def wake(self) -> None:
        """Let the layer see its weights."""
        for owner, leaf, view in self.weights:
            setattr(owner, leaf, view)

    def rest(self) -> None:
        """Take them away again: on the meta device they would be silently computed with, as None left out."""
        for owner, leaf, _ in self.weights:
            delattr(owner, leaf)

    def lacks(self, error: AttributeError) -> bool:
        """Whether an error tells that a weight of this block was asked for while the block was not called."""
        return any(error.obj is owner and error.name == leaf for owner, leaf, _ in self.weights)


class Streamed:
    """A module whose blocks share two slots on the device; what is no block stays there.

    The order of the blocks is learnt by nothing: each asks for the one after it in the module. Where the forward pass
    goes another way, a block that is not there is waited for.
    """

    def __init__(self, ground: Ground, module: nn.Module, feed: Feed, told: str, ahead: bool = True) -> None:
        self._module, self._feed, self._home, self._told = module, feed, ground.device, told
        self._ahead = ahead
        self._blocks: list[Block] = []
        self._after: list[Callable[[], None]] = []

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The module's outputs, on this rank's device."""
        args, kwargs = carry((args, kwargs), self._home)
        try:
            return carry(self._module(*args, **kwargs), self._home)
        except AttributeError as error:
            for block in self._blocks:
                if block.lacks(error):
                    raise TeacherError(
                        f"the teacher uses {error.name!r} of a layer in {block.name!r} without calling {block.name!r}, "
                        "and it streams in when it is called: use placement='gpu', 'cpu' or 'sharded'"
                    ) from error
            raise

    def describe(self) -> str:
        """Where the weights lie."""
        return self._told

    def close(self) -> None:
        """Wait for copies that are under way, and give memory and threads back."""
        self._feed.close()
        self._module, self._blocks = nn.Identity(), []
        for act in self._after:
            act()
        self._after = []

    def at_close(self, act: Callable[[], None]) -> None:
        """Let `act` follow when nothing is read from the host any more."""
        self._after.append(act)

    def take(self, block: Block) -> None:
        """Let a block stream from now on."""
        number = len(self._blocks)
        self._blocks.append(block)
        # first of all hooks: those of a block itself may look at its weights, as that of weight_norm does
        block.module.register_forward_pre_hook(partial(self._enter, number), prepend=True)
        block.module.register_forward_hook(partial(self._leave, number), always_call=True)

    def _enter(self, number: int, *_: object) -> None:
        block = self._blocks[number]
        if block.slot.users and block.slot.holder != number:
            raise TeacherError(
                f"{block.name!r} is called inside {self._blocks[block.slot.holder or 0].name!r}, and both would stream "
                "through the same memory: use placement='gpu', 'cpu' or 'sharded'"
            )
        if block.slot.holder != number or block.slot.spoilt:
            self._send(number)
        block.slot.users += 1
        block.wake()
        try:
            self._feed.await_ready(block.slot)
        except BaseException:
            self._leave(number)
            block.slot.holder = None  # what is there is not whole
            raise
        self._send_next(number)

    def _leave(self, number: int, *_: object) -> None:
        block = self._blocks[number]
        if block.slot.holder != number:
            return  # its call ended before it began
        block.slot.users -= 1
        if not block.slot.users:
            block.rest()
        self._feed.used(block.slot)
        self._send_next(number)

    def _send_next(self, number: int) -> None:
        following = (number + 1) % len(self._blocks)
        slot = self._blocks[following].slot
        if self._ahead and not slot.users and slot.holder != following:
            self._send(following)

    def _send(self, number: int) -> None:
        block = self._blocks[number]
        block.slot.holder = None  # where sending fails, nobody's weights are there
        self._feed.send(block.slot, block.pieces)
        block.slot.holder = number


def place_offloaded(ground: Ground, frozen: FrozenModel, wish: TeacherOptions) -> PlacedTeacher:
    """Blocks stream from the node's one copy in host memory."""
    cuda = ground.device.type == "cuda"
    if cuda or frozen.converts(wish.dtype):
        copy = share_memory(ground, frozen, wish.dtype, writable=cuda)
    else:
        copy = map_files(frozen)
    pinned = copy.memory if cuda and copy.memory is not None and pin(copy.memory) else None
    return stream(ground, frozen, wish, _host_source(copy, pinned is not None or not cuda), "offload", pinned)


def place_on_disk(ground: Ground, frozen: FrozenModel, wish: TeacherOptions) -> PlacedTeacher:
    """Blocks stream from the files, through host memory of two blocks' size."""
    return stream(ground, frozen, wish, Source(None, open_reader(frozen), "from its files"), "disk", None)


@dataclass(frozen=True)
class Source:
    """Where blocks stream from."""

    host: Callable[[str], torch.Tensor] | None
    """Host tensors that a device may copy from without help; None: `read` brings them into memory from where it can."""
    read: Read
    """Brings the bytes of a piece into host memory."""
    told: str
    """In words."""


def stream(
    ground: Ground,
    frozen: FrozenModel,
    wish: TeacherOptions,
    source: Source,
    name: str,
    pinned: torch.Tensor | None,
    ahead: bool = True,
) -> Streamed:
    """A teacher whose blocks stream from `source`, and whose other weights lie on the device."""

    def load() -> Streamed:
        """Fill what stays, and let each block stream."""
        module = frozen.skeleton()
        parts = blocks(module)
        laid = {part: _lay_out(frozen, wish, part) for part in parts}
        sizes = {part: _end(pieces) for part, pieces in laid.items()}
        rest = frozen.bytes_in(wish.dtype) - sum(sizes.values())
        slots = sorted(sizes.values(), reverse=True)[:_SLOTS]
        _refuse_too_large(ground, max(0, rest) + max(slots) * len(slots), name)
        feed = Feed(ground.device, max(slots), source.host, source.read)
        where = f"{format_bytes(max(0, rest) + max(slots) * len(slots))} on {ground.device}"
        told = f"{name}: {format_bytes(frozen.bytes_in(wish.dtype))} {source.told}, {where}, {len(parts)} blocks stream"
        placed = Streamed(ground, module, feed, told, ahead)
        _fill(ground, frozen, wish, module, lambda tensor: not any(inside(tensor, part) for part in parts))
        ring = [feed.new_slot(max(slots)) for _ in slots]
        for number, (part, layer) in enumerate(parts.items()):
            slot = ring[number % len(ring)]
            placed.take(Block(part, layer, laid[part], slot, _weights(frozen, module, part, laid[part], slot)))
        return placed

    try:
        placed = run_on_every_rank(ground.link, "placing the teacher", load)
    except BaseException:
        if pinned is not None:
            unpin(pinned)
        raise
    if pinned is not None:
        placed.at_close(partial(unpin, pinned))
    return placed


def _host_source(copy: Copy, direct: bool) -> Source:
    read = partial(copy_mapped, copy.get)
    return Source(copy.get if direct else None, read, f"in host memory, once for the node ({copy.told})")


def _lay_out(frozen: FrozenModel, wish: TeacherOptions, part: str) -> list[Piece]:
    pieces: list[Piece] = []
    at = 0
    for name in dict.fromkeys(frozen.source(tensor) for tensor in frozen.saved() if inside(tensor, part)):
        length = frozen.bytes_of(name, wish.dtype)
        pieces.append(Piece(name, frozen.weights.shape(name), frozen.dtype(name, wish.dtype), at, length))
        at += aligned(length)
    return pieces


def _weights(
    frozen: FrozenModel, module: nn.Module, part: str, pieces: list[Piece], slot: Slot
) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """The weights of a block as views of its slot, taken out of the module that owns them."""
    views = {piece.name: piece.view(slot.memory) for piece in pieces}
    frozen.fill(module, views.__getitem__, partial(inside, module=part))
    found: list[tuple[nn.Module, str, torch.Tensor]] = []
    for name in frozen.saved():
        if inside(name, part):
            owner, leaf = module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            found.append((owner, leaf, getattr(owner, leaf)))
    for owner, leaf, _ in found:
        delattr(owner, leaf)
    return found


def _end(pieces: list[Piece]) -> int:
    return max((piece.start + piece.length for piece in pieces), default=0)


def _fill(
    ground: Ground, frozen: FrozenModel, wish: TeacherOptions, module: nn.Module, which: Callable[[str], bool]
) -> None:
    def get(name: str) -> torch.Tensor:
        """A copy on the device."""
        has = frozen.weights.tensor(name)
        return has.to(ground.device, frozen.dtype(name, wish.dtype), copy=True)

    frozen.fill(module, get, which)
    settle(module, lambda name: ground.device)
    frozen.weights.release()


def _refuse_too_large(ground: Ground, size: int, name: str) -> None:
    room = device_room(ground.device)
    if size > room:
        raise TeacherError(
            f"placement={name!r} needs {format_bytes(size)} on {ground.device} for two blocks and what is no block, and "
            f"{format_bytes(room)} are free: use placement='cpu' or 'sharded', or a smaller dtype="
        )
