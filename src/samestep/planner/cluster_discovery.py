"""Find out which cluster a run has: the hardware of this machine, a SLURM job, a rank's memory share and speed."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch

from samestep.environment.gpus import detect_gpus, detect_links
from samestep.environment.hardware import Gpu, GpuLink, Hardware, read_hardware
from samestep.environment.world import World, read_environ
from samestep.errors import PlanError
from samestep.messages import read_integer
from samestep.planner.calibration import apply_calibration, read_calibration
from samestep.planner.cluster_spec import (
    KNOWN_DEVICES,
    ClusterSpec,
    DeviceSpec,
    find_device,
    match_gpu,
    metal_memory_fraction,
    mig_fraction,
    parse_cluster_spec,
)

# Fraction of PCIe's bandwidth by the path between two GPUs: one switch, several, a host bridge, a socket, two sockets.
_PCIE_PATHS = {"PIX": 1.0, "PXB": 1.0, "PHB": 0.8, "NODE": 0.8, "SYS": 0.5}
_SOCKET_CORES = 10  # cores that saturate the memory bandwidth of a CPU
_MIB = 2**20


def detect_cluster(nodes: int) -> ClusterSpec:
    """`nodes` nodes like this machine, with its calibration if there is one."""
    cluster = local_cluster(read_hardware(detect_gpus(), detect_links()), nodes, torch.backends.mps.is_available())
    name = torch.cuda.get_device_name() if cluster.device.kind == "cuda" else cluster.device.kind
    return apply_calibration(cluster, read_calibration(name, read_environ()))


def cluster_of_ranks(world: World, ranks_per_device: int) -> ClusterSpec:
    """The cluster of this run, in which each rank has its part of a device's memory, speed and host bandwidth."""
    cluster = detect_cluster(world.nodes)
    cores = min(cluster.cores, world.local_size * torch.get_num_threads())
    used = cores / cluster.cores if cluster.device.kind == "cpu" else 1.0
    device = _slow_down(cluster.device, used / ranks_per_device)
    device = replace(device, memory=device.memory // ranks_per_device)
    return replace(cluster, device=device, cores=cores, host_bandwidth=cluster.host_bandwidth / ranks_per_device)


def _slow_down(device: DeviceSpec, fraction: float) -> DeviceSpec:
    """The device at a fraction of its speed."""
    return replace(
        device,
        peak_flops={dtype: rate * fraction for dtype, rate in device.peak_flops.items()},
        bandwidth=device.bandwidth * fraction,
        measured_flops={
            dtype: tuple((work, rate * fraction) for work, rate in points)
            for dtype, points in device.measured_flops.items()
        },
        copy_bandwidth=None if device.copy_bandwidth is None else device.copy_bandwidth * fraction,
    )


def local_cluster(hardware: Hardware, nodes: int = 1, mps: bool = False) -> ClusterSpec:
    """`nodes` nodes like this machine: its CUDA GPUs if there are any, else its Apple GPU, else its CPU."""
    cluster = _gpu_cluster(hardware) if hardware.gpus else _host_cluster(hardware, mps)
    return replace(
        cluster,
        nodes=nodes,
        host_memory=hardware.memory_available,
        cores=hardware.cores.usable,
        source=cluster.source + (f", on each of {nodes} nodes" if nodes > 1 else ""),
        shm=hardware.shm_total,
    )


def _gpu_cluster(hardware: Hardware) -> ClusterSpec:
    smallest = min(hardware.gpus, key=lambda gpu: gpu.memory_free)
    known, exact = match_gpu(smallest.name, smallest.capability)
    fraction = mig_fraction(smallest.name)
    device = replace(
        _slow_down(known.device, fraction),
        name=known.device.name if exact and fraction == 1 else smallest.name,
        memory=smallest.memory_total,
        memory_free=smallest.memory_free,
        source=known.device.source
        if exact
        else f"unknown GPU, estimated as {known.device.name}; measure it with `samestep plan --calibrate`",
    )
    return replace(
        known,
        device=device,
        devices_per_node=len(hardware.gpus),
        intra_node_bandwidth=peer_bandwidth(hardware.links, hardware.gpus, known.host_bandwidth),
        source=f"this machine: {len(hardware.gpus)} x {smallest.name}",
    )


def peer_bandwidth(links: Sequence[GpuLink], gpus: Sequence[Gpu], pcie: float) -> float:
    """Bytes per second over the slowest connection between two GPUs of a node; that of PCIe if none is known.

    >>> peer_bandwidth([GpuLink(0, 1, "NV18")], [], pcie=64e9) / 1e9
    450.0
    """
    blackwell = any(gpu.capability[0] >= 10 for gpu in gpus)
    nvlink = 50e9 if blackwell else 25e9  # of one link in one direction: NVLink 5, or 2 to 4

    def bandwidth(kind: str) -> float:
        lanes = re.fullmatch(r"NV(\d+)", kind)
        return int(lanes[1]) * nvlink if lanes else _PCIE_PATHS.get(kind, 0.5) * pcie

    return min((bandwidth(link.kind) for link in links), default=pcie)


def _host_cluster(hardware: Hardware, mps: bool) -> ClusterSpec:
    """One rank per node that uses all cores, or the Apple GPU, which shares the memory of the machine."""
    known, cores = KNOWN_DEVICES["mps" if mps else "cpu"], hardware.cores.usable
    memory = int(hardware.memory_total * metal_memory_fraction(hardware.memory_total)) if mps else hardware.memory_total
    device = replace(known.device, memory=memory, memory_free=min(memory, hardware.memory_available))
    if not mps:
        flops = {dtype: rate * cores for dtype, rate in device.peak_flops.items()}
        device = replace(device, peak_flops=flops, bandwidth=device.bandwidth * min(cores, _SOCKET_CORES))
    return replace(known, device=device, source=f"this machine: {device.name}, {cores} core(s)")


@dataclass(frozen=True)
class Allocation:
    """A SLURM job as its environment variables describe it."""

    job: str  # job ID
    gpus: int  # GPUs per node; 0 if the job has none or the variables do not say
    name: str | None  # the known device that the job requested by name; None if it named none, or an unknown one
    inside: bool  # whether this process runs on a node of the job. `salloc` leaves the shell on the login node

    def describe(self, nodes: int) -> str:
        """The allocation in one phrase."""
        return f"SLURM job {self.job}: {self.gpus} GPU(s) on each of {nodes} node(s)"


def slurm_job_cluster(here: ClusterSpec, environ: Mapping[str, str], nodes: int) -> ClusterSpec:
    """The cluster of the SLURM job that this process belongs to; `here` without a job or without GPUs in the job.

    On a node of the job the GPUs of this node count, on a login node those that the job requested by name.
    """
    job = read_allocation(environ)
    if job is None or not job.gpus:
        return here
    if here.device.kind == "cuda" and (job.inside or job.name is None):
        return _nodes_like_this(here, job, nodes)
    if job.name is None:
        raise PlanError(
            f"{job.describe(nodes)}, but the job does not name a known device. Pass --gpus NAME:{job.gpus} --nodes "
            f"{nodes}, for example --gpus a100:{job.gpus} --nodes {nodes}."
        )
    cluster = parse_cluster_spec(f"{job.name}:{job.gpus}", nodes)
    memory, cores = _number(environ, "SLURM_MEM_PER_NODE") * _MIB, _number(environ, "SLURM_CPUS_ON_NODE")
    return replace(
        cluster, host_memory=memory or cluster.host_memory, cores=cores or cluster.cores, source=job.describe(nodes)
    )


def _nodes_like_this(here: ClusterSpec, job: Allocation, nodes: int) -> ClusterSpec:
    """All GPUs of the job, each like those of this node; a job step may see only one of several GPUs."""
    count = max(job.gpus, here.devices_per_node) if job.inside else job.gpus
    known = find_device(here.device.name) if here.devices_per_node == 1 < count else None
    assumed = "" if job.inside else ", assumed to be like those of this machine"
    return replace(
        here,
        devices_per_node=count,
        nodes=nodes,
        intra_node_bandwidth=known.intra_node_bandwidth if known else here.intra_node_bandwidth,
        source=f"{replace(job, gpus=count).describe(nodes)}{assumed}; {here.source}",
    )


def read_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The SLURM job of this process; None outside of a job.

    >>> read_allocation({"SLURM_JOB_ID": "7", "SLURM_GPUS_PER_NODE": "a100:4"})
    Allocation(job='7', gpus=4, name='a100', inside=False)
    """
    if "SLURM_JOB_ID" not in environ:
        return None
    gpus, requested = _gpus_per_node(environ, slurm_nodes(environ))
    known = find_device(requested)
    return Allocation(environ["SLURM_JOB_ID"], gpus, known.device.name if known else None, "SLURMD_NODENAME" in environ)


def slurm_nodes(environ: Mapping[str, str]) -> int:
    """Number of nodes of the SLURM job of this process; 1 outside of a job."""
    return _number(environ, "SLURM_JOB_NUM_NODES") or _number(environ, "SLURM_NNODES") or 1


def _gpus_per_node(environ: Mapping[str, str], nodes: int) -> tuple[int, str]:
    """GPUs per node and their requested name: requested per node, per job or per task, or visible on this node."""
    tasks = _number(environ, "SLURM_NTASKS") or nodes
    per_node = {"SLURM_GPUS_PER_NODE": 1.0, "SLURM_GPUS": 1 / nodes, "SLURM_GPUS_PER_TASK": tasks / nodes}
    for variable, factor in per_node.items():
        count, name = _parse_gres(environ.get(variable, ""))
        if count:
            return ceil(count * factor), name
    visible = [gpu for gpu in environ.get("SLURM_JOB_GPUS", "").split(",") if gpu]
    return _number(environ, "SLURM_GPUS_ON_NODE") or len(visible), ""


def _parse_gres(text: str) -> tuple[int, str]:
    """Number and name in `4`, `a100:4` or `a100:2,v100:2`; several names count as none."""
    found = [match for part in text.split(",") if (match := re.fullmatch(r"(?:(.+):)?(\d+)", part.strip()))]
    names = {match[1] or "" for match in found}
    return sum(read_integer(match[2]) or 0 for match in found), names.pop() if len(names) == 1 else ""


def _number(environ: Mapping[str, str], variable: str) -> int:
    """The value of a variable; 0 if it is not set or not a number."""
    return read_integer(environ.get(variable, "")) or 0
