"""Estimate memory and time of a frozen teacher for every placement, and choose the fastest placement that fits."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from samestep.errors import PlanError
from samestep.messages import format_bytes, format_seconds
from samestep.planner.cluster_spec import HOST_MARGIN, ClusterSpec
from samestep.planner.model_profile import CUDA_MARGIN
from samestep.planner.time_model import (
    CORE_FLOPS,
    HOST_MEMORY_BANDWIDTH,
    collective_seconds,
    host_bandwidth,
    matmul_rate,
    memory_bandwidth,
)

_SEQUENTIAL_FILL = 0.9  # fraction of a device's free memory that `sequential` fills
_MIN_SHOWN_SLOWDOWN = 1.05  # a smaller factor would be printed as 1.0 times
_EQUALLY_FAST = 1.02  # of placements closer than this the one with less memory is better


@dataclass(frozen=True)
class TeacherProfile:
    """Memory and work of a frozen model, independent of its placement."""

    bytes: int  # bytes of its weights in the dtype of the computation
    largest_layer: int  # bytes of the largest layer, which moves as a unit
    flops_per_sample: float  # FLOPs of the forward pass per sample
    output_per_sample: int  # bytes of the outputs per sample
    working_per_sample: int = 0  # bytes per sample that the forward pass uses in addition to weights and outputs
    dtype: str = "bfloat16"  # dtype of the computation
    resident: int = 0  # bytes outside of layers, such as embeddings, which stay on the device with any placement


@dataclass(frozen=True)
class TeacherSetup:
    """The training run that a teacher is placed for."""

    cluster: ClusterSpec
    ranks: int  # number of ranks that train, the same number on each node
    global_batch: int  # samples per step
    micro_batch: int  # samples per forward pass on a rank
    used_per_gpu: int = 0  # bytes of each device that training uses
    used_per_node: int = 0  # bytes of each node's host memory that training uses

    @property
    def ranks_per_node(self) -> int:
        """Ranks per node."""
        return -(-self.ranks // self.cluster.nodes)

    @property
    def samples(self) -> int:
        """Samples per step and rank."""
        return -(-self.global_batch // self.ranks)

    @property
    def micro_batches(self) -> int:
        """Forward passes per step and rank."""
        return -(-self.samples // self.micro_batch)

    @property
    def devices_per_rank(self) -> int:
        """Devices that one rank can use alone."""
        return max(1, self.cluster.devices_per_node // self.ranks_per_node)

    @property
    def free_per_gpu(self) -> int:
        """Bytes of a device that are left for the teacher."""
        device = self.cluster.device
        return device.memory_free - int(device.memory * CUDA_MARGIN) - self.used_per_gpu

    @property
    def free_per_node(self) -> int:
        """Bytes of a node's host memory that are left for the teacher."""
        return int(self.cluster.host_memory * (1 - HOST_MARGIN)) - self.used_per_node


class PlacementCost(NamedTuple):
    """What a placement of a teacher costs."""

    per_gpu: int  # bytes on the device with the most of it
    per_node: int  # bytes of host memory per node
    seconds: float  # estimated time that it adds to a step, without overlap with the student


@dataclass(frozen=True)
class Placement:
    """One placement of a teacher with its cost."""

    name: str  # name in `run.teacher(placement=...)`
    per_gpu: int  # bytes on the device with the most of it
    per_node: int  # bytes of host memory per node
    seconds: float  # estimated time that it adds to a step, without overlap with the student
    fits: bool  # whether it can be chosen
    reason: str  # why it was or was not chosen


@dataclass(frozen=True)
class TeacherPlan:
    """All placements: the chosen one first, then those that fit, then the others, each by time."""

    chosen: Placement | None  # the fastest placement that fits; None if none fits
    placements: tuple[Placement, ...]  # all ten placements

    def to_json(self) -> dict[str, object]:
        """The plan as plain data."""
        return {
            "chosen": self.chosen.name if self.chosen else None,
            "placements": [asdict(placement) for placement in self.placements],
        }


def compare_placements(setup: TeacherSetup, teacher: TeacherProfile) -> TeacherPlan:
    """Estimate every placement and choose the fastest that fits; of equally fast ones that with the least memory."""
    if min(setup.micro_batch, setup.global_batch, setup.ranks) < 1:
        raise PlanError(
            "A teacher needs at least 1 rank, a global batch and a micro-batch of at least 1, got "
            f"{setup.ranks}, {setup.global_batch} and {setup.micro_batch}."
        )
    placements = [_assess(name, cost(setup, teacher), setup) for name, cost in _COSTS.items()]
    placements.append(_cached_placement(placements, setup, teacher))
    placements.append(
        replace(placements[0], name="custom", fits=False, reason="your own device map: never chosen automatically")
    )
    fitting = [placement for placement in placements if placement.fits]
    limit = min((placement.seconds for placement in fitting), default=0.0) * _EQUALLY_FAST
    chosen = choose_placement(fitting, limit, setup)
    explained = [explain_placement(placement, chosen, limit) for placement in placements]
    explained.sort(
        key=lambda placement: (chosen is None or placement.name != chosen.name, not placement.fits, placement.seconds)
    )
    return TeacherPlan(explained[0] if chosen else None, tuple(explained))


