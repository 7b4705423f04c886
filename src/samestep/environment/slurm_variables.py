"""Whether SLURM is here, and which of its jobs this process belongs to."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

# Steps that SLURM makes by itself (the batch script, an interactive shell, an external one) carry numbers from here up.
_FIRST_RESERVED_STEP = 0xFFFFFFF0

# Below Linux's ephemeral ports (32768 and up), which any outgoing connection may take, and below 29400 and 29500, where
# torchrun listens by default.
_FIRST_PORT, _PORTS = 10_000, 19_000

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task of a step.

    The batch script has SLURM_PROCID=0 and SLURM_NTASKS too, but no step: a python started there is alone.
    """
    step = environ.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in environ and step.isdecimal() and int(step) < _FIRST_RESERVED_STEP


def expand_nodes(text: str) -> list[str]:
    """Host names of a SLURM node list, in its order.

    >>> expand_nodes("node[01-03,07],gpu3")
    ['node01', 'node02', 'node03', 'node07', 'gpu3']
    """
    parts = re.split(r",(?![^\[]*\])", text.strip())
    hosts = [host for part in parts for host in _expand(part)]
    if any(not host or "[" in host or "]" in host for host in hosts):
        raise ValueError(f"{text!r} is not a SLURM node list such as node[01-04,07],gpu3")
    return hosts


def expand_tasks(text: str) -> list[int]:
    """Tasks of each node, from the way SLURM abbreviates them.

    >>> expand_tasks("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a list of tasks such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def port_of(job: int, step: int) -> int:
    """A port that all ranks of a step agree on without talking, and that other jobs on the node do not use.

    Two jobs meet on one port only if their ids lie a multiple of 19000 apart, or if one of them runs dozens of steps.

    >>> port_of(4242, 0) == port_of(4243, 0)
    False
    """
    return _FIRST_PORT + (job * 97 + step) % _PORTS


def _expand(part: str) -> list[str]:
    bracket = _BRACKETS.search(part)
    if bracket is None:
        return [part]
    before, after = part[: bracket.start()], _expand(part[bracket.end() :])
    return [f"{before}{number}{rest}" for number in _numbers(bracket[1]) for rest in after]


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for item in text.split(","):
        first, dash, last = item.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()):
            raise ValueError(f"[{text}] is not a range of nodes such as [01-04,07]")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


_PATIENCE_SECONDS = 3


@dataclass(frozen=True)
class SlurmInfo:
    """What can be told of SLURM without asking its controller."""

    version: str | None
    """As srun tells it, or None where there is no srun."""
    job: str | None
    """The id of the job, or None outside of one."""
    partition: str | None
    """Where the job runs."""
    nodes: int | None
    """How many nodes the job has."""


def read_slurm(environ: Mapping[str, str]) -> SlurmInfo:
    """Ask srun for its version, and the environment for the job."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", ""))
    return SlurmInfo(
        version=_srun_version(),
        job=environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID")),
        partition=environ.get("SLURM_JOB_PARTITION"),
        nodes=int(nodes) if nodes.isdecimal() else None,
    )


def _srun_version() -> str | None:
    srun = shutil.which("srun")
    if srun is None:
        return None
    try:
        asked = subprocess.run(
            [srun, "--version"], capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=True
        )
    except subprocess.CalledProcessError as error:
        said = str(error.stderr).strip().splitlines()
        return f"unknown (srun --version: {said[-1] if said else f'exit code {error.returncode}'})"
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    return asked.stdout.strip().removeprefix("slurm ").removeprefix("slurm-wlm ")
