"""Connections between the ranks and a teacher's server: addresses, the handshake, and trees of tensors over TCP.

Nothing that arrives is unpickled: a message is a JSON header and the bytes of its tensors.
"""

import contextlib
import hmac
import ipaddress
import json
import secrets
import socket
from dataclasses import dataclass
from typing import Any, Final

import torch

from samestep.environment.network import read_network
from samestep.environment.world import World, read_environ
from samestep.errors import TeacherError
from samestep.teacher.outputs import TreeSpec, encode_parts, flatten, tensor_from_bytes, unflatten

_LOOPBACK: Final = "127.0.0.1"
_ANY_PORT: Final = 9  # connecting a datagram socket sends nothing
_LENGTH_BYTES: Final = 8  # of the length of a message's header
_NONCE_BYTES: Final = 32
_HANDSHAKE_SECONDS: Final = 30.0
# A node that lost power never closes its connections: probe after 30 s of silence, give up after another 30 s.
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
DISCONNECTED: Final = (OSError, EOFError)
"""What a connection raises if the peer is gone."""
Message = list[bytes | memoryview]
"""An encoded tree of tensors: the header, then the bytes of each tensor."""


class Connection:
    """One TCP connection that sends and receives trees of tensors."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if (option := getattr(socket, name, None)) is not None:  # not every system has these options
                connected.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: Message) -> None:
        """Send what `encode` returned."""
        for part in message:
            self._socket.sendall(part)

    def send_error(self, text: str) -> None:
        """Send an error instead of a response."""
        self._socket.sendall(_frame(json.dumps({"error": text}).encode()))

    def receive(self) -> object:
        """Receive a tree, with its tensors on the CPU; raises TeacherError if the peer sent an error."""
        spec, tensors = self.receive_flat()
        return unflatten(spec, iter(tensors))

    def receive_flat(self) -> tuple[TreeSpec, list[torch.Tensor]]:
        """Receive the spec and the tensors of a tree."""
        length = int.from_bytes(bytes(self._read(_LENGTH_BYTES)), "little")
        header: dict[str, Any] = json.loads(bytes(self._read(length)))
        if "error" in header:
            raise TeacherError(header["error"])
        return header["form"], [self._receive_tensor(dtype, shape) for dtype, shape in header["tensors"]]

    def close(self) -> None:
        """Close the connection; a thread that waits on either end returns."""
        close_socket(self._socket)

    def _receive_tensor(self, dtype: str, shape: list[int]) -> torch.Tensor:
        data = torch.empty(torch.Size(shape).numel() * getattr(torch, dtype).itemsize, dtype=torch.uint8)
        self._read_into(data.numpy().data)
        return tensor_from_bytes(data, dtype, shape)

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        self._read_into(memoryview(data))
        return data

    def _read_into(self, target: memoryview) -> None:
        while target:
            count = self._socket.recv_into(target)
            if not count:
                raise EOFError("the connection was closed")
            target = target[count:]


def encode(tree: object, what: str) -> Message:
    """Encode a tree completely, before any of it is sent; `what` names the tree in an error."""
    header, contents = encode_parts(*flatten(tree, what))
    return [_frame(header), *contents]


def connect(address: tuple[str, int], key: bytes) -> Connection:
    """Connect to a server and prove that this rank knows its key."""
    connecting = socket.create_connection(address, timeout=_HANDSHAKE_SECONDS)
    try:
        nonce = _read_exactly(connecting, _NONCE_BYTES)
        connecting.sendall(hmac.digest(key, nonce, "sha256"))
        connecting.settimeout(None)
    except BaseException:
        connecting.close()
        raise
    return Connection(connecting)


def authenticate(accepted: socket.socket, key: bytes) -> Connection | None:
    """Return the connection to a client, or None if it does not know the key."""
    try:
        accepted.settimeout(_HANDSHAKE_SECONDS)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        accepted.sendall(nonce)
        known = hmac.compare_digest(_read_exactly(accepted, _NONCE_BYTES), hmac.digest(key, nonce, "sha256"))
        accepted.settimeout(None)
    except DISCONNECTED:
        known = False
    if not known:
        accepted.close()
        return None
    return Connection(accepted)


@dataclass(frozen=True)
class ServerAddress:
    """The address of a server."""

    bind: str
    """Where the server listens; empty: on all interfaces."""
    host: str
    """The name or IPv4 or IPv6 address that clients connect to."""


def server_address(world: World) -> ServerAddress:
    """Return the address at which the other ranks reach a server on this rank.

    On one node: the loopback address. On several nodes: the interface in GLOO_SOCKET_IFNAME, else the address with
    which this machine reaches the rendezvous. The rendezvous machine itself has the name that all ranks already use.
    """
    if world.nodes == 1:
        return ServerAddress(_LOOPBACK, _LOOPBACK)
    gloo = read_network(read_environ()).gloo
    if gloo.variable is not None and gloo.address is not None:
        return ServerAddress(gloo.address, gloo.address)
    outward = local_address_toward(world.address, world.port)
    if outward is None or ipaddress.ip_address(outward).is_loopback:
        return ServerAddress("", world.address)
    return ServerAddress(outward, outward)


def local_address_toward(host: str, port: int) -> str | None:
    """Return the local address of the route to `host`; None without a route. Sends nothing."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, remote in socket.getaddrinfo(host, port or _ANY_PORT, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(remote)
                return str(probe.getsockname()[0]).partition("%")[0]
    return None


def listen(address: ServerAddress, backlog: int) -> socket.socket:
    """Return a socket that listens at `address`, on a port that the system chooses."""
    if address.bind:
        family = socket.AF_INET6 if ":" in address.bind else socket.AF_INET
        return socket.create_server((address.bind, 0), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # the system supports IPv6, but no interface has an IPv6 address
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def close_socket(closing: socket.socket) -> None:
    """Close a socket; a thread that waits on it, here or on the other end, returns."""
    with contextlib.suppress(OSError):
        closing.shutdown(socket.SHUT_RDWR)
    closing.close()


def _frame(header: bytes) -> bytes:
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header


def _read_exactly(connected: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connected.recv(count - len(data))
        if not part:
            raise EOFError("the connection was closed")
        data += part
    return data
