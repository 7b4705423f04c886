"""Bytes that a layout takes of each device and of each node's host memory, part by part."""

from collections.abc import Mapping
from dataclasses import dataclass

from samestep.planner.cluster_spec import ClusterSpec
from samestep.planner.layouts import Layout, frozen_bytes
from samestep.planner.model_profile import CUDA_CONTEXT, ModelProfile

_MIB = 2**20
_CONTEXT = {"cuda": CUDA_CONTEXT, "mps": 300 * _MIB, "cpu": 300 * _MIB}  # without CUDA: a Python with torch
_CHANNELS = 400 * _MIB  # what NCCL takes to talk to peers
_HALF = ("bf16", "fp16")
_WIDE = "float32"


@dataclass(frozen=True)
class Memory:
    """What one device holds at the worst moment of a step, and what its node holds for all of its ranks."""

    weights: int
    """Weights and buffers."""
    gradients: int
    """Gradients that stand at the end of a backward pass."""
    optimizer: int
    """The optimizer's state."""
    working: int
    """Activations, what is computed on the way, the batch."""
    buckets: int
    """Gradients that stand already when activations are at their most: in DDP's buckets, or of the last micro-batch."""
    gathered: int
    """Weights gathered from other ranks for the blocks at work, and their gradients before they are cut."""
    overhead: int
    """The device's context and the channels between ranks."""
    host: int
    """Bytes of a node's host memory, over all of its ranks."""

    @property
    def total(self) -> int:
        """Bytes of one device."""
        return sum(self.parts().values())

    def parts(self) -> Mapping[str, int]:
        """The device's bytes by part, in the order of a bar."""
        names = ("weights", "gradients", "optimizer", "working", "buckets", "gathered", "overhead")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Placed:
    """Where frozen parts are that the model itself does not hold."""

    per_gpu: int
    """Bytes of each device."""
    per_node: int
    """Bytes of each node's host memory."""


def memory(
    layout: Layout,
    machines: ClusterSpec,
    model: ModelProfile,
    micro_batch: int,
    accumulates: bool,
    precision: str,
    placed: Placed | None,
) -> Memory:
    """Memory of `layout` with `micro_batch` samples at once; `accumulates`: a step has several micro-batches."""
    trains = sum(model.trainable.values())
    stays = model.weights - trains - (frozen_bytes(model) if placed else 0) + (placed.per_gpu if placed else 0)
    mine = 0 if layout.offload else _part(trains, layout.shards)
    working, held = _working(layout, model, micro_batch, accumulates, precision)
    return Memory(
        weights=stays + mine,
        gradients=_gradients(layout, model.gradients, accumulates),
        optimizer=0 if layout.offload else _part(model.optimizer_state, layout.shards),
        working=working,
        buckets=held,
        gathered=_gathered(layout, model, precision) if layout.shards > 1 else 0,
        overhead=_CONTEXT[machines.device.kind] + (_CHANNELS if _talks(layout, machines) else 0),
        host=_host(layout, machines, model, placed),
    )


def compute_bytes(trainable: Mapping[str, int], precision: str) -> int:
    """Bytes of weights in the precision they are computed in, by what they are stored in.

    >>> compute_bytes({"float32": 100, "bfloat16": 10}, "bf16")
    60
    """
    return sum(size // 2 if precision in _HALF and dtype == _WIDE else size for dtype, size in trainable.items())


def _part(size: int, shards: int) -> int:
    return -(-size // shards)


def _gradients(layout: Layout, size: int, accumulates: bool) -> int:
    """Sharded gradients of early micro-batches wait whole for the last one: until then ranks send nothing."""
    if layout.shards == 1:
        return size
    mine = 0 if layout.offload else _part(size, layout.shards)
    return mine + size if accumulates else mine


def _working(layout: Layout, model: ModelProfile, samples: int, accumulates: bool, precision: str) -> tuple[int, int]:
    """Working memory, and what gradients add to it that stand throughout: in DDP's buckets, or between micro-batches.

    Sharded weights are gathered in the precision they are computed in: the copies that autocast keeps are not made.
    """
    told = model.working_recomputed if layout.recompute and model.working_recomputed else model.working
    # offloaded gradients leave the device as they come
    working = told.kept(samples) if layout.offload else told.at(samples, layout.shards)
    throughout = layout.strategy == "ddp" or accumulates
    held = max(0, told.kept(samples) - working) if throughout else 0
    if layout.shards > 1 and precision in _HALF:
        copies = compute_bytes(model.trainable, precision)
        working = max(working - copies, min(working, told.per_sample * samples))
    return working, held


def _gathered(layout: Layout, model: ModelProfile, precision: str) -> int:
    """Two blocks at once, the one at work and the next; all of a step what is outside of blocks, or with zero2 all."""
    trains = sum(model.trainable.values())
    whole = compute_bytes(model.trainable, precision)
    narrow = whole / trains if trains else 1.0
    largest = max((part.trainable for part in model.blocks), default=0)
    outside = trains - sum(part.trainable for part in model.blocks)
    kept = whole if layout.strategy == "zero2" else int(narrow * (min(2 * largest, trains) + outside))
    uncut = 2 * max(largest, outside)  # whole gradients on their way out, and the copy that is sent
    return min(kept, whole) + min(uncut, 2 * model.gradients)


def _talks(layout: Layout, machines: ClusterSpec) -> bool:
    return layout.ranks > 1 and machines.device.kind == "cuda"


def _host(layout: Layout, machines: ClusterSpec, model: ModelProfile, placed: Placed | None) -> int:
    held = placed.per_node if placed else 0
    if not layout.offload:
        return held
    state = sum(model.trainable.values()) + model.gradients + model.optimizer_state
    return held + machines.per_node * _part(state, layout.shards)
