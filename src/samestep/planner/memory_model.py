"""Estimate the memory of a layout, component by component: on each device and in each node's host memory."""

from collections.abc import Mapping
from dataclasses import dataclass

from samestep.planner.cluster_spec import ClusterSpec
from samestep.planner.layouts import Layout
from samestep.planner.model_profile import CUDA_CONTEXT, ModelProfile
from samestep.planner.teacher_costs import Placement

_MIB = 2**20
_CONTEXT = {"cuda": CUDA_CONTEXT, "mps": 300 * _MIB, "cpu": 300 * _MIB}  # without CUDA: a Python process with torch
_NCCL_BUFFERS = 400 * _MIB
_COMPONENTS = ("weights", "gradients", "optimizer", "activations", "buckets", "gathered", "overhead")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device at the peak of a step, and bytes of host memory per node."""

    weights: int  # weights and buffers
    gradients: int  # gradients at the end of a backward pass
    optimizer: int  # optimizer state
    activations: int  # activations, temporaries and the batch
    buckets: int  # gradients that exist at the peak of the activations: DDP's buckets, or from earlier micro-batches
    gathered: int  # weights gathered from other ranks for the current blocks, and their gradients before reduce-scatter
    overhead: int  # context of the device and buffers of NCCL
    host: int  # bytes of host memory per node, for all of its ranks
    wrap: int  # bytes on one device at the peak of run.wrap, without overhead; not a part of the total

    @property
    def total(self) -> int:
        """Bytes on one device."""
        return sum(self.components().values())

    def components(self) -> Mapping[str, int]:
        """Bytes on one device by component."""
        return {name: getattr(self, name) for name in _COMPONENTS}


def estimate_memory(
    layout: Layout,
    cluster: ClusterSpec,
    model: ModelProfile,
    micro_batch: int,
    *,
    accumulates: bool,
    precision: str,
    teacher: Placement | None = None,
) -> MemoryEstimate:
    """Memory of `layout` with `micro_batch` samples per forward pass.

    `accumulates`: a step has several micro-batches. `teacher`: cost of the frozen parts if they are placed outside of
    the model.
    """
    trainable = sum(model.trainable.values())
    not_trained = model.weights - trainable
    if teacher is not None:
        not_trained += teacher.per_gpu - model.frozen_part_bytes
    activations, buckets = _activations(layout, model, micro_batch, accumulates, precision)
    uses_nccl = layout.ranks > 1 and cluster.device.kind == "cuda"
    offloaded = trainable + model.gradients + model.optimizer_state if layout.cpu_offload else 0
    return MemoryEstimate(
        weights=not_trained + (0 if layout.cpu_offload else _shard(trainable, layout.shards)),
        gradients=_gradients(layout, model.gradients, accumulates),
        optimizer=0 if layout.cpu_offload else _shard(model.optimizer_state, layout.shards),
        activations=activations,
        buckets=buckets,
        gathered=_gathered(layout, model, precision) if layout.shards > 1 else 0,
        overhead=_CONTEXT[cluster.device.kind] + (_NCCL_BUFFERS if uses_nccl else 0),
        host=cluster.devices_per_node * _shard(offloaded, layout.shards) + (teacher.per_node if teacher else 0),
        wrap=not_trained + _wrapped(layout, model),
    )


def _wrapped(layout: Layout, model: ModelProfile) -> int:
    """The shards of all blocks so far and the next block in full, in the order in which run.wrap shards them.

    Offloaded shards leave the device one after the other: at most those of one block are there.
    """
    trainable = sum(model.trainable.values())
    if layout.shards == 1:
        return trainable
    blocks = [part.trainable for part in model.blocks]
    peak = shards = 0
    for size in (*blocks, trainable - sum(blocks)):
        shards = _shard(size, layout.shards) + (0 if layout.cpu_offload else shards)
        peak = max(peak, shards + size)
    return peak


def _shard(size: int, shards: int) -> int:
    return -(-size // shards)


def _gradients(layout: Layout, size: int, accumulates: bool) -> int:
    """With accumulation, unsharded gradients stay until the last micro-batch, since ranks reduce only then."""
    if layout.shards == 1:
        return size
    shard = 0 if layout.cpu_offload else _shard(size, layout.shards)
    return shard + size if accumulates else shard


def _activations(
    layout: Layout, model: ModelProfile, samples: int, accumulates: bool, precision: str
) -> tuple[int, int]:
    """Activation memory, and the memory that gradients add if they exist throughout the step.

    Sharded weights are gathered in the precision of the computation, so autocast does not make its own copies.
    """
    peak = (layout.activation_checkpointing and model.checkpointed_activations) or model.activations
    # offloaded gradients leave the device as soon as they are computed
    activations = peak.at_with_all_gradients(samples) if layout.cpu_offload else peak.at(samples, layout.shards)
    persistent_gradients = layout.strategy == "ddp" or accumulates
    buckets = max(0, peak.at_with_all_gradients(samples) - activations) if persistent_gradients else 0
    if layout.shards > 1 and precision in ("bf16", "fp16"):
        activations = max(activations - model.compute_bytes(precision), min(activations, peak.per_sample * samples))
    return activations, buckets


def _gathered(layout: Layout, model: ModelProfile, precision: str) -> int:
    """The current and the next block, and all parameters outside of blocks; with zero2 all parameters."""
    trainable = sum(model.trainable.values())
    full = model.compute_bytes(precision)
    ratio = full / trainable if trainable else 1.0
    largest = max((part.trainable for part in model.blocks), default=0)
    outside = trainable - sum(part.trainable for part in model.blocks)
    weights = full if layout.strategy == "zero2" else int(ratio * (min(2 * largest, trainable) + outside))
    gradients = 2 * max(largest, outside)  # unsharded gradients, and the copy that reduce-scatter sends
    return min(weights, full) + min(gradients, 2 * model.gradients)
