"""Opening the connection between ranks: the store they share and the process group over it."""

import socket
import time
from datetime import timedelta
from functools import lru_cache
from hashlib import sha256
from typing import Final
from uuid import uuid4

import torch
import torch.distributed as dist

from samestep.environment.world import World
from samestep.errors import WorldError

_FIRST_PAUSE: Final = 0.002
_LONGEST_PAUSE: Final = 0.25  # a thousand ranks that wait for the last one must not wear the store out


def connect_store(world: World, timeout: float) -> dist.Store:
    """The store of a world: served by the launcher's agent or by the first rank."""
    hosts = world.is_main and not world.agent_store
    try:
        return _open_store(world.address, world.port, hosts, timeout)
    except RuntimeError as error:
        what = (
            f"rank 0 cannot listen at {world.address}:{world.port}: set MASTER_PORT to a free port"
            if hosts
            else f"rank {world.rank} cannot reach the first rank at {world.address}:{world.port} (waited {timeout:g} "
            "s): check "
            "that it started, that MASTER_ADDR and MASTER_PORT are right and that no firewall stands between"
        )
        raise WorldError(f"{what} ({str(error).splitlines()[0]})") from error


@lru_cache(maxsize=1)
def _open_store(address: str, port: int, hosts: bool, timeout: float) -> dist.Store:
    """A store that outlives a run: others may still read there, and the next run of these processes meets there."""
    left = timeout if hosts else max(1.0, timeout - _wait_for_listener(address, port, timeout))
    store = dist.TCPStore(
        address, port, is_master=hosts, timeout=timedelta(seconds=left), wait_for_workers=False, multi_tenant=True
    )
    store.set_timeout(timedelta(seconds=timeout))
    return store


def _wait_for_listener(address: str, port: int, timeout: float) -> float:
    """The seconds until somebody listened there. Torch, once refused, would sleep a whole second before it asks again.

    Whatever else keeps a connection from being made is left to torch, which tells it.
    """
    since, pause = time.monotonic(), _FIRST_PAUSE
    while (waited := time.monotonic() - since) < timeout:
        try:
            socket.create_connection((address, port), timeout=timeout - waited).close()
        except ConnectionRefusedError:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        except OSError:
            break
        else:
            break
    return waited


def meet(store: dist.Store, rank: int, size: int, timeout: float) -> str:
    """Wait for all ranks; a name for this meeting, the same on all of them, that no earlier meeting had.

    A store may outlive the ranks that met there, and no launcher numbers meetings: of two nodes the one whose rank was
    killed counts a restart, the other only sees that nodes changed. So every rank brings a token of its own, the first
    one draws up a roll of the tokens it finds, and the meeting stands once each rank has found itself on that roll. A
    token of the dead never signs; when its successor comes, there is a new roll.
    """
    place, token = dist.PrefixStore(f"samestep/meet/{size}", store), uuid4().hex
    place.set(f"came/{rank}", token)
    since, pause, roll, signed = time.monotonic(), _FIRST_PAUSE, b"", ""
    while True:
        if rank == 0:
            roll = _call_the_roll(place, size, roll)
        if place.check([f"roll/{token}"]):
            name = place.get(f"roll/{token}").decode()
            signatures = place.add(f"signed/{name}", int(name != signed))
            if signatures == size:
                return name
            signed = name
        if time.monotonic() - since > timeout:
            raise _nobody_came(place, rank, size, timeout)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _call_the_roll(place: dist.Store, size: int, before: bytes) -> bytes:
    """On the first rank: tell every token that is there which roll it stands on, where the tokens have changed."""
    keys = [f"came/{each}" for each in range(size)]
    if not place.check(keys):
        return before
    tokens = place.multi_get(keys)
    roll = b"".join(tokens)
    if roll != before:
        name = sha256(roll).hexdigest()[:32]
        for token in tokens:
            place.set(f"roll/{token.decode()}", name)
    return roll


def _nobody_came(place: dist.Store, rank: int, size: int, timeout: float) -> WorldError:
    absent = [each for each in range(size) if not place.check([f"came/{each}"])]
    shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    who = f"rank(s) {shown} did not come" if absent else "one of them came and has gone"
    return WorldError(
        f"rank {rank} has waited {timeout:g} s for {size} ranks to meet, and {who}: look for their last lines, check "
        "that as many were started as WORLD_SIZE says, or give slow ones time with Run(start_timeout=...)"
    )


def store_beside_group(world: World) -> dist.Store:
    """A store of our own beside a group that somebody else opened: the first rank serves it and tells where."""
    served: dist.TCPStore | None = None
    if dist.get_rank() == 0:
        served = dist.TCPStore(world.address, 0, is_master=True, wait_for_workers=False)
    told = [served.port if served is not None else 0]
    dist.broadcast_object_list(told, src=0, device=torch.device("cpu"))
    return served or dist.TCPStore(world.address, told[0], is_master=False, wait_for_workers=False)


def open_group(store: dist.Store, world: World, backend: str, device: torch.device, timeout: float) -> None:
    """The process group: NCCL for tensors on the GPU and gloo for small things on the CPU, or gloo for both."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout),
        device_id=device if backend == "nccl" else None,
    )


def open_talk(backend: str, timeout: float) -> dist.ProcessGroup | None:
    """A group for small things alone, where training uses gloo too; a common act of all ranks. None: none is needed.

    In one group with training a small thing could meet weights that FSDP gathers there, and gloo ends a process that is
    sent more than it has room for.
    """
    if backend != "gloo":
        return None
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    assert isinstance(group, dist.ProcessGroup), "all ranks are in it"
    return group
