"""Which rank this process is among its peers; the only module that touches the environment."""

import os
import shlex
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from samestep.environment.slurm_variables import expand_nodes, expand_tasks, in_step, port_of
from samestep.errors import PlanError, WorldError

T = TypeVar("T")


@dataclass(frozen=True)
class Variables:
    """The variables of one launcher.

    >>> Variables({"RANK": "3"}, ("RANK",), remedy="unset RANK").number("RANK")
    3
    """

    environ: Mapping[str, str]
    """Where they are looked up."""
    names: tuple[str, ...]
    """Which of them a complaint shows."""
    remedy: str
    """What a person should type where a complaint knows nothing better."""

    def number(self, name: str) -> int | None:
        """A whole number from 0 up, or None where the variable is not set."""
        text = self.environ.get(name)
        if text is None:
            return None
        if not text.strip().isdecimal():
            raise self.error(
                f"{name}={shlex.quote(text)} is not a whole number from 0 up", f"type `unset {name}`, or {self.remedy}"
            )
        return int(text)

    def count(self, name: str, otherwise: int = 0) -> int:
        """A whole number from 0 up, with the value it has where the variable is not set."""
        found = self.number(name)
        return otherwise if found is None else found

    def text(self, name: str) -> str | None:
        """The text, or None where the variable is not set or empty."""
        return self.environ.get(name) or None

    def parsed(self, name: str, parse: Callable[[str], T]) -> T:
        """The variable as `parse` reads it; what `parse` complains of is told with all variables."""
        try:
            return parse(self.environ[name])
        except ValueError as error:
            raise self.error(f"{name}: {error}", self.remedy) from error

    def pick(self, *names: str) -> str:
        """The first of several names for one thing that is set; the first name where none is."""
        return next((name for name in names if self.text(name)), names[0])

    def error(self, problem: str, remedy: str) -> WorldError:
        """A complaint that shows what is set to what, and what to type instead."""
        known = [name for name in self.names if name in self.environ]
        told = ", ".join(f"{name}={shlex.quote(self.environ[name])}" for name in known) or "nothing"
        missing = ", ".join(name for name in self.names if name not in known)
        return WorldError(f"{problem}. Set: {told}. Not set: {missing or 'nothing'}. To repair it: {remedy}")

    def refuse(self, *checks: tuple[bool, str]) -> None:
        """Raise for the first check that is true."""
        for wrong, problem in checks:
            if wrong:
                raise self.error(problem, self.remedy)


