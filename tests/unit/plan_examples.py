"""Models and clusters with round numbers, so that estimates can be checked by hand."""

from dataclasses import replace

from samestep.planner.cluster_spec import ClusterSpec, DeviceSpec
from samestep.planner.model_profile import MemoryPoint, ModelPart, ModelProfile, Op, PeakMemory

GIB = 2**30
MIB = 2**20

DEVICE = DeviceSpec(
    name="plain",
    kind="cuda",
    memory=100 * GIB,
    memory_free=100 * GIB,
    bandwidth=1e12,
    peak_flops={"float32": 1e13, "tf32": 5e13, "bfloat16": 1e14, "float16": 1e14},
    source="example",
)
CLUSTER = ClusterSpec(
    device=DEVICE,
    devices_per_node=1,
    nodes=1,
    host_memory=1000 * GIB,
    cores=64,
    intra_node_bandwidth=1e11,
    inter_node_bandwidth=1e10,
    host_bandwidth=1e10,
    disk_bandwidth=1e9,
    source="example",
)


def cluster(devices_per_node=1, nodes=1, gib=100, **changes):
    """Nodes with plain devices of `gib` GiB each."""
    device = replace(DEVICE, memory=int(gib * GIB), memory_free=int(gib * GIB))
    return replace(CLUSTER, device=device, devices_per_node=devices_per_node, nodes=nodes, **changes)


def model(gib=1.0, per_sample=GIB, fixed=0, blocks=10, **changes):
    """A model with `gib` GiB of float32 weights in equal blocks and AdamW; activations are larger than gradients."""
    size = int(gib * GIB)
    profile = ModelProfile(
        name="Plain",
        trainable={"float32": size},
        frozen={},
        buffers=0,
        gradients=size,
        optimizer="AdamW",
        optimizer_state=2 * size,
        activations=PeakMemory.linear(fixed, per_sample),
        checkpointed_activations=PeakMemory.linear(fixed, per_sample // 10) if blocks else None,
        forward_flops=1e12,
        step_flops=3e12,
        checkpointed_step_flops=4e12,
        ops=(Op("aten.mm", 300, 6e12, 1e9, "bfloat16"), Op("aten.add", 100, 0.0, 1e10, "bfloat16")),
        traced_samples=2,
        blocks=tuple(ModelPart(f"h.{at}", size // blocks, 0, 1e12 / blocks) for at in range(blocks)),
        frozen_parts=(),
        method="example",
    )
    return replace(profile, **changes)


def with_teacher(profile, gib, gradient_flows):
    """`profile` with a frozen bfloat16 part of `gib` GiB that has half of the forward FLOPs."""
    size = int(gib * GIB)
    part = ModelPart("teacher", 0, size, profile.forward_flops, gradient_flows)
    return replace(
        profile,
        frozen={"bfloat16": size},
        frozen_parts=(part,),
        blocks=(*profile.blocks, *(ModelPart(f"teacher.h.{at}", 0, size // 30, 0.0) for at in range(30))),
        forward_flops=2 * profile.forward_flops,
        step_flops=profile.step_flops + (2 if gradient_flows else 1) * profile.forward_flops,
        checkpointed_step_flops=profile.checkpointed_step_flops + (3 if gradient_flows else 1) * profile.forward_flops,
    )


def peak(gib, activations):
    """The maximum of two points: activations before there are gradients, then all gradients."""
    size = int(gib * GIB)
    return PeakMemory((MemoryPoint(0, activations, 0), MemoryPoint(10 * MIB, 0, size)), size)
