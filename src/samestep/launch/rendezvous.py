"""Where the launchers of a job's nodes meet: decided from what was typed, before anything is started."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace

from samestep.errors import LaunchError

_DEFAULT_STATIC_PORT = 29500
_SHORT = 8  # letters of a fresh name, which a person may have to type
_BACKENDS = ("c10d", "static", "etcd", "etcd-v2")


@dataclass(frozen=True)
class RendezvousOptions:
    """What the command line said about nodes and their meeting place; None where it said nothing."""

    nodes: str = "1"
    """Number of nodes, or MIN:MAX."""
    standalone: bool = False
    """Whether this machine alone was asked for."""
    backend: str | None = None
    """Rendezvous backend."""
    endpoint: str | None = None
    """HOST or HOST:PORT of the rendezvous."""
    id: str | None = None
    """Name that the launchers of one job share."""
    settings: str = ""
    """Further settings of the backend, as KEY=VALUE,KEY=VALUE."""
    node_rank: int | None = None
    """This node's number, for the static backend."""
    address: str | None = None
    """First node's host, for the static backend."""
    port: int | None = None
    """First node's port, for the static backend."""
    local_address: str | None = None
    """Address under which the other nodes reach this one."""


@dataclass(frozen=True)
class Rendezvous:
    """How torch's elastic agent finds its peers."""

    backend: str
    """One of torch's rendezvous backends."""
    endpoint: str
    """HOST:PORT; port 0 lets the agent take any free one."""
    id: str
    """Name that the launchers of one job share."""
    settings: dict[str, str | int]
    """Further settings of the backend."""
    nodes_min: int
    """Fewest nodes that make a world."""
    nodes_max: int
    """Most nodes that may join."""
    local_address: str | None
    """Address under which the other nodes reach this one; None lets torch find it."""

    @property
    def hosted_port(self) -> int | None:
        """The port that must be free on this node, or None where another may hold it or any will do."""
        alone = self.nodes_max == 1 and self.backend in ("c10d", "static")
        hosts = (
            alone or self.settings.get("rank") == 0 or str(self.settings.get("is_host", "")).lower() in ("1", "true")
        )
        return _port_of(self.endpoint) or None if hosts else None


def parse_nodes(text: str) -> tuple[int, int]:
    """Fewest and most nodes, from `N` or `MIN:MAX`.

    >>> parse_nodes("2"), parse_nodes("1:4")
    ((2, 2), (1, 4))
    """
    fewest, colon, most = text.partition(":")
    most = most if colon else fewest
    if not (fewest.isdecimal() and most.isdecimal()) or not 0 < int(fewest) <= int(most):
        raise LaunchError(
            f"--nnodes {text} is not a number of nodes: type one number from 1 up, or MIN:MAX with MIN not above MAX, "
            "as in --nnodes 1:4"
        )
    return int(fewest), int(most)


def host_here(asked: RendezvousOptions, fresh_id: str, find_place: Callable[[], str]) -> RendezvousOptions:
    """Let this node host the meeting, at the place that is found, where it may begin alone and no place was named.

    `fresh_id` names the job, so that nobody who only knows the place comes into it by mistake.
    """
    fewest, most = parse_nodes(asked.nodes)
    named = (asked.endpoint, asked.address, asked.port, asked.node_rank)
    if asked.standalone or not fewest == 1 < most or asked.backend not in (None, "c10d"):
        return asked
    if "is_host" in _parse_settings(asked.settings) or any(each is not None for each in named):
        return asked
    settings = f"is_host=1,{asked.settings}"
    return replace(asked, endpoint=find_place(), id=asked.id or fresh_id[:_SHORT], settings=settings)


def invitation(asked: RendezvousOptions) -> str:
    """What another node types to join a meeting that this node hosts; the dots stand for what was typed here.

    >>> invitation(Asked(nodes="1:4", endpoint="node1:29400", id="3f1c"))
    'samestep run --nnodes 1:4 --rdzv-endpoint node1:29400 --rdzv-id 3f1c ...'
    """
    place = ["--nnodes", asked.nodes, "--rdzv-endpoint", asked.endpoint or "", "--rdzv-id", asked.id or ""]
    return f"{shlex.join(['samestep', 'run', *place])} ..."


def choose_rendezvous(asked: RendezvousOptions, fresh_id: str) -> Rendezvous:
    """Decide how the launchers meet; `fresh_id` names a job that runs on this machine alone.

    One machine needs nothing: a free port is taken, so that two jobs never meet by mistake.
    """
    fewest, most = parse_nodes(asked.nodes)
    settings = _parse_settings(asked.settings)
    nobody = asked.endpoint is None and asked.address is None and asked.port is None and asked.backend is None
    if asked.standalone or (most == 1 and nobody):
        _refuse_beside_standalone(asked, most)
        return Rendezvous("c10d", "localhost:0", asked.id or fresh_id, settings, 1, 1, asked.local_address)
    backend = _choose_backend(asked)
    if backend == "static":
        endpoint = _static_endpoint(asked)
        settings |= {"rank": _static_rank(asked, fewest, most)}
    else:
        endpoint = _dynamic_endpoint(asked, backend, most)
    _port_of(endpoint)  # a port that is none is told here, not by torch
    return Rendezvous(backend, endpoint, asked.id or "samestep", settings, fewest, most, asked.local_address)


