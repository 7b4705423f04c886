"""How long a step of a layout takes: computing, what ranks send, the optimizer, frozen parts elsewhere."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

from samestep.planner.cluster_spec import ClusterSpec
from samestep.planner.layouts import Layout, frozen_flops
from samestep.planner.memory_model import compute_bytes
from samestep.planner.model_profile import ModelProfile, Op

# The part of a printed bandwidth that is reached; what was measured is taken as it is.
_STREAMED = 0.8
_SENT = 0.7
_KERNEL = 2e-6  # seconds below which no kernel of a GPU ends
# Seconds of the host for one operation of a step, where nobody measured: in eager mode, with Python around it.
_START = {"cuda": 3e-5}
_START_ELSE = 5e-6
# The part of the rate of a large product, or of a copy, that kinds of operations reach on a GPU: by
# `benchmarks/step_time.py --operations` on an H200, rounded. Kinds that are not here only move data, at _MOVING.
_REACHED = {
    "aten.convolution": 0.5,
    "aten.convolution_backward": 0.5,
    "aten.native_batch_norm": 0.2,
    "aten.native_batch_norm_backward": 0.3,
    "aten.native_group_norm": 0.4,
    "aten.native_group_norm_backward": 0.4,
    "aten.native_layer_norm": 0.5,
    "aten.native_layer_norm_backward": 0.3,
    "aten._scaled_dot_product_flash_attention_for_cpu": 0.7,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": 0.9,
    "aten.sum": 0.4,
    "aten.cat": 0.4,
    "aten.clone": 0.4,
    "aten.mm": 0.7,
    "aten.addmm": 0.9,
    "aten.bmm": 0.7,
}
_MOVING = 0.8
# Seconds that ranks need to begin a collective, however small: NCCL's between GPUs, gloo's between processes.
_MEETING = {"cuda": 3e-5}
_MEETING_ELSE = 3e-4
CORE_RATE = 5e10
"""Operations a second that one processor core reaches in large products."""
HOST_BANDWIDTH = 1e11
"""Bytes a second between a node's memory and its cores."""


def product_rate(machines: ClusterSpec, dtype: str, work: float, tf32: bool) -> float:
    """Operations a second in products of `work` operations each: as measured, else a part of the peak.

    A dtype that the device has no units for is computed as float32.
    """
    device = machines.device
    names = (dtype, "tf32", "float32") if tf32 and dtype == "float32" else (dtype, "float32")
    name = "tf32" if tf32 and dtype == "float32" and "tf32" in device.rates else dtype
    for known in (name, *names):
        if points := device.measured.get(known):
            return _between(points, work)
        if known in device.rates:
            return device.rates[known] * machines.efficiency
    return min(device.rates.values()) * machines.efficiency


def memory_rate(machines: ClusterSpec) -> float:
    """Bytes a second that operations read and write in a device's memory."""
    device = machines.device
    return device.streamed if device.streamed is not None else device.bandwidth * _STREAMED


def compute_seconds(machines: ClusterSpec, ops: Sequence[Op], scale: float, tf32: bool) -> float:
    """Seconds of a device for operations with `scale` times the samples they were traced with.

    Each takes the longer of its products and its memory.
    """
    return sum(op_seconds(machines, op, tf32, scale) for op in ops)


def start_seconds(machines: ClusterSpec, ops: Sequence[Op]) -> float:
    """Seconds in which the host starts these operations, however small they are."""
    device = machines.device
    each = _START.get(device.kind, _START_ELSE) if device.launch is None else device.launch
    return sum(op.count for op in ops) * each


def op_seconds(machines: ClusterSpec, op: Op, tf32: bool, scale: float = 1.0) -> float:
    """Seconds of one kind of operation on the device alone, with `scale` times the samples."""
    flops, moved = op.flops * scale, op.moved * scale
    products = flops / product_rate(machines, op.dtype, flops / max(op.count, 1), tf32) if flops else 0.0
    longest = max(products, moved / memory_rate(machines))
    if machines.device.kind != "cuda":
        return longest
    return max(longest / _REACHED.get(op.name, _MOVING), op.count * _KERNEL)


def collective_seconds(machines: ClusterSpec, ranks: int, sent: float) -> float:
    """Seconds until every rank has sent `sent` bytes to its neighbour in a ring over `ranks` ranks."""
    if ranks < 2 or sent <= 0:
        return 0.0
    return sent / ring_rate(machines, ranks) + meeting_seconds(machines)


