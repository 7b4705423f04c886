"""The store and the process groups of a run: rendezvous of all ranks, then gloo or NCCL."""

import socket
import time
from datetime import timedelta
from functools import lru_cache
from hashlib import sha256
from typing import Final
from uuid import uuid4

import torch
import torch.distributed as dist

from samestep.environment.network import ANSWER_SECONDS, accepts_connections, connect_unless_silent, find_route_problem
from samestep.environment.processes import allow_open_files
from samestep.environment.world import World
from samestep.errors import WorldError

_NCCL_AND_GLOO: Final = "cpu:gloo,cuda:nccl"
_OPEN_FILES: Final = 34  # of a rank, besides its connections to other ranks
_FIRST_PAUSE: Final = 0.002
_LONGEST_PAUSE: Final = 0.25  # a thousand ranks that poll for the last one must not overload the store


def connect_store(world: World, timeout: float) -> dist.Store:
    """The key-value store of all ranks, hosted by torchrun's agent or by rank 0."""
    hosts = world.is_main and not world.agent_store
    # The default group, those of samestep (one with NCCL, which opens its own sockets), and the store's clients.
    if problem := allow_open_files(_OPEN_FILES + (4 if hosts else 3) * world.size):
        raise WorldError(f"rank {world.rank} cannot connect {world.size} ranks: {problem}")
    if problem := find_route_problem(world.address, world.port, min(timeout, ANSWER_SECONDS)):
        raise WorldError(
            f"rank {world.rank} cannot reach rank 0: {problem}; set MASTER_ADDR to an address of rank 0's machine that "
            "every rank can reach, 127.0.0.1 if all ranks run on one machine"
        )
    try:
        return _open_store(world.address, world.port, hosts, timeout)
    except RuntimeError as error:
        what = (
            f"rank 0 cannot listen on {world.address}:{world.port}: set MASTER_PORT to a free port"
            if hosts
            else f"rank {world.rank} cannot connect to rank 0 at {world.address}:{world.port} within {timeout:g} s: "
            "check that rank 0 has started, that MASTER_ADDR and MASTER_PORT are right, and that no firewall blocks "
            "the port"
        )
        raise WorldError(f"{what} ({str(error).splitlines()[0]})") from error


@lru_cache(maxsize=1)
def _open_store(address: str, port: int, hosts: bool, timeout: float) -> dist.Store:
    """Cached: the store outlives a run, since peers may still read from it and the next run of this process uses it."""
    left = timeout if hosts else max(1.0, timeout - _wait_for_listener(address, port, timeout))

    def connect() -> dist.TCPStore:
        return dist.TCPStore(
            address, port, is_master=hosts, timeout=timedelta(seconds=left), wait_for_workers=False, multi_tenant=True
        )

    cause: RuntimeError | None = None
    try:
        store = connect() if hosts else connect_unless_silent(connect, address, port, min(timeout, ANSWER_SECONDS))
    except RuntimeError as error:
        if hosts or not accepts_connections(address, port):
            raise
        store, cause = None, error
    if store is None:
        answer = f"torch says: {str(cause).splitlines()[0]}" if cause else "no answer"
        raise WorldError(
            f"the process that listens at {address}:{port} is not rank 0 of this job, since it does not answer like a "
            f"store of torch ({answer}): set MASTER_PORT to a port that no other service uses, the same on every rank"
        ) from cause
    store.set_timeout(timedelta(seconds=timeout))
    return store


def _wait_for_listener(address: str, port: int, timeout: float) -> float:
    """Poll until the port accepts connections; returns the seconds waited.

    TCPStore sleeps a full second after a refused connection. Any other error is left for TCPStore to report.
    """
    since, pause = time.monotonic(), _FIRST_PAUSE
    while (waited := time.monotonic() - since) < timeout:
        try:
            socket.create_connection((address, port), timeout=timeout - waited).close()
            break
        except ConnectionRefusedError:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        except OSError:
            break
    return waited


def rendezvous(store: dist.Store, rank: int, size: int, timeout: float) -> str:
    """Wait for all ranks; returns a name for this generation, the same on all of them and never used before.

    A store may outlive the processes that used it, and no launcher numbers the generations: of two nodes, the one whose
    rank was killed counts a restart and the other only sees a membership change. So every rank posts a random token,
    rank 0 publishes a membership list of the tokens it finds, and the generation is complete once every rank has found
    its token in the list and confirmed it. The token of a dead process is never confirmed. When its successor posts a
    new token, rank 0 publishes a new list.
    """
    board = dist.PrefixStore(f"samestep/rendezvous/{size}", store)
    try:
        return _agree_on_generation(board, rank, size, timeout)
    except RuntimeError as error:
        raise WorldError(
            f"rank {rank} waited for {size} ranks and lost the store of rank 0 ({str(error).splitlines()[0]}): rank 0 "
            "has exited, so look for its last lines, and check that WORLD_SIZE is the same on every rank"
        ) from error


