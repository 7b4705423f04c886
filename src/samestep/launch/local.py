"""What this machine offers a job: cores, GPUs, a free port, the script itself."""

import errno
import socket
import sys
from importlib.machinery import ModuleSpec, PathFinder
from ipaddress import ip_address
from pathlib import Path

import psutil

from samestep.errors import LaunchError
from samestep.facts.hardware import read_hardware
from samestep.facts.world import environment, export

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
    level = environment().get(_NATIVE_LOG)
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
