"""A teacher's server: threads that answer the ranks which call in, one forward pass at a time."""

import contextlib
import secrets
import socket
import traceback
from threading import Lock, Thread
from typing import Final

import torch
from torch import nn

from samestep.teacher.carry import carry
from samestep.teacher.frozen import Frozen
from samestep.teacher.ground import Wish
from samestep.teacher.outputs import compressed
from samestep.teacher.served_address import Address, open_door
from samestep.teacher.served_wire import GONE, Wire, answer_call, hang_up, packed

_JOIN_SECONDS: Final = 5.0


class Server:
    """Holds the teacher's module and answers a known number of callers until they hang up.

    Each caller has a thread, so that one's inputs arrive while another's are computed; forward passes take turns.
    Inputs of different callers are never joined: outputs have the same bits however many there are. Whoever calls and
    does not know the key, or says nothing, keeps nobody else waiting; when all have called, nobody is let in any more.
    """

    def __init__(self, module: nn.Module, device: torch.device, wish: Wish, host: Address, callers: int) -> None:
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


def load(frozen: Frozen, device: torch.device, wish: Wish) -> nn.Module:
    """The module for a server: on a GPU a copy, on the CPU the mapped files themselves where their dtype is right."""
    if device.type != "cpu":
        return frozen.load(device, wish.dtype)
    module = frozen.skeleton()
    frozen.fill(module, lambda source: frozen.tensor(source, wish.dtype))
    return module
