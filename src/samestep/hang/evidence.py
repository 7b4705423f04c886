"""What is known about each rank of a run that hangs: its process, its Python stacks and its collectives.

Plain data: a launcher collects it on its node and sends it to the launcher of node 0 as JSON. Times are in seconds, and
points in time are seconds since 1970.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

_WORKER_FILE: Final = "torch/utils/data/_utils/worker.py"
_WORKER_NAME: Final = "pt_data_worker"  # which torch gives it; its children have this name until they run a program
_SAMESTEP = f"{Path(__file__).parent.parent}/"
_LIBRARY = re.compile(r"/(site|dist)-packages/")
_PYTHON_OR_TORCH = re.compile(
    r"/lib(64)?/python3(\.\d+)?/(?!(site|dist)-packages/)|^<frozen |/python3\d*\.zip/|/(site|dist)-packages/torch/"
    # torch built from source
    r"|/torch/(nn/(modules|parallel)|distributed/(fsdp|tensor|_\w+)|autograd|utils/data|optim|_dynamo|multiprocessing)/"
    r"|/torch/(_tensor|_ops|distributed/(distributed_c10d|c10d_logger|rendezvous|utils))\.py$"
)


@dataclass(frozen=True)
class Frame:
    """A line of Python on a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Collective:
    """A collective that a rank has called, from torch's flight recorder."""

    group: str  # name of the process group
    number: int  # of the collectives of this group, from 1
    name: str  # "all_reduce"
    shapes: list[list[int]]  # of the input
    dtypes: list[str]  # of the input, "Float"
    called: float  # when
    is_pending: bool
    timeout: float  # 0 if it is unknown
    backend: str = "gloo"
    stack: list[Frame] = field(default_factory=list[Frame])  # the innermost frame first; empty in threads of C++
    ranks: list[int] = field(default_factory=list[int])  # members of the group, as ranks of the run
    is_p2p: bool = False  # a send or a receive: `number` counts those of this pair of ranks


@dataclass(frozen=True)
class ProcessInfo:
    """One process: a rank, a data worker or another child of a rank."""

    pid: int
    state: str  # "running", "sleeping", "disk", "stopped", "zombie", "gone"
    command: str = ""
    cpu_seconds: float = 0.0  # used while the evidence was collected, over `window`
    window: float = 0.0
    is_swapping: bool = False
    waits_for: str = ""  # the kernel function that it sleeps in, if the kernel shows it
    stacks: Mapping[str, list[Frame]] = field(default_factory=dict[str, list[Frame]])
    """Of each thread, the innermost frame first; the main thread is "main"."""
    name: str = ""  # that the process has given itself, or of its program; also known of one that has ended
    parent: int = 0  # process that has started it; 0 if not known
    exit_code: int | None = None  # of one that has ended and that its parent has not collected; negative for a signal

    @property
    def is_data_worker(self) -> bool:
        """Whether this is a worker of a torch DataLoader, by its name or its stack."""
        return self.name == _WORKER_NAME or any(
            frame.file.endswith(_WORKER_FILE) for stack in self.stacks.values() for frame in stack
        )


@dataclass(frozen=True)
class Progress:
    """How far a rank is with its collectives."""

    calls: int  # collectives that it has called, over all groups
    waiting: float  # how long its oldest pending collective has waited; 0 if none is pending
    timeout: float
    """Of that collective; 0 if none is pending, or if it is unknown, as in init_process_group or recv over gloo."""
    interval: float | None = None  # usual time between two collectives; None if it is not known yet
    is_waiting: bool = False  # whether it is in a collective, however short
    is_measured: bool = False  # whether it measures itself how long ranks wait, as a Run does
    stack: list[Frame] = field(default_factory=list[Frame])  # of the main thread, the innermost frame first


@dataclass(frozen=True)
class RankEvidence:
    """What a launcher knows about one of its ranks."""

    rank: int
    node: str
    process: ProcessInfo
    children: list[ProcessInfo] = field(default_factory=list[ProcessInfo])
    collectives: list[Collective] | None = None  # pending ones and the latest; None if they are not known
    collected: float = 0.0  # when
    exit_code: int | None = None  # if the process has ended; negative for a signal
    last_lines: list[str] = field(default_factory=list[str])  # of its log
    step_seconds: float | None = None  # usual time between its collectives, or of its steps
    gpu_percent: float | None = None  # utilization of its GPU
    full_disk: str = ""  # a file system that the rank writes to and that is full
    oom_kills: int = 0  # processes that the kernel has killed for memory since the start of the ranks
    error: str = ""  # why its probe cannot read its collectives: torch may have changed; empty if it can

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def read_evidence(value: Mapping[str, Any]) -> RankEvidence:
    """The reverse of RankEvidence.to_json."""
    fields = dict(value)
    fields["process"] = _read_process(value["process"])
    fields["children"] = [_read_process(child) for child in value["children"]]
    if value["collectives"] is not None:
        fields["collectives"] = [read_collective(each) for each in value["collectives"]]
    return RankEvidence(**fields)


def read_collective(value: Mapping[str, Any]) -> Collective:
    """A collective from JSON values."""
    fields = dict(value)
    fields["stack"] = _read_stack(value["stack"])
    return Collective(**fields)


def _read_process(value: Mapping[str, Any]) -> ProcessInfo:
    fields = dict(value)
    fields["stacks"] = {thread: _read_stack(stack) for thread, stack in value["stacks"].items()}
    return ProcessInfo(**fields)


def _read_stack(frames: Sequence[Mapping[str, Any]]) -> list[Frame]:
    return [Frame(**frame) for frame in frames]


def is_samestep(frame: Frame) -> bool:
    """Whether a line belongs to samestep."""
    return frame.file.startswith(_SAMESTEP)


def is_user_code(frame: Frame) -> bool:
    """Whether a line belongs neither to samestep, nor to the standard library, torch or another installed package."""
    return _is_program(frame) and not _LIBRARY.search(frame.file)


def _is_program(frame: Frame) -> bool:
    """Whether a line belongs neither to samestep, nor to the standard library or torch."""
    return not is_samestep(frame) and not _PYTHON_OR_TORCH.search(frame.file)


def user_frame(stack: Sequence[Frame]) -> Frame | None:
    """The innermost line of user code on a stack; None for an empty stack.

    If there is none, because the program is an installed package: the innermost line of a package other than torch, or
    else the outermost line. The stack starts with the innermost frame.
    """
    candidates = *filter(is_user_code, stack), *filter(_is_program, stack), *stack[-1:]
    return next(iter(candidates), None)
