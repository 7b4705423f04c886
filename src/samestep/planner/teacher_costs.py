"""Where a frozen teacher should be: bytes and seconds of every placement, and the fastest that fits."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

from samestep.errors import PlanError
from samestep.messages import format_bytes, format_seconds
from samestep.planner.cluster_spec import HOST_MARGIN, ClusterSpec
from samestep.planner.model_profile import CUDA_MARGIN
from samestep.planner.time_model import (
    CORE_RATE,
    HOST_BANDWIDTH,
    collective_seconds,
    host_rate,
    memory_rate,
    product_rate,
)

_FILLED = 0.9  # of what is free on a device, for `sequential`
_TOLD = 1.05  # what is less slow than this would be told as 1.0 times as slow
_SAME = 1.02  # two placements closer than this are equally fast: the one that takes less memory is better


@dataclass(frozen=True)
class TeacherProfile:
    """What a frozen model takes, whatever its place."""

    bytes: int
    """Bytes of its weights in the dtype they are computed in."""
    largest_layer: int
    """Bytes of the largest layer that moves as one."""
    flops_per_sample: float
    """Work of its forward pass for one sample."""
    output_per_sample: int
    """Bytes of its outputs for one sample."""
    working_per_sample: int = 0
    """Bytes that its forward pass takes beside the weights, for each sample at once."""
    dtype: str = "bfloat16"
    """What it computes in."""
    resident: int = 0
    """Bytes that are in no layer, such as embeddings, and stay on the device while layers come and go."""


@dataclass(frozen=True)
class TeacherSetup:
    """The training around a teacher."""

    machines: ClusterSpec
    """What there is."""
    ranks: int
    """How many ranks train, equally many on each node."""
    global_batch: int
    """Samples of a step."""
    micro_batch: int
    """Samples that a rank puts through at once."""
    taken_per_gpu: int = 0
    """Bytes of each device that training takes."""
    taken_per_node: int = 0
    """Bytes of host memory that training takes in a node."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share a node."""
        return -(-self.ranks // self.machines.nodes)

    @property
    def samples(self) -> int:
        """Samples of a step that one rank has."""
        return -(-self.global_batch // self.ranks)

    @property
    def micro_batches(self) -> int:
        """Forward passes of a step on one rank."""
        return -(-self.samples // self.micro_batch)

    @property
    def devices_per_rank(self) -> int:
        """Devices that one rank can use alone."""
        return max(1, self.machines.per_node // self.ranks_per_node)


@dataclass(frozen=True)
class Placement:
    """One place for a teacher, weighed."""

    name: str
    """As `run.teacher(placement=...)` calls it."""
    per_gpu: int
    """Bytes on the fullest device."""
    per_node: int
    """Bytes of host memory on a node."""
    seconds: float
    """What it adds to a step, estimated, nothing overlapped with the student."""
    fits: bool
    """Whether it may be chosen."""
    why: str
    """Why it was, or was not."""


@dataclass(frozen=True)
class TeacherPlan:
    """All placements, the chosen one first, then by seconds."""

    chosen: Placement | None
    """The fastest that fits; None where none does."""
    placements: tuple[Placement, ...]
    """All ten."""

    def to_json(self) -> dict[str, object]:
        """The same as plain data."""
        return {
            "chosen": self.chosen.name if self.chosen else None,
            "placements": [asdict(placement) for placement in self.placements],
        }


Cost = tuple[int, int, float]
"""Bytes on a device, bytes on a node, seconds of a step."""


def compare_placements(setting: TeacherSetup, teacher: TeacherProfile) -> TeacherPlan:
    """Weigh every placement and choose the fastest that fits; equally fast ones by the memory they take."""
    if min(setting.micro_batch, setting.global_batch, setting.ranks) < 1:
        raise PlanError("a teacher is placed for at least 1 rank, a global batch and a micro-batch of at least 1")
    weighed = [_weigh(name, cost(setting, teacher), setting, teacher) for name, cost in _COSTS.items()]
    weighed += [_weigh_cached(weighed, setting, teacher)]
    weighed += [replace(weighed[0], name="custom", fits=False, why="a device map of your own: never chosen by itself")]
    fitting = [placement for placement in weighed if placement.fits]
    limit = min((placement.seconds for placement in fitting), default=0.0) * _SAME
    chosen = _best(fitting, limit, setting)
    told = [_tell(placement, chosen, limit) for placement in weighed]
    told.sort(
        key=lambda placement: (chosen is None or placement.name != chosen.name, not placement.fits, placement.seconds)
    )
    return TeacherPlan(told[0] if chosen else None, tuple(told))


def _best(fitting: list[Placement], limit: float, setting: TeacherSetup) -> Placement | None:
    """Of those as fast as the fastest, the one that takes least memory of a node, and of its devices."""
    near = [placement for placement in fitting if placement.seconds <= limit]
    devices = setting.machines.per_node
    return min(near, key=lambda each: (each.per_gpu * devices + each.per_node, each.per_gpu), default=None)


def placement_cost(name: str, setting: TeacherSetup, teacher: TeacherProfile) -> Cost:
    """Bytes and seconds of one placement by its name."""
    return _COSTS[name](setting, teacher)


def forward_seconds(setting: TeacherSetup, teacher: TeacherProfile, samples: int) -> float:
    """One forward pass on one device: the longer of its products and of reading the weights once."""
    machines = setting.machines
    work = teacher.flops_per_sample * samples
    return max(work / product_rate(machines, teacher.dtype, work, tf32=True), teacher.bytes / memory_rate(machines))


def _every_forward(setting: TeacherSetup, teacher: TeacherProfile, transfer: float = 0.0) -> float:
    """All forward passes of a step, each as long as the slower of computing and of what must arrive meanwhile."""
    return setting.micro_batches * max(forward_seconds(setting, teacher, setting.micro_batch), transfer)


def _gpu(setting: TeacherSetup, teacher: TeacherProfile) -> Cost:
    return teacher.bytes + _working(setting, teacher), 0, _every_forward(setting, teacher)


def _cpu(setting: TeacherSetup, teacher: TeacherProfile) -> Cost:
    """One copy in host memory; the ranks of a node share its cores."""
    held = teacher.bytes + setting.ranks_per_node * _working(setting, teacher)
    if setting.machines.device.kind == "cpu":
        return 0, held, _every_forward(setting, teacher)  # as with a copy of its own: each rank has its cores
    work = teacher.flops_per_sample * setting.samples * setting.ranks_per_node
    passes = setting.micro_batches * setting.ranks_per_node
    seconds = max(work / (setting.machines.cores * CORE_RATE), passes * teacher.bytes / HOST_BANDWIDTH)
    back = teacher.output_per_sample * setting.samples / host_rate(setting.machines)
    return 0, held, seconds + back


def _balanced(setting: TeacherSetup, teacher: TeacherProfile) -> Cost:
    share = -(-teacher.bytes // setting.devices_per_rank)
    spread = share + (teacher.largest_layer if setting.devices_per_rank > 1 else 0)
    return min(spread, teacher.bytes) + _working(setting, teacher), 0, _every_forward(setting, teacher)


def _sequential(setting: TeacherSetup, teacher: TeacherProfile) -> Cost:
    """The first device is filled before the next is touched, whatever training will need there."""
    filled = int(_FILLED * setting.machines.device.memory_free)
    first = teacher.bytes if setting.devices_per_rank == 1 else min(teacher.bytes, filled)
    return first + _working(setting, teacher), 0, _every_forward(setting, teacher)


def _offload(setting: TeacherSetup, teacher: TeacherProfile) -> Cost:
    transfer = teacher.bytes / host_rate(setting.machines)
    return _streamed(setting, teacher), teacher.bytes, _every_forward(setting, teacher, transfer)


def _disk(setting: TeacherSetup, teacher: TeacherProfile) -> Cost:
    """The ranks of a node share its disk."""
    transfer = teacher.bytes * setting.ranks_per_node / setting.machines.disk
    return _streamed(setting, teacher), 0, _every_forward(setting, teacher, transfer)


def _sharded(setting: TeacherSetup, teacher: TeacherProfile) -> Cost:
    sent = teacher.bytes * (setting.ranks - 1) / setting.ranks
    transfer = collective_seconds(setting.machines, setting.ranks, sent)
    mine = -(-teacher.bytes // setting.ranks)
    return (
        min(mine + _streamed(setting, teacher), _gpu(setting, teacher)[0]),
        0,
        _every_forward(setting, teacher, transfer),
    )


def _served(setting: TeacherSetup, teacher: TeacherProfile) -> Cost:
    """One rank holds it and computes for all; inputs are small beside outputs."""
    held = _gpu(setting, teacher)[0]
    passes = setting.micro_batches * setting.ranks
    others = setting.ranks - 1
    back = collective_seconds(setting.machines, setting.ranks, teacher.output_per_sample * setting.samples * others)
    seconds = passes * forward_seconds(setting, teacher, setting.micro_batch) + back
    # Without a GPU it lies in the memory of one node, once: a rank's own device is counted for each of them.
    return (0, held, seconds) if setting.machines.device.kind == "cpu" else (held, 0, seconds)


_COSTS: Mapping[str, Callable[[TeacherSetup, TeacherProfile], Cost]] = {
    "gpu": _gpu,
    "cpu": _cpu,
    "balanced": _balanced,
    "sequential": _sequential,
    "offload": _offload,
    "disk": _disk,
    "sharded": _sharded,
    "served": _served,
}


def _working(setting: TeacherSetup, teacher: TeacherProfile) -> int:
    return (teacher.working_per_sample + teacher.output_per_sample) * min(setting.micro_batch, setting.samples)


def _streamed(setting: TeacherSetup, teacher: TeacherProfile) -> int:
    """The layer at work and the next, beside what is no layer."""
    return min(2 * teacher.largest_layer + teacher.resident, teacher.bytes) + _working(setting, teacher)


def _room(setting: TeacherSetup) -> int:
    device = setting.machines.device
    return device.memory_free - int(device.memory * CUDA_MARGIN) - setting.taken_per_gpu


def _host_room(setting: TeacherSetup) -> int:
    return int(setting.machines.host_memory * (1 - HOST_MARGIN)) - setting.taken_per_node


def _weigh(name: str, cost: Cost, setting: TeacherSetup, teacher: TeacherProfile) -> Placement:
    per_gpu, per_node, seconds = cost
    why = _unfit(name, setting) or _too_large(per_gpu, per_node, setting)
    return Placement(name, per_gpu, per_node, seconds, why is None, why or "")


def _unfit(name: str, setting: TeacherSetup) -> str | None:
    """Why a placement has no meaning here."""
    alone = setting.devices_per_rank == 1
    cases = {
        "balanced": (alone, "each rank has one device: the same as gpu"),
        "sequential": (alone, "each rank has one device: the same as gpu"),
        "sharded": (setting.ranks == 1, "one rank has nobody to share with"),
        "served": (setting.ranks == 1, "one rank has nobody to serve"),
        "offload": (setting.machines.device.kind != "cuda", "there is no GPU to stream to"),
        "disk": (setting.machines.device.kind != "cuda", "there is no GPU to stream to"),
    }
    applies, why = cases.get(name, (False, ""))
    return why if applies else None


def _too_large(per_gpu: int, per_node: int, setting: TeacherSetup) -> str | None:
    if per_gpu > max(_room(setting), 0):
        return f"needs {format_bytes(per_gpu)} on a device and {format_bytes(max(_room(setting), 0))} are left there"
    # without a GPU a rank's own copy lies in the memory of the node as well
    host = per_node + (per_gpu * setting.ranks_per_node if setting.machines.device.kind == "cpu" else 0)
    if host > _host_room(setting):
        return f"needs {format_bytes(host)} of a node's memory and {format_bytes(max(_host_room(setting), 0))} are left there"
    return None


def _weigh_cached(weighed: list[Placement], setting: TeacherSetup, teacher: TeacherProfile) -> Placement:
    """The fastest of the others in the first epoch, then the disk; never chosen: the user alone knows his inputs."""
    first = min((each for each in weighed if each.fits), key=lambda each: each.seconds, default=weighed[0])
    read = teacher.output_per_sample * setting.samples * setting.ranks_per_node / setting.machines.disk
    if first.fits:
        later = f": later epochs take {format_seconds(read)}" if read else ""
        why = f"if a sample's inputs stay the same, which is yours to say{later}"
    else:
        why = "no place fits for the first epoch, which fills the cache"
    return Placement("cached", first.per_gpu, first.per_node, first.seconds, False, why)


def _tell(placement: Placement, chosen: Placement | None, limit: float) -> Placement:
    if placement.why or chosen is None:
        return placement
    if placement.name == chosen.name:
        return replace(placement, why="the fastest that fits")
    if placement.seconds <= limit:
        return replace(placement, why=f"as fast, with no less memory than {chosen.name}")
    times = placement.seconds / chosen.seconds if chosen.seconds else 1.0
    slower = f"{times:.1f} times as slow as" if times >= _TOLD else "a little slower than"
    return replace(placement, why=f"{slower} {chosen.name}")
