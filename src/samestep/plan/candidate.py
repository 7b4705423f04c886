"""What a plan is made for, and one layout of it, weighed."""

from dataclasses import dataclass

from samestep.facts.machines import Machines
from samestep.facts.model import ModelFacts
from samestep.plan.memory import Memory
from samestep.plan.step_time import StepTime
from samestep.plan.strategy import NOTHING_ASKED, Asked, Layout


@dataclass(frozen=True)
class Task:
    """What a plan is made for."""

    machines: Machines
    """What there is."""
    model: ModelFacts
    """What is trained."""
    global_batch: int
    """Samples of a step, over all ranks."""
    precision: str
    """fp32, bf16 or fp16."""
    tf32: bool
    """Whether products in fp32 may use TF32."""
    margin: float
    """The part of a device's memory that stays free."""
    asked: Asked = NOTHING_ASKED
    """What is asked for whatever the strategy."""

    @property
    def room(self) -> int:
        """Bytes of a device that may be used."""
        device = self.machines.device
        return device.memory_free - int(device.memory * self.margin)


@dataclass(frozen=True)
class Candidate:
    """One layout with its micro-batch, weighed."""

    layout: Layout
    """How the step is spread."""
    micro_batch: int
    """Samples that each rank puts through at once."""
    accumulation: int
    """Micro-batches of a step on each rank."""
    memory: Memory
    """What it takes; with a micro-batch of 1 where nothing fits."""
    time: StepTime
    """How long a step takes, estimated."""
    fits: bool
    """Whether it may be chosen."""
    reason: str
    """Why it was, or was not, in numbers."""