def meeting_seconds(machines: ClusterSpec) -> float:
    """Seconds that ranks need to begin a collective, however small it is."""
    return _MEETING.get(machines.device.kind, _MEETING_ELSE)


def ring_rate(machines: ClusterSpec, ranks: int) -> float:
    """Bytes a second that one device sends while all do; between nodes the devices of a node send side by side."""
    within = machines.within_node * (1 if machines.links_measured else _SENT)
    if ranks <= machines.per_node:
        return within
    return min(within, network_rate(machines) * machines.per_node)


def network_rate(machines: ClusterSpec) -> float:
    """Bytes a second that one device sends to another node."""
    return machines.between_nodes * _SENT


def host_rate(machines: ClusterSpec) -> float:
    """Bytes a second between host memory and one device."""
    return machines.host_link if machines.device.streamed is not None else machines.host_link * _STREAMED


def _between(points: Sequence[tuple[float, float]], work: float) -> float:
    """The rate at `work`, between measured points by their logarithms; beyond them that of the outermost."""
    at = bisect_left([size for size, _ in points], work)
    if at in (0, len(points)):
        return points[min(at, len(points) - 1)][1]
    (low, slow), (high, fast) = points[at - 1], points[at]
    part = (log(work) - log(low)) / (log(high) - log(low))
    return exp(log(slow) + part * (log(fast) - log(slow)))


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
    machines: ClusterSpec,
    model: ModelProfile,
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
    layout: Layout, machines: ClusterSpec, model: ModelProfile, samples: int, precision: str, tf32: bool
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


def slowness(machines: ClusterSpec, model: ModelProfile, samples: int, precision: str, tf32: bool) -> float:
    """How many times longer a device takes over a micro-batch than over its products alone, at their full rate."""
    work = model.step_flops * samples
    if not work:
        return 1.0
    layout = Layout("single", 1, 1)
    device, _ = _micro_batch(layout, machines, model, samples, precision, tf32)
    return max(1.0, device * product_rate(machines, _DTYPES[precision], work, tf32) / work)


def _reckoned(machines: ClusterSpec, model: ModelProfile, samples: int, precision: str, tf32: bool) -> float:
    """By rates and bandwidth."""
    seconds = compute_seconds(machines, model.ops, samples / model.traced_batch, tf32)
    if not model.ops:  # measured, not traced: the work is all that is known
        work = model.step_flops * samples
        seconds = work / product_rate(machines, _DTYPES[precision], work, tf32)
    # few samples do not make it shorter than reading all weights for the forward and for the backward pass
    return max(seconds, 2 * model.weights / memory_rate(machines))


def _communication(
    layout: Layout, machines: ClusterSpec, model: ModelProfile, each: float, number: int, precision: str
) -> float:
    if layout.ranks == 1:
        return 0.0
    backward = each * _backward_part(model)
    if layout.strategy == "ddp":
        sent = 2 * model.gradients * (layout.ranks - 1) / layout.ranks
        seconds = collective_seconds(machines, layout.ranks, sent)
        return max(seconds - backward, seconds * min(1.0, _BUCKET / max(model.gradients, 1)))
    return _gathers(layout, machines, model, each, precision) * number + _scatters(layout, machines, model, backward)


def _gathers(layout: Layout, machines: ClusterSpec, model: ModelProfile, each: float, precision: str) -> float:
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


def _scatters(layout: Layout, machines: ClusterSpec, model: ModelProfile, backward: float) -> float:
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


def _backward_part(model: ModelProfile) -> float:
    return 1 - model.forward_flops / model.step_flops if model.step_flops else 2 / 3


def _optimizer(layout: Layout, machines: ClusterSpec, model: ModelProfile) -> float:
    """Weights and state are read and written, gradients read; offloaded, a node's cores do it for all of its ranks."""
    touched = 2 * sum(model.trainable.values()) + model.gradients + 2 * model.optimizer_state
    mine = touched / layout.shards * (1 if model.optimizer in _IN_ONE_KERNEL else _KERNELS_APART)
    if not layout.offload:
        return mine / memory_rate(machines)
    ranks = min(layout.ranks, machines.per_node)
    by_cores = mine * ranks / (machines.cores * CORE_RATE / 10)  # ten operations a byte, as of AdamW in float32
    return max(by_cores, mine * ranks / HOST_BANDWIDTH)
