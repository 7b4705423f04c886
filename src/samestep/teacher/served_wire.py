"""The line between a rank and a teacher's server: trees of tensors over a socket, to those who know the key."""

import contextlib
import hmac
import json
import secrets
import socket
from typing import Any, Final

import torch

from samestep.errors import TeacherError
from samestep.teacher.outputs import Form, as_bytes, from_bytes, put_together, signature, take_apart

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
