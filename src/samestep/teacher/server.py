"""A teacher's server: threads that answer the ranks which call in, one forward pass at a time."""

import contextlib
import hmac
import ipaddress
import json
import secrets
import socket
import traceback
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any, Final

import torch
from torch import nn

from samestep.environment.network import read_network
from samestep.environment.world import World, read_environ
from samestep.errors import TeacherError
from samestep.teacher.frozen_model import FrozenModel
from samestep.teacher.options import TeacherOptions
from samestep.teacher.outputs import Form, as_bytes, compressed, from_bytes, put_together, signature, take_apart
from samestep.teacher.transfer import carry

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
    named = read_network(read_environ()).gloo
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


_LENGTH: Final = 8  # bytes that say how long the head of a message is
_NONCE: Final = 32
_HANDSHAKE_SECONDS: Final = 30.0
# A node that lost its power says nothing more: silent for half a minute it is asked, and half a minute later given up.
_ALIVE: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
GONE: Final = (OSError, EOFError)
"""What a wire raises when the other end is no longer there."""
Message = list[bytes | memoryview]
"""A tree of tensors as it travels: its head, then the bytes of each tensor."""


class Wire:
    """One connection. Nothing that arrives is unpickled: heads are JSON, and tensors are their bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _ALIVE.items():
            if (option := getattr(socket, name, None)) is not None:  # not every system lets one choose
                connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: Message) -> None:
        """Send what `packed` made of a tree of tensors."""
        for part in message:
            self._socket.sendall(part)

    def refuse(self, text: str) -> None:
        """Send the reason why there is no answer."""
        self._socket.sendall(_framed({"error": text}))

    def receive(self) -> object:
        """The next tree, its tensors on the CPU; TeacherError where the other end refused."""
        form, tensors = self.receive_parts()
        return put_together(form, iter(tensors))

    def receive_parts(self) -> tuple[Form, list[torch.Tensor]]:
        """The form of the next tree and its tensors, for who brings them elsewhere first."""
        head: dict[str, Any] = json.loads(bytes(self._read(int.from_bytes(bytes(self._read(_LENGTH)), "little"))))
        if "error" in head:
            raise TeacherError(head["error"])
        return head["form"], [self._receive_tensor(dtype, shape) for dtype, shape in head["tensors"]]

    def close(self) -> None:
        """Hang up, also where another thread waits on either end."""
        hang_up(self._socket)

    def _receive_tensor(self, dtype: str, shape: list[int]) -> torch.Tensor:
        data = torch.empty(torch.Size(shape).numel() * getattr(torch, dtype).itemsize, dtype=torch.uint8)
        self._fill(data.numpy().data)
        return from_bytes(data, dtype, shape)

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        self._fill(memoryview(data))
        return data

    def _fill(self, room: memoryview) -> None:
        while room:
            read = self._socket.recv_into(room)
            if not read:
                raise EOFError("the connection was closed")
            room = room[read:]


def packed(tree: object, what: str) -> Message:
    """A tree of tensors as a wire sends it, whole before any of it is sent; `what` names it where it cannot be."""
    form, tensors = take_apart(tree, what)
    head = _framed({"form": form, "tensors": [signature(tensor) for tensor in tensors]})
    return [head, *(as_bytes(tensor) for tensor in tensors)]


def hang_up(connection: socket.socket) -> None:
    """Close a socket, and wake whoever waits on it, here or at the other end."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def call_in(address: tuple[str, int], key: bytes) -> Wire:
    """Connect to a server, and show that this rank knows its key."""
    connection = socket.create_connection(address, timeout=_HANDSHAKE_SECONDS)
    try:
        nonce = _exactly(connection, _NONCE)
        connection.sendall(hmac.digest(key, nonce, "sha256"))
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return Wire(connection)


