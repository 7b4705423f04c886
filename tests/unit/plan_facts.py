"""Models and machines by hand, with figures that can be checked on paper."""

from dataclasses import replace

from samestep.planner.cluster_spec import ClusterSpec, DeviceSpec
from samestep.planner.model_profile import Line, ModelProfile, Moment, Op, Part, Peak

GIB = 2**30
MIB = 2**20

DEVICE = DeviceSpec(
    name="plain",
    kind="cuda",
    memory=100 * GIB,
    memory_free=100 * GIB,
    bandwidth=1e12,
    rates={"float32": 1e13, "tf32": 5e13, "bfloat16": 1e14, "float16": 1e14},
    source="by hand",
)
MACHINES = ClusterSpec(
    device=DEVICE,
    per_node=1,
    nodes=1,
    host_memory=1000 * GIB,
    cores=64,
    within_node=1e11,
    between_nodes=1e10,
    host_link=1e10,
    disk=1e9,
    source="by hand",
)


def machines(per_node=1, nodes=1, gib=100, **changes):
    """Plain machines with so much memory on each device."""
    device = replace(DEVICE, memory=int(gib * GIB), memory_free=int(gib * GIB))
    return replace(MACHINES, device=device, per_node=per_node, nodes=nodes, **changes)


def model(gib=1.0, per_sample=GIB, fixed=0, blocks=10, **changes):
    """A model of `gib` GiB of float32 weights in equal blocks, trained by AdamW; activations far beyond gradients."""
    size = int(gib * GIB)
    facts = ModelProfile(
        name="Plain",
        trainable={"float32": size},
        frozen={},
        buffers=0,
        gradients=size,
        optimizer="AdamW",
        optimizer_state=2 * size,
        working=Line(fixed, per_sample),
        working_recomputed=Line(fixed, per_sample // 10) if blocks else None,
        forward_flops=1e12,
        step_flops=3e12,
        step_flops_recomputed=4e12,
        ops=(Op("aten.mm", 300, 6e12, 1e9, "bfloat16"), Op("aten.add", 100, 0.0, 1e10, "bfloat16")),
        traced_batch=2,
        blocks=tuple(Part(f"h.{at}", size // blocks, 0, 1e12 / blocks) for at in range(blocks)),
        frozen_parts=(),
        how="by hand",
    )
    return replace(facts, **changes)


def with_teacher(facts, gib, passes):
    """`facts` with a frozen part of `gib` GiB in bfloat16 that does half of the forward work; gradients pass or not."""
    size = int(gib * GIB)
    part = Part("teacher", 0, size, facts.forward_flops)
    return replace(
        facts,
        frozen={"bfloat16": size},
        frozen_parts=(part,),
        blocks=(*facts.blocks, *(Part(f"teacher.h.{at}", 0, size // 30, 0.0) for at in range(30))),
        forward_flops=2 * facts.forward_flops,
        step_flops=facts.step_flops + (2 if passes else 1) * facts.forward_flops,
        step_flops_recomputed=facts.step_flops_recomputed + (3 if passes else 1) * facts.forward_flops,
    )


def peak(gib, activations):
    """Activations before gradients, then gradients: the worst of two moments."""
    size = int(gib * GIB)
    return Peak((Moment(0, activations, 0), Moment(10 * MIB, 0, size)), size)
