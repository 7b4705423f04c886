"""The network interfaces of this machine, and which of them gloo and NCCL would use."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final, TypeVar

import psutil

from samestep.messages import shorten

T = TypeVar("T")
ANSWER_SECONDS: Final = 15.0
"""How long a host name may take to resolve, and a store that accepts connections to answer: usually milliseconds."""
_POLL_SECONDS: Final = 1.0

_NCCL_ORDER = (
    ("ib", "InfiniBand comes first"),
    ("^docker,lo,virbr", "the first that is not docker, lo or virbr"),
    ("docker", "only docker and lo are up"),
    ("lo", "only lo is up"),
    ("virbr", "only virbr is up"),
)


@dataclass(frozen=True)
class Interface:
    """One network interface."""

    name: str  # as `ip link` shows it
    addresses: tuple[str, ...]  # IPv4 first
    up: bool
    loopback: bool  # whether all its addresses are loopback addresses


@dataclass(frozen=True)
class InterfaceChoice:
    """The interface that a backend would use."""

    interface: str | None  # its name; None if no interface is usable
    address: str | None
    reason: str  # why this interface, or why none
    variable: str | None = None  # the environment variable that decided, if one did

    @property
    def loopback(self) -> bool:
        """Whether other machines cannot reach it."""
        return self.address is not None and ip_address(self.address).is_loopback


@dataclass(frozen=True)
class Network:
    """The interfaces of this machine and which of them would be used."""

    host: str
    host_addresses: tuple[str, ...]  # addresses of this machine that the host name resolves to
    interfaces: tuple[Interface, ...]
    gloo: InterfaceChoice
    nccl: InterfaceChoice  # what NCCL would use to find its peers, and for data without InfiniBand


def read_network(environ: Mapping[str, str]) -> Network:
    """Read the interfaces; resolves the host name, which may take a while."""
    host, interfaces = socket.gethostname(), tuple(_interfaces())
    addresses = tuple(own_addresses(host))
    return Network(
        host=host,
        host_addresses=addresses,
        interfaces=interfaces,
        gloo=choose_gloo(interfaces, host, addresses, environ),
        nccl=choose_nccl(interfaces, environ),
    )


def choose_gloo(
    interfaces: Sequence[Interface], host: str, addresses: Sequence[str], environ: Mapping[str, str]
) -> InterfaceChoice:
    """Gloo's rule: GLOO_SOCKET_IFNAME, else the first address that the host name resolves to, else loopback."""
    name = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name:
        return _choose_named("GLOO_SOCKET_IFNAME", name, [i for i in interfaces if i.name == name])
    if addresses:
        first = addresses[0]
        # A loopback address such as 127.0.1.1 belongs to the loopback interface even if it is not listed.
        loopback = ip_address(first).is_loopback
        owners = [i.name for i in interfaces if first in i.addresses or (loopback and i.loopback)]
        return InterfaceChoice(owners[0] if owners else None, first, f"the host name {host} resolves to {first}")
    return InterfaceChoice("lo", "127.0.0.1", f"the host name {host} resolves to no address of this machine")


def choose_nccl(interfaces: Sequence[Interface], environ: Mapping[str, str]) -> InterfaceChoice:
    """NCCL's rule: NCCL_SOCKET_IFNAME, else names that begin with ib, else all but docker, lo and virbr, then those.

    NCCL_COMM_ID and NCCL_SOCKET_FAMILY are not considered.
    """
    pattern = environ.get("NCCL_SOCKET_IFNAME", "")
    if len(pattern) > 1:
        return _choose_named("NCCL_SOCKET_IFNAME", pattern, [i for i in interfaces if _matches(pattern, i.name)])
    # NCCL skips IPv6 loopback addresses.
    usable = [i for i in interfaces if i.up and any(address != "::1" for address in i.addresses)]
    for preferred, reason in _NCCL_ORDER:
        for interface in usable:
            if _matches(preferred, interface.name):
                return InterfaceChoice(interface.name, interface.addresses[0], reason)
    return InterfaceChoice(None, None, "no interface is up and has an address")


