"""The machines of a SLURM job: all that it was given, also where this node shows a part of them or none."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from samestep.errors import PlanError
from samestep.facts.devices import find_sheet
from samestep.facts.machine_words import machines_of
from samestep.facts.machines import Machines

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


def machines_of_job(here: Machines, environ: Mapping[str, str], nodes: int) -> Machines:
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
    found = machines_of(f"{job.name}:{job.gpus}", nodes)
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


def _like_this_node(here: Machines, job: Allocation, nodes: int) -> Machines:
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
