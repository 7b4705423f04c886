"""Placements `offload` and `disk`: blocks are copied to the device one by one, the next while this one computes."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import nn

from samestep.context import RunContext
from samestep.distributed.device import pin, unpin
from samestep.distributed.once import run_on_every_rank
from samestep.errors import TeacherError
from samestep.messages import format_bytes
from samestep.parallel.materialize import is_inside
from samestep.teacher.frozen_model import FrozenModel, blocks, move_unsaved_buffers
from samestep.teacher.model_files import ByteRange
from samestep.teacher.options import TeacherOptions
from samestep.teacher.outputs import to_device
from samestep.teacher.resident import (
    HostCopy,
    PackedTensor,
    copy_to_shared_memory,
    free_device_memory,
    pack,
    packed_bytes,
)

_SLOTS: Final = 2  # one block computes while the next is copied; a third slot would not start copies earlier
_STAGES: Final = 2  # one staging buffer is filled while the other is copied to the GPU
_OTHER_PLACEMENTS: Final = "use placement='gpu', 'cpu' or 'sharded'"


Read = Callable[[PackedTensor, torch.Tensor], None]
"""Reads the bytes of a tensor into host memory of its size."""


@dataclass(eq=False)
class Slot:
    """Memory on the device that holds one block at a time."""

    memory: torch.Tensor
    block: int | None = None  # the number of the block that is in the slot, or being copied into it
    users: int = 0  # how many calls of that block are in progress
    free: torch.cuda.Event | None = None  # recorded after the last computation that uses the slot
    ready: torch.cuda.Event | None = None  # recorded after the copy into the slot
    filling: Future[None] | None = None  # the background read that fills the slot


class BlockCopier:
    """Copies blocks into slots, on CUDA in a separate stream.

    With `host`, tensors are copied directly from host memory; the copy overlaps with computation if that memory is
    pinned. Without, a thread first reads them with `read` into one of two pinned staging buffers.
    """

    def __init__(
        self, device: torch.device, largest: int, host: Callable[[str], torch.Tensor] | None, read: Read
    ) -> None:
        self._device, self._host, self._read = device, host, read
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._worker: ThreadPoolExecutor | None = None
        self._stages: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        if host is None:
            pinned = device.type == "cuda"
            self._worker = ThreadPoolExecutor(1, "teacher-offload")
            self._stages = [(torch.empty(largest, dtype=torch.uint8, pin_memory=pinned), None) for _ in range(_STAGES)]

    def new_slot(self, size: int) -> Slot:
        """Allocate a slot on the device; copies into it wait for the current work of the device."""
        slot = Slot(torch.empty(size, dtype=torch.uint8, device=self._device))
        self.record_use(slot)
        return slot

    def start(self, slot: Slot, tensors: list[PackedTensor]) -> None:
        """Start to fill a slot; the copy waits for the last computation that uses it."""
        slot.filling = None
        if self._worker is not None:
            slot.filling = self._worker.submit(self._copy_staged, slot, tensors)
        else:
            self._copy(slot, lambda: self._copy_from_host(slot, tensors))

    def wait(self, slot: Slot) -> None:
        """Make the following work of the device wait for the copy into a slot."""
        if slot.filling is not None:
            slot.filling.result()
        if slot.ready is not None:
            torch.cuda.current_stream(self._device).wait_event(slot.ready)

    def record_use(self, slot: Slot) -> None:
        """Record that the work queued so far is the last that uses the slot's contents."""
        if self._stream is not None:
            slot.free = torch.cuda.Event()
            slot.free.record(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        """Wait for copies in progress and free the thread and its memory."""
        if self._worker is not None:
            self._worker.shutdown()
        if self._stream is not None:
            self._stream.synchronize()
        self._stages = []

    def _copy_from_host(self, slot: Slot, tensors: list[PackedTensor]) -> None:
        assert self._host is not None
        for tensor in tensors:
            tensor.view(slot.memory).copy_(self._host(tensor.name), non_blocking=True)

    def _copy_staged(self, slot: Slot, tensors: list[PackedTensor]) -> None:
        stage, copied = self._stages[0]
        if copied is not None:
            copied.synchronize()  # the GPU may still read what is about to be overwritten
        for tensor in tensors:
            self._read(tensor, stage[tensor.start : tensor.stop])
        self._stages.pop(0)
        length = packed_bytes(tensors)
        self._copy(slot, lambda: slot.memory[:length].copy_(stage[:length], non_blocking=True))
        self._stages.append((stage, slot.ready))

    def _copy(self, slot: Slot, copy: Callable[[], object]) -> None:
        if self._stream is None:
            copy()
            return
        with torch.cuda.stream(self._stream):
            if slot.free is not None:
                self._stream.wait_event(slot.free)
            copy()
            slot.ready = torch.cuda.Event()
            slot.ready.record(self._stream)


@dataclass(eq=False)
class Block:
    """A layer that is copied to the device for each call.

    Outside of its calls it has no weights at all: with weights on the meta device it would silently compute nonsense.
    """

    name: str
    module: nn.Module
    tensors: list[PackedTensor]
    slot: Slot
    weights: list[tuple[nn.Module, str, torch.Tensor]]  # for each its owner, its name there, and a view of the slot


class OffloadedTeacher:
    """A module whose blocks share two slots on the device; everything outside of the blocks stays there.

    Each block prefetches the one after it in the module. If the forward pass takes another order, it waits for a block
    that is not in its slot.
    """

    def __init__(self, context: RunContext, module: nn.Module, copier: BlockCopier, description: str) -> None:
        self._module, self._copier, self._device, self.description = module, copier, context.device, description
        self._blocks: list[Block] = []
        self.prefetch = True
        self.pinned: torch.Tensor | None = None  # host memory to unpin at the end

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Return the module's outputs, on this rank's device."""
        args, kwargs = to_device((args, kwargs), self._device)
        try:
            return to_device(self._module(*args, **kwargs), self._device)
        except AttributeError as error:
            for block in self._blocks:
                if any(error.obj is owner and error.name == leaf for owner, leaf, _ in block.weights):
                    raise TeacherError(
                        f"the teacher uses {error.name!r} of a layer in {block.name!r} without calling {block.name!r}, "
                        f"and the layer is only on the device while it is called: {_OTHER_PLACEMENTS}"
                    ) from error
            raise

    def close(self) -> None:
        """Wait for copies in progress, and free memory and threads."""
        self._copier.close()
        self._module, self._blocks = nn.Identity(), []
        if self.pinned is not None:
            unpin(self.pinned)
            self.pinned = None

    def add_block(self, block: Block) -> None:
        """Copy this block to the device for each call from now on."""
        number = len(self._blocks)
        self._blocks.append(block)
        # Before other hooks: those of the block itself may use its weights, as that of weight_norm does.
        block.module.register_forward_pre_hook(partial(self._before_call, number), prepend=True)
        block.module.register_forward_hook(partial(self._after_call, number), always_call=True)

    def _before_call(self, number: int, *_: object) -> None:
        block, slot = self._blocks[number], self._blocks[number].slot
        if slot.users and slot.block != number:
            raise TeacherError(
                f"{block.name!r} is called inside {self._blocks[slot.block or 0].name!r}, and both would use the same "
                f"memory on the device: {_OTHER_PLACEMENTS}"
            )
        # A background read that failed may have been for a call that never came: try again.
        failed = slot.filling is not None and slot.filling.done() and slot.filling.exception() is not None
        if slot.block != number or failed:
            self._copy(number)
        slot.users += 1
        for owner, leaf, view in block.weights:
            setattr(owner, leaf, view)
        try:
            self._copier.wait(slot)
        except BaseException:
            self._after_call(number)
            slot.block = None  # the copy is incomplete
            raise
        self._copy_next(number)

    def _after_call(self, number: int, *_: object) -> None:
        block = self._blocks[number]
        if block.slot.block != number:
            return  # _before_call raised before it counted the call
        block.slot.users -= 1
        if not block.slot.users:
            _detach(block.weights)
        self._copier.record_use(block.slot)
        self._copy_next(number)

    def _copy_next(self, number: int) -> None:
        following = (number + 1) % len(self._blocks)
        slot = self._blocks[following].slot
        if self.prefetch and not slot.users and slot.block != following:
            self._copy(following)

    def _copy(self, number: int) -> None:
        block = self._blocks[number]
        block.slot.block = None  # if the copy fails, the slot holds no block
        self._copier.start(block.slot, block.tensors)
        block.slot.block = number


def place_offloaded(context: RunContext, frozen: FrozenModel, options: TeacherOptions) -> OffloadedTeacher:
    """Copy blocks from the one copy of the node in host memory."""
    cuda = context.device.type == "cuda"
    if cuda or frozen.needs_conversion(options.dtype):
        copy = copy_to_shared_memory(context, frozen, options.dtype, writable=cuda)
    else:
        copy = HostCopy(frozen.weights.tensor)
    pinned = copy.memory if cuda and copy.memory is not None and pin(copy.memory) else None
    host = copy.get if pinned is not None or not cuda else None
    location = f"in host memory, once for the node ({copy.location})"
    try:
        placed = offload_blocks(
            context, frozen, options, "offload", host=host, read=partial(_read_tensor, copy.get), location=location
        )
    except BaseException:
        if pinned is not None:
            unpin(pinned)
        raise
    placed.pinned = pinned
    return placed


def place_on_disk(context: RunContext, frozen: FrozenModel, options: TeacherOptions) -> OffloadedTeacher:
    """Copy blocks from the files, through host memory for two blocks."""
    return offload_blocks(
        context, frozen, options, "disk", host=None, read=file_reader(frozen), location="in its files"
    )


def offload_blocks(
    context: RunContext,
    frozen: FrozenModel,
    options: TeacherOptions,
    placement: str,
    *,
    host: Callable[[str], torch.Tensor] | None,
    read: Read,
    location: str,
) -> OffloadedTeacher:
    """Place a teacher whose blocks are copied from `host` or with `read`, and whose other weights are on the device."""
    device, dtype = context.device, options.dtype

    def load() -> OffloadedTeacher:
        module = frozen.skeleton()
        layers = blocks(module)
        saved = {name: [each for each in frozen.saved_names() if is_inside(each, name)] for name in layers}
        stored = {name: dict.fromkeys(map(frozen.stored_name, names)) for name, names in saved.items()}
        layouts = {name: pack(frozen, dtype, names) for name, names in stored.items()}
        sizes = [packed_bytes(layout) for layout in layouts.values()]
        largest, count = max(sizes), min(_SLOTS, len(sizes))
        on_device = max(0, frozen.total_bytes(dtype) - sum(sizes)) + largest * count
        if on_device > (free := free_device_memory(device)):
            raise TeacherError(
                f"placement={placement!r} needs {format_bytes(on_device)} on {device} for two blocks and the weights "
                f"outside of blocks, and {format_bytes(free)} are free: use placement='cpu' or 'sharded', or a smaller "
                "dtype="
            )
        copier = BlockCopier(device, largest, host, read)
        description = (
            f"{placement}: {format_bytes(frozen.total_bytes(dtype))} {location}, {format_bytes(on_device)} on "
            f"{device}, {len(layers)} blocks are copied there one by one"
        )
        placed = OffloadedTeacher(context, module, copier, description)
        frozen.fill(
            module,
            lambda name: frozen.copy_tensor(name, device, dtype),
            lambda name: not any(is_inside(name, layer) for layer in layers),
        )
        move_unsaved_buffers(module, lambda name: device)
        frozen.weights.release()
        slots = [copier.new_slot(largest) for _ in range(count)]
        for number, (name, layer) in enumerate(layers.items()):
            slot, layout = slots[number % count], layouts[name]
            views = {tensor.name: tensor.view(slot.memory) for tensor in layout}
            frozen.fill(module, views.__getitem__, partial(is_inside, module=name))
            owners = [(module.get_submodule(each.rpartition(".")[0]), each.rpartition(".")[2]) for each in saved[name]]
            weights = [(owner, leaf, getattr(owner, leaf)) for owner, leaf in owners]
            _detach(weights)
            placed.add_block(Block(name, layer, layout, slot, weights))
        return placed

    return run_on_every_rank(context.comm, "placing the teacher", TeacherError, load)


def file_reader(frozen: FrozenModel) -> Read:
    """Return a function that reads a tensor from its file into host memory, converted to its dtype on the device.

    Safetensors files are read, not mapped, so that this process holds no more of them than was requested. A torch file
    has to be mapped: its pages count for this process until the system reclaims them.
    """
    buffer = torch.empty(0, dtype=torch.uint8)  # as large as the largest tensor that is converted

    def read(tensor: PackedTensor, target: torch.Tensor) -> None:
        nonlocal buffer
        source, stored = frozen.weights.byte_range(tensor.name), frozen.weights.dtype(tensor.name)
        if source is None:
            _read_tensor(frozen.weights.tensor, tensor, target)
        elif stored == tensor.dtype:
            _read_bytes(source, target)
        else:
            if buffer.numel() < source.length:
                buffer = torch.empty(source.length, dtype=torch.uint8)
            raw = buffer[: source.length]
            _read_bytes(source, raw)
            target.view(tensor.dtype).copy_(raw.view(stored))

    return read


def _read_tensor(get: Callable[[str], torch.Tensor], tensor: PackedTensor, target: torch.Tensor) -> None:
    target.view(tensor.dtype).view(tensor.shape).copy_(get(tensor.name))


def _read_bytes(source: ByteRange, target: torch.Tensor) -> None:
    view = memoryview(target.numpy())  # pyright: ignore[reportArgumentType]  # a buffer, from Python 3.12 on also by name
    with Path(source.path).open("rb", buffering=0) as file:
        done = 0
        while done < source.length:
            count = os.preadv(file.fileno(), [view[done:]], source.start + done)
            if not count:
                raise TeacherError(
                    f"{source.path} ended {source.length - done} bytes too early: it has changed since the teacher was "
                    "opened; do not change its files during the run"
                )
            done += count


def _detach(weights: list[tuple[nn.Module, str, torch.Tensor]]) -> None:
    for owner, leaf, _ in weights:
        delattr(owner, leaf)