Launcher = Literal["none", "torchrun", "slurm"]

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_MEETING = ("MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
# What SLURM tells under several names: of the step first, of the whole job where the step's is not set.
_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_SPREAD = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_JOB = ("SLURM_JOB_ID", "SLURM_JOBID")
_HERE = "127.0.0.1"
MICRO_BATCH_HALVINGS = "SAMESTEP_MICRO_BATCH_HALVINGS"
"""The variable in which `samestep run` tells its ranks how often to halve their micro-batches."""

_IMPORT_ONLY = "SAMESTEP_IMPORT_ONLY"


@dataclass(frozen=True)
class World:
    """Which rank this process is, of how many, and where the ranks meet.

    >>> World().is_main, World().size
    (True, 1)
    """

    rank: int = 0
    """This process's number among all ranks, from 0."""
    size: int = 1
    """How many ranks there are."""
    local_rank: int = 0
    """This process's number among the ranks of its node, from 0."""
    local_size: int = 1
    """How many ranks run on this node."""
    node: int = 0
    """This node's number, from 0."""
    nodes: int = 1
    """How many nodes there are."""
    address: str = _HERE
    """Host where the ranks meet: the first rank's node."""
    port: int = 0
    """Port where the ranks meet; 0 where one rank needs none."""
    launcher: Launcher = "none"
    """Whose variables were read. Variables set by hand as torchrun sets them count as torchrun's."""
    restart: int = 0
    """How often the ranks were started anew: by torchrun's agent, or by SLURM that requeued the job."""
    job: str = ""
    """Name of the job: torchrun's run id or SLURM's job id; empty where there is none."""
    agent_store: bool = False
    """Whether torchrun's agent already serves the store at address:port, so that no rank may."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_node_main(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.local_rank == 0


def read_environ() -> dict[str, str]:
    """A copy of this process's environment, for modules that may not read it themselves."""
    return dict(os.environ)


def export(variables: Mapping[str, str]) -> None:
    """Set variables for this process and for every process that it starts from now on."""
    os.environ.update(variables)


@contextmanager
def import_without_running() -> Generator[None]:
    """Mark this process, and those it starts inside, as one that looks at a script and does not train it."""
    os.environ[_IMPORT_ONLY] = "1"
    try:
        yield
    finally:
        os.environ.pop(_IMPORT_ONLY, None)


def refuse_if_only_imported(what: str, environ: Mapping[str, str] | None = None) -> None:
    """Raise where a script that is only looked at does `what`, which belongs to training."""
    if _IMPORT_ONLY in (read_environ() if environ is None else environ):
        raise PlanError(
            f"{what} by a script that `samestep plan` only looks at: put what trains into a function, main(), and call "
            'it under `if __name__ == "__main__":`'
        )


def run_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """The folder of this run, which the launcher exports as SAMESTEP_FOLDER; None where no launcher gave one."""
    folder = (read_environ() if environ is None else environ).get("SAMESTEP_FOLDER")
    return Path(folder) if folder else None


def run_folder_is_explicit(environ: Mapping[str, str] | None = None) -> bool:
    """Whether somebody named SAMESTEP_FOLDER, by --folder or by hand; else the launcher made up a name."""
    return (read_environ() if environ is None else environ).get("SAMESTEP_FOLDER_IS_EXPLICIT", "1") != "0"


def launch_name(environ: Mapping[str, str] | None = None) -> str:
    """What torch's agent calls this launch, the same after a restart of its ranks; empty where it has no name."""
    name = (read_environ() if environ is None else environ).get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name  # which is torchrun's own default, for every launch


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where this user keeps what can be made again: XDG_CACHE_HOME, or ~/.cache."""
    values = read_environ() if environ is None else environ
    return Path(values.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samestep"


def micro_batch_halvings(environ: Mapping[str, str] | None = None) -> int:
    """How often the micro-batch was halved, since the first steps ran out of memory, as `samestep run` exports it."""
    return int((read_environ() if environ is None else environ).get(MICRO_BATCH_HALVINGS, "0"))


def deadline(environ: Mapping[str, str] | None = None) -> float | None:
    """When this run should have ended, in seconds since the epoch, as `samestep run --time-limit` exports it."""
    told = (read_environ() if environ is None else environ).get("SAMESTEP_DEADLINE")
    return float(told) if told else None


def read_world(environ: Mapping[str, str] | None = None) -> World:
    """Understand what torchrun, srun or nobody has set; raise WorldError where it does not make one world.

    torchrun started by srun counts as torchrun, since its agent numbers the ranks. A python started directly in an
    sbatch script is one rank, however many tasks the job has.

    >>> read_world({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}).local_rank
    1
    """
    source = read_environ() if environ is None else environ
    if in_step(source) and "TORCHELASTIC_RUN_ID" not in source:
        return _from_slurm(source)
    if any(name in source for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _from_torchrun(source)
    return World()


def _start(ranks: int) -> str:
    return (
        f"start all ranks with `samestep run train.py` or `torchrun --nproc-per-node={ranks} train.py`, "
        "or type `unset RANK WORLD_SIZE LOCAL_RANK` for one process alone"
    )


def _from_torchrun(environ: Mapping[str, str]) -> World:
    rank, size = _rank_and_size(Variables(environ, _TORCHRUN + _MEETING, _start(4)))
    given = Variables(environ, _TORCHRUN + _MEETING, _start(size))
    address, port = _meeting_place(given, size)
    local_rank, local_size = _place_on_node(given, rank, size, address)
    nodes = given.count("GROUP_WORLD_SIZE", -(-size // local_size))
    node = given.count("GROUP_RANK", (rank - local_rank) // local_size)
    given.refuse(
        (local_size > size, f"LOCAL_WORLD_SIZE={local_size} is more than WORLD_SIZE={size}"),
        (local_rank >= local_size, f"LOCAL_RANK={local_rank} is not one of the {local_size} rank(s) of this node"),
        (local_rank > rank, f"LOCAL_RANK={local_rank} is more than RANK={rank}"),
        (node >= nodes, f"GROUP_RANK={node} is not one of the {nodes} node(s)"),
        (nodes == 1 and local_size != size, f"{local_size} rank(s) on the only node do not make WORLD_SIZE={size}"),
    )
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node=node,
        nodes=nodes,
        address=address,
        port=port,
        launcher="torchrun",
        restart=given.count("TORCHELASTIC_RESTART_COUNT"),
        job=environ.get("TORCHELASTIC_RUN_ID", ""),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _rank_and_size(given: Variables) -> tuple[int, int]:
    rank, size = given.number("RANK"), given.number("WORLD_SIZE")
    given.refuse(
        (
            rank is None and size is None,
            "LOCAL_RANK without RANK and WORLD_SIZE gives a place on a node, none among all",
        ),
        (rank is None, f"WORLD_SIZE={size} without RANK does not say which of the {size} rank(s) this process is"),
        (size is None, f"RANK={rank} without WORLD_SIZE does not say how many ranks there are"),
        (size == 0, "WORLD_SIZE=0 leaves no rank, not even this one"),
    )
    assert rank is not None
    assert size is not None
    given.refuse((rank >= size, f"RANK={rank} is not one of the ranks 0 to {size - 1} of WORLD_SIZE={size}"))
    return rank, size


def _meeting_place(given: Variables, size: int) -> tuple[str, int]:
    address, port = given.text("MASTER_ADDR"), given.count("MASTER_PORT")
    missing = [name for name in _MEETING if given.text(name) is None]
    if size > 1 and missing:
        raise given.error(
            f"{' and '.join(missing)} missing: {size} ranks do not know where to meet",
            "type `export MASTER_ADDR=HOST MASTER_PORT=29500` with the first rank's host (127.0.0.1 where all run on "
            f"one machine), or {given.remedy}",
        )
    given.refuse((size > 1 and not 0 < port < 65536, f"MASTER_PORT={port} is not a port from 1 to 65535"))
    return address or _HERE, port


def _place_on_node(given: Variables, rank: int, size: int, address: str) -> tuple[int, int]:
    local_rank, local_size = given.number("LOCAL_RANK"), given.number("LOCAL_WORLD_SIZE")
    # Ranks that meet at a loopback address cannot be on several nodes.
    loopback = address in ("localhost", "::1") or address.startswith("127.")
    one_node = size == 1 or loopback or local_size == size or given.number("GROUP_WORLD_SIZE") == 1
    if one_node:
        return rank if local_rank is None else local_rank, local_size or size
    if local_rank is None or not local_size:
        raise given.error(
            "LOCAL_RANK and LOCAL_WORLD_SIZE are both needed: they follow from RANK and WORLD_SIZE on one node only",
            "type `export LOCAL_RANK=... LOCAL_WORLD_SIZE=...` with this rank's number on its node and the number of "
            f"ranks there, or {given.remedy}",
        )
    return local_rank, local_size


def _from_slurm(environ: Mapping[str, str]) -> World:
    given = _slurm_variables(environ)
    rank, local_rank, node = (given.count(name) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"))
    tasks = given.pick(*_TASKS)
    size, nodes = given.count(tasks), given.count(given.pick(*_NODES), 1)
    given.refuse(
        (size == 0, f"srun started this process, but {tasks} does not say how many there are"),
        (rank >= size, f"SLURM_PROCID={rank} is not one of the tasks 0 to {size - 1}"),
        (size > 1 and "SLURM_LOCALID" not in environ, f"SLURM_LOCALID is missing for one of {size} ranks"),
        (nodes > 1 and "SLURM_NODEID" not in environ, f"SLURM_NODEID is missing on one of {nodes} nodes"),
    )
    for name, slurm_name, value in (
        ("RANK", "SLURM_PROCID", rank),
        ("WORLD_SIZE", tasks, size),
        ("LOCAL_RANK", "SLURM_LOCALID", local_rank),
    ):
        if given.count(name, value) != value:
            raise given.error(
                f"{name}={environ[name]} contradicts {slurm_name}={value}", f"type `unset {name}`, and {given.remedy}"
            )
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=_slurm_local_size(given, size, node, nodes),
        node=node,
        nodes=nodes,
        address=_slurm_address(given, size, nodes),
        port=_slurm_port(given),
        launcher="slurm",
        restart=given.count("SLURM_RESTART_COUNT"),
        job=environ.get(given.pick(*_JOB), ""),
    )


def _slurm_variables(environ: Mapping[str, str]) -> Variables:
    remedy = "let srun number the ranks: `srun --ntasks=4 python train.py`, or `srun samestep run train.py`"
    given = Variables(environ, (), remedy)
    by_hand = tuple(name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", *_MEETING) if name in environ)
    return Variables(environ, (*_SLURM, *(given.pick(*names) for names in (_TASKS, _SPREAD, _HOSTS)), *by_hand), remedy)


def _slurm_address(given: Variables, size: int, nodes: int) -> str:
    address, hosts = given.text("MASTER_ADDR"), given.pick(*_HOSTS)
    if address is not None:
        return address
    if nodes == 1:
        return _HERE  # the name of the only node may not resolve on it; the loopback address always does
    if given.text(hosts) is None:
        raise given.error(
            f"{hosts} is missing: {size} ranks do not know where to meet",
            "type `export MASTER_ADDR=HOST` with the first node's name before srun",
        )
    return given.parsed(hosts, expand_nodes)[0]


def _slurm_port(given: Variables) -> int:
    job = given.number(given.pick(*_JOB))
    if "MASTER_PORT" in given.environ:
        port = given.count("MASTER_PORT")
        given.refuse((not 0 < port < 65536, f"MASTER_PORT={port} is not a port from 1 to 65535"))
        return port
    if job is None:
        raise given.error(
            "SLURM_JOB_ID is missing, from which the ranks derive their port",
            "type `export MASTER_PORT=29500` before srun",
        )
    return port_of(job, given.count("SLURM_STEP_ID"))


def _slurm_local_size(given: Variables, size: int, node: int, nodes: int) -> int:
    spread = given.pick(*_SPREAD)
    if given.text(spread) is None:
        given.refuse((nodes > 1, f"{spread} is missing: the ranks of this node cannot be counted"))
        return size
    counts = given.parsed(spread, expand_tasks)
    given.refuse((node >= len(counts), f"SLURM_NODEID={node} is not one of the {len(counts)} node(s) of {spread}"))
    return counts[node]
