"""How a block's weights come to the device that computes: copied ahead, beside the computation."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Final

import torch


def carry(tree: Any, device: torch.device) -> Any:
    """`tree` with every tensor on `device`; containers keep their class, and what is no container rides along.

    Where all of it is there already it is `tree` itself.
    """

    def there(tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device; towards the host a copy that does not wait would be read before it has arrived."""
        return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")

    return _map(tree, there)


def with_items(tree: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping of the same class with these values, also where an attribute stands for a key; made by no constructor.

    A mapping that cannot be changed is made of them by its class.
    """
    kind: Any = type(tree)
    if kind is dict or not isinstance(tree, MutableMapping):
        return kind(values)
    made: Any = copy(tree)
    attributes: dict[Any, object] = getattr(made, "__dict__", {})
    for key, value in values.items():
        if key in attributes and attributes[key] is tree[key]:
            attributes[key] = value
        made[key] = value
    return made


def with_fields(tree: Any, values: Mapping[str, object]) -> Any:
    """A copy of an object with these attributes, though it be frozen; made by no constructor."""
    made = copy(tree)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _map(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return _map_named(tree, dict(tree.items()), function, with_items)
    if isinstance(tree, list | tuple):
        parts = [_map(value, function) for value in tree]
        if _same(parts, tree):
            return tree
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if is_dataclass(tree) and not isinstance(tree, type):
        return _map_named(tree, {each.name: getattr(tree, each.name) for each in fields(tree)}, function, with_fields)
    return tree


def _map_named(
    tree: Any,
    has: dict[Any, Any],
    function: Callable[[torch.Tensor], torch.Tensor],
    make: Callable[[Any, dict[Any, Any]], Any],
) -> Any:
    values = {name: _map(value, function) for name, value in has.items()}
    return tree if _same(list(values.values()), list(has.values())) else make(tree, values)


def _same(values: Sequence[object], others: Sequence[object]) -> bool:
    return all(value is other for value, other in zip(values, others, strict=True))


_STAGES: Final = 2  # one is filled while the other is on its way to the GPU


@dataclass(frozen=True)
class Piece:
    """One tensor of a block and its place in the block's bytes."""

    name: str
    """Its name in the files."""
    shape: tuple[int, ...]
    """Its shape."""
    dtype: torch.dtype
    """What it is on the device."""
    start: int
    """The first of its bytes."""
    length: int
    """How many there are."""

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """This tensor in bytes that hold the block."""
        return memory[self.start : self.start + self.length].view(self.dtype).view(self.shape)


@dataclass(eq=False)
class Slot:
    """Memory on the device that holds one block at a time."""

    memory: torch.Tensor
    """Its bytes."""
    holder: int | None = None
    """The block that is there, or on its way."""
    users: int = 0
    """How many calls of that block are under way."""
    free: torch.cuda.Event | None = None
    """When the last computation with it is over."""
    ready: torch.cuda.Event | None = None
    """When the copy into it is over."""
    coming: Future[None] | None = field(default=None, repr=False)
    """What fills it in the background."""

    @property
    def spoilt(self) -> bool:
        """Whether what was to fill it has failed: read ahead for a call that never came, it is worth another try."""
        return self.coming is not None and self.coming.done() and self.coming.exception() is not None


Read = Callable[[Piece, torch.Tensor], None]
"""Puts the bytes of a piece into host memory of its size."""


class Feed:
    """Fills slots, in a stream of its own on CUDA.

    With `host` tensors are copied straight from there, which overlaps where that memory is pinned. With `read` a thread
    brings them into pinned memory of two blocks' size first.
    """

    def __init__(self, device: torch.device, most: int, host: Callable[[str], torch.Tensor] | None, read: Read) -> None:
        self._device, self._host, self._read = device, host, read
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._worker: ThreadPoolExecutor | None = None
        self._stages: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        if host is None:
            pin = device.type == "cuda"
            self._worker = ThreadPoolExecutor(1, "teacher-feed")
            self._stages = [(torch.empty(most, dtype=torch.uint8, pin_memory=pin), None) for _ in range(_STAGES)]

    def new_slot(self, size: int) -> Slot:
        """Memory on the device, which the feed's stream may write once what the device does now is over."""
        slot = Slot(torch.empty(size, dtype=torch.uint8, device=self._device))
        self.used(slot)
        return slot

    def send(self, slot: Slot, pieces: list[Piece]) -> None:
        """Begin to fill a slot; the copy waits for the last computation with what is there."""
        slot.coming = None
        if self._worker is not None:
            slot.coming = self._worker.submit(self._send_staged, slot, pieces)
        elif self._stream is None:
            self._copy(slot, pieces)
        else:
            with torch.cuda.stream(self._stream):
                self._copy_when_free(self._stream, slot, lambda: self._copy(slot, pieces))

    def await_ready(self, slot: Slot) -> None:
        """Let what the device computes from now on wait for the copy into a slot."""
        if slot.coming is not None:
            slot.coming.result()
        if slot.ready is not None:
            torch.cuda.current_stream(self._device).wait_event(slot.ready)

    def used(self, slot: Slot) -> None:
        """Note that what was begun until now is the last that needs the slot's contents."""
        if self._stream is not None:
            slot.free = torch.cuda.Event()
            slot.free.record(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        """Wait for what is under way and give the thread and its memory back."""
        if self._worker is not None:
            self._worker.shutdown()
        if self._stream is not None:
            self._stream.synchronize()
        self._stages = []

    def _copy(self, slot: Slot, pieces: list[Piece]) -> None:
        assert self._host is not None
        for piece in pieces:
            piece.view(slot.memory).copy_(self._host(piece.name), non_blocking=True)

    def _send_staged(self, slot: Slot, pieces: list[Piece]) -> None:
        stage, sent = self._stages[0]
        if sent is not None:
            sent.synchronize()  # the GPU may still be reading what is to be overwritten
        for piece in pieces:
            self._read(piece, stage[piece.start : piece.start + piece.length])
        self._stages.pop(0)
        length = max((piece.start + piece.length for piece in pieces), default=0)
        whole = slot.memory[:length]
        if self._stream is None:
            whole.copy_(stage[:length])
            self._stages.append((stage, None))
            return
        with torch.cuda.stream(self._stream):
            self._copy_when_free(self._stream, slot, lambda: whole.copy_(stage[:length], non_blocking=True))
        self._stages.append((stage, slot.ready))

    def _copy_when_free(self, stream: torch.cuda.Stream, slot: Slot, copy: Callable[[], object]) -> None:
        if slot.free is not None:
            stream.wait_event(slot.free)
        copy()
        slot.ready = torch.cuda.Event()
        slot.ready.record(stream)
