"""How long a step of a layout takes: computing, what ranks send, the optimizer, frozen parts elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass

from samestep.facts.machines import Machines
from samestep.facts.model import ModelFacts
from samestep.plan.memory import compute_bytes
from samestep.plan.speed import (
    CORE_RATE,
    HOST_BANDWIDTH,
    collective_seconds,
    compute_seconds,
    host_rate,
    meeting_seconds,
    memory_rate,
    network_rate,
    product_rate,
    start_seconds,
)
from samestep.plan.strategy import Layout, frozen_flops

_BUCKET = 25 * 2**20  # what DDP sends at once; the last bucket has no backward pass left to hide behind
_GATHER = 1e-4  # seconds of the host for each block that is gathered and let go again
_IN_ONE_KERNEL = ("Adagrad", "Adam", "AdamW", "SGD")
_KERNELS_APART = 3  # times that other optimizers read and write the same bytes, one operation after another
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, estimated."""

    compute: float
    """Forward and backward passes."""
    communication: float
    """What ranks send that computing does not hide."""
    optimizer: float
    """The optimizer's own step."""
    teacher: float
    """Frozen parts that `run.teacher` placed."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.parts().values())

    def parts(self) -> Mapping[str, float]:
        """Seconds by part."""
        return {
            "compute": self.compute,
            "communication": self.communication,
            "optimizer": self.optimizer,
            "teacher": self.teacher,
        }


def step_time(
    layout: Layout,
    machines: Machines,
    model: ModelFacts,
    shape: tuple[int, int],
    precision: str,
    tf32: bool,
    teacher: float,
) -> StepTime:
    """Seconds of a step of `shape`: samples of a micro-batch, and how many micro-batches each rank has."""
    samples, number = shape
    device, host = _micro_batch(layout, machines, model, samples, precision, tf32)
    each = max(device, host)
    return StepTime(
        compute=each * number,
        communication=_communication(layout, machines, model, each, number, precision),
        # a device that waits for the host has time for its optimizer meanwhile
        optimizer=max(0.0, _optimizer(layout, machines, model) - (each - device) * number),
        teacher=teacher,
    )


def _micro_batch(
    layout: Layout, machines: Machines, model: ModelFacts, samples: int, precision: str, tf32: bool
) -> tuple[float, float]:
    """Seconds of a forward and a backward pass: those of the device, and those in which the host starts them."""
    if model.timed is not None and model.timed.device == machines.device.name:
        seconds, host = model.timed.at(samples), model.timed.host
    else:
        seconds, host = _reckoned(machines, model, samples, precision, tf32), None
    started = start_seconds(machines, model.ops) if host is None else host
    if not model.step_flops:
        return seconds, started
    twice = model.step_flops_recomputed / model.step_flops if layout.recompute else 1.0
    elsewhere = frozen_flops(model) / model.step_flops if layout.frozen else 0.0
    here = max(twice - elsewhere, 0.0)
    return seconds * here, started * here


def slowness(machines: Machines, model: ModelFacts, samples: int, precision: str, tf32: bool) -> float:
    """How many times longer a device takes over a micro-batch than over its products alone, at their full rate."""
    work = model.step_flops * samples
    if not work:
        return 1.0
    layout = Layout("single", 1, 1)
    device, _ = _micro_batch(layout, machines, model, samples, precision, tf32)
    return max(1.0, device * product_rate(machines, _DTYPES[precision], work, tf32) / work)


def _reckoned(machines: Machines, model: ModelFacts, samples: int, precision: str, tf32: bool) -> float:
    """By rates and bandwidth."""
    seconds = compute_seconds(machines, model.ops, samples / model.traced_batch, tf32)
    if not model.ops:  # measured, not traced: the work is all that is known
        work = model.step_flops * samples
        seconds = work / product_rate(machines, _DTYPES[precision], work, tf32)
    # few samples do not make it shorter than reading all weights for the forward and for the backward pass
    return max(seconds, 2 * model.weights / memory_rate(machines))


def _communication(
    layout: Layout, machines: Machines, model: ModelFacts, each: float, number: int, precision: str
) -> float:
    if layout.ranks == 1:
        return 0.0
    backward = each * _backward_part(model)
    if layout.strategy == "ddp":
        sent = 2 * model.gradients * (layout.ranks - 1) / layout.ranks
        seconds = collective_seconds(machines, layout.ranks, sent)
        return max(seconds - backward, seconds * min(1.0, _BUCKET / max(model.gradients, 1)))
    return _gathers(layout, machines, model, each, precision) * number + _scatters(layout, machines, model, backward)


def _gathers(layout: Layout, machines: Machines, model: ModelFacts, each: float, precision: str) -> float:
    """Weights of a micro-batch: gathered for the forward pass and, unless kept, again for the backward pass.

    They travel while the block before computes; nothing hides the first one, nor what the host does for each.
    """
    whole = compute_bytes(model.trainable, precision)
    times = 1 if layout.strategy == "zero2" else 2
    sent = times * whole * (layout.shards - 1) / layout.shards
    seconds = collective_seconds(machines, layout.shards, sent)
    if layout.offload:
        stored = sum(model.trainable.values())
        seconds += times * stored / layout.shards / host_rate(machines)
    units = len(model.blocks) + 1  # what no block holds is gathered as one
    by_host = times * units * (_GATHER + meeting_seconds(machines))
    return max(seconds - each, seconds / (times * units)) + by_host


def _scatters(layout: Layout, machines: Machines, model: ModelFacts, backward: float) -> float:
    """Gradients cut and sent once a step, behind the last backward pass; between nodes the replicas' parts as well."""
    sent = model.gradients * (layout.shards - 1) / layout.shards
    seconds = collective_seconds(machines, layout.shards, sent)
    replicas = layout.ranks // layout.shards
    if replicas > 1:
        between = 2 * model.gradients / layout.shards * (replicas - 1) / replicas
        seconds += between / network_rate(machines)
    if layout.offload:
        seconds += model.gradients / layout.shards / host_rate(machines)
    last = 1 / max(len(model.blocks), 1)
    return max(seconds - backward, seconds * last)


def _backward_part(model: ModelFacts) -> float:
    return 1 - model.forward_flops / model.step_flops if model.step_flops else 2 / 3


def _optimizer(layout: Layout, machines: Machines, model: ModelFacts) -> float:
    """Weights and state are read and written, gradients read; offloaded, a node's cores do it for all of its ranks."""
    touched = 2 * sum(model.trainable.values()) + model.gradients + 2 * model.optimizer_state
    mine = touched / layout.shards * (1 if model.optimizer in _IN_ONE_KERNEL else _KERNELS_APART)
    if not layout.offload:
        return mine / memory_rate(machines)
    ranks = min(layout.ranks, machines.per_node)
    by_cores = mine * ranks / (machines.cores * CORE_RATE / 10)  # ten operations a byte, as of AdamW in float32
    return max(by_cores, mine * ranks / HOST_BANDWIDTH)