def choose_placement(fitting: list[Placement], limit: float, setup: TeacherSetup) -> Placement | None:
    """Of the placements within `limit` seconds, the one with the least memory per node, then per device."""
    fast = [placement for placement in fitting if placement.seconds <= limit]
    devices = setup.cluster.devices_per_node
    return min(fast, key=lambda each: (each.per_gpu * devices + each.per_node, each.per_gpu), default=None)


def explain_placement(placement: Placement, chosen: Placement | None, limit: float) -> Placement:
    """The placement with the reason why it was or was not chosen."""
    if placement.reason or chosen is None:
        return placement
    if placement.name == chosen.name:
        return replace(placement, reason="fastest placement that fits")
    if placement.seconds <= limit:
        return replace(placement, reason=f"as fast as {chosen.name}, without using less memory")
    factor = placement.seconds / chosen.seconds if chosen.seconds else 1.0
    slower = f"{factor:.1f} times as slow as" if factor >= _MIN_SHOWN_SLOWDOWN else "slightly slower than"
    return replace(placement, reason=f"{slower} {chosen.name}")


def _assess(name: str, cost: PlacementCost, setup: TeacherSetup) -> Placement:
    problem = _not_applicable(name, setup) or _does_not_fit(cost, setup)
    return Placement(name, *cost, fits=problem is None, reason=problem or "")


def _not_applicable(name: str, setup: TeacherSetup) -> str | None:
    """Why a placement makes no sense here; None if it does."""
    one_device, one_rank = setup.devices_per_rank == 1, setup.ranks == 1
    no_gpu = setup.cluster.device.kind != "cuda"
    cases = {
        "balanced": (one_device, "each rank has one device: the same as gpu"),
        "sequential": (one_device, "each rank has one device: the same as gpu"),
        "sharded": (one_rank, "needs at least 2 ranks"),
        "served": (one_rank, "needs at least 2 ranks"),
        "offload": (no_gpu, "needs a GPU to load layers to"),
        "disk": (no_gpu, "needs a GPU to load layers to"),
    }
    applies, reason = cases.get(name, (False, ""))
    return reason if applies else None


def _does_not_fit(cost: PlacementCost, setup: TeacherSetup) -> str | None:
    free = max(setup.free_per_gpu, 0)
    if cost.per_gpu > free:
        return f"does not fit: {format_bytes(cost.per_gpu)} needed, {format_bytes(free)} free per device"
    # without a GPU the copy of each rank is in host memory too
    on_cpu = setup.cluster.device.kind == "cpu"
    host = cost.per_node + (cost.per_gpu * setup.ranks_per_node if on_cpu else 0)
    if host > setup.free_per_node:
        free = max(setup.free_per_node, 0)
        return f"does not fit: {format_bytes(host)} of host memory needed, {format_bytes(free)} free per node"
    return None


def _cached_placement(others: list[Placement], setup: TeacherSetup, teacher: TeacherProfile) -> Placement:
    """The first epoch costs as much as the fastest other placement, later ones read the disk.

    Never chosen, because only the user knows whether a sample's inputs are the same in every epoch.
    """
    first = min((each for each in others if each.fits), key=lambda each: each.seconds, default=others[0])
    read = teacher.output_per_sample * setup.samples * setup.ranks_per_node / setup.cluster.disk_bandwidth
    if first.fits:
        later = f": later epochs take {format_seconds(read)} per step" if read else ""
        reason = f"choose it yourself if a sample has the same inputs in every epoch{later}"
    else:
        reason = "no placement fits for the first epoch, which fills the cache"
    return Placement("cached", first.per_gpu, first.per_node, first.seconds, False, reason)


def placement_cost(name: str, setup: TeacherSetup, teacher: TeacherProfile) -> PlacementCost:
    """Memory and time of one placement."""
    return _COSTS[name](setup, teacher)


def _gpu(setup: TeacherSetup, teacher: TeacherProfile) -> PlacementCost:
    return PlacementCost(teacher.bytes + _working(setup, teacher), 0, _all_forwards(setup, teacher))


