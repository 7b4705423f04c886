"""A teacher that is served: few ranks or processes hold it, all ranks ask it and each gets its own outputs."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from samestep.errors import TeacherError
from samestep.facts.world import World
from samestep.teacher.carry import carry
from samestep.teacher.frozen import Frozen
from samestep.teacher.ground import Ground, Wish
from samestep.teacher.outputs import Form, put_together
from samestep.teacher.served_address import address_of
from samestep.teacher.served_process import Order, ServingProcess
from samestep.teacher.served_server import Server, load
from samestep.teacher.served_wire import GONE, Wire, call_in, packed
from samestep.teacher.together import together
from samestep.units import bytes_text

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

    def __init__(self, ground: Ground, frozen: Frozen, wish: Wish) -> None:
        self._ground, self._wish, self._bytes = ground, wish, frozen.bytes_in(wish.dtype)
        self._in_process = wish.inner == "process"
        self._hosts = serving_ranks(ground.link.world.size, 1 if wish.servers is None else wish.servers)
        self._mine = next(host for host in self._hosts if host >= ground.link.world.rank)
        self._server: Server | ServingProcess | None = None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="samestep-teacher-ask")
        self._wire: Wire | None = None
        link = ground.link
        try:
            together(link, "starting the teacher's server", self._start, frozen)
            posts = link.exchange_objects("the teacher's servers", _post(self._server, link.world.rank))
            post = posts[self._mine]
            assert post is not None
            self._where = post.told
            together(link, "calling the teacher's server", self._call_in, post)
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
        return f"served: {bytes_text(self._bytes)} on each of {count} {holders}, this rank asks {self._where}"

    def close(self) -> None:
        """Hang up, and end the server that this rank keeps."""
        if self._wire is not None:
            self._wire.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _start(self, frozen: Frozen) -> None:
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
        return self._ground.link.tell_peers() or "nothing more is known here"


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


def place(ground: Ground, frozen: Frozen, wish: Wish) -> Served:
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
