"""The machines that a run is on, for its plans: what is seen here, and what one rank has of it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch

from samestep.environment.gpus import detect_gpus, detect_links
from samestep.environment.hardware import Gpu, GpuLink, Hardware, read_hardware
from samestep.environment.world import World, read_environ
from samestep.errors import PlanError
from samestep.planner.calibration import apply_calibration, read_calibration
from samestep.planner.cluster_spec import (
    DEVICE_SPECS,
    USUAL_DISK,
    ClusterSpec,
    DeviceSpec,
    Sheet,
    apple_share,
    find_sheet,
    parse_cluster_spec,
    sheet_like,
    slice_of,
)

_NVLINK = 25e9  # one link of NVLink 2, 3 and 4, one direction
_NVLINK_5 = 50e9
_BLACKWELL = 10  # compute capability from which NVLink is of the fifth generation
# The part of PCIe's rate that is left on ever longer ways: one switch, several, a host bridge, a socket, both sockets.
_WAYS = {"PIX": 1.0, "PXB": 1.0, "PHB": 0.8, "NODE": 0.8, "SYS": 0.5}


def local_cluster(hardware: Hardware, nodes: int = 1, mps: bool = False) -> ClusterSpec:
    """What this machine has, once for each node: GPUs if torch can use any, else Apple's, else the CPU."""
    if hardware.gpus:
        return _of_gpus(hardware, nodes)
    sheet = DEVICE_SPECS["mps" if mps else "cpu"]
    return _of_host(hardware, sheet, nodes)


def link_rate(links: Sequence[GpuLink], gpus: Sequence[Gpu], pcie: float) -> float:
    """Bytes a second over the slowest link between two GPUs of a node; PCIe's where nobody tells.

    >>> link_rate([Link(0, 1, "NV18")], [], pcie=64e9) / 1e9
    450.0
    """
    each = _NVLINK_5 if any(gpu.capability[0] >= _BLACKWELL for gpu in gpus) else _NVLINK
    return min((_rate(link.kind, each, pcie) for link in links), default=pcie)


def _rate(kind: str, nvlink: float, pcie: float) -> float:
    lanes = re.fullmatch(r"NV(\d+)", kind)
    return int(lanes[1]) * nvlink if lanes else _WAYS.get(kind, 0.5) * pcie


def _of_gpus(hardware: Hardware, nodes: int) -> ClusterSpec:
    smallest = min(hardware.gpus, key=lambda gpu: gpu.memory_free)
    sheet, own = sheet_like(smallest.name, smallest.capability)
    part = slice_of(smallest.name)
    reckoned = f"reckoned as {sheet.device.name} until `samestep plan --calibrate` has measured it"
    device = replace(
        sheet.device,
        name=sheet.device.name if own and part == 1 else smallest.name,
        memory=smallest.memory_total,
        memory_free=smallest.memory_free,
        bandwidth=sheet.device.bandwidth * part,
        rates={dtype: rate * part for dtype, rate in sheet.device.rates.items()},
        source=sheet.device.source if own else reckoned,
    )
    return ClusterSpec(
        device=device,
        per_node=len(hardware.gpus),
        nodes=nodes,
        host_memory=hardware.memory_available,
        cores=hardware.cores.usable,
        within_node=link_rate(hardware.links, hardware.gpus, sheet.host_link),
        between_nodes=sheet.network,
        host_link=sheet.host_link,
        disk=USUAL_DISK,
        source=f"this machine: {len(hardware.gpus)} x {smallest.name}" + _on_nodes(nodes),
        shm=hardware.shm_total,
    )


def _of_host(hardware: Hardware, sheet: Sheet, nodes: int) -> ClusterSpec:
    """One rank a node that computes with all cores, or with Apple's GPU, which shares the memory of the machine."""
    apple = sheet.device.kind == "mps"
    cores = hardware.cores.usable
    memory = int(hardware.memory_total * apple_share(hardware.memory_total)) if apple else hardware.memory_total
    device: DeviceSpec = replace(
        sheet.device,
        memory=memory,
        memory_free=min(memory, hardware.memory_available),
        rates=sheet.device.rates if apple else {name: rate * cores for name, rate in sheet.device.rates.items()},
        bandwidth=sheet.device.bandwidth if apple else sheet.device.bandwidth * min(cores, 10),
    )
    return ClusterSpec(
        device=device,
        per_node=1,
        nodes=nodes,
        host_memory=hardware.memory_available,
        cores=cores,
        within_node=sheet.link,
        between_nodes=sheet.network,
        host_link=sheet.host_link,
        disk=USUAL_DISK,
        source=f"this machine: {sheet.device.name}, {cores} core(s)" + _on_nodes(nodes),
        shm=hardware.shm_total,
    )


def _on_nodes(nodes: int) -> str:
    return f", on each of {nodes} nodes" if nodes > 1 else ""


_MIB = 2**20
_NODES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")


@dataclass(frozen=True)
class Allocation:
    """What a job was given, as far as its variables say."""

    job: str
    """Its number."""
    gpus: int
    """GPUs in each of its nodes; 0 where it has none, or nobody says."""
    name: str | None
    """The device of the table that was asked for; None where none was named, or one that the table lacks."""
    inside: bool
    """Whether this process is on one of its nodes: salloc leaves the shell on the login node."""


