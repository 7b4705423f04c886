"""Which network interfaces there are, and which of them gloo and NCCL would use."""

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

import psutil


@dataclass(frozen=True)
class Interface:
    """One network interface."""

    name: str
    """As `ip link` shows it."""
    addresses: tuple[str, ...]
    """Its addresses, IPv4 first."""
    up: bool
    """Whether it can be used now."""
    loopback: bool
    """Whether it only leads back to this machine."""


@dataclass(frozen=True)
class InterfaceChoice:
    """The interface that a backend would use."""

    interface: str | None
    """Its name, or None where there is none to use."""
    address: str | None
    """The address it would use there."""
    reason: str
    """Why this one, or why none."""
    variable: str | None = None
    """The environment variable that decided it, if one did."""

    @property
    def loopback(self) -> bool:
        """Whether other machines cannot reach it."""
        return self.address is not None and ip_address(self.address).is_loopback


@dataclass(frozen=True)
class Network:
    """The interfaces of this machine and what would be made of them."""

    host: str
    """The name of this machine."""
    host_addresses: tuple[str, ...]
    """Addresses of its own that the name resolves to; empty where it resolves to none."""
    interfaces: tuple[Interface, ...]
    """All of them."""
    gloo: InterfaceChoice
    """What gloo would use."""
    nccl: InterfaceChoice
    """What NCCL would use to find its peers, and for data where there is no InfiniBand."""


def read_network(environ: Mapping[str, str]) -> Network:
    """Look at the interfaces; asks the name service for this machine's own name, which may take it a while."""
    host, interfaces = socket.gethostname(), tuple(_interfaces())
    addresses = tuple(_own_addresses(host))
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
    """Gloo's rule: GLOO_SOCKET_IFNAME, else the first address the host's name resolves to, else loopback."""
    wish = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if wish:
        return _named("GLOO_SOCKET_IFNAME", wish, [i for i in interfaces if i.name == wish])
    if addresses:
        first = addresses[0]
        # A loopback address such as 127.0.1.1 need not be listed to belong to the loopback interface.
        loopback = ip_address(first).is_loopback
        owners = [i.name for i in interfaces if first in i.addresses or (loopback and i.loopback)]
        return InterfaceChoice(owners[0] if owners else None, first, f"the host's name {host} resolves to {first}")
    return InterfaceChoice("lo", "127.0.0.1", f"the host's name {host} resolves to no address of this machine")


def choose_nccl(interfaces: Sequence[Interface], environ: Mapping[str, str]) -> InterfaceChoice:
    """NCCL's rule: NCCL_SOCKET_IFNAME, else names that begin with ib, else all but docker, lo and virbr, then those.

    It leaves out NCCL_COMM_ID and NCCL_SOCKET_FAMILY, which few set.
    """
    # NCCL skips IPv6 loopback addresses.
    usable = [i for i in interfaces if i.up and any(not _is_v6_loopback(a) for a in i.addresses)]
    wish = environ.get("NCCL_SOCKET_IFNAME", "")
    if len(wish) > 1:
        return _named("NCCL_SOCKET_IFNAME", wish, [i for i in interfaces if _matches(wish, i.name)])
    for pattern, reason in _NCCL_ORDER:
        for interface in usable:
            if _matches(pattern, interface.name):
                return InterfaceChoice(interface.name, interface.addresses[0], reason)
    return InterfaceChoice(None, None, "no interface is up and has an address")


_NCCL_ORDER = (
    ("ib", "InfiniBand comes first"),
    ("^docker,lo,virbr", "the first that is neither docker, lo nor virbr"),
    ("docker", "nothing but docker and lo is up"),
    ("lo", "nothing but lo is up"),
    ("virbr", "nothing but virbr is up"),
)


def _named(variable: str, wish: str, matching: Sequence[Interface]) -> InterfaceChoice:
    usable = [i for i in matching if i.up and i.addresses]
    if usable:
        return InterfaceChoice(usable[0].name, usable[0].addresses[0], f"{variable}={wish}", variable)
    told = [f"{i.name}, which {'has no address' if i.up else 'is down'}" for i in matching] or ["no interface"]
    return InterfaceChoice(None, None, f"{variable}={wish} matches {told[0]}", variable)


def _matches(pattern: str, name: str) -> bool:
    """NCCL's patterns: prefixes joined by commas, `=` for whole names, `^` for all others."""
    others = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    whole = pattern.startswith("=")
    parts = pattern.removeprefix("=").split(",")
    return any(name == part if whole else name.startswith(part) for part in parts) != others


def _is_v6_loopback(address: str) -> bool:
    return address == "::1"


def _interfaces() -> Iterator[Interface]:
    stats = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        found = [(e.family, e.address.partition("%")[0]) for e in entries]
        ordered = tuple(a for family in (socket.AF_INET, socket.AF_INET6) for f, a in found if f == family)
        up = name in stats and stats[name].isup
        loopback = bool(ordered) and all(ip_address(address).is_loopback for address in ordered)
        yield Interface(name, ordered, up, loopback)


def _own_addresses(host: str) -> Iterator[str]:
    """Addresses of the name that can be listened on, in the order in which gloo tries them."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return
    for family, kind, protocol, _, place in found:
        with socket.socket(family, kind, protocol) as trial:
            try:
                trial.bind(place)
            except OSError:
                continue
        yield str(place[0])
