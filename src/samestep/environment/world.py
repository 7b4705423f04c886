"""Which rank this process is among its peers, from the variables of torchrun or SLURM.

This is the only module that reads and sets environment variables.
"""

import os
import pwd
import re
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeVar

from samestep.environment.network import is_loopback
from samestep.errors import PlanError, WorldError
from samestep.messages import read_integer, shorten

T = TypeVar("T")
MAX_RANKS: Final = 1_000_000
"""The most ranks and nodes of a job; a larger number is a mistake, and waiting for so many ranks would not end."""
MAX_LOCAL_RANKS: Final = 4096
"""The most ranks per node: every rank is a process that imports torch and needs some 0.3 GB of memory."""
Launcher = Literal["none", "torchrun", "slurm"]

OOM_RETRIES = "SAMESTEP_OOM_RETRIES"
"""The variable in which `samestep run` passes to its ranks how often to halve their micro-batches."""
PRECISION = "SAMESTEP_PRECISION"
"""The variable that replaces the precision of a script, to compare runs in fp64 without editing it."""
COMPARISON = "SAMESTEP_COMPARISON"
"""The variable in which `samestep parity` and `samestep rerun` pass the folder for logs and checkpoints of one run."""
CONFIG = "SAMESTEP_CONFIG"
"""The variable in which `samestep run --config` passes the values of the file, as JSON, for the records of the run."""
LAST_STEP = "SAMESTEP_LAST_STEP"
"""The variable in which `samestep parity` passes the step after which a run ends."""
PROFILE = "SAMESTEP_PROFILE"
"""The variable in which `samestep run --profile` passes the steps to record, as in 10:13."""
LAUNCHER_LINK: Final = "run"
"""The link in the folder of a launcher to that of the run, if the run writes elsewhere."""
FIX = " To fix it: "
"""Separates the problem from the remedy in the message of a WorldError."""

