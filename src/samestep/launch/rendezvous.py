"""How the launchers of several nodes find each other: decided from the command line before anything is started."""

import errno
import shlex
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from ipaddress import ip_address
from uuid import uuid4

import psutil

from samestep.environment.network import ANSWER_SECONDS, find_route_problem, own_addresses
from samestep.environment.world import MAX_RANKS
from samestep.errors import LaunchError
from samestep.messages import read_integer, shorten

_BACKENDS = ("c10d", "static", "etcd", "etcd-v2")
_STATIC_PORT = 29500  # torch's default
_DYNAMIC_PORTS = range(29400, _STATIC_PORT)  # from torch's default upwards
_UNNAMED = "samestep"  # the id of launchers of several nodes without --rdzv-id, which must have the same id
_ID_LENGTH = 8  # of a generated id, which a person may have to type


@dataclass(frozen=True)
class RendezvousOptions:
    """The options of `samestep run` about nodes; None if an option was not given."""

    nodes: str = "1"  # or MIN:MAX
    standalone: bool = False
    backend: str | None = None
    endpoint: str | None = None  # HOST or HOST:PORT
    id: str | None = None  # name that the launchers of one job share
    settings: str = ""  # of the backend, as KEY=VALUE,KEY=VALUE
    node_rank: int | None = None  # this node's number, for the static backend
    address: str | None = None  # host of node 0, for the static backend
    port: int | None = None  # port of node 0, for the static backend
    local_address: str | None = None  # address at which other nodes reach this one


@dataclass(frozen=True)
class Rendezvous:
    """How torch's elastic agent finds its peers."""

    backend: str
    endpoint: str  # HOST:PORT; with port 0 the agent uses any free one
    id: str  # name that the launchers of one job share
    settings: dict[str, str | int]  # of the backend
    min_nodes: int  # needed to start
    max_nodes: int  # that may join
    local_address: str | None  # address at which other nodes reach this one; None lets torch find it
    is_unnamed: bool = False  # whether other launches have the same id, since the user gave them none

    @property
    def host(self) -> str:
        """The host of the endpoint."""
        return self.endpoint.rpartition(":")[0].strip("[]") if _parse_port(self.endpoint) is not None else self.endpoint

    @property
    def port(self) -> int:
        """The port of the endpoint, or the one that torch uses if it has none; 0 for any free one."""
        port = _parse_port(self.endpoint)
        return _DYNAMIC_PORTS[0] if port is None else port

    @property
    def is_host(self) -> bool | None:
        """Whether this node hosts the rendezvous; None if torch decides it by the host name."""
        if self.backend == "static":
            return self.settings.get("rank") == 0
        decided = str(self.settings.get("is_host", "")).lower()
        return decided in ("1", "true") if decided else None

    @property
    def hosted_port(self) -> int | None:
        """The port that must be free on this node, or None if another node hosts it or any port will do."""
        single = self.max_nodes == 1 and self.backend in ("c10d", "static")
        return _parse_port(self.endpoint) or None if single or self.is_host else None


def find_rendezvous(options: RendezvousOptions, echo: Callable[[str], None]) -> Rendezvous:
    """Decide how the launchers find each other; if this node hosts the rendezvous, print how other nodes join it."""
    generated_id = uuid4().hex
    hosted = host_on_this_node(options, generated_id, lambda: find_endpoint(options.local_address))
    if options.local_address is not None and not can_resolve(options.local_address):
        raise LaunchError(
            f"--local-addr {options.local_address} cannot be resolved: pass an address of this machine at which other "
            "nodes reach it"
        )
    chosen = choose_rendezvous(hosted, generated_id)
    check_route(chosen)
    rendezvous = serve_own_endpoint(chosen, can_listen)
    if rendezvous.hosted_port is not None:
        check_port(rendezvous.hosted_port)
    if hosted != options:
        echo(f"samestep: this node hosts the rendezvous; to join, run on another node: {join_command(hosted)}")
    return rendezvous


def parse_nodes(text: str) -> tuple[int, int]:
    """Minimum and maximum number of nodes, from `N` or `MIN:MAX`.

    >>> parse_nodes("2"), parse_nodes("1:4")
    ((2, 2), (1, 4))
    """
    first, colon, last = text.partition(":")
    fewest = read_integer(first)
    most = read_integer(last) if colon else fewest
    if fewest is None or most is None or not 0 < fewest <= most <= MAX_RANKS:
        shown = text if len(text) < 7 else f"{shorten(text)}, which must be at most {MAX_RANKS},"
        raise LaunchError(
            f"--nnodes {shown} is not a number of nodes: pass a number of at least 1, or MIN:MAX as in --nnodes 1:4"
        )
    return fewest, most


