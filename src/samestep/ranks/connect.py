"""Opening the connection between ranks: the store they share and the process group over it."""

from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist

from samestep.errors import WorldError
from samestep.facts.world import World


def connect_store(world: World, timeout: float) -> dist.Store:
    """The store of a world: served by the launcher's agent or by the first rank."""
    hosts = world.first and not world.agent_store
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
    return dist.TCPStore(
        address, port, is_master=hosts, timeout=timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=True
    )


def count_runs(store: dist.Store, rank: int) -> int:
    """Which run of these processes begins: ranks count alike, since each of them opens every run."""
    return store.add(f"runs/{rank}", 1)


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