def _agree_on_generation(board: dist.Store, rank: int, size: int, timeout: float) -> str:
    token = uuid4().hex
    board.set(f"token/{rank}", token)
    since, pause, members, confirmed = time.monotonic(), _FIRST_PAUSE, b"", ""
    while True:
        if rank == 0:
            members = _publish_membership(board, size, members)
        if board.check([f"generation/{token}"]):
            name = board.get(f"generation/{token}").decode()
            confirmations = board.add(f"confirmed/{name}", int(name != confirmed))
            if confirmations == size:
                return name
            confirmed = name
        if time.monotonic() - since > timeout:
            raise _rendezvous_timeout(board, rank, size, timeout)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _publish_membership(board: dist.Store, size: int, before: bytes) -> bytes:
    """On rank 0: if the tokens have changed, publish the name of the generation to each of them."""
    keys = [f"token/{rank}" for rank in range(size)]
    if not board.check(keys):
        return before
    tokens = board.multi_get(keys)
    members = b"".join(tokens)
    if members != before:
        name = sha256(members).hexdigest()[:32]
        for token in tokens:
            board.set(f"generation/{token.decode()}", name)
    return members


def _rendezvous_timeout(board: dist.Store, rank: int, size: int, timeout: float) -> WorldError:
    absent = [each for each in range(size) if not board.check([f"token/{each}"])]
    shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    who = f"rank(s) {shown} did not connect" if absent else "one of them connected and has exited"
    return WorldError(
        f"rank {rank} waited {timeout:g} s for {size} ranks, and {who}: look for their last lines, check that "
        "WORLD_SIZE processes were started, or raise the timeout with Run(start_timeout=...)"
    )


def check_existing_group(world: World) -> None:
    """Raise if the script has created a process group that a run of this world cannot use."""
    if not dist.is_initialized():
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (world.rank, world.size):
        raise WorldError(
            f"the script created a process group in which this process is rank {rank} of {size}, and the environment "
            f"variables say rank {world.rank} of {world.size}: remove dist.init_process_group and mp.spawn, and start "
            f"the ranks with `samestep run --nproc-per-node {size} train.py`"
        )


def store_beside_group(world: World, group: dist.ProcessGroup) -> dist.Store:
    """A store for ranks whose script created a process group: rank 0 hosts it and sends the port through `group`."""
    hosted: dist.TCPStore | None = None
    if world.is_main:
        hosted = dist.TCPStore(world.address, 0, is_master=True, wait_for_workers=False)
    port = [hosted.port if hosted is not None else 0]
    dist.broadcast_object_list(port, src=0, group=group, device=torch.device("cpu"))
    return hosted or dist.TCPStore(world.address, port[0], is_master=False, wait_for_workers=False)


def init_process_group(store: dist.Store, world: World, backend: str, device: torch.device, timeout: float) -> None:
    """Create the default process group: NCCL for CUDA tensors and gloo for CPU tensors, or gloo for both."""
    dist.init_process_group(
        _NCCL_AND_GLOO if backend == "nccl" else backend,
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout),
        device_id=device if backend == "nccl" else None,
    )


def backends_to_add(existing: str | None, backend: str) -> str | None:
    """The backends of a group for tensors of training; None if the default group serves.

    With gloo, the default group is left to the script. With NCCL it serves, since a second one takes memory of the GPU,
    unless the script created it (`existing`) without a backend for CPU tensors or without NCCL.

    >>> backends_to_add(None, "nccl"), backends_to_add("cuda:nccl", "nccl"), backends_to_add(None, "gloo")
    (None, 'cpu:gloo,cuda:nccl', 'gloo')
    """
    if backend != "nccl":
        return backend
    serves = existing is None or ("cpu:" in existing and "cuda:nccl" in existing)
    return None if serves else _NCCL_AND_GLOO


def new_group(backends: str, timeout: float) -> dist.ProcessGroup:
    """Another group of all ranks; a collective of all ranks.

    In one group, a collective of samestep on one rank could match another one of the script on another rank, and gloo
    aborts a process that receives more bytes than it has allocated.
    """
    group = dist.new_group(backend=backends, timeout=timedelta(seconds=timeout))
    assert isinstance(group, dist.ProcessGroup), "all ranks are members"
    return group