def serve_where_named(meeting: Rendezvous, can_serve: Callable[[str, int], bool]) -> Rendezvous:
    """Let this node serve the meeting place where the endpoint is an address of its own.

    torch knows its own address by the host's name alone. Where the endpoint is that of a second network card, or
    several nodes bear one name, all of them would wait for a host and none would be it.
    """
    host, port = meeting.endpoint.rpartition(":")[0].strip("[]"), _port_of(meeting.endpoint)
    if meeting.backend != "c10d" or "is_host" in meeting.settings or not host or not port or not can_serve(host, port):
        return meeting
    return replace(meeting, settings={**meeting.settings, "is_host": "1"})


def _choose_backend(asked: RendezvousOptions) -> str:
    if asked.backend is not None:
        if asked.backend not in _BACKENDS:
            raise LaunchError(f"--rdzv-backend {asked.backend} is unknown: use one of {', '.join(_BACKENDS)}")
        return asked.backend
    return "c10d" if asked.endpoint is not None and asked.node_rank is None else "static"


def _refuse_beside_standalone(asked: RendezvousOptions, most: int) -> None:
    if most > 1:
        raise LaunchError(
            f"--standalone is for this machine alone, and --nnodes {asked.nodes} asks for more: leave one of them out"
        )
    given = {
        "--rdzv-backend": asked.backend,
        "--rdzv-endpoint": asked.endpoint,
        "--master-addr": asked.address,
        "--master-port": asked.port,
    }
    extra = [name for name, value in given.items() if value is not None]
    if extra:
        raise LaunchError(f"--standalone finds a free port by itself: leave out {' and '.join(extra)}")


def _static_endpoint(asked: RendezvousOptions) -> str:
    if asked.endpoint is not None:
        return asked.endpoint if _port_of(asked.endpoint) is not None else f"{asked.endpoint}:{_DEFAULT_STATIC_PORT}"
    if asked.port is not None and not 0 < asked.port < 65536:
        raise LaunchError(f"--master-port {asked.port} is not a port: type a number from 1 to 65535")
    if asked.address is None and parse_nodes(asked.nodes)[1] > 1:
        raise LaunchError(
            f"--nnodes {asked.nodes} needs a place where the nodes meet: type the same "
            "--rdzv-endpoint FIRST_NODE:29400 on every node"
        )
    return f"{asked.address or '127.0.0.1'}:{asked.port or _DEFAULT_STATIC_PORT}"


def _static_rank(asked: RendezvousOptions, fewest: int, most: int) -> int:
    if fewest != most:
        raise LaunchError(
            f"--nnodes {asked.nodes} may change, and a static rendezvous cannot: use --rdzv-endpoint HOST:PORT without "
            "--node-rank, --master-addr and --master-port"
        )
    if asked.node_rank is None and most > 1:
        raise LaunchError(f"--master-addr on {most} nodes needs --node-rank 0 to {most - 1}, another on each node")
    rank = asked.node_rank or 0
    if not 0 <= rank < most:
        raise LaunchError(f"--node-rank {rank} is not one of the {most} node(s): type a number from 0 to {most - 1}")
    return rank


def _dynamic_endpoint(asked: RendezvousOptions, backend: str, most: int) -> str:
    if asked.endpoint is not None:
        return asked.endpoint
    if backend == "c10d" and most == 1:
        return "localhost:0"
    raise LaunchError(
        f"--rdzv-backend {backend} with --nnodes {asked.nodes} needs a place where the nodes meet: type the same "
        "--rdzv-endpoint FIRST_NODE:29400 on every node"
    )


def _port_of(endpoint: str) -> int | None:
    """The port of HOST:PORT or [IPV6]:PORT; None where there is none."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        return None
    if not host or not port.isdecimal() or int(port) > 65535:
        raise LaunchError(
            f"{endpoint} is not a meeting place: type HOST:PORT with a port up to 65535, as in node1:29400"
        )
    return int(port)


def _parse_settings(text: str) -> dict[str, str | int]:
    settings: dict[str, str | int] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (side.strip() for side in item.partition("="))
        if not key or not value:
            raise LaunchError(f"--rdzv-conf {text} is not a list of settings: type KEY=VALUE,KEY=VALUE")
        settings[key] = value
    return settings
