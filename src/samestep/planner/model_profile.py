"""What a model needs: bytes of its parts, bytes and work of a step, told per sample."""

from collections.abc import Mapping
from dataclasses import dataclass

CUDA_CONTEXT = 600 * 2**20
"""Bytes of a GPU that the driver, the loaded kernels and the libraries take beside everything that torch counts: 350 to
600 MiB, by GPU and by version of CUDA. What a GPU says to be free before a process begins does not leave it out."""

CUDA_MARGIN = 0.06
"""The part of a GPU's memory that a plan should leave free beyond what it counted. Measured steps took at most 1.2 %
more than a trace had predicted (benchmarks/memory.py); the rest is for what torch's allocator holds in pieces that fit
nothing, for another cuDNN's choices, and for NCCL's buffers."""


@dataclass(frozen=True)
class Line:
    """Bytes as a straight line over the micro-batch."""

    fixed: int
    """Bytes that are there with any micro-batch."""
    per_sample: int
    """Bytes that each sample adds."""

    def at(self, samples: int, shards: int = 1) -> int:
        """Bytes with so many samples in the micro-batch; the same however gradients are sharded.

        >>> Line(100, 10).at(4)
        140
        """
        return self.fixed + self.per_sample * samples

    def kept(self, samples: int) -> int:
        """The same: a line does not know when gradients stand."""
        return self.at(samples)


@dataclass(frozen=True)
class Moment:
    """One moment of a step at which memory may be fullest."""

    fixed: int
    """Bytes beyond weights, optimizer state and gradients, with any micro-batch."""
    per_sample: int
    """Bytes that each sample adds."""
    gradients: int
    """Bytes of gradients that stand at that moment."""


@dataclass(frozen=True)
class Peak:
    """Bytes at the worst moment of a step, over the micro-batch.

    Gradients come one by one while activations go: which moment is the worst depends on the micro-batch and on how much
    of the gradients this device holds, so the moments are kept, each a line.
    """

    moments: tuple[Moment, ...]
    """Those that are the worst for some micro-batch and some sharding; at least one."""
    gradients: int
    """Bytes of all gradients."""

    def at(self, samples: int, shards: int = 1) -> int:
        """Bytes beyond weights, optimizer state and all gradients, of which this device holds one of `shards` parts.

        >>> Peak((Moment(100, 10, 0), Moment(20, 0, 400)), 400).at(2), Peak((Moment(100, 10, 0),), 0).at(4)
        (20, 140)
        """
        worst = max(m.fixed + m.per_sample * samples + m.gradients // shards for m in self.moments)
        return worst - self.gradients // shards

    def kept(self, samples: int) -> int:
        """The same where all gradients stand all the time: in DDP's buckets, or between micro-batches of one step.

        >>> Peak((Moment(100, 10, 0), Moment(20, 0, 400)), 400).kept(2)
        120
        """
        return max(m.fixed + m.per_sample * samples for m in self.moments)

    @property
    def fixed(self) -> int:
        """Bytes that are there with any micro-batch."""
        return self.at(0)

    @property
    def per_sample(self) -> int:
        """Bytes that each sample adds where there are many."""
        return max(m.per_sample for m in self.moments)


@dataclass(frozen=True)
class Op:
    """One kind of operation in a step, forward and backward together."""

    name: str
    """As torch calls it, e.g. aten.mm."""
    count: int
    """How often it runs in one micro-batch of `ModelProfile.traced_batch` samples."""
    flops: float
    """Multiplications and additions of all of them together; 0 for what only moves data."""
    moved: float
    """Bytes that all of them together read and write."""
    dtype: str
    """What it computes in, e.g. bfloat16."""


@dataclass(frozen=True)
class Timed:
    """How long a device takes over a micro-batch, its operations measured there one by one."""

    device: str
    """Which device, as `Device.name` has it."""
    points: tuple[tuple[int, float], ...]
    """(samples, seconds), at least one, fewest samples first."""
    host: float | None = None
    """Seconds in which the host starts all operations, with any number of samples; None where nobody knows."""

    def at(self, samples: int) -> float:
        """Seconds with so many samples, on the straight line through the points.

        >>> Timed("h100", ((4, 0.5), (8, 0.75))).at(16), Timed("h100", ((4, 0.5),)).at(8)
        (1.25, 1.0)
        """
        (few, quick), (many, slow) = self.points[0], self.points[-1]
        if few == many or slow <= quick:
            return slow * samples / many
        each = (slow - quick) / (many - few)
        return max(slow + (samples - many) * each, quick * samples / few if samples < few else 0.0)


@dataclass(frozen=True)
class Part:
    """A part of the model that is sharded, gathered or placed as one: a block, or a frozen submodule."""

    name: str
    """As in `named_modules`."""
    trainable: int
    """Bytes of its parameters that train."""
    frozen: int
    """Bytes of those that do not, and of its buffers."""
    forward_flops: float
    """Work of its forward pass for one sample."""


@dataclass(frozen=True)
class ModelProfile:
    """What one training step of a model takes on one device, by trace or by measurement."""

    name: str
    """The class of the model."""
    trainable: Mapping[str, int]
    """Bytes of parameters that train, by dtype."""
    frozen: Mapping[str, int]
    """Bytes of parameters that do not, by dtype."""
    buffers: int
    """Bytes of buffers."""
    gradients: int
    """Bytes of gradients, all of them at once."""
    optimizer: str
    """The optimizer's class, e.g. AdamW."""
    optimizer_state: int
    """Bytes it keeps beside the parameters."""
    working: Line | Peak
    """Bytes beyond weights, gradients and optimizer state at the worst moment of a steady step: activations, what is
    computed on the way, the batch."""
    working_recomputed: Line | Peak | None
    """The same with every block computing its activations twice; None where there are no blocks to recompute."""
    forward_flops: float
    """Work of the forward pass for one sample."""
    step_flops: float
    """Work of forward and backward pass for one sample."""
    step_flops_recomputed: float
    """The same where blocks compute twice; equal to `step_flops` where there are none."""
    ops: tuple[Op, ...]
    """What a micro-batch of `traced_batch` samples runs, so that time can be told from rates and bandwidth."""
    traced_batch: int
    """Samples in the micro-batch that was traced."""
    blocks: tuple[Part, ...]
    """The repeated blocks, each gathered as one when the model is sharded."""
    frozen_parts: tuple[Part, ...]
    """The outermost submodules in which nothing trains."""
    how: str
    """Traced without memory, or measured with real micro-batches and why."""
    timed: Timed | None = None
    """How long a device at hand takes; None: time is reckoned from `ops`."""

    @property
    def weights(self) -> int:
        """Bytes of all parameters and buffers."""
        return sum(self.trainable.values()) + sum(self.frozen.values()) + self.buffers

    @property
    def persistent(self) -> int:
        """Bytes that stand between steps: weights, gradients, optimizer state."""
        return self.weights + self.gradients + self.optimizer_state
