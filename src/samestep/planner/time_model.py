"""Estimate the time of a step: compute, communication, optimizer, and frozen parts that run elsewhere."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log

from samestep.planner.cluster_spec import ClusterSpec
from samestep.planner.layouts import Layout
from samestep.planner.model_profile import ModelProfile, Op

# Fraction of the nominal bandwidth that is reached. Measured bandwidths are used as they are.
_MEMORY_EFFICIENCY = 0.8
_NETWORK_EFFICIENCY = 0.7
_MIN_KERNEL_SECONDS = 2e-6
# Host time to launch one operation in eager mode, including Python, if no calibration measured it.
_LAUNCH_SECONDS = {"cuda": 3e-5, "mps": 5e-6, "cpu": 5e-6}
# Fraction of the rate of a large matrix product, or of a copy, that operators reach on a GPU: measured with
# `benchmarks/step_time.py --operations` on an H200, rounded. Operators that are missing here only move data.
_OP_EFFICIENCY = {
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
_DATA_MOVEMENT_EFFICIENCY = 0.8
# Latency of a collective: NCCL between GPUs, gloo between processes.
_COLLECTIVE_LATENCY = {"cuda": 3e-5, "mps": 3e-4, "cpu": 3e-4}
_DDP_BUCKET = 25 * 2**20  # the last bucket has no backward pass left to overlap with
_GATHER_HOST_SECONDS = 1e-4  # host time per block that FSDP gathers and frees
_FUSED_OPTIMIZERS = ("Adagrad", "Adam", "AdamW", "SGD")
_UNFUSED_FACTOR = 3  # times that other optimizers read and write the same bytes
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
CORE_FLOPS = 5e10
"""FLOP/s that one CPU core reaches in large matrix products."""
HOST_MEMORY_BANDWIDTH = 1e11
"""Bytes per second between a node's memory and its cores."""


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of one optimizer step."""

    compute: float  # forward and backward passes
    communication: float  # communication that does not overlap with compute
    optimizer: float  # the optimizer's step
    teacher: float  # frozen parts that `run.teacher` placed

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.components().values())

    def components(self) -> Mapping[str, float]:
        """Seconds by component."""
        return asdict(self)


def estimate_step_time(
    layout: Layout,
    cluster: ClusterSpec,
    model: ModelProfile,
    micro_batch: int,
    accumulation: int,
    *,
    precision: str,
    tf32: bool,
    teacher_seconds: float = 0.0,
) -> StepTime:
    """Time of a step in which each rank has `accumulation` micro-batches of `micro_batch` samples."""
    device, host = _micro_batch_seconds(layout, cluster, model, micro_batch, precision, tf32)
    seconds = max(device, host)
    return StepTime(
        compute=seconds * accumulation,
        communication=_communication_seconds(layout, cluster, model, seconds, accumulation, precision),
        # while the device waits for the host it has time for the optimizer
        optimizer=max(0.0, _optimizer_seconds(layout, cluster, model) - (seconds - device) * accumulation),
        teacher=teacher_seconds,
    )


def matmul_slowdown(cluster: ClusterSpec, model: ModelProfile, samples: int, precision: str, tf32: bool) -> float:
    """How many times longer a micro-batch takes than its matrix products alone would at their full rate."""
    flops = model.step_flops * samples
    if not flops:
        return 1.0
    device, _ = _micro_batch_seconds(Layout("single", 1, 1), cluster, model, samples, precision, tf32)
    return max(1.0, device * matmul_rate(cluster, _DTYPES[precision], flops, tf32) / flops)


def _micro_batch_seconds(
    layout: Layout, cluster: ClusterSpec, model: ModelProfile, samples: int, precision: str, tf32: bool
) -> tuple[float, float]:
    """Device time of a forward and backward pass, and host time to launch it."""
    measured = model.measured_time
    if measured is not None and measured.device == cluster.device.name:
        seconds, host = measured.at(samples), measured.host_seconds
    else:
        seconds, host = _estimated_device_seconds(cluster, model, samples, precision, tf32), None
    host = launch_seconds(cluster, model.ops) if host is None else host
    if not model.step_flops:
        return seconds, host
    factor = model.checkpointed_step_flops / model.step_flops if layout.activation_checkpointing else 1.0
    elsewhere = model.frozen_part_flops / model.step_flops if layout.teacher_placement else 0.0
    factor = max(factor - elsewhere, 0.0)
    return seconds * factor, host * factor


def _estimated_device_seconds(
    cluster: ClusterSpec, model: ModelProfile, samples: int, precision: str, tf32: bool
) -> float:
    """Device time of a forward and backward pass from FLOP/s and bandwidth."""
    seconds = compute_seconds(cluster, model.ops, samples / model.traced_samples, tf32)
    if not model.ops:  # measured, not traced: only the FLOPs are known
        flops = model.step_flops * samples
        seconds = flops / matmul_rate(cluster, _DTYPES[precision], flops, tf32)
    # even a small micro-batch reads all weights in the forward and in the backward pass
    return max(seconds, 2 * model.weights / memory_bandwidth(cluster))


def compute_seconds(cluster: ClusterSpec, ops: Sequence[Op], scale: float, tf32: bool) -> float:
    """Device time of operations with `scale` times the samples they were traced with."""
    return sum(op_seconds(cluster, op, tf32, scale) for op in ops)


def op_seconds(cluster: ClusterSpec, op: Op, tf32: bool, scale: float = 1.0) -> float:
    """Device time of one operator: the maximum of its matrix products, its memory traffic and its kernel launches."""
    flops, moved = op.flops * scale, op.bytes_moved * scale
    products = flops / matmul_rate(cluster, op.dtype, flops / max(op.count, 1), tf32) if flops else 0.0
    seconds = max(products, moved / memory_bandwidth(cluster))
    if cluster.device.kind != "cuda":
        return seconds
    return max(seconds / _OP_EFFICIENCY.get(op.name, _DATA_MOVEMENT_EFFICIENCY), op.count * _MIN_KERNEL_SECONDS)


def launch_seconds(cluster: ClusterSpec, ops: Sequence[Op]) -> float:
    """Host time to launch these operations, which does not depend on their size."""
    measured = cluster.device.launch_seconds
    return sum(op.count for op in ops) * (_LAUNCH_SECONDS[cluster.device.kind] if measured is None else measured)


def matmul_rate(cluster: ClusterSpec, dtype: str, flops: float, tf32: bool) -> float:
    """FLOP/s of matrix products of `flops` operations each: as measured, else a fraction of the peak.

    A dtype that the device does not support is computed as float32.
    """
    device = cluster.device
    use_tf32 = tf32 and dtype == "float32" and "tf32" in device.peak_flops
    for name in ("tf32", "float32") if use_tf32 else (dtype, "float32"):
        if points := device.measured_flops.get(name):
            return _interpolate(points, flops)
        if name in device.peak_flops:
            return device.peak_flops[name] * cluster.efficiency
    return min(device.peak_flops.values()) * cluster.efficiency


def _interpolate(points: Sequence[tuple[float, float]], flops: float) -> float:
    """The rate at `flops`, by log-log interpolation; beyond the points, the rate of the nearest one."""
    at = bisect_left([size for size, _ in points], flops)
    if at in (0, len(points)):
        return points[min(at, len(points) - 1)][1]
    (low, slow), (high, fast) = points[at - 1], points[at]
    fraction = (log(flops) - log(low)) / (log(high) - log(low))
    return exp(log(slow) + fraction * (log(fast) - log(slow)))


def memory_bandwidth(cluster: ClusterSpec) -> float:
    """Bytes per second that operations read and write in device memory."""
    measured = cluster.device.copy_bandwidth
    return cluster.device.bandwidth * _MEMORY_EFFICIENCY if measured is None else measured


def host_bandwidth(cluster: ClusterSpec) -> float:
    """Bytes per second between host memory and one device."""
    calibrated = cluster.device.copy_bandwidth is not None
    return cluster.host_bandwidth if calibrated else cluster.host_bandwidth * _MEMORY_EFFICIENCY


def collective_seconds(cluster: ClusterSpec, ranks: int, sent: float) -> float:
    """Time until every rank has sent `sent` bytes to its neighbor in a ring of `ranks` ranks."""
    if ranks < 2 or sent <= 0:
        return 0.0
    return sent / ring_bandwidth(cluster, ranks) + _COLLECTIVE_LATENCY[cluster.device.kind]


def ring_bandwidth(cluster: ClusterSpec, ranks: int) -> float:
    """Bytes per second that each device of a ring sends; all devices of a node send to the next node in parallel."""
    intra = cluster.intra_node_bandwidth * (1 if cluster.all_reduce_measured else _NETWORK_EFFICIENCY)
    if ranks <= cluster.devices_per_node:
        return intra
    return min(intra, cluster.inter_node_bandwidth * _NETWORK_EFFICIENCY * cluster.devices_per_node)


def _communication_seconds(
    layout: Layout, cluster: ClusterSpec, model: ModelProfile, compute: float, accumulation: int, precision: str
) -> float:
    """Communication of a step that does not overlap with compute; `compute` is the time of one micro-batch."""
    if layout.ranks == 1:
        return 0.0
    backward = compute * (1 - model.forward_flops / model.step_flops if model.step_flops else 2 / 3)
    if layout.strategy == "ddp":
        sent = 2 * model.gradients * (layout.ranks - 1) / layout.ranks
        seconds = collective_seconds(cluster, layout.ranks, sent)
        return max(seconds - backward, seconds * min(1.0, _DDP_BUCKET / max(model.gradients, 1)))
    gather = _all_gather_seconds(layout, cluster, model, compute, precision)
    return gather * accumulation + _reduce_scatter_seconds(layout, cluster, model, backward)


def _all_gather_seconds(
    layout: Layout, cluster: ClusterSpec, model: ModelProfile, compute: float, precision: str
) -> float:
    """All-gathers of a micro-batch: for the forward pass and, except with zero2, again for the backward pass.

    They overlap with the compute of the previous block, except for the first one and for the host time of each.
    """
    times = 1 if layout.strategy == "zero2" else 2
    sent = times * model.compute_bytes(precision) * (layout.shards - 1) / layout.shards
    seconds = collective_seconds(cluster, layout.shards, sent)
    if layout.cpu_offload:
        seconds += times * sum(model.trainable.values()) / layout.shards / host_bandwidth(cluster)
    units = len(model.blocks) + 1  # parameters outside of blocks are gathered as one unit
    host = times * units * (_GATHER_HOST_SECONDS + _COLLECTIVE_LATENCY[cluster.device.kind])
    return max(seconds - compute, seconds / (times * units)) + host


def _reduce_scatter_seconds(layout: Layout, cluster: ClusterSpec, model: ModelProfile, backward: float) -> float:
    """Reduce-scatter once per step, during the last backward pass; with hybrid also the all-reduce between nodes."""
    sent = model.gradients * (layout.shards - 1) / layout.shards
    seconds = collective_seconds(cluster, layout.shards, sent)
    replicas = layout.ranks // layout.shards
    if replicas > 1:
        between = 2 * model.gradients / layout.shards * (replicas - 1) / replicas
        seconds += between / (cluster.inter_node_bandwidth * _NETWORK_EFFICIENCY)
    if layout.cpu_offload:
        seconds += model.gradients / layout.shards / host_bandwidth(cluster)
    return max(seconds - backward, seconds * (1 / max(len(model.blocks), 1)))  # the last block cannot overlap


def _optimizer_seconds(layout: Layout, cluster: ClusterSpec, model: ModelProfile) -> float:
    """Weights and state are read and written, gradients are read; with offload the CPU cores do it for all ranks."""
    moved = 2 * sum(model.trainable.values()) + model.gradients + 2 * model.optimizer_state
    moved = moved / layout.shards * (1 if model.optimizer in _FUSED_OPTIMIZERS else _UNFUSED_FACTOR)
    if not layout.cpu_offload:
        return moved / memory_bandwidth(cluster)
    ranks = min(layout.ranks, cluster.devices_per_node)
    by_cores = moved * ranks / (cluster.cores * CORE_FLOPS / 10)  # 10 operations per byte, as AdamW in float32
    return max(by_cores, moved * ranks / HOST_MEMORY_BANDWIDTH)
