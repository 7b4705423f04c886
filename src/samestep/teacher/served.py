"""A teacher that is served: few ranks or processes hold it, all ranks ask it and each gets its own outputs."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import torch

from samestep.distributed.once import run_on_every_rank
from samestep.environment.world import World
from samestep.errors import TeacherError
from samestep.messages import format_bytes
from samestep.teacher.frozen_model import Build, FrozenModel
from samestep.teacher.options import Ground, TeacherOptions
from samestep.teacher.outputs import Form, put_together
from samestep.teacher.server import GONE, Address, Server, Wire, address_of, call_in, load, packed
from samestep.teacher.transfer import carry
from samestep.teacher.weight_files import open_weights

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
    wish: TeacherOptions
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
        command = [sys.executable, "-m", "samestep.teacher.served"]
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
        frozen = FrozenModel(build, open_weights(order.weights), unused=lambda others, own: others)
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


Ready = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class _Post:
    """Where a server can be reached."""

    address: tuple[str, int]
    key: bytes
    told: str


class Served:
    """This rank's line to the server that answers it, and the server itself where this rank keeps one.

    A rank may ask as often as it likes: no other rank need ask at the same time, so that evaluation of uneven parts
    cannot hang. Answers come in the order of the questions. What travels goes through host memory and sockets of its
    own, never through the process group of training.
    """

    def __init__(self, ground: Ground, frozen: FrozenModel, wish: TeacherOptions) -> None:
        self._ground, self._wish, self._bytes = ground, wish, frozen.bytes_in(wish.dtype)
        self._in_process = wish.inner == "process"
        self._hosts = serving_ranks(ground.link.world.size, 1 if wish.servers is None else wish.servers)
        self._mine = next(host for host in self._hosts if host >= ground.link.world.rank)
        self._server: Server | ServingProcess | None = None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="samestep-teacher-ask")
        self._wire: Wire | None = None
        link = ground.link
        try:
            run_on_every_rank(link, "starting the teacher's server", self._start, frozen)
            posts = link.exchange_objects("the teacher's servers", _post(self._server, link.world.rank))
            post = posts[self._mine]
            assert post is not None
            self._where = post.told
            run_on_every_rank(link, "calling the teacher's server", self._call_in, post)
        except BaseException:
            self.close()
            raise

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The module's outputs for this rank's inputs; waits for them."""
        return self.ahead(*args, **kwargs).result()

    def ahead(self, *args: object, **kwargs: object) -> "Asked":
        """Ask, and go on: the outputs are computed and travel while this rank does something else."""
        ready = _mark(self._ground.device)
        return Asked(self._pool.submit(self._ask, ready, args, kwargs), self._ground, self._gone, self._where)

    def describe(self) -> str:
        """One line for the log."""
        count, holders = len(self._hosts), "process(es)" if self._in_process else "rank(s)"
        return f"served: {format_bytes(self._bytes)} on each of {count} {holders}, this rank asks {self._where}"

    def close(self) -> None:
        """Hang up, and end the server that this rank keeps."""
        if self._wire is not None:
            self._wire.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _start(self, frozen: FrozenModel) -> None:
        """Start the server of this rank's part of the ranks, where this rank is the one to keep it.

        It is kept before the others are heard of: where one of them fails, it must be closed.
        """
        world, device, wish = self._ground.link.world, self._ground.device, self._wish
        if world.rank not in self._hosts:
            return
        before = [host for host in self._hosts if host < world.rank]
        callers = world.rank - (before[-1] if before else -1)
        host = address_of(world)
        if self._in_process:
            spare = _spare_device(world, device, self._hosts)
            self._server = ServingProcess(frozen.build, Order(frozen.weights.path, spare, wish, host, callers))
        else:
            self._server = Server(load(frozen, device, wish), device, wish, host, callers)

    def _call_in(self, post: _Post) -> None:
        self._wire = _call(post)

    def _ask(self, ready: Ready, args: object, kwargs: object) -> tuple[Form, list[torch.Tensor]]:
        assert self._wire is not None
        with ready():
            question = packed((args, kwargs), "the teacher's input")
        self._wire.send(question)
        return self._wire.receive_parts()

    def _gone(self) -> str:
        """What is known of why the server no longer answers."""
        if isinstance(self._server, ServingProcess) and (code := self._server.exit_code) is not None:
            return f"its process {self._server.pid} ended with exit code {code}"
        return self._ground.link.peers_note() or "nothing more is known here"


