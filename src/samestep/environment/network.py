"""The network interfaces of this machine, and which of them gloo and NCCL would use."""

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

import psutil

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
