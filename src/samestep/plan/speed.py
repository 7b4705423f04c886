"""How long work takes on given machines: operations by roofline, transfers by bytes and links."""

from bisect import bisect_left
from collections.abc import Sequence
from math import exp, log

from samestep.facts.machines import Machines
from samestep.facts.model import Op

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


def product_rate(machines: Machines, dtype: str, work: float, tf32: bool) -> float:
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


def memory_rate(machines: Machines) -> float:
    """Bytes a second that operations read and write in a device's memory."""
    device = machines.device
    return device.streamed if device.streamed is not None else device.bandwidth * _STREAMED


def compute_seconds(machines: Machines, ops: Sequence[Op], scale: float, tf32: bool) -> float:
    """Seconds of a device for operations with `scale` times the samples they were traced with.

    Each takes the longer of its products and its memory.
    """
    return sum(op_seconds(machines, op, tf32, scale) for op in ops)


def start_seconds(machines: Machines, ops: Sequence[Op]) -> float:
    """Seconds in which the host starts these operations, however small they are."""
    device = machines.device
    each = _START.get(device.kind, _START_ELSE) if device.launch is None else device.launch
    return sum(op.count for op in ops) * each


def op_seconds(machines: Machines, op: Op, tf32: bool, scale: float = 1.0) -> float:
    """Seconds of one kind of operation on the device alone, with `scale` times the samples."""
    flops, moved = op.flops * scale, op.moved * scale
    products = flops / product_rate(machines, op.dtype, flops / max(op.count, 1), tf32) if flops else 0.0
    longest = max(products, moved / memory_rate(machines))
    if machines.device.kind != "cuda":
        return longest
    return max(longest / _REACHED.get(op.name, _MOVING), op.count * _KERNEL)


def collective_seconds(machines: Machines, ranks: int, sent: float) -> float:
    """Seconds until every rank has sent `sent` bytes to its neighbour in a ring over `ranks` ranks."""
    if ranks < 2 or sent <= 0:
        return 0.0
    return sent / ring_rate(machines, ranks) + meeting_seconds(machines)


def meeting_seconds(machines: Machines) -> float:
    """Seconds that ranks need to begin a collective, however small it is."""
    return _MEETING.get(machines.device.kind, _MEETING_ELSE)


def ring_rate(machines: Machines, ranks: int) -> float:
    """Bytes a second that one device sends while all do; between nodes the devices of a node send side by side."""
    within = machines.within_node * (1 if machines.links_measured else _SENT)
    if ranks <= machines.per_node:
        return within
    return min(within, network_rate(machines) * machines.per_node)


def network_rate(machines: Machines) -> float:
    """Bytes a second that one device sends to another node."""
    return machines.between_nodes * _SENT


def host_rate(machines: Machines) -> float:
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
