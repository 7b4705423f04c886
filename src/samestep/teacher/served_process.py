"""A teacher's server in a process of its own: how a rank starts it, and what runs in it."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import torch

from samestep.errors import TeacherError
from samestep.teacher.frozen import Build, Frozen
from samestep.teacher.ground import Wish
from samestep.teacher.served_address import Address
from samestep.teacher.served_server import Server, load
from samestep.teacher.weights import open_weights

_LENGTH: Final = 8
_END: Final = b"."
_END_SECONDS: Final = 10.0
# Schedulers send them to every process of a job, and terminals to all in front: the rank decides what follows.
_LEFT_TO_THE_RANK: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Order:
    """What the process is to serve, and to how many."""

    weights: Path
    """Where the weights lie."""
    device: torch.device
    """Where the teacher computes."""
    wish: Wish
    """Its dtype, and how its outputs are compressed."""
    host: Address
    """Where it listens, and is called."""
    callers: int
    """How many ranks will call."""


class ServingProcess:
    """A process that serves until this one lets it go, or ends: then its input closes, and it ends too."""

    def __init__(self, build: Build, order: Order) -> None:
        try:
            recipe = pickle.dumps((order, build))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TeacherError(_unknown(build, str(error))) from error
        command = [sys.executable, "-m", "samestep.teacher.served_process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self._process.pid
        told = self._begin(pickle.dumps(sys.path), recipe)
        if "error" in told:
            self.close()
            raise TeacherError(_unknown(build, told["error"]) if told["unknown"] else told["error"])
        self.address: tuple[str, int] = (told["address"][0], told["address"][1])
        self.key = bytes.fromhex(told["key"])

    @property
    def exit_code(self) -> int | None:
        """How the process ended; None while it runs."""
        return self._process.poll()

    def close(self) -> None:
        """End the process; one that does not end by itself is killed."""
        pipe = _pipe(self._process.stdin)
        if not pipe.closed:  # a data worker that was forked off holds the pipe open too: closing says nothing then
            with contextlib.suppress(OSError):
                pipe.write(_END)
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _pipe(self._process.stdout).close()

    def _begin(self, *messages: bytes) -> dict[str, Any]:
        """Tell it what to do, and hear where it listens."""
        line = b""
        with contextlib.suppress(OSError):  # it died: then it has nothing to say
            for message in messages:
                _write(_pipe(self._process.stdin), message)
            line = _pipe(self._process.stdout).readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        return {
            "error": f"the process of the teacher (pid {self.pid}) ended with exit code {code} before it served: its "
            "last lines are above; a negative code is a signal, and -9 often means that memory ran out",
            "unknown": False,
        }


def serve() -> None:
    """Read the order, load the teacher, say where it listens, and stay until the rank says so or ends."""
    for number in _LEFT_TO_THE_RANK:
        signal.signal(number, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what build() prints must not be taken for the answer
    sys.path[:] = pickle.loads(_read(sys.stdin.buffer))
    told, server = _open(_read(sys.stdin.buffer))
    print(json.dumps(told), file=out, flush=True)
    sys.stdin.buffer.read(len(_END))
    if server is not None:
        server.close()


def _open(recipe: bytes) -> tuple[dict[str, Any], Server | None]:
    """The server and where it listens; or what failed, which the rank that started this process raises."""
    try:
        order, build = pickle.loads(recipe)
    except Exception as error:  # noqa: BLE001  # importing a module runs it
        return _failure(error, unknown=True), None
    try:
        # names were checked by the rank, with what may be left over in the files
        frozen = Frozen(build, open_weights(order.weights), unused=lambda others, own: others)
        server = Server(load(frozen, order.device, order.wish), order.device, order.wish, order.host, order.callers)
    except Exception as error:  # noqa: BLE001  # whatever build() raises
        return _failure(error, unknown=False), None
    return {"address": server.address, "key": server.key.hex()}, server


def _failure(error: Exception, unknown: bool) -> dict[str, Any]:
    """`unknown`: whether `build` could not be found where it was said to be."""
    return {"error": f"{type(error).__name__}: {error}", "unknown": unknown}


def _unknown(build: Build, why: str) -> str:
    name = getattr(build, "__qualname__", type(build).__name__)
    return (
        f"a process of its own cannot import build={name} ({why}): define it in a module beside the script and import "
        "it, or let a rank serve with inner='rank'"
    )


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(_LENGTH, "little") + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    return pipe.read(int.from_bytes(pipe.read(_LENGTH), "little"))


if __name__ == "__main__":
    serve()
