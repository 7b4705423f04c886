"""Placements `sharded` (each rank holds 1/N of the teacher) and `served` (a few ranks or processes hold all of it).

With `sharded`, FSDP2 gathers layers when they are needed, so all ranks call the teacher together. With `served`, every
rank sends its requests to a rank or process that holds the teacher, independently of the other ranks.
"""

import contextlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from samestep.context import RunContext
from samestep.distributed.once import run_on_every_rank
from samestep.environment.world import World
from samestep.errors import TeacherError
from samestep.messages import format_bytes
from samestep.parallel.fsdp import local_tensor, mesh_of_ranks
from samestep.parallel.materialize import copy_part
from samestep.parallel.submodules import repeated_blocks
from samestep.teacher.frozen_model import FrozenModel, set_tensor
from samestep.teacher.options import TeacherOptions
from samestep.teacher.outputs import TreeSpec, to_device, unflatten
from samestep.teacher.server import (
    DISCONNECTED,
    Connection,
    Server,
    ServerProcess,
    connect,
    encode,
    load_for_server,
    server_address,
)

Response = tuple[TreeSpec, list[torch.Tensor]]
EnterStream = Callable[[], contextlib.AbstractContextManager[object]]


class ShardedTeacher:
    """A teacher that is sharded over all ranks. Every call is a collective, with inputs of any shape on each rank.

    The ranks first make a small exchange. It names a rank that calls the teacher more often than the others or from
    another line; without it the all-gather of the weights would hang, or match a collective of training.
    """

    lockstep = True

    def __init__(self, context: RunContext, frozen: FrozenModel, options: TeacherOptions) -> None:
        self._comm, dtype = context.comm, options.dtype
        self._module = frozen.load(context.device, dtype) if self._comm.alone else _shard(context, frozen, dtype)
        here, total = format_bytes(self.local_bytes), format_bytes(frozen.total_bytes(dtype))
        ranks = self._comm.world.size
        self.description = f"sharded: {here} of {total} on this rank of {ranks}, layers gathered when needed"

    @property
    def local_bytes(self) -> int:
        """Bytes of weights on this rank between two calls."""
        return sum(local_tensor(parameter).nbytes for parameter in self._module.parameters())

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Return the module's outputs for this rank's inputs."""
        self._comm.exchange("teacher(...)", [])
        with torch.no_grad():
            return self._module(*args, **kwargs)

    def close(self) -> None:
        """Free the weights."""
        self._module = nn.Identity()


def _shard(context: RunContext, frozen: FrozenModel, dtype: torch.dtype | None) -> nn.Module:
    """Shard the module and load this rank's part of each tensor from the mapped files, one tensor at a time."""
    device = context.device
    module = frozen.skeleton()
    parameters = {frozen.stored_name(name) for name, _ in module.named_parameters(remove_duplicate=False)}

    def prepare(name: str) -> torch.Tensor:
        # Parameters stay on the meta device, in their final dtype. Buffers are small: every rank holds them in full.
        if name in parameters:
            return torch.empty(frozen.weights.shape(name), dtype=frozen.dtype(name, dtype), device="meta")
        return frozen.copy_tensor(name, device, dtype)

    frozen.fill(module, prepare)
    buffers = {name: buffer.to(device) for name, buffer in module.named_buffers(remove_duplicate=False)}
    scalars = {parameter for parameter in module.parameters() if parameter.dim() == 0}  # FSDP cannot shard them
    mesh = mesh_of_ranks(context.comm, device)
    for part in (*_untied_blocks(module), module):
        fully_shard(part, mesh=mesh, reshard_after_forward=True, ignored_params=scalars)

    def load() -> None:
        module.to_empty(device=device)
        for name, buffer in buffers.items():
            set_tensor(module, name, buffer)
        for name, parameter in module.named_parameters():
            copy_part(parameter, frozen.weights.tensor(frozen.stored_name(name)))
        frozen.weights.release()

    run_on_every_rank(context.comm, "loading this rank's part of the teacher", TeacherError, load)
    return module


