"""What training a model costs on one device: bytes of its state, memory and work of a step, as functions of the batch.

All sizes are in bytes. `samestep.planner.trace` fills a `ModelProfile`; memory model and time model read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

CUDA_CONTEXT = 600 * 2**20
"""Bytes of a GPU that the CUDA context, kernels and libraries use in addition to what torch counts: 350 to 600 MiB,
depending on GPU and CUDA version. The free memory that a GPU reports before a process starts still includes them."""

CUDA_MARGIN = 0.06
"""Fraction of a GPU's memory that a plan leaves free by default. Measured steps used at most 1.2 % more than a trace
predicted (benchmarks/memory.py). The rest covers fragmentation, other algorithms of cuDNN, and buffers of NCCL."""


@dataclass(frozen=True)
class MemoryPoint:
    """One point of a step's memory timeline, as a linear function of the micro-batch size."""

    fixed: int  # bytes for any micro-batch, without weights, optimizer state and gradients
    per_sample: int  # additional bytes per sample
    gradients: int  # bytes of gradients that exist at this point


@dataclass(frozen=True)
class PeakMemory:
    """Peak memory of a step in addition to weights, optimizer state and gradients: activations, temporaries, batch.

    During the backward pass gradients appear while activations are freed. Which point of the timeline is the peak
    depends on the micro-batch size and on how gradients are sharded, so all points that can be the peak are kept.
    """

    points: tuple[MemoryPoint, ...]  # those that are the peak for some micro-batch size and some sharding
    gradients: int  # bytes of all gradients

    @classmethod
    def linear(cls, fixed: int, per_sample: int) -> "PeakMemory":
        """A peak that does not depend on when gradients appear.

        >>> PeakMemory.linear(100, 10).at(4)
        140
        """
        return cls((MemoryPoint(fixed, per_sample, 0),), 0)

    def at(self, samples: int, shards: int = 1) -> int:
        """Bytes with `samples` in the micro-batch if this device holds one of `shards` equal parts of the gradients.

        >>> PeakMemory((MemoryPoint(100, 10, 0), MemoryPoint(20, 0, 400)), 400).at(2)
        20
        """
        peak = max(p.fixed + p.per_sample * samples + p.gradients // shards for p in self.points)
        return peak - self.gradients // shards

    def at_with_all_gradients(self, samples: int) -> int:
        """Bytes if all gradients exist throughout the step: in DDP's buckets, or from an earlier micro-batch.

        >>> PeakMemory((MemoryPoint(100, 10, 0), MemoryPoint(20, 0, 400)), 400).at_with_all_gradients(2)
        120
        """
        return max(p.fixed + p.per_sample * samples for p in self.points)

    @property
    def fixed(self) -> int:
        """Bytes for any micro-batch."""
        return self.at(0)

    @property
    def per_sample(self) -> int:
        """Additional bytes per sample in a large micro-batch."""
        return max(p.per_sample for p in self.points)


@dataclass(frozen=True)
class Op:
    """All calls of one operator in one dtype during forward and backward pass."""

    name: str  # Torch's name, such as aten.mm
    count: int  # calls in one micro-batch of `ModelProfile.traced_samples` samples
    flops: float  # floating-point operations of all calls; 0 for operators that only move data
    bytes_moved: float  # bytes that all calls read and write
    dtype: str  # dtype of the computation, such as bfloat16


@dataclass(frozen=True)
class MeasuredTime:
    """Time of a micro-batch on one device, from operations that were measured there."""

    device: str  # `DeviceSpec.name` of the device
    points: tuple[tuple[int, float], ...]  # (samples, seconds), at least one, smallest micro-batch first
    host_seconds: float | None = None  # host time to launch a micro-batch of any size; None if it was not measured

    def at(self, samples: int) -> float:
        """Seconds of a micro-batch, by linear interpolation through the points.

        >>> MeasuredTime("h100", ((4, 0.5), (8, 0.75))).at(16), MeasuredTime("h100", ((4, 0.5),)).at(8)
        (1.25, 1.0)
        """
        (few, fast), (many, slow) = self.points[0], self.points[-1]
        if few == many or slow <= fast:
            return slow * samples / many
        per_sample = (slow - fast) / (many - few)
        return max(slow + (samples - many) * per_sample, fast * samples / few if samples < few else 0.0)


@dataclass(frozen=True)
class ModelPart:
    """A submodule that is sharded, gathered or placed as a unit: a block, or a frozen submodule."""

    name: str  # name in `named_modules`
    trainable: int  # bytes of its trainable parameters
    frozen: int  # bytes of its frozen parameters and its buffers
    forward_flops: float  # FLOPs of its forward pass per sample
    needs_gradient: bool = False  # whether the backward pass goes through it


@dataclass(frozen=True)
class ModelProfile:
    """Memory and work of a training step on one device, traced or measured."""

    name: str  # class of the model
    trainable: Mapping[str, int]  # bytes of trainable parameters by dtype
    frozen: Mapping[str, int]  # bytes of frozen parameters by dtype
    buffers: int  # bytes of buffers
    gradients: int  # bytes of all gradients
    optimizer: str  # class of the optimizer, such as AdamW
    optimizer_state: int  # bytes of the optimizer state
    activations: PeakMemory  # peak memory of a step in addition to weights, gradients and optimizer state
    checkpointed_activations: PeakMemory | None  # with activation checkpointing of all blocks; None without blocks
    forward_flops: float  # FLOPs of the forward pass per sample
    step_flops: float  # FLOPs of forward and backward pass per sample
    checkpointed_step_flops: float  # with activation checkpointing; equal to `step_flops` without blocks
    ops: tuple[Op, ...]  # operators of a micro-batch of `traced_samples` samples; empty if they are unknown
    traced_samples: int  # samples in the traced micro-batch
    blocks: tuple[ModelPart, ...]  # repeated blocks; FSDP gathers each as a unit
    frozen_parts: tuple[ModelPart, ...]  # outermost submodules without trainable parameters
    method: str  # how the profile was made: traced, or measured with real micro-batches and why
    measured_time: MeasuredTime | None = None  # None: the time is estimated from `ops`

    @property
    def weights(self) -> int:
        """Bytes of all parameters and buffers."""
        return sum(self.trainable.values()) + sum(self.frozen.values()) + self.buffers

    @property
    def persistent(self) -> int:
        """Bytes that exist between steps: weights, gradients, optimizer state."""
        return self.weights + self.gradients + self.optimizer_state

    @property
    def frozen_part_bytes(self) -> int:
        """Bytes of the frozen submodules, which `run.teacher` can place elsewhere."""
        return sum(part.frozen for part in self.frozen_parts)

    @property
    def frozen_part_flops(self) -> float:
        """FLOPs of the forward passes of the frozen submodules per sample."""
        return sum(part.forward_flops for part in self.frozen_parts)

    def compute_bytes(self, precision: str) -> int:
        """Bytes of the trainable parameters in the precision of the computation: half of fp32 in bf16 and fp16."""
        half = precision in ("bf16", "fp16")
        return sum(size // 2 if half and dtype == "float32" else size for dtype, size in self.trainable.items())