def _choose_named(variable: str, value: str, matching: Sequence[Interface]) -> InterfaceChoice:
    usable = [i for i in matching if i.up and i.addresses]
    if usable:
        return InterfaceChoice(usable[0].name, usable[0].addresses[0], f"{variable}={value}", variable)
    found = [f"{i.name}, which {'has no address' if i.up else 'is down'}" for i in matching] or ["no interface"]
    return InterfaceChoice(None, None, f"{variable}={value} matches {found[0]}", variable)


def _matches(pattern: str, name: str) -> bool:
    """NCCL's patterns: comma-separated prefixes, `=` for exact names, `^` for all others."""
    others = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    exact = pattern.startswith("=")
    parts = pattern.removeprefix("=").split(",")
    return any(name == part if exact else name.startswith(part) for part in parts) != others


def _interfaces() -> Iterator[Interface]:
    stats = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        found = [(e.family, e.address.partition("%")[0]) for e in entries]
        addresses = tuple(a for family in (socket.AF_INET, socket.AF_INET6) for f, a in found if f == family)
        up = name in stats and stats[name].isup
        loopback = bool(addresses) and all(ip_address(address).is_loopback for address in addresses)
        yield Interface(name, addresses, up, loopback)


def find_route_problem(host: str, port: int, seconds: float) -> str:
    """Why this machine cannot send to a host: its name does not resolve, or there is no network. Empty if it can.

    Nothing is sent to the host. A problem other than that of a loopback address counts if it lasts for `seconds`, since
    a node that has just started may get its name a few seconds later.
    """
    deadline = time.monotonic() + seconds
    while problem := _route_problem(host, port):
        if is_loopback(host) or time.monotonic() >= deadline:
            return problem
        time.sleep(min(_POLL_SECONDS, seconds))
    return ""


def _route_problem(host: str, port: int) -> str:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name such as a..b
        return f"the host name {shorten(host)} cannot be resolved ({getattr(error, 'strerror', None) or error})"
    problems: list[str] = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # with UDP, this only looks up the route
        except OSError as error:
            problems.append(f"this machine has no route to {shorten(host)} ({error.strerror})")
        else:
            return ""
    loopback = ", since its loopback interface is down: run `ip link set lo up`" if is_loopback(host) else ""
    return f"{problems[0]}{loopback}"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine for every machine: localhost, 127.0.0.1 or ::1."""
    return host in ("localhost", "::1") or host.startswith("127.")


def connect_unless_silent(connect: Callable[[], T], host: str, port: int, seconds: float = ANSWER_SECONDS) -> T | None:
    """The result of `connect`, or None if host:port accepts connections and `connect` does not return for `seconds`.

    torch waits without a limit for the answer of a service that is not a store, and retries until its timeout if it
    gets another answer. `connect` runs in a thread, which is left behind in this case.
    """
    results: list[T | BaseException] = []

    def run() -> None:
        try:
            results.append(connect())
        except BaseException as error:  # noqa: BLE001  # raised below
            results.append(error)

    thread = threading.Thread(target=run, name="samestep connect", daemon=True)
    thread.start()
    thread.join(_POLL_SECONDS)
    silent_since: float | None = None
    while thread.is_alive():
        now = time.monotonic()
        silent_since = (silent_since or now) if accepts_connections(host, port) else None
        if silent_since is not None and now - silent_since >= seconds:
            return None
        thread.join(_POLL_SECONDS)
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def accepts_connections(host: str, port: int) -> bool:
    """Whether a process listens at host:port."""
    try:
        socket.create_connection((host, port), timeout=_POLL_SECONDS).close()
    except (OSError, UnicodeError):
        return False
    return True


def own_addresses(host: str, port: int | None = None) -> Iterator[str]:
    """Addresses of a host name on which this machine can listen, in the order in which gloo tries them."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: a name such as a..b
        return
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError:  # an address of another machine, or in use
            continue
        yield str(address[0])