def _untied_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated layers that can be gathered separately: those that share no weight with another module."""
    owners = Counter(id(parameter) for part in module.modules() for parameter in part.parameters(recurse=False))
    layers = repeated_blocks(module).values()
    return [layer for layer in layers if all(owners[id(parameter)] == 1 for parameter in layer.parameters())]


@dataclass(frozen=True)
class Endpoint:
    """Where a server can be reached."""

    address: tuple[str, int]
    key: bytes
    name: str  # in messages, e.g. "rank 3"


class ServedTeacher:
    """This rank's connection to its server, and the server itself if this rank runs one.

    A rank may call the teacher any number of times: no other rank has to call it too, so an evaluation of uneven parts
    cannot hang. Responses arrive in the order of the requests. Data is sent through host memory and separate sockets,
    never through the process group of training.
    """

    def __init__(self, context: RunContext, frozen: FrozenModel, options: TeacherOptions) -> None:
        self._context, self._options = context, options
        comm, world = context.comm, context.comm.world
        self._server_ranks = serving_ranks(world.size, 1 if options.servers is None else options.servers)
        self._server: Server | ServerProcess | None = None
        self._connection: Connection | None = None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="samestep-teacher-request")
        try:
            run_on_every_rank(comm, "starting the teacher's server", TeacherError, self._start_server, frozen)
            endpoints = comm.exchange_objects("the teacher's servers", _endpoint(self._server, world.rank))
            endpoint = endpoints[next(rank for rank in self._server_ranks if rank >= world.rank)]
            assert endpoint is not None
            self._server_name = endpoint.name
            size, count = format_bytes(frozen.total_bytes(options.dtype)), len(self._server_ranks)
            holders = f"{count} {'process(es)' if options.inner == 'process' else 'rank(s)'}"
            self.description = f"served: {size} on each of {holders}, this rank sends its requests to {endpoint.name}"
            run_on_every_rank(comm, "connecting to the teacher's server", TeacherError, self._connect, endpoint)
        except BaseException:
            self.close()
            raise

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Request the module's outputs for this rank's inputs and wait for them."""
        return self.submit(*args, **kwargs).result()

    def submit(self, *args: object, **kwargs: object) -> "ServedOutputs":
        """Request outputs without waiting: they are computed and sent while this rank continues."""
        future = self._pool.submit(self._request, _after_current_work(self._context.device), args, kwargs)
        return ServedOutputs(future, self._context, self._server_name, self._explain_disconnect)

    def close(self) -> None:
        """Disconnect, and stop the server that this rank runs."""
        if self._connection is not None:
            self._connection.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _start_server(self, frozen: FrozenModel) -> None:
        """Start a server if this rank is to run one; `close` stops it if another rank fails."""
        world, device, options = self._context.comm.world, self._context.device, self._options
        if world.rank not in self._server_ranks:
            return
        earlier = [rank for rank in self._server_ranks if rank < world.rank]
        clients = world.rank - (earlier[-1] if earlier else -1)
        address = server_address(world)
        if options.inner == "process":
            free = _free_device(world, device, self._server_ranks)
            self._server = ServerProcess(frozen.build, frozen.weights.path, free, options, address, clients)
        else:
            module = load_for_server(frozen, device, options.dtype)
            self._server = Server(module, device, options, address, clients)

    def _connect(self, endpoint: Endpoint) -> None:
        self._connection = connect_to(endpoint)

    def _request(self, enter_stream: EnterStream, args: object, kwargs: object) -> Response:
        assert self._connection is not None
        with enter_stream():
            message = encode((args, kwargs), "the teacher's input")
        self._connection.send(message)
        return self._connection.receive_flat()

    def _explain_disconnect(self) -> str:
        """Return what this rank knows about why the server is gone."""
        if isinstance(self._server, ServerProcess) and (code := self._server.exit_code) is not None:
            return f"its process {self._server.pid} ended with exit code {code}"
        return self._context.comm.peers_note() or "this rank knows no more about it"


class ServedOutputs:
    """Outputs that were requested from a server."""

    def __init__(
        self, response: Future[Response], context: RunContext, server: str, explain_disconnect: Callable[[], str]
    ) -> None:
        self._response, self._context, self._server = response, context, server
        self._explain_disconnect = explain_disconnect

    def done(self) -> bool:
        """Whether the outputs have arrived, or the request has failed."""
        return self._response.done()

    def result(self) -> object:
        """Wait for the outputs and return them, on this rank's device."""
        rank, timeout = self._context.comm.world.rank, self._context.comm.timeout
        # Not result(timeout=...): the socket of a node that lost power raises TimeoutError too.
        if not wait([self._response], timeout=timeout).done:
            raise TeacherError(
                f"rank {rank} has waited {timeout:.0f} s for the teacher on {self._server}: if a forward pass takes "
                "that long, raise Run(step_timeout=...), or use servers= to share the work"
            )
        try:
            spec, tensors = self._response.result()
        except DISCONNECTED as error:
            raise TeacherError(
                f"rank {rank} lost the teacher on {self._server} ({error}): it failed or was killed, often because "
                f"memory ran out; see its last lines. {self._explain_disconnect()}"
            ) from error
        return unflatten(spec, iter(to_device(tensors, self._context.device)))


def serving_ranks(size: int, servers: int) -> list[int]:
    """Return the ranks that run a server: the last of each of `servers` equal parts of the ranks.

    With one server per node, each rank uses the server on its node.

    >>> serving_ranks(8, 2)
    [3, 7]
    """
    if not 1 <= servers <= size:
        raise TeacherError(f"servers={servers} is more than the {size} rank(s) of this run: pass 1 to {size}")
    return [(part + 1) * size // servers - 1 for part in range(servers)]


def connect_to(endpoint: Endpoint) -> Connection:
    """Connect to a server; TeacherError if it cannot be reached."""
    try:
        return connect(endpoint.address, endpoint.key)
    except DISCONNECTED as error:
        host, port = endpoint.address
        raise TeacherError(
            f"the teacher's server on {endpoint.name} cannot be reached at {host}:{port} ({error}): set "
            "GLOO_SOCKET_IFNAME to the network interface that connects the nodes"
        ) from error


def _endpoint(server: Server | ServerProcess | None, rank: int) -> Endpoint | None:
    if server is None:
        return None
    name = f"rank {rank}" if isinstance(server, Server) else f"process {server.pid} (started by rank {rank})"
    return Endpoint(server.address, server.key, name)


def _free_device(world: World, device: torch.device, server_ranks: list[int]) -> torch.device:
    """Return a GPU of this node on which no rank trains, or the CPU."""
    if device.type != "cuda":
        return device
    first_on_node = world.rank - world.local_rank
    index = world.local_size + sum(first_on_node <= rank < world.rank for rank in server_ranks)
    return torch.device("cuda", index) if index < torch.cuda.device_count() else torch.device("cpu")


def _after_current_work(device: torch.device) -> EnterStream:
    """Return a context in which another thread can read tensors of this one.

    On CUDA it is a new stream that waits for the work that is queued now.
    """
    if device.type != "cuda":
        return contextlib.nullcontext
    event = torch.cuda.current_stream(device).record_event()

    def enter() -> contextlib.AbstractContextManager[object]:
        stream = torch.cuda.Stream(device)
        stream.wait_event(event)
        return torch.cuda.stream(stream)

    return enter
