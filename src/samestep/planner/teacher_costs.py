"""Estimate memory and time of a frozen teacher for every placement, and choose the fastest placement that fits."""

from dataclasses import asdict, dataclass, replace

from samestep.errors import PlanError
from samestep.messages import format_bytes, format_seconds
from samestep.planner.cluster_spec import HOST_MARGIN, ClusterSpec
from samestep.planner.layouts import Placement
from samestep.planner.model_profile import CUDA_MARGIN
from samestep.planner.time_model import (
    CORE_FLOPS,
    HOST_MEMORY_BANDWIDTH,
    collective_seconds,
    host_bandwidth,
    matmul_rate,
    memory_bandwidth,
)

TEACHER_COLUMNS = ("placement", "per GPU", "per node", "time", "reason")
"""Column titles of `teacher_rows`."""
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
    placements = [_check(Placement(name, *cost), setup) for name, cost in _costs(setup, teacher).items()]
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


def teacher_rows(plan: TeacherPlan) -> list[tuple[str, ...]]:
    """One row per placement, in the order of the plan."""
    return [
        (each.name, format_bytes(each.per_gpu), format_bytes(each.per_node), format_seconds(each.seconds), each.reason)
        for each in plan.placements
    ]


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


def _check(placement: Placement, setup: TeacherSetup) -> Placement:
    """The placement with the reason if it makes no sense here or does not fit."""
    kind, free, free_on_node = setup.cluster.device.kind, max(setup.free_per_gpu, 0), max(setup.free_per_node, 0)
    # without a GPU the copy of each rank is in host memory too
    host = placement.per_node + (placement.per_gpu * setup.ranks_per_node if kind == "cpu" else 0)
    needed, needed_on_host = format_bytes(placement.per_gpu), format_bytes(host)
    name, one_device = placement.name, setup.devices_per_rank == 1
    problems = {
        "each rank has one device: the same as gpu": name in ("balanced", "sequential") and one_device,
        "needs at least 2 ranks": name in ("sharded", "served") and setup.ranks == 1,
        "needs a GPU to load layers to": name in ("offload", "disk") and kind != "cuda",
        f"does not fit: {needed} needed, {format_bytes(free)} free per device": placement.per_gpu > free,
        f"does not fit: {needed_on_host} of host memory needed, {format_bytes(free_on_node)} free per node": (
            host > setup.free_per_node
        ),
    }
    reason = next((reason for reason, applies in problems.items() if applies), "")
    return replace(placement, fits=not reason, reason=reason)


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


def placement_cost(name: str, setup: TeacherSetup, teacher: TeacherProfile) -> Placement:
    """Memory and time of one placement."""
    return Placement(name, *_costs(setup, teacher)[name])


def _costs(setup: TeacherSetup, teacher: TeacherProfile) -> dict[str, tuple[int, int, float]]:
    """Bytes on the device with the most of it, bytes of host memory per node, and seconds per step, by placement."""
    cluster, size, ranks, local_ranks = setup.cluster, teacher.bytes, setup.ranks, setup.ranks_per_node
    working = (teacher.working_per_sample + teacher.output_per_sample) * min(setup.micro_batch, setup.samples)
    full, output = size + working, teacher.output_per_sample * setup.samples
    # the current and the next layer, and everything outside of layers
    two_layers = min(2 * teacher.largest_layer + teacher.resident, size) + working
    # one forward pass on one device: the maximum of its matrix products and of reading the weights once
    flops = teacher.flops_per_sample * setup.micro_batch
    products = flops / matmul_rate(cluster, teacher.dtype, flops, tf32=True)
    forward = max(products, size / memory_bandwidth(cluster))

    def overlapped(transfer: float) -> float:
        return setup.micro_batches * max(forward, transfer)

    several = setup.devices_per_rank > 1
    balanced = min(-(-size // setup.devices_per_rank) + (teacher.largest_layer if several else 0), size)
    # `sequential` fills the first device before it uses the next one, whatever training needs there
    first = min(size, int(_SEQUENTIAL_FILL * cluster.device.memory_free)) if several else size
    gather = collective_seconds(cluster, ranks, size * (ranks - 1) / ranks)
    # `served`: one rank computes for all ranks; the size of the inputs is negligible
    served = setup.micro_batches * ranks * forward + collective_seconds(cluster, ranks, output * (ranks - 1))
    on_cpu = cluster.device.kind == "cpu"  # then it is in the host memory of one node once, not once per rank
    return {
        "gpu": (full, 0, overlapped(0)),
        # one copy in host memory; without a GPU each rank computes on its own cores
        "cpu": (0, size + local_ranks * working, overlapped(0) if on_cpu else _shared_cores_seconds(setup, teacher)),
        "balanced": (balanced + working, 0, overlapped(0)),
        "sequential": (first + working, 0, overlapped(0)),
        "offload": (two_layers, size, overlapped(size / host_bandwidth(cluster))),
        "disk": (two_layers, 0, overlapped(size * local_ranks / cluster.disk_bandwidth)),  # shared by a node's ranks
        "sharded": (min(-(-size // ranks) + two_layers, full), 0, overlapped(gather)),
        "served": (0, full, served) if on_cpu else (full, 0, served),
    }


def _shared_cores_seconds(setup: TeacherSetup, teacher: TeacherProfile) -> float:
    """All forward passes of a node on its cores, and the copy of the outputs to a rank's device."""
    flops = teacher.flops_per_sample * setup.samples * setup.ranks_per_node
    passes = setup.micro_batches * setup.ranks_per_node
    seconds = max(flops / (setup.cluster.cores * CORE_FLOPS), passes * teacher.bytes / HOST_MEMORY_BANDWIDTH)
    return seconds + teacher.output_per_sample * setup.samples / host_bandwidth(setup.cluster)