def host_on_this_node(
    options: RendezvousOptions, generated_id: str, find_endpoint: Callable[[], str]
) -> RendezvousOptions:
    """Host the rendezvous on this node if the job may start with one node and no endpoint was given.

    The generated id keeps launchers of other jobs out that use the same endpoint by mistake.
    """
    fewest, most = parse_nodes(options.nodes)
    given = (options.endpoint, options.address, options.port, options.node_rank)
    if options.standalone or not fewest == 1 < most or options.backend not in (None, "c10d"):
        return options
    if "is_host" in _parse_settings(options.settings) or any(value is not None for value in given):
        return options
    settings = f"is_host=1,{options.settings}"
    return replace(options, endpoint=find_endpoint(), id=options.id or generated_id[:_ID_LENGTH], settings=settings)


def join_command(options: RendezvousOptions) -> str:
    """The command with which another node joins a rendezvous that this node hosts.

    >>> join_command(RendezvousOptions(nodes="1:4", endpoint="node1:29400", id="3f1c"))
    'samestep run --nnodes 1:4 --rdzv-endpoint node1:29400 --rdzv-id 3f1c ...'
    """
    arguments = ["--nnodes", options.nodes, "--rdzv-endpoint", options.endpoint or "", "--rdzv-id", options.id or ""]
    return f"{shlex.join(['samestep', 'run', *arguments])} ..."


def choose_rendezvous(options: RendezvousOptions, generated_id: str) -> Rendezvous:
    """Decide how the launchers find each other. `generated_id` names a job that runs on this machine only.

    A single machine needs no options: it uses a free port, so that two jobs never join each other.
    """
    fewest, most = parse_nodes(options.nodes)
    settings = _parse_settings(options.settings)
    given = (options.endpoint, options.address, options.port, options.backend)
    if options.standalone or (most == 1 and all(value is None for value in given)):
        _check_standalone(options, most)
        address = options.local_address or "localhost"  # the host name of a single machine may not resolve
        return Rendezvous("c10d", "localhost:0", options.id or generated_id, settings, 1, 1, address)
    backend = _choose_backend(options)
    if backend == "static":
        endpoint = _static_endpoint(options, most)
        settings |= {"rank": _static_rank(options, fewest, most)}
    else:
        endpoint = _dynamic_endpoint(options, backend, most)
    if _parse_port(endpoint) == 0 and (fewest > 1 or backend == "static"):
        raise LaunchError(
            f"{endpoint} has port 0, which means any free port, so other processes cannot know it: pass a port "
            "from 1 to 65535, the same on every node"
        )
    name, is_unnamed = options.id or _UNNAMED, not options.id
    return Rendezvous(backend, endpoint, name, settings, fewest, most, options.local_address, is_unnamed)


def check_route(rendezvous: Rendezvous) -> None:
    """Raise if the host of the rendezvous does not resolve, or if this machine has no network to reach it.

    A `join_timeout` in `--rdzv-conf` is also the time to wait for the name, for example of a pod that starts later.
    """
    read_timeout, join_timeout = (
        read_integer(str(rendezvous.settings.get(name, ""))) for name in ("read_timeout", "join_timeout")
    )
    seconds = ANSWER_SECONDS if read_timeout is None else min(ANSWER_SECONDS, read_timeout)
    if join_timeout is not None:
        seconds = join_timeout
    if problem := find_route_problem(rendezvous.host, rendezvous.port, seconds):
        raise LaunchError(
            f"the launcher cannot reach its rendezvous at {shorten(rendezvous.endpoint)}: {problem}; pass an address "
            f"that every node can reach, or wait longer than {seconds:g} s for it with --rdzv-conf join_timeout=600"
        )


def serve_own_endpoint(rendezvous: Rendezvous, can_listen: Callable[[str, int], bool]) -> Rendezvous:
    """Let this node serve the rendezvous if the endpoint is an address of this node.

    torch recognizes its own address by the host name only. If the endpoint belongs to a second network card, or if
    several nodes have the same name, all nodes would wait for a host.
    """
    host, port = rendezvous.host, _parse_port(rendezvous.endpoint)
    decided = rendezvous.backend != "c10d" or "is_host" in rendezvous.settings
    if decided or not host or not port or not can_listen(host, port):
        return rendezvous
    return replace(rendezvous, settings={**rendezvous.settings, "is_host": "1"})


def _choose_backend(options: RendezvousOptions) -> str:
    if options.backend is None:
        return "c10d" if options.endpoint is not None and options.node_rank is None else "static"
    if options.backend not in _BACKENDS:
        raise LaunchError(f"--rdzv-backend {options.backend} is unknown: use one of {', '.join(_BACKENDS)}")
    return options.backend


def _check_standalone(options: RendezvousOptions, most: int) -> None:
    if most > 1:
        raise LaunchError(
            f"--standalone uses this machine only, but --nnodes is {options.nodes}: leave out one of the two"
        )
    names = ("--rdzv-backend", "--rdzv-endpoint", "--master-addr", "--master-port")
    given = (options.backend, options.endpoint, options.address, options.port)
    if extra := [name for name, value in zip(names, given, strict=True) if value is not None]:
        raise LaunchError(f"--standalone chooses a free port itself: leave out {' and '.join(extra)}")


