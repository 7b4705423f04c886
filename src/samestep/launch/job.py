"""What to start: a script or module, its arguments, and how many ranks of it."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from samestep.errors import LaunchError
from samestep.launch.rendezvous import Rendezvous

Show = Literal["first", "all"]


@dataclass(frozen=True)
class Job:
    """One node's part of a job, decided in full."""

    target: str
    """Path of a script, or name of a module."""
    module: bool
    """Whether `target` is a module, as in `python -m`."""
    arguments: tuple[str, ...]
    """What the script gets, untouched."""
    processes: int
    """How many ranks to start on this node."""
    rendezvous: Rendezvous
    """How the launchers of several nodes find each other."""
    max_restarts: int
    """How often all ranks are started anew after a failure."""
    folder: Path
    """Absolute path of the run's folder; logs lie beneath it."""
    folder_typed: bool = True
    """Whether the user named it; else run.restore may name another for what the run writes."""
    show: Show = "first"
    """Whose output reaches the console: the first rank's of this node, or everybody's."""
    verbose: bool = False
    """Whether torch's own agent may speak on the console too."""
    time_limit: str = ""
    """How long the ranks may run, as it was typed; empty where there is no limit."""

    @property
    def command(self) -> tuple[str, ...]:
        """Arguments of the interpreter that runs a rank; unbuffered, so that a killed rank's last words are kept."""
        return ("-u", *(("-m",) if self.module else ()), self.target, *self.arguments)

    @property
    def may_restart(self) -> bool:
        """Whether ranks may be started anew within this job: after a failure, or because nodes came or went."""
        return self.max_restarts > 0 or self.rendezvous.nodes_max > 1


def count_processes(asked: str, gpus: int, cores: int) -> int:
    """Ranks to start on this node for `auto`, `gpu`, `cpu` or a number.

    `auto` takes every GPU; without any, one process for two cores, since each also feeds itself data.

    >>> count_processes("auto", gpus=4, cores=64), count_processes("auto", gpus=0, cores=6)
    (4, 3)
    """
    if asked == "gpu" and gpus == 0:
        raise LaunchError(
            "--nproc-per-node gpu needs a GPU and torch sees none: type --nproc-per-node cpu, or a number"
        )
    named = {"auto": gpus or max(1, cores // 2), "gpu": gpus, "cpu": cores}
    if asked in named:
        return named[asked]
    if not asked.isdecimal() or int(asked) == 0:
        raise LaunchError(f"--nproc-per-node {asked} is impossible: type auto, gpu, cpu or a number from 1 up")
    return int(asked)


def count_threads(processes: int, cores: int) -> int:
    """OMP_NUM_THREADS that shares the cores among the ranks of a node.

    >>> count_threads(processes=4, cores=10)
    2
    """
    return max(1, cores // processes)


def folder_name(target: str, now: datetime) -> str:
    """What a run's folder is called where the user gave no name: its script and when it started.

    >>> folder_name("lab/train.py", datetime(2026, 1, 31, 9, 30, 5))
    'train-20260131-093005'
    """
    return f"{Path(target).stem if target.endswith('.py') else Path(target).name}-{now:%Y%m%d-%H%M%S}"