def _cpu(setup: TeacherSetup, teacher: TeacherProfile) -> PlacementCost:
    """One copy in host memory; the ranks of a node share its cores."""
    memory = teacher.bytes + setup.ranks_per_node * _working(setup, teacher)
    if setup.cluster.device.kind == "cpu":
        return PlacementCost(0, memory, _all_forwards(setup, teacher))  # each rank computes on its own cores
    flops = teacher.flops_per_sample * setup.samples * setup.ranks_per_node
    passes = setup.micro_batches * setup.ranks_per_node
    seconds = max(flops / (setup.cluster.cores * CORE_FLOPS), passes * teacher.bytes / HOST_MEMORY_BANDWIDTH)
    copy_back = teacher.output_per_sample * setup.samples / host_bandwidth(setup.cluster)
    return PlacementCost(0, memory, seconds + copy_back)


def _balanced(setup: TeacherSetup, teacher: TeacherProfile) -> PlacementCost:
    part = -(-teacher.bytes // setup.devices_per_rank)
    part += teacher.largest_layer if setup.devices_per_rank > 1 else 0
    memory = min(part, teacher.bytes) + _working(setup, teacher)
    return PlacementCost(memory, 0, _all_forwards(setup, teacher))


def _sequential(setup: TeacherSetup, teacher: TeacherProfile) -> PlacementCost:
    """Fills the first device before it uses the next one, whatever training needs there."""
    filled = int(_SEQUENTIAL_FILL * setup.cluster.device.memory_free)
    first = teacher.bytes if setup.devices_per_rank == 1 else min(teacher.bytes, filled)
    return PlacementCost(first + _working(setup, teacher), 0, _all_forwards(setup, teacher))


def _offload(setup: TeacherSetup, teacher: TeacherProfile) -> PlacementCost:
    transfer = teacher.bytes / host_bandwidth(setup.cluster)
    return PlacementCost(_two_layers(setup, teacher), teacher.bytes, _all_forwards(setup, teacher, transfer))


def _disk(setup: TeacherSetup, teacher: TeacherProfile) -> PlacementCost:
    """The ranks of a node share its disk."""
    transfer = teacher.bytes * setup.ranks_per_node / setup.cluster.disk_bandwidth
    return PlacementCost(_two_layers(setup, teacher), 0, _all_forwards(setup, teacher, transfer))


def _sharded(setup: TeacherSetup, teacher: TeacherProfile) -> PlacementCost:
    sent = teacher.bytes * (setup.ranks - 1) / setup.ranks
    transfer = collective_seconds(setup.cluster, setup.ranks, sent)
    shard = -(-teacher.bytes // setup.ranks)
    memory = min(shard + _two_layers(setup, teacher), teacher.bytes + _working(setup, teacher))
    return PlacementCost(memory, 0, _all_forwards(setup, teacher, transfer))


def _served(setup: TeacherSetup, teacher: TeacherProfile) -> PlacementCost:
    """One rank holds the teacher and computes for all ranks; the size of the inputs is negligible."""
    memory = teacher.bytes + _working(setup, teacher)
    sent = teacher.output_per_sample * setup.samples * (setup.ranks - 1)
    passes = setup.micro_batches * setup.ranks
    seconds = passes * _forward_seconds(setup, teacher) + collective_seconds(setup.cluster, setup.ranks, sent)
    # Without a GPU it is in the host memory of one node, once. `per_gpu` would count it for each rank.
    on_cpu = setup.cluster.device.kind == "cpu"
    return PlacementCost(0, memory, seconds) if on_cpu else PlacementCost(memory, 0, seconds)


_COSTS: Mapping[str, Callable[[TeacherSetup, TeacherProfile], PlacementCost]] = {
    "gpu": _gpu,
    "cpu": _cpu,
    "balanced": _balanced,
    "sequential": _sequential,
    "offload": _offload,
    "disk": _disk,
    "sharded": _sharded,
    "served": _served,
}


def _forward_seconds(setup: TeacherSetup, teacher: TeacherProfile) -> float:
    """One forward pass on one device: the maximum of its matrix products and of reading the weights once."""
    flops = teacher.flops_per_sample * setup.micro_batch
    products = flops / matmul_rate(setup.cluster, teacher.dtype, flops, tf32=True)
    return max(products, teacher.bytes / memory_bandwidth(setup.cluster))


def _all_forwards(setup: TeacherSetup, teacher: TeacherProfile, transfer: float = 0.0) -> float:
    """All forward passes of a step, each the maximum of compute and of the transfer that overlaps with it."""
    return setup.micro_batches * max(_forward_seconds(setup, teacher), transfer)


def _working(setup: TeacherSetup, teacher: TeacherProfile) -> int:
    return (teacher.working_per_sample + teacher.output_per_sample) * min(setup.micro_batch, setup.samples)


def _two_layers(setup: TeacherSetup, teacher: TeacherProfile) -> int:
    """The current and the next layer, and everything outside of layers."""
    return min(2 * teacher.largest_layer + teacher.resident, teacher.bytes) + _working(setup, teacher)