def _static_endpoint(options: RendezvousOptions, most: int) -> str:
    if options.endpoint is not None:
        has_port = _parse_port(options.endpoint) is not None
        return options.endpoint if has_port else f"{options.endpoint}:{_STATIC_PORT}"
    if options.port is not None and not 0 < options.port < 65536:
        raise LaunchError(f"--master-port {options.port} is not a port: pass a number from 1 to 65535")
    if options.address is None and most > 1:
        raise LaunchError(
            f"--nnodes {options.nodes} needs an endpoint for the rendezvous: pass the same "
            "--rdzv-endpoint NODE_0:29400 on every node"
        )
    return f"{options.address or '127.0.0.1'}:{options.port or _STATIC_PORT}"


def _static_rank(options: RendezvousOptions, fewest: int, most: int) -> int:
    if fewest != most:
        raise LaunchError(
            f"--nnodes {options.nodes} is elastic, which a static rendezvous does not support: use --rdzv-endpoint "
            "HOST:PORT without --node-rank, --master-addr and --master-port"
        )
    if options.node_rank is None and most > 1:
        remedy = f"pass a different number from 0 to {most - 1} on each node"
        raise LaunchError(f"--master-addr with {most} nodes needs --node-rank: {remedy}")
    rank = options.node_rank or 0
    if not 0 <= rank < most:
        raise LaunchError(f"--node-rank {rank} is out of range for {most} node(s): pass a number from 0 to {most - 1}")
    return rank


def _dynamic_endpoint(options: RendezvousOptions, backend: str, most: int) -> str:
    if options.endpoint is not None:
        return options.endpoint
    if backend == "c10d" and most == 1:
        return "localhost:0"
    raise LaunchError(
        f"--rdzv-backend {backend} with --nnodes {options.nodes} needs an endpoint: pass the same "
        "--rdzv-endpoint NODE_0:29400 on every node"
    )


def _parse_port(endpoint: str) -> int | None:
    """The port of HOST:PORT or [IPV6]:PORT; None if it has none."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        return None
    number = read_integer(port)
    if not host or number is None or number > 65535:
        raise LaunchError(
            f"{shorten(endpoint)} is not an endpoint: pass HOST:PORT with a port up to 65535, as in node1:29400"
        )
    return number


def _parse_settings(text: str) -> dict[str, str | int]:
    settings: dict[str, str | int] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (side.strip() for side in item.partition("="))
        if not key or not value:
            raise LaunchError(f"--rdzv-conf {text} is not a list of settings: pass KEY=VALUE,KEY=VALUE")
        settings[key] = value
    return settings


def find_endpoint(address: str | None) -> str:
    """HOST:PORT at which this node can host a rendezvous: `address` or its host name, port 29400 or the next free."""
    host = address or socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise LaunchError(
            f"this machine would host the rendezvous, but its name {host} cannot be resolved ({error.strerror}): pass "
            "--local-addr ADDRESS, at which other nodes reach it, or --nnodes 1 to use this machine only"
        ) from error
    port = next((port for port in _DYNAMIC_PORTS if _port_error(port) is None), None)
    if port is None:
        raise LaunchError(
            f"this machine would host the rendezvous, but its ports {_DYNAMIC_PORTS[0]} to {_DYNAMIC_PORTS[-1]} are "
            f"all in use: pass --rdzv-endpoint {host}:PORT with a free port"
        )
    return f"{host}:{port}"


def can_resolve(host: str) -> bool:
    """Whether a host name or address can be resolved on this node."""
    try:
        return bool(socket.getaddrinfo(host, None))
    except (OSError, UnicodeError):  # UnicodeError: a name such as a..b
        return False


def can_listen(host: str, port: int) -> bool:
    """Whether `host` is a free address of this machine; False for loopback addresses, which every machine has."""
    return any(not ip_address(address.partition("%")[0]).is_loopback for address in own_addresses(host, port))


def check_port(port: int) -> None:
    """Raise if this user cannot listen on a port of this machine."""
    error = _port_error(port)
    if isinstance(error, PermissionError):
        raise LaunchError(f"this user may not listen on port {port}: use a port from 1024 up") from error
    if error is not None:
        raise LaunchError(
            f"port {port} is in use{_port_owner(port)}: choose another port, or leave it out to use a free one"
        ) from error


def _port_error(port: int) -> OSError | None:
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


def _port_owner(port: int) -> str:
    try:
        listening = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        pids = {each.pid for each in listening if each.pid and (*each.laddr, 0, 0)[1] == port}
        owners = [f"{psutil.Process(pid).name()}, pid {pid}" for pid in sorted(pids)]
    except psutil.Error:  # the owner may be hidden from this user
        return ""
    return f" (by {'; '.join(owners)})" if owners else ""
