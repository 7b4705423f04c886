"""What the ranks find in their environment beyond what torch's agent sets, and why, in one line."""

import errno
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.machinery import ModuleSpec, PathFinder
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

import psutil

from samestep.environment.bf16_probe import Bf16Support
from samestep.environment.hardware import read_hardware
from samestep.environment.world import export, read_environ
from samestep.errors import LaunchError
from samestep.launch.rendezvous import Rendezvous

# SLURM's own forms, in the order of its manual; a number alone is minutes.
_FORMS = (
    r"(?P<m>\d+)",
    r"(?P<m>\d+):(?P<s>[0-5]?\d)",
    r"(?P<h>\d+):(?P<m>[0-5]?\d):(?P<s>[0-5]?\d)",
    r"(?P<d>\d+)-(?P<h>\d+)",
    r"(?P<d>\d+)-(?P<h>\d+):(?P<m>[0-5]?\d)",
    r"(?P<d>\d+)-(?P<h>\d+):(?P<m>[0-5]?\d):(?P<s>[0-5]?\d)",
    r"(?:(?P<d>\d+)d)?(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m(?:in)?)?(?:(?P<s>\d+)s)?",
)
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def read_time_limit(option: str, text: str) -> int:
    """Seconds of a limit such as 4:00:00, 1-12:00 or 3h55m; `option` is named where it is none of these.

    >>> read_time_limit("--time", "90"), read_time_limit("--time", "3h55m"), read_time_limit("--time", "1-12")
    (5400, 14100, 129600)
    """
    for form in _FORMS:
        match = re.fullmatch(form, text.strip().lower(), re.ASCII)
        seconds = sum(_SECONDS[unit] * int(number or 0) for unit, number in match.groupdict().items()) if match else 0
        if seconds:
            return seconds
    raise LaunchError(
        f"{option} {text} is not a time limit: type hours, minutes and seconds as in 4:00:00 or 3h55m, days before "
        "them as in 1-12:00:00 or 1d12h, or a number of minutes"
    )


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
    folder_is_explicit: bool = True
    """Whether the user named it; else run.checkpoint may name another for what the run writes."""
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


_NATIVE_LOG = "TORCH_CPP_LOG_LEVEL"
_MEETING_PORTS = range(29400, 29500)  # from torch's own for a meeting up to its own for a static one


def count_cores() -> int:
    """Cores that this process may keep busy: fewer than the machine's under SLURM or in a container."""
    return read_hardware().cores.usable


def count_gpus(quiet: bool) -> int:
    """GPUs that torch sees, counted without touching any; loads torch.

    Quiet keeps torch's native code from burying one clear line of the launcher's under a stack of its own. torch reads
    the level once, when it is loaded, so the ranks get back what they would have had.
    """
    level = read_environ().get(_NATIVE_LOG)
    if quiet and level is None:
        export({_NATIVE_LOG: "FATAL"})
    import torch

    export({_NATIVE_LOG: level or "WARNING"})
    return torch.cuda.device_count()


def make_folder(wanted: Path | None, name: str) -> Path:
    """Make the run's folder: the one that is wanted, or a new one of its own among `runs`."""
    number = 1
    folder = wanted or Path("runs") / name
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=wanted is not None)
        except FileExistsError as error:
            if wanted is not None:
                raise LaunchError(f"--folder {wanted} is a file: name a folder, or a new name") from error
            number += 1  # two runs of one script have begun within a second
            folder = Path("runs") / f"{name}-{number}"
        except OSError as error:
            raise LaunchError(
                f"the run's folder {folder} cannot be made ({error.strerror}): name another --folder"
            ) from error
        else:
            return folder


def check_script(path: str) -> None:
    """Complain about a script that cannot be started."""
    script = Path(path)
    if script.is_dir():
        raise LaunchError(
            f"{path} is a folder, not a script: name a file in it, or type `samestep run -m PACKAGE` for a package"
        )
    if not script.is_file():
        nearby = sorted(entry.name for entry in Path.cwd().glob("*.py"))[:5]
        hint = f"here are {', '.join(nearby)}" if nearby else "no script lies here"
        raise LaunchError(f"there is no script {path} in {Path.cwd()}: {hint}")