_MAX_OOM_RETRIES = 64  # of a micro-batch: none has more rows than a 64-bit integer can count
_IMPORT_ONLY = "SAMESTEP_IMPORT_ONLY"
_LOCALHOST = "127.0.0.1"
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_MASTER = ("MASTER_ADDR", "MASTER_PORT")
_TORCHRUN = (*_RANKS, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", *_MASTER)
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
# SLURM's variables of the step, then those of the job, which apply if the step's are not set.
_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_JOB = ("SLURM_JOB_ID", "SLURM_JOBID")
# SLURM numbers its own steps (the batch script, an interactive shell, an external step) from here up.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
# Below Linux's ephemeral ports (32768 and up) and below 29400 and 29500, torchrun's defaults.
_FIRST_PORT, _PORTS = 10_000, 19_000
_NODE_RANGE = re.compile(r"\[([^\[\]]*)\]")
_TASK_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_MAX_NODES = 100_000  # SLURM supports 65,533; a longer list would fill the memory


@dataclass(frozen=True)
class World:
    """Which rank this process is, and how the ranks reach each other.

    >>> World().is_main, World().size
    (True, 1)
    """

    rank: int = 0
    """Global rank."""
    size: int = 1
    """Number of ranks."""
    local_rank: int = 0
    """Rank among the ranks of this node."""
    local_size: int = 1
    """Number of ranks on this node."""
    node: int = 0
    """Number of this node, from 0."""
    nodes: int = 1
    """Number of nodes."""
    address: str = _LOCALHOST
    """Host of rank 0, to which all ranks connect."""
    port: int = 0
    """Port of rank 0; 0 if there is one rank only."""
    launcher: Launcher = "none"
    """Whose variables were read; variables set by hand count as torchrun's."""
    restart: int = 0
    """How often torchrun's agent restarted the ranks, or SLURM requeued the job."""
    job: str = ""
    """torchrun's run id or SLURM's job id; empty without a launcher."""
    agent_store: bool = False
    """Whether torchrun's agent already serves the store at address:port, so that no rank may."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_node_main(self) -> bool:
        """Whether this is local rank 0."""
        return self.local_rank == 0


def read_world(environ: Mapping[str, str] | None = None) -> World:
    """Read the variables of torchrun or srun; raises WorldError if they contradict each other.

    torchrun inside of srun counts as torchrun, since its agent numbers the ranks. A Python process started directly in
    an sbatch script is a single rank, however many tasks the job has.

    >>> read_world({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}).local_rank
    1
    """
    source = _environ(environ)
    if in_step(source) and "TORCHELASTIC_RUN_ID" not in source:
        return _from_slurm(source)
    if any(name in source for name in _RANKS):
        return _from_torchrun(source)
    return World()


def read_environ() -> dict[str, str]:
    """A copy of this process's environment, for modules that may not read it themselves."""
    return dict(os.environ)


def export(variables: Mapping[str, str | None]) -> None:
    """Set variables, or remove those that are None, for this process and for processes that it starts from now on."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def import_without_running() -> Generator[None]:
    """Mark this process and its children as ones that import a script and must not train."""
    os.environ[_IMPORT_ONLY] = "1"
    try:
        yield
    finally:
        os.environ.pop(_IMPORT_ONLY, None)


def refuse_if_only_imported(what: str, environ: Mapping[str, str] | None = None) -> None:
    """Raise PlanError if a script that `samestep plan` only imports does `what`, which belongs to training."""
    if _IMPORT_ONLY in _environ(environ):
        raise PlanError(
            f"{what} while `samestep plan` imported the script: move the training into a function, main(), and call it "
            'under `if __name__ == "__main__":`'
        )


def run_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """The folder of this run, from SAMESTEP_FOLDER; None without a launcher."""
    folder = _environ(environ).get("SAMESTEP_FOLDER")
    return Path(folder) if folder else None


def run_folder_is_explicit(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the user chose the folder of this run; False if the launcher generated its name."""
    return _environ(environ).get("SAMESTEP_FOLDER_IS_EXPLICIT", "1") != "0"


def launch_name(environ: Mapping[str, str] | None = None) -> str:
    """The run id of torchrun's agent, which stays the same when the ranks restart; empty without one."""
    name = _environ(environ).get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name  # torchrun's default for every launch


def shares_gpus(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the user allows NCCL to use a GPU for several ranks, which it can do since version 2.30."""
    return _environ(environ).get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def home_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """The user's home directory: HOME, or else that of the user id; None if it has none, as in some containers."""
    home = Path(_environ(environ).get("HOME", ""))
    try:
        return home if home.is_absolute() else Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The user's folder for files that can be created again: XDG_CACHE_HOME, ~/.cache, or one for temporary files."""
    folder, home = Path(_environ(environ).get("XDG_CACHE_HOME", "")), home_folder(environ)
    if folder.is_absolute():  # others are to be ignored, says the XDG specification
        return folder / "samestep"
    return home / ".cache" / "samestep" if home else Path(tempfile.gettempdir()) / f"samestep-{os.getuid()}"


def oom_retries(environ: Mapping[str, str] | None = None) -> int:
    """How often `samestep run` has restarted with half the micro-batch because the first steps ran out of memory."""
    return int(_own_number(OOM_RETRIES, environ, most=_MAX_OOM_RETRIES) or 0)


def halved_note(environ: Mapping[str, str] | None = None) -> str:
    """For messages: why a step has more micro-batches than the script says; empty if it does not."""
    return " (samestep has halved the micro-batch, which ran out of memory)" if oom_retries(environ) else ""


def requested_precision(environ: Mapping[str, str] | None = None) -> str:
    """The precision that replaces that of the script, as `samestep run --precision` exports it; empty: the script's."""
    return _environ(environ).get(PRECISION, "")


def comparison_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """The folder that replaces those of the script, so that a run to compare with starts from the beginning."""
    folder = _environ(environ).get(COMPARISON)
    return Path(folder) if folder else None


def last_step(environ: Mapping[str, str] | None = None) -> int | None:
    """The number of steps after which `samestep parity` ends a run."""
    number = _own_number(LAST_STEP, environ)
    return None if number is None else int(number)


def read_steps(text: str) -> range | None:
    """The steps of `FIRST:END`, without the end, as in a slice of Python; None if it is not that.

    >>> read_steps("10:13"), read_steps("13:10")
    (range(10, 13), None)
    """
    first, _, end = text.partition(":")
    begin, stop = read_integer(first), read_integer(end)
    return None if begin is None or stop is None or begin >= stop else range(begin, stop)


def profiled_steps(environ: Mapping[str, str] | None = None) -> range | None:
    """The steps that `samestep run --profile` exports; None without it."""
    text = _environ(environ).get(PROFILE)
    if not text:
        return None
    if (steps := read_steps(text)) is None:
        raise WorldError(
            f"{PROFILE}={shorten(text)} does not name steps: set it as in {PROFILE}=10:13, which are the steps 10 to "
            f"12, or run `unset {PROFILE}`"
        )
    return steps


def deadline(environ: Mapping[str, str] | None = None) -> float | None:
    """When this run must have ended, in seconds since the epoch, as `samestep run --time-limit` exports it."""
    return _own_number("SAMESTEP_DEADLINE", environ)


def _own_number(name: str, environ: Mapping[str, str] | None, most: float = 1e18) -> float | None:
    """The number in a variable that samestep sets for its own processes; None if it is not set."""
    text = _environ(environ).get(name)
    if not text:
        return None
    if not re.fullmatch(r"\d{1,18}(\.\d+)?", text, re.ASCII) or float(text) > most:
        raise WorldError(
            f"{name}={shorten(text)} is not a number from 0 to {most:g}: samestep sets this variable itself for the "
            f"processes that it starts; run `unset {name}`"
        )
    return float(text)


def _environ(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    return os.environ if environ is None else environ


@dataclass(frozen=True)
class LauncherVariables:
    """The variables of one launcher, and what to do if they are wrong."""

    environ: Mapping[str, str]
    names: tuple[str, ...]  # the variables that an error shows
    remedy: str  # what to do, unless an error has a better remedy

    def number(self, name: str) -> int | None:
        """A non-negative integer, or None if the variable is not set."""
        text = self.environ.get(name)
        if text is None:
            return None
        if (number := read_integer(text)) is None:
            remedy = f"run `unset {name}`, or {self.remedy}"
            size = f"too large: it has {len(text)} digits" if text.isdecimal() else "not a non-negative integer"
            raise self.error(f"{name}={shorten(text)} is {size}", remedy)
        return number

    def count(self, name: str, default: int = 0) -> int:
        """A non-negative integer, or `default` if the variable is not set."""
        found = self.number(name)
        return default if found is None else found

    def port(self) -> int:
        """MASTER_PORT, or 0 if it is not set."""
        port = self.count("MASTER_PORT")
        invalid = "MASTER_PORT" in self.environ and not 0 < port < 65536
        self.check((invalid, f"MASTER_PORT={port} is not a port from 1 to 65535"))
        return port

    def parse(self, name: str, function: Callable[[str], T]) -> T:
        """The variable as `function` parses it; its ValueError becomes a WorldError."""
        try:
            return function(self.environ[name])
        except ValueError as error:
            raise self.error(f"{name}: {error}", self.remedy) from error

    def check(self, *checks: tuple[bool, str]) -> None:
        """Raise the error of the first check that is true."""
        for wrong, problem in checks:
            if wrong:
                raise self.error(problem, self.remedy)

    def error(self, problem: str, remedy: str) -> WorldError:
        """An error that shows the variables and what to do."""
        known = [name for name in self.names if name in self.environ]
        values = ", ".join(f"{name}={shorten(self.environ[name])}" for name in known) or "nothing"
        missing = ", ".join(name for name in self.names if name not in known)
        return WorldError(f"{problem}. Set: {values}. Not set: {missing or 'nothing'}.{FIX}{remedy}")


def _from_torchrun(environ: Mapping[str, str]) -> World:
    rank, size = _rank_and_size(LauncherVariables(environ, _TORCHRUN, _start_remedy(4)))
    given = LauncherVariables(environ, _TORCHRUN, _start_remedy(size))
    address, port = _master(given, size)
    local_rank, local_size = _local_rank_and_size(given, rank, size, address)
    nodes = given.count("GROUP_WORLD_SIZE", -(-size // local_size))
    node = given.count("GROUP_RANK", (rank - local_rank) // local_size)
    given.check(
        (local_size > size, f"LOCAL_WORLD_SIZE={local_size} is larger than WORLD_SIZE={size}"),
        (local_rank >= local_size, f"LOCAL_RANK={local_rank} is out of range for {local_size} rank(s) on this node"),
        (local_rank > rank, f"LOCAL_RANK={local_rank} is larger than RANK={rank}"),
        (nodes > size, f"GROUP_WORLD_SIZE={nodes} is larger than WORLD_SIZE={size}, but every node has a rank"),
        (node >= nodes, f"GROUP_RANK={node} is out of range for {nodes} node(s)"),
        (nodes == 1 and local_size != size, f"the only node has {local_size} rank(s), but WORLD_SIZE={size}"),
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


def _start_remedy(ranks: int) -> str:
    return (
        f"start all ranks with `samestep run train.py` or `torchrun --nproc-per-node={ranks} train.py`, "
        "or run `unset RANK WORLD_SIZE LOCAL_RANK` for a single process"
    )


def _rank_and_size(given: LauncherVariables) -> tuple[int, int]:
    rank, size = given.number("RANK"), given.number("WORLD_SIZE")
    given.check(
        (rank is None and size is None, "LOCAL_RANK is set, but RANK and WORLD_SIZE are missing"),
        (rank is None, f"WORLD_SIZE={size} is set, but RANK is missing"),
        (size is None, f"RANK={rank} is set, but WORLD_SIZE is missing"),
        (size == 0, "WORLD_SIZE must be at least 1, got 0"),
        ((size or 0) > MAX_RANKS, f"WORLD_SIZE={size} is more than {MAX_RANKS} ranks: no job has so many"),
    )
    assert rank is not None
    assert size is not None
    given.check((rank >= size, f"RANK={rank} is out of range for WORLD_SIZE={size}"))
    return rank, size


def _master(given: LauncherVariables, size: int) -> tuple[str, int]:
    missing = [name for name in _MASTER if not given.environ.get(name)]
    if size > 1 and missing:
        verb = "is" if len(missing) == 1 else "are"
        raise given.error(
            f"{' and '.join(missing)} {verb} missing, so {size} ranks cannot reach each other",
            "run `export MASTER_ADDR=HOST MASTER_PORT=29500` with the host of rank 0 (127.0.0.1 if all ranks run on "
            f"one machine), or {given.remedy}",
        )
    return given.environ.get("MASTER_ADDR") or _LOCALHOST, given.port() if size > 1 else given.count("MASTER_PORT")


def _local_rank_and_size(given: LauncherVariables, rank: int, size: int, address: str) -> tuple[int, int]:
    local_rank, local_size = given.number("LOCAL_RANK"), given.number("LOCAL_WORLD_SIZE")
    # Ranks that use a loopback address are all on one node.
    if size == 1 or is_loopback(address) or local_size == size or given.number("GROUP_WORLD_SIZE") == 1:
        return rank if local_rank is None else local_rank, local_size or size
    if local_rank is None or not local_size:
        raise given.error(
            "LOCAL_RANK and LOCAL_WORLD_SIZE are both needed with several nodes",
            "run `export LOCAL_RANK=... LOCAL_WORLD_SIZE=...` with this rank's number on its node and the number of "
            f"ranks there, or {given.remedy}",
        )
    return local_rank, local_size


def _from_slurm(environ: Mapping[str, str]) -> World:
    given = _slurm_variables(environ)
    rank, local_rank, node = (given.count(name) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"))
    tasks = _first_set(environ, _TASKS)
    size, nodes = given.count(tasks), given.count(_first_set(environ, _NODES), 1)
    given.check(
        (size == 0, f"srun started this process, but {tasks}, the number of tasks, is missing"),
        (size > MAX_RANKS, f"{tasks}={size} is more than {MAX_RANKS} ranks: no job has so many"),
        (rank >= size, f"SLURM_PROCID={rank} is out of range for {size} task(s)"),
        (size > 1 and "SLURM_LOCALID" not in environ, f"SLURM_LOCALID is missing, but there are {size} ranks"),
        (nodes > 1 and "SLURM_NODEID" not in environ, f"SLURM_NODEID is missing, but there are {nodes} nodes"),
    )
    same = {"RANK": ("SLURM_PROCID", rank), "WORLD_SIZE": (tasks, size), "LOCAL_RANK": ("SLURM_LOCALID", local_rank)}
    for name, (slurm_name, value) in same.items():
        if given.count(name, value) != value:
            problem = f"{name}={environ[name]} contradicts {slurm_name}={value}"
            raise given.error(problem, f"run `unset {name}`, and {given.remedy}")
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
        job=environ.get(_first_set(environ, _JOB), ""),
    )


def _slurm_variables(environ: Mapping[str, str]) -> LauncherVariables:
    remedy = "let srun number the ranks: `srun --ntasks=4 python train.py`, or `srun samestep run train.py`"
    by_hand = (name for name in (*_RANKS, *_MASTER) if name in environ)
    of_step = (_first_set(environ, names) for names in (_TASKS, _TASKS_PER_NODE, _HOSTS))
    return LauncherVariables(environ, (*_SLURM, *of_step, *by_hand), remedy)


def _first_set(environ: Mapping[str, str], names: Sequence[str]) -> str:
    """The first of several names for the same value that is set; the first name if none is."""
    return next((name for name in names if environ.get(name)), names[0])


def _slurm_address(given: LauncherVariables, size: int, nodes: int) -> str:
    hosts = _first_set(given.environ, _HOSTS)
    if address := given.environ.get("MASTER_ADDR"):
        return address
    if nodes == 1:
        return _LOCALHOST  # always resolves, unlike the name of the node
    if not given.environ.get(hosts):
        problem = f"{hosts} is missing, so {size} ranks cannot reach each other"
        raise given.error(problem, "run `export MASTER_ADDR=HOST` with the name of node 0 before srun")
    return given.parse(hosts, expand_nodes)[0]


def _slurm_port(given: LauncherVariables) -> int:
    job = given.number(_first_set(given.environ, _JOB))
    if "MASTER_PORT" in given.environ:
        return given.port()
    if job is None:
        problem = "SLURM_JOB_ID is missing, from which the ranks derive their port"
        raise given.error(problem, "run `export MASTER_PORT=29500` before srun")
    return port_of(job, given.count("SLURM_STEP_ID"))


def _slurm_local_size(given: LauncherVariables, size: int, node: int, nodes: int) -> int:
    name = _first_set(given.environ, _TASKS_PER_NODE)
    if not given.environ.get(name):
        given.check((nodes > 1, f"{name} is missing, so the ranks of this node cannot be counted"))
        return size
    counts = given.parse(name, expand_tasks)
    given.check((node >= len(counts), f"SLURM_NODEID={node} is out of range for the {len(counts)} node(s) of {name}"))
    return counts[node]


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


def _expand_brackets(part: str) -> list[str]:
    bracket = _NODE_RANGE.search(part)
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


def expand_tasks(text: str) -> list[int]:
    """Number of tasks per node, from SLURM's short form.

    >>> expand_tasks("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _TASK_COUNT.fullmatch(part.strip())
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