def slurm_job_cluster(here: ClusterSpec, environ: Mapping[str, str], nodes: int) -> ClusterSpec:
    """The machines of the job that this process belongs to; without a job, or one without GPUs, those that are here.

    GPUs are what this node shows where it is one of the job's, else what was asked for by name.
    """
    job = read_allocation(environ)
    if job is None or not job.gpus:
        return here
    if here.device.kind == "cuda" and (job.inside or job.name is None):
        return _like_this_node(here, job, nodes)
    if job.name is None:
        raise PlanError(
            f"SLURM job {job.job} has {job.gpus} GPU(s) on each of {nodes} node(s) and names none of the table: type "
            f"--gpus NAME:{job.gpus} --nodes {nodes}, as in --gpus a100:{job.gpus}"
        )
    found = parse_cluster_spec(f"{job.name}:{job.gpus}", nodes)
    memory, cores = _whole(environ.get("SLURM_MEM_PER_NODE", "")), _whole(environ.get("SLURM_CPUS_ON_NODE", ""))
    return replace(
        found, host_memory=memory * _MIB or found.host_memory, cores=cores or found.cores, source=_source(job, nodes)
    )


def read_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The job that this process is in; None outside of one.

    >>> read_allocation({"SLURM_JOB_ID": "7", "SLURM_GPUS_PER_NODE": "a100:4"})
    Allocation(job='7', gpus=4, name='a100', inside=False)
    """
    if "SLURM_JOB_ID" not in environ:
        return None
    gpus, asked = _gpus(environ, slurm_nodes(environ))
    sheet = find_sheet(asked)
    return Allocation(environ["SLURM_JOB_ID"], gpus, sheet.device.name if sheet else None, "SLURMD_NODENAME" in environ)


def slurm_nodes(environ: Mapping[str, str]) -> int:
    """Nodes of the SLURM job that this process is in; 1 outside of one."""
    return next((count for name in _NODES if (count := _whole(environ.get(name, "")))), 1)


def _gpus(environ: Mapping[str, str], nodes: int) -> tuple[int, str]:
    """GPUs in a node and the name they were asked for by: typed for a node, for the job, for a task; or seen here."""
    tasks = _whole(environ.get("SLURM_NTASKS", "")) or nodes
    # by variable, how often a node has what it counts
    known = {"SLURM_GPUS_PER_NODE": 1.0, "SLURM_GPUS": 1 / nodes, "SLURM_GPUS_PER_TASK": tasks / nodes}
    for variable, times in known.items():
        count, name = _asked(environ.get(variable, ""))
        if count:
            return ceil(count * times), name
    listed = [each for each in environ.get("SLURM_JOB_GPUS", "").split(",") if each]
    return _whole(environ.get("SLURM_GPUS_ON_NODE", "")) or len(listed), ""


def _asked(text: str) -> tuple[int, str]:
    """Number and name out of `4`, `a100:4` or `a100:2,v100:2`, which has no one name."""
    parts = [re.fullmatch(r"(?:(.+):)?(\d+)", part.strip()) for part in text.split(",")]
    found = [part for part in parts if part is not None]
    names = {part[1] or "" for part in found}
    return sum(int(part[2]) for part in found), names.pop() if len(names) == 1 else ""


def _like_this_node(here: ClusterSpec, job: Allocation, nodes: int) -> ClusterSpec:
    """All GPUs of the job, each as those of this node; a step may show one of several."""
    count = max(job.gpus, here.per_node) if job.inside else job.gpus
    sheet = find_sheet(here.device.name)
    lone = here.per_node == 1 < count and sheet is not None
    where = "" if job.inside else ", reckoned as those of this machine"
    return replace(
        here,
        per_node=count,
        nodes=nodes,
        within_node=sheet.link if lone and sheet else here.within_node,
        source=f"{_source(replace(job, gpus=count), nodes)}{where}; {here.source}",
    )


def _source(job: Allocation, nodes: int) -> str:
    return f"SLURM job {job.job}: {job.gpus} GPU(s) on each of {nodes} node(s)"


def _whole(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def detect_cluster(nodes: int) -> ClusterSpec:
    """This machine once for each node, with what a calibration has kept of it."""
    hardware = read_hardware(detect_gpus(), detect_links())
    found = local_cluster(hardware, nodes, torch.backends.mps.is_available())
    name = torch.cuda.get_device_name() if found.device.kind == "cuda" else found.device.kind
    return apply_calibration(found, read_calibration(name, read_environ()))


def cluster_of_ranks(world: World, sharing: int) -> ClusterSpec:
    """The same as each of `sharing` ranks has it that compute on one device: a part of its memory, speed and link."""
    found = detect_cluster(world.nodes)
    cores = min(found.cores, world.local_size * torch.get_num_threads())
    used = cores / found.cores if found.device.kind == "cpu" else 1.0
    own = replace(_part(found.device, used / sharing), memory=found.device.memory // sharing)
    return replace(found, device=own, cores=cores, host_link=found.host_link / sharing)


def _part(device: DeviceSpec, share: float) -> DeviceSpec:
    """How fast one rank computes on a device that it shares with others, or does not use in full."""
    return replace(
        device,
        rates={dtype: rate * share for dtype, rate in device.rates.items()},
        bandwidth=device.bandwidth * share,
        measured={
            dtype: tuple((work, rate * share) for work, rate in points) for dtype, points in device.measured.items()
        },
        streamed=None if device.streamed is None else device.streamed * share,
    )
