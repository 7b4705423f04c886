"""What a model needs: bytes of its parts, bytes and work of a step, told per sample."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """Bytes as a straight line over the micro-batch."""

    fixed: int
    """Bytes that are there with any micro-batch."""
    per_sample: int
    """Bytes that each sample adds."""

    def at(self, samples: int) -> int:
        """Bytes with so many samples in the micro-batch.

        >>> Line(100, 10).at(4)
        140
        """
        return self.fixed + self.per_sample * samples


@dataclass(frozen=True)
class Op:
    """One kind of operation in a step, forward and backward together."""

    name: str
    """As torch calls it, e.g. aten.mm."""
    count: int
    """How often it runs in one micro-batch of `ModelFacts.traced_batch` samples."""
    flops: float
    """Multiplications and additions of all of them together; 0 for what only moves data."""
    moved: float
    """Bytes that all of them together read and write."""
    dtype: str
    """What it computes in, e.g. bfloat16."""


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
class ModelFacts:
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
    working: Line
    """Bytes beyond weights, gradients and optimizer state at the worst moment of a steady step: activations, what is
    computed on the way, the batch."""
    working_recomputed: Line | None
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

    @property
    def weights(self) -> int:
        """Bytes of all parameters and buffers."""
        return sum(self.trainable.values()) + sum(self.frozen.values()) + self.buffers

    @property
    def persistent(self) -> int:
        """Bytes that stand between steps: weights, gradients, optimizer state."""
        return self.weights + self.gradients + self.optimizer_state
