"""Where other ranks reach a server of this one: the way on which the ranks have met already."""

import contextlib
import ipaddress
import socket
from dataclasses import dataclass
from typing import Final

from samestep.facts.network import read_network
from samestep.facts.world import World, environment

_LOOPBACK: Final = "127.0.0.1"
_ANY_PORT: Final = 9  # a datagram socket sends nothing when it is connected


@dataclass(frozen=True)
class Address:
    """A host as its server and its callers know it."""

    listen: str
    """Where the server listens; empty: at all addresses of this machine."""
    call: str
    """What the others call, a name or an address of IPv4 or IPv6."""


def address_of(world: World) -> Address:
    """Where the ranks of a run reach a server on this one.

    On one node the loopback address. On several: the interface that GLOO_SOCKET_IFNAME names; else the address from
    which this machine reaches the ranks' meeting place, as it has done since they met. The meeting place itself is
    known to the others by the name that all have called already.
    """
    if world.nodes == 1:
        return Address(_LOOPBACK, _LOOPBACK)
    named = read_network(environment()).gloo
    if named.variable is not None and named.address is not None:
        return Address(named.address, named.address)
    outward = address_towards(world.address, world.port)
    if outward is None or ipaddress.ip_address(outward).is_loopback:
        return Address("", world.address)
    return Address(outward, outward)


def address_towards(host: str, port: int) -> str | None:
    """This machine's address on the way to another; None where there is no way. Nothing is sent."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(host, port or _ANY_PORT, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0]).partition("%")[0]
    return None


def open_door(address: Address, backlog: int) -> socket.socket:
    """A socket that listens there, on a port of the system's choice."""
    if address.listen:
        family = socket.AF_INET6 if ":" in address.listen else socket.AF_INET
        return socket.create_server((address.listen, 0), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # the system knows IPv6, and no interface has it
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)
