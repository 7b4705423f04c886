"""The machines a plan is made for: one kind of device, so many in a node, so many nodes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

HOST_MARGIN = 0.1
"""The part of a node's memory that a plan leaves to the system and to what nobody counted."""
USUAL_DISK = 2e9
"""Bytes a second that an NVMe disk of a node usually reads, where nobody has measured it."""


@dataclass(frozen=True)
class Device:
    """One accelerator, or the share of a CPU that one rank has."""

    name: str
    """As in the table of known devices, or as its maker calls it."""
    kind: str
    """One of cuda, mps and cpu."""
    memory: int
    """Bytes it has for a run."""
    memory_free: int
    """Bytes of them that nobody has taken."""
    bandwidth: float
    """Bytes a second between its memory and its cores."""
    rates: Mapping[str, float]
    """Peak operations a second of a matrix product by dtype: float32, tf32, bfloat16, float16."""
    source: str
    """Where the figures come from: a data sheet, this machine, a calibration."""
    launch: float | None = None
    """Seconds of the host for one operation, as a calibration saw; work shorter than that leaves the device idle."""
    measured: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    """By dtype, what a calibration saw: (operations in one product, operations a second), smallest product first."""
    streamed: float | None = None
    """Bytes a second that a calibration saw in a copy; None: reckoned from `bandwidth`."""


@dataclass(frozen=True)
class Machines:
    """What a run would have: `nodes` times `per_node` equal devices and what joins them."""

    device: Device
    """One of the devices; where they differ, the smallest."""
    per_node: int
    """Devices in a node."""
    nodes: int
    """Nodes."""
    host_memory: int
    """Bytes of host memory in a node that a run may use."""
    cores: int
    """Processor cores in a node."""
    within_node: float
    """Bytes a second that one device can send to others of its node."""
    between_nodes: float
    """Bytes a second that one device can send to other nodes."""
    host_link: float
    """Bytes a second between host memory and one device."""
    disk: float
    """Bytes a second from a node's disk."""
    source: str
    """Words, this machine, or SLURM, with what was read."""
    efficiency: float = 0.5
    """The part of a device's peak rate that large matrix products reach in practice; a calibration measures it."""
    links_measured: bool = False
    """Whether `within_node` was reached in an all-reduce, not printed on a sheet."""
    shm: int | None = None
    """Bytes of /dev/shm in a node; None where nobody looked."""

    @property
    def devices(self) -> int:
        """All devices, hence ranks."""
        return self.per_node * self.nodes

    def of_size(self, per_node: int, nodes: int) -> "Machines":
        """The same devices, so many in a node and so many nodes; memory and cores of a node grow with its devices."""
        host, cores = self.host_memory // self.per_node * per_node, max(1, self.cores // self.per_node * per_node)
        return replace(self, per_node=per_node, nodes=nodes, host_memory=host, cores=cores)

    @property
    def words(self) -> str:
        """How they are called in a sentence, as in `2 x 4 x h100`, two nodes of four."""
        return f"{f'{self.nodes} x ' if self.nodes > 1 else ''}{self.per_node} x {self.device.name}"
