"""A teacher's server, in threads of a rank or in a separate process, and the connections between it and the ranks.

Nothing that arrives over TCP is unpickled: a message is a JSON header and the bytes of its tensors.
`main` runs in the separate process; the rank that starts it sends its configuration.
"""

import contextlib
import hmac
import ipaddress
import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Final

import torch
from torch import nn

from samestep.environment.network import read_network
from samestep.environment.world import World, read_environ
from samestep.errors import TeacherError
from samestep.teacher.frozen_model import Build, FrozenModel
from samestep.teacher.model_files import open_weights
from samestep.teacher.options import TeacherOptions
from samestep.teacher.outputs import (
    TreeSpec,
    encode_parts,
    flatten,
    keep_top_k,
    tensor_from_bytes,
    to_device,
    unflatten,
)

_LOOPBACK: Final = "127.0.0.1"
_ANY_PORT: Final = 9  # connecting a datagram socket sends nothing
_LENGTH_BYTES: Final = 8  # of the length of a message's header
_NONCE_BYTES: Final = 32
_HANDSHAKE_SECONDS: Final = 30.0
# A node that lost power never closes its connections: probe after 30 s of silence, give up after another 30 s.
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
_JOIN_SECONDS: Final = 5.0
_STOP: Final = b"."
_STOP_SECONDS: Final = 10.0
# Schedulers and terminals send these to every process of a job: the server process leaves the reaction to its rank.
_IGNORED_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
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
        length = int.from_bytes(_read(self._socket, _LENGTH_BYTES), "little")
        header: dict[str, Any] = json.loads(_read(self._socket, length))
        if "error" in header:
            raise TeacherError(header["error"])
        return header["form"], [self._receive_tensor(dtype, shape) for dtype, shape in header["tensors"]]

    def close(self) -> None:
        """Close the connection; a thread that waits on either end returns."""
        close_socket(self._socket)

    def _receive_tensor(self, dtype: str, shape: list[int]) -> torch.Tensor:
        data = torch.empty(torch.Size(shape).numel() * getattr(torch, dtype).itemsize, dtype=torch.uint8)
        _read_into(self._socket, data.numpy().data)
        return tensor_from_bytes(data, dtype, shape)


def encode(tree: object, what: str) -> Message:
    """Encode a tree completely, before any of it is sent; `what` names the tree in an error."""
    header, contents = encode_parts(*flatten(tree, what))
    return [_frame(header), *contents]


def connect(address: tuple[str, int], key: bytes) -> Connection:
    """Connect to a server and prove that this rank knows its key."""
    connecting = socket.create_connection(address, timeout=_HANDSHAKE_SECONDS)
    try:
        connecting.sendall(hmac.digest(key, _read(connecting, _NONCE_BYTES), "sha256"))
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
        known = hmac.compare_digest(_read(accepted, _NONCE_BYTES), hmac.digest(key, nonce, "sha256"))
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

    bind: str  # where the server listens; empty: on all interfaces
    host: str  # the name or IPv4 or IPv6 address that clients connect to


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