def check_module(name: str) -> None:
    """Complain about a module that `python -m` would not find; nothing is imported to find out."""
    path: list[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        part = ".".join(parts[:depth])
        # A module that is no package holds no other.
        spec = None if path == [] else _find_spec(part, path)
        if spec is None:
            raise LaunchError(
                f"there is no module {name}: {part} is neither in {Path.cwd()} nor installed; type its dotted name as "
                "in `samestep run -m package.module`, from the folder that holds the package"
            )
        path = list(spec.submodule_search_locations or [])
    if path and _find_spec(f"{name}.__main__", path) is None:
        raise LaunchError(f"{name} is a package without __main__.py: name a module in it, as in {name}.train")


def check_port(port: int) -> None:
    """Complain about a port that cannot be opened here."""
    problem = _try_port(port)
    if isinstance(problem, PermissionError):
        raise LaunchError(f"port {port} may not be opened by this user: use one from 1024 up") from problem
    if problem is not None:
        raise LaunchError(
            f"port {port} is taken{_holder(port)}: choose another, or leave the port out and a free one is found"
        ) from problem


def find_place(address: str | None) -> str:
    """HOST:PORT at which this node can host a meeting: `address` or its own name, port 29400 or the next free one."""
    host = address or socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise LaunchError(
            f"the nodes would meet on this machine, and its name {host} leads nowhere ({error.strerror}): type "
            "--local-addr ADDRESS, under which other nodes reach it, or --nnodes 1 for this machine alone"
        ) from error
    port = next((each for each in _MEETING_PORTS if _try_port(each) is None), None)
    if port is None:
        raise LaunchError(
            f"the nodes would meet on this machine, and none of its ports {_MEETING_PORTS[0]} to {_MEETING_PORTS[-1]} "
            f"is free: type --rdzv-endpoint {host}:PORT with one that is"
        )
    return f"{host}:{port}"


def is_known(host: str) -> bool:
    """Whether a host's name, or address, leads anywhere from here."""
    try:
        return bool(socket.getaddrinfo(host, None))
    except (OSError, UnicodeError):  # a name such as a..b is no question for the network
        return False


def can_serve(host: str, port: int) -> bool:
    """Whether `host` is an address of this machine at which nobody listens yet; loopback ones are everybody's."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # a name that nobody knows here, or that is none
        return False
    for family, kind, protocol, _, address in found:
        if ip_address(str(address[0]).partition("%")[0]).is_loopback:
            continue
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError:  # another machine's, or taken
            continue
        return True
    return False


def _try_port(port: int) -> OSError | None:
    """What keeps a port from being opened here, or nothing."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, port))
                probe.listen(1)
        except OSError as error:
            if family == socket.AF_INET or error.errno == errno.EADDRINUSE:  # else a machine without IPv6
                return error
    return None


def _holder(port: int) -> str:
    try:
        listening = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        pids = {each.pid for each in listening if each.pid and (*each.laddr, 0, 0)[1] == port}
        holders = [f"{psutil.Process(pid).name()}, pid {pid}" for pid in sorted(pids)]
    except psutil.Error:  # whose it is may be hidden from this user
        return ""
    return f" (by {'; '.join(holders)})" if holders else ""


def _find_spec(name: str, path: list[str] | None) -> ModuleSpec | None:
    here = PathFinder.find_spec(name, [str(Path.cwd())]) if path is None else None
    if here is not None:
        return here
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


@dataclass(frozen=True)
class RankVariables:
    """Variables to export before the ranks start."""

    values: dict[str, str]
    """Names and values; what the user set is not among them."""
    reason: str
    """What was set and why, in one line."""


def choose_variables(job: Job, environ: Mapping[str, str], cores: int, gpus: int, bf16: Bf16Support) -> RankVariables:
    """Decide what to set for the ranks; what the user has set stays."""
    shared = f"{_count(cores, 'core')} for {_count(job.processes, 'rank')}, {_count(gpus, 'GPU')}"
    wanted = {"OMP_NUM_THREADS": (str(count_threads(job.processes, cores)), shared)}
    if job.may_restart:
        name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
        wanted[name] = ("1", "the store that torch shares with its agent keeps dead addresses over a restart")
    for name, value in bf16.workaround.items():
        wanted[name] = (value, bf16.detail)
    values = {name: value for name, (value, _) in wanted.items() if name not in environ}
    told = [
        f"{name}={value} ({reason})" if name in values else f"{name}={environ[name]} (as you set it)"
        for name, (value, reason) in wanted.items()
    ]
    folder = {"SAMESTEP_FOLDER": str(job.folder), "SAMESTEP_FOLDER_IS_EXPLICIT": str(int(job.folder_is_explicit))}
    return RankVariables({**values, **folder}, "; ".join(told))


def _count(number: int, thing: str) -> str:
    return f"{number or 'no'} {thing}{'s' if number > 1 else ''}"
