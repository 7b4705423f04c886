"""A teacher's server, in threads of a rank or in a separate process: one forward pass at a time for all clients.

`python -m samestep.teacher.server` is the separate process; the rank that starts it sends its configuration.
"""

import contextlib
import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from threading import Lock, Thread
from typing import IO, Any, Final

import torch
from torch import nn

from samestep.errors import TeacherError
from samestep.teacher.connection import (
    DISCONNECTED,
    Connection,
    ServerAddress,
    authenticate,
    close_socket,
    encode,
    listen,
)
from samestep.teacher.frozen_model import Build, FrozenModel
from samestep.teacher.options import TeacherOptions
from samestep.teacher.outputs import keep_top_k, to_device
from samestep.teacher.weight_files import open_weights

_JOIN_SECONDS: Final = 5.0
_LENGTH_BYTES: Final = 8
_STOP: Final = b"."
_STOP_SECONDS: Final = 10.0
# Schedulers and terminals send these to every process of a job: the server process leaves the reaction to its rank.
_IGNORED_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


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
        command = [sys.executable, "-m", "samestep.teacher.server"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.pid = self._process.pid
        reply = self._start(pickle.dumps(sys.path), payload)
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

    def _start(self, *messages: bytes) -> dict[str, Any]:
        """Send the configuration and return the reply."""
        line = b""
        with contextlib.suppress(OSError):  # the process died and sends no reply
            for message in messages:
                _write(self._stdin, message)
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
    sys.path[:] = pickle.loads(_read(sys.stdin.buffer))
    reply, server = _open_server(_read(sys.stdin.buffer))
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


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    return pipe.read(int.from_bytes(pipe.read(_LENGTH_BYTES), "little"))


if __name__ == "__main__":
    main()