def _read(connected: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    _read_into(connected, memoryview(data))
    return data


def _read_into(connected: socket.socket, target: memoryview) -> None:
    while target:
        count = connected.recv_into(target)
        if not count:
            raise EOFError("the connection was closed")
        target = target[count:]


class Server:
    """Holds the teacher's module and answers a fixed number of clients until they disconnect.

    Each client has a thread, so that inputs arrive while another client's outputs are computed; forward passes run one
    after another. Inputs of different clients are never joined, so outputs have the same bits for any number of them. A
    client that does not know the key, or sends nothing, delays no other. After the last client the server accepts none.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, options: TeacherOptions, address: ServerAddress, clients: int
    ) -> None:
        self._module, self._device, self._options = module, device, options
        self.key = secrets.token_bytes(32)
        self._listener = listen(address, clients)
        self.address: tuple[str, int] = (address.host, self._listener.getsockname()[1])
        self._forward_lock, self._count_lock = Lock(), Lock()
        self._clients_left = clients
        self._sockets: list[socket.socket] = []
        self._threads = [Thread(target=self._accept, name="samestep-teacher-accept", daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Disconnect all clients and stop the threads."""
        with self._count_lock:
            self._clients_left = 0
        close_socket(self._listener)
        self._threads[0].join(_JOIN_SECONDS)
        for accepted in self._sockets:
            close_socket(accepted)
        for thread in self._threads[1:]:
            thread.join(_JOIN_SECONDS)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed after the last client, or by close()
            while True:
                accepted = self._listener.accept()[0]
                self._sockets.append(accepted)
                thread = Thread(target=self._admit, args=(accepted,), name="samestep-teacher-serve", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _admit(self, accepted: socket.socket) -> None:
        connection = authenticate(accepted, self.key)
        if connection is None:
            return
        with self._count_lock:
            expected = self._clients_left > 0
            self._clients_left -= expected
            last = expected and not self._clients_left
        if last:
            close_socket(self._listener)
        if expected:
            self._serve(connection)
        else:
            connection.close()

    def _serve(self, connection: Connection) -> None:
        # In the default stream the kernels of the teacher would wait for those of training.
        cuda = self._device.type == "cuda"
        stream = torch.cuda.stream(torch.cuda.Stream(self._device)) if cuda else contextlib.nullcontext()
        with contextlib.closing(connection), stream, torch.no_grad(), contextlib.suppress(*DISCONNECTED):
            while True:
                self._respond(connection, connection.receive())

    def _respond(self, connection: Connection, request: object) -> None:
        try:  # an OSError in here comes from the teacher itself; only in send() does it mean that the client is gone
            args, kwargs = to_device(request, self._device)
            with self._forward_lock:
                outputs = keep_top_k(self._module(*args, **kwargs), self._options.top_k, self._options.temperature)
            response = encode(outputs, "the teacher's output")
        except Exception as error:  # noqa: BLE001  # the client raises it
            connection.send_error(
                f"the teacher failed on its server: {type(error).__name__}: {error}\n{traceback.format_exc()}"
            )
        else:
            connection.send(response)


def load_for_server(frozen: FrozenModel, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """Load the module: on a GPU a copy, on the CPU views of the mapped files if they have the right dtype."""
    if device.type != "cpu":
        return frozen.load(device, dtype)
    module = frozen.skeleton()
    frozen.fill(module, lambda name: frozen.tensor(name, dtype))
    return module


class ServerProcess:
    """A process that serves until this one stops it or ends: then its standard input closes, and it ends too."""

    def __init__(
        self,
        build: Build,
        weights: Path,
        device: torch.device,
        options: TeacherOptions,
        address: ServerAddress,
        clients: int,
    ) -> None:
        try:
            payload = pickle.dumps((build, weights, device, options, address, clients))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TeacherError(_cannot_import(build, str(error))) from error
        command = [sys.executable, "-c", "from samestep.teacher.server import main; main()"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.pid = self._process.pid
        reply = self._start(pickle.dumps((sys.path, payload)))
        if "error" in reply:
            self.close()
            raise TeacherError(_cannot_import(build, reply["error"]) if reply["import_failed"] else reply["error"])
        self.address: tuple[str, int] = (reply["address"][0], reply["address"][1])
        self.key = bytes.fromhex(reply["key"])

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process; None while it runs."""
        return self._process.poll()

    def close(self) -> None:
        """Stop the process; kill it if it does not stop."""
        if not self._stdin.closed:
            # A forked data worker may hold the pipe open too, and then closing it has no effect: send a byte.
            with contextlib.suppress(OSError):
                self._stdin.write(_STOP)
            with contextlib.suppress(OSError):
                self._stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()

    def _start(self, message: bytes) -> dict[str, Any]:
        """Send the configuration and return the reply."""
        line = b""
        with contextlib.suppress(OSError):  # the process died and sends no reply
            self._stdin.write(message)
            self._stdin.flush()
            line = self._stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        return {
            "error": f"the teacher's server process (pid {self.pid}) ended with exit code {code} before it served: see "
            "its last lines above; a negative code is a signal, and -9 often means out of memory",
            "import_failed": False,
        }


def main() -> None:
    """Read the configuration, load the teacher, reply with the address, and serve until the rank stops or ends."""
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    reply_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that output of build() is not read as the reply
    sys.path[:], payload = pickle.load(sys.stdin.buffer)  # the payload itself needs the path
    reply, server = _open_server(payload)
    print(json.dumps(reply), file=reply_to, flush=True)
    sys.stdin.buffer.read(len(_STOP))
    if server is not None:
        server.close()


def _open_server(payload: bytes) -> tuple[dict[str, Any], Server | None]:
    """Return the reply and the server; if it fails, an error for the rank to raise, and None."""
    try:
        build, weights, device, options, address, clients = pickle.loads(payload)
    except Exception as error:  # noqa: BLE001  # importing a module runs its code
        return {"error": f"{type(error).__name__}: {error}", "import_failed": True}, None
    try:
        # The rank has checked the names: whatever else is in the files is unused.
        frozen = FrozenModel(build, open_weights(weights), unused=lambda others, own: others)
        server = Server(load_for_server(frozen, device, options.dtype), device, options, address, clients)
    except Exception as error:  # noqa: BLE001  # whatever build() raises
        return {"error": f"{type(error).__name__}: {error}", "import_failed": False}, None
    return {"address": server.address, "key": server.key.hex()}, server


def _cannot_import(build: Build, reason: str) -> str:
    name = getattr(build, "__qualname__", type(build).__name__)
    return (
        f"the server process cannot import build={name} ({reason}): define it in a module next to the script and "
        "import it, or serve from a rank with inner='rank'"
    )
