"""SLURM as this process sees it: its version, the variables of the job, and the formats of these variables."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.messages import read_integer, shorten

# SLURM numbers its own steps (the batch script, an interactive shell, an external step) from here up.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
# Below Linux's ephemeral ports (32768 and up) and below 29400 and 29500, torchrun's defaults.
_FIRST_PORT, _PORTS = 10_000, 19_000
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_TIMEOUT_SECONDS = 3
_MAX_NODES = 100_000  # SLURM supports 65,533; a longer list would fill the memory


@dataclass(frozen=True)
class SlurmInfo:
    """What is known of SLURM without a request to its controller."""

    version: str | None  # of srun; None if it is not installed
    job: str | None  # None outside of a job
    partition: str | None
    nodes: int | None


def read_slurm(environ: Mapping[str, str]) -> SlurmInfo:
    """Read the version of srun and the variables of the job."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", ""))
    return SlurmInfo(
        version=_srun_version(),
        job=environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID")),
        partition=environ.get("SLURM_JOB_PARTITION"),
        nodes=read_integer(nodes),
    )


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task of a step.

    The batch script also has SLURM_PROCID=0 and SLURM_NTASKS, but a Python process started there is a single rank.
    """
    step = read_integer(environ.get("SLURM_STEP_ID", ""))
    return "SLURM_PROCID" in environ and step is not None and step < _FIRST_RESERVED_STEP


def expand_nodes(text: str) -> list[str]:
    """Host names of a SLURM node list, in order.

    >>> expand_nodes("node[01-03,07],gpu3")
    ['node01', 'node02', 'node03', 'node07', 'gpu3']
    """
    parts = re.split(r",(?![^\[]*\])", text.strip())
    hosts = [host for part in parts for host in _expand_brackets(part)]
    if any(not host or "[" in host or "]" in host for host in hosts):
        raise ValueError(f"{text!r} is not a SLURM node list such as node[01-04,07],gpu3")
    return hosts


def expand_tasks(text: str) -> list[int]:
    """Number of tasks per node, from SLURM's short form.

    >>> expand_tasks("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part.strip())
        tasks, nodes = (read_integer(number) for number in (match[1], match[2] or "1")) if match else (None, None)
        if tasks is None or nodes is None or nodes > _MAX_NODES:
            raise ValueError(f"{shorten(text)} is not a list of tasks such as 2(x3),1")
        counts += [tasks] * nodes
    return counts


def port_of(job: int, step: int) -> int:
    """A port that all ranks of a step derive without communication, and that other jobs on the node do not use.

    Two jobs get the same port only if their ids differ by a multiple of 19000, or if one runs dozens of steps.

    >>> port_of(4242, 0) == port_of(4243, 0)
    False
    """
    return _FIRST_PORT + (job * 97 + step) % _PORTS


def _expand_brackets(part: str) -> list[str]:
    bracket = _BRACKETS.search(part)
    if bracket is None:
        return [part]
    numbers: list[str] = []
    for item in bracket[1].split(","):
        first, dash, last = item.partition("-")
        lowest, highest = read_integer(first), read_integer(last if dash else first)
        if lowest is None or highest is None or highest - lowest > _MAX_NODES:
            raise ValueError(f"[{shorten(bracket[1])}] is not a range of nodes such as [01-04,07]")
        numbers += [str(number).zfill(len(first)) for number in range(lowest, highest + 1)]
    before, after = part[: bracket.start()], _expand_brackets(part[bracket.end() :])
    if len(numbers) * len(after) > _MAX_NODES:
        raise ValueError(f"{shorten(part)} has more than {_MAX_NODES} nodes")
    return [f"{before}{number}{rest}" for number in numbers for rest in after]


def _srun_version() -> str | None:
    srun = shutil.which("srun")
    if srun is None:
        return None
    try:
        done = subprocess.run([srun, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).strip().splitlines()
        return f"unknown (srun --version: {lines[-1] if lines else f'exit code {error.returncode}'})"
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    return done.stdout.strip().removeprefix("slurm ").removeprefix("slurm-wlm ")