class Asked:
    """Outputs that a server was asked for."""

    def __init__(
        self,
        answer: "Future[tuple[Form, list[torch.Tensor]]]",
        ground: Ground,
        why_gone: Callable[[], str],
        where: str,
    ) -> None:
        self._answer, self._ground, self._why_gone, self._where = answer, ground, why_gone, where

    def result(self) -> object:
        """The outputs, on this rank's device."""
        rank, patience = self._ground.link.world.rank, self._ground.link.timeout
        # Not result(timeout=...): a socket whose other end lost its power raises TimeoutError too.
        if not wait([self._answer], timeout=patience).done:
            raise TeacherError(
                f"rank {rank} waits for the teacher of {self._where} since {patience:.0f} s: if a forward pass takes "
                "that long, give it time with Run(step_timeout=...), or use servers= to share the work"
            )
        try:
            form, tensors = self._answer.result()
        except GONE as error:
            raise TeacherError(
                f"rank {rank} asked the teacher of {self._where}, which is gone ({error}): it died or was killed, "
                f"often for want of memory; look for its last lines. {self._why_gone()}"
            ) from error
        return put_together(form, iter(carry(tensors, self._ground.device)))


def place(ground: Ground, frozen: FrozenModel, wish: TeacherOptions) -> Served:
    """The teacher on `wish.servers` ranks, or in as many processes of their own where `wish.inner` is "process"."""
    return Served(ground, frozen, wish)


def serving_ranks(size: int, servers: int) -> list[int]:
    """The ranks that serve: the last of each of `servers` equal stretches of ranks, so that one a node is near all.

    >>> serving_ranks(8, 2)
    [3, 7]
    """
    if not 1 <= servers <= size:
        raise TeacherError(f"servers={servers} cannot stand on {size} rank(s): give 1 to {size}")
    return [(at + 1) * size // servers - 1 for at in range(servers)]


def _post(server: Server | ServingProcess | None, rank: int) -> _Post | None:
    if server is None:
        return None
    told = f"rank {rank}" if isinstance(server, Server) else f"process {server.pid}, which rank {rank} started"
    return _Post(server.address, server.key, told)


def _call(post: _Post) -> Wire:
    try:
        return call_in(post.address, post.key)
    except GONE as error:
        raise TeacherError(
            f"the teacher's server of {post.told} cannot be reached at {post.address[0]}:{post.address[1]} ({error}): "
            "GLOO_SOCKET_IFNAME names the network interface that nodes reach each other by"
        ) from error


def _spare_device(world: World, device: torch.device, hosts: list[int]) -> torch.device:
    """A GPU of this node on which no rank trains, or the CPU."""
    if device.type != "cuda":
        return device
    first_here = world.rank - world.local_rank
    at = world.local_size + sum(first_here <= host < world.rank for host in hosts)
    return torch.device("cuda", at) if at < torch.cuda.device_count() else torch.device("cpu")


def _mark(device: torch.device) -> Ready:
    """What another thread enters to read tensors of this one: on CUDA a stream that waits for what is queued now."""
    if device.type != "cuda":
        return contextlib.nullcontext
    event = torch.cuda.current_stream(device).record_event()

    def stream() -> contextlib.AbstractContextManager[object]:
        """A new stream behind the event."""
        side = torch.cuda.Stream(device)
        side.wait_event(event)
        return torch.cuda.stream(side)

    return stream