def answer_call(connection: socket.socket, key: bytes) -> Wire | None:
    """The wire to one who called, or None where it does not know the key."""
    try:
        connection.settimeout(_HANDSHAKE_SECONDS)
        nonce = secrets.token_bytes(_NONCE)
        connection.sendall(nonce)
        known = hmac.compare_digest(_exactly(connection, _NONCE), hmac.digest(key, nonce, "sha256"))
        connection.settimeout(None)
    except GONE:
        known = False
    if not known:
        connection.close()
        return None
    return Wire(connection)


def _framed(head: dict[str, Any]) -> bytes:
    data = json.dumps(head).encode()
    return len(data).to_bytes(_LENGTH, "little") + data


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError("the connection was closed")
        data += part
    return data


_JOIN_SECONDS: Final = 5.0


class Server:
    """Holds the teacher's module and answers a known number of callers until they hang up.

    Each caller has a thread, so that one's inputs arrive while another's are computed; forward passes take turns.
    Inputs of different callers are never joined: outputs have the same bits however many there are. Whoever calls and
    does not know the key, or says nothing, keeps nobody else waiting; when all have called, nobody is let in any more.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, wish: TeacherOptions, host: Address, callers: int
    ) -> None:
        self._module, self._device, self._wish = module, device, wish
        self.key = secrets.token_bytes(32)
        self._listening = open_door(host, callers)
        self.address: tuple[str, int] = (host.call, self._listening.getsockname()[1])
        self._turn, self._door = Lock(), Lock()
        self._awaited = callers  # 0 as soon as nobody is let in any more
        self._connections: list[socket.socket] = []
        self._threads = [Thread(target=self._accept, name="samestep-teacher-accept", daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Hang up on everybody and let the module go."""
        with self._door:
            self._awaited = 0
        hang_up(self._listening)  # wakes who waits for callers
        self._threads[0].join(_JOIN_SECONDS)
        for connection in self._connections:
            hang_up(connection)
        for thread in self._threads[1:]:
            thread.join(_JOIN_SECONDS)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # all have called, or the server was closed before
            while True:
                connection = self._listening.accept()[0]
                self._connections.append(connection)
                thread = Thread(target=self._welcome, args=(connection,), name="samestep-teacher-serve", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _welcome(self, connection: socket.socket) -> None:
        wire = answer_call(connection, self.key)
        if wire is None:
            return
        with self._door:
            expected = self._awaited > 0
            self._awaited -= expected
            last = expected and not self._awaited
        if last:
            hang_up(self._listening)
        if expected:
            self._serve(wire)
        else:
            wire.close()

    def _serve(self, wire: Wire) -> None:
        with contextlib.closing(wire), self._own_stream(), torch.no_grad(), contextlib.suppress(*GONE):
            while True:
                self._answer(wire, wire.receive())

    def _own_stream(self) -> contextlib.AbstractContextManager[object]:
        """A stream of its own: on the default one its kernels would wait for those of training."""
        cuda = self._device.type == "cuda"
        return torch.cuda.stream(torch.cuda.Stream(self._device)) if cuda else contextlib.nullcontext()

    def _answer(self, wire: Wire, request: object) -> None:
        try:  # an OSError in here is the teacher's own, of a file it reads; only below does it mean that a caller left
            args, kwargs = carry(request, self._device)
            with self._turn:
                outputs = compressed(self._module(*args, **kwargs), self._wish.top_k, self._wish.temperature)
            answer = packed(outputs, "the teacher's output")
        except Exception as error:  # noqa: BLE001  # it is the caller's to raise
            wire.refuse(f"the teacher failed on its server: {type(error).__name__}: {error}\n{traceback.format_exc()}")
        else:
            wire.send(answer)


def load(frozen: FrozenModel, device: torch.device, wish: TeacherOptions) -> nn.Module:
    """The module for a server: on a GPU a copy, on the CPU the mapped files themselves where their dtype is right."""
    if device.type != "cpu":
        return frozen.load(device, wish.dtype)
    module = frozen.skeleton()
    frozen.fill(module, lambda source: frozen.tensor(source, wish.dtype))
    return module
