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
_MEETING = 3e-5  # seconds that ranks need to begin a collective, however small
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
    """Seconds of operations with `scale` times the samples they were traced with.

    Each takes the longer of its products and its memory; a device that is faster than the host can start operations
    waits for the host.
    """
    on_device = sum(_op_seconds(machines, op, scale, tf32) for op in ops)
    by_host = sum(op.count for op in ops) * machines.device.launch
    return max(on_device, by_host)


def collective_seconds(machines: Machines, ranks: int, sent: float) -> float:
    """Seconds until every rank has sent `sent` bytes to its neighbour in a ring over `ranks` ranks."""
    if ranks < 2 or sent <= 0:
        return 0.0
    return sent / ring_rate(machines, ranks) + _MEETING


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


def _op_seconds(machines: Machines, op: Op, scale: float, tf32: bool) -> float:
    flops, moved = op.flops * scale, op.moved * scale
    products = flops / product_rate(machines, op.dtype, flops / max(op.count, 1), tf32) if flops else 0.0
    shortest = op.count * _KERNEL if machines.device.kind == "cuda" else 0.0
    return max(products, moved / memory_rate(machines), shortest)


def _between(points: Sequence[tuple[float, float]], work: float) -> float:
    """The rate at `work`, between measured points by their logarithms; beyond them that of the outermost."""
    at = bisect_left([size for size, _ in points], work)
    if at in (0, len(points)):
        return points[min(at, len(points) - 1)][1]
    (low, slow), (high, fast) = points[at - 1], points[at]
    part = (log(work) - log(low)) / (log(high) - log(low))
    return exp(log(slow) + part * (log(fast) - log(slow)))
