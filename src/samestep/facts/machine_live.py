"""The machines that are here: memory by query, rates by name, links by what joins the GPUs."""

import re
from collections.abc import Sequence
from dataclasses import replace

from samestep.facts.devices import SHEETS, Sheet, apple_share, sheet_like, slice_of
from samestep.facts.hardware import Gpu, Hardware, Link
from samestep.facts.machines import USUAL_DISK, Device, Machines

_NVLINK = 25e9  # one link of NVLink 2, 3 and 4, one direction
_NVLINK_5 = 50e9
_BLACKWELL = 10  # compute capability from which NVLink is of the fifth generation
# The part of PCIe's rate that is left on ever longer ways: one switch, several, a host bridge, a socket, both sockets.
_WAYS = {"PIX": 1.0, "PXB": 1.0, "PHB": 0.8, "NODE": 0.8, "SYS": 0.5}


def machines_here(hardware: Hardware, nodes: int = 1, mps: bool = False) -> Machines:
    """What this machine has, once for each node: GPUs if torch can use any, else Apple's, else the CPU."""
    if hardware.gpus:
        return _of_gpus(hardware, nodes)
    sheet = SHEETS["mps" if mps else "cpu"]
    return _of_host(hardware, sheet, nodes)


def link_rate(links: Sequence[Link], gpus: Sequence[Gpu], pcie: float) -> float:
    """Bytes a second over the slowest link between two GPUs of a node; PCIe's where nobody tells.

    >>> link_rate([Link(0, 1, "NV18")], [], pcie=64e9) / 1e9
    450.0
    """
    each = _NVLINK_5 if any(gpu.capability[0] >= _BLACKWELL for gpu in gpus) else _NVLINK
    return min((_rate(link.kind, each, pcie) for link in links), default=pcie)


def _rate(kind: str, nvlink: float, pcie: float) -> float:
    lanes = re.fullmatch(r"NV(\d+)", kind)
    return int(lanes[1]) * nvlink if lanes else _WAYS.get(kind, 0.5) * pcie


def _of_gpus(hardware: Hardware, nodes: int) -> Machines:
    smallest = min(hardware.gpus, key=lambda gpu: gpu.memory_free)
    sheet, own = sheet_like(smallest.name, smallest.capability)
    part = slice_of(smallest.name)
    reckoned = f"reckoned as {sheet.device.name} until `samestep plan --calibrate` has measured it"
    device = replace(
        sheet.device,
        name=sheet.device.name if own and part == 1 else smallest.name,
        memory=smallest.memory_total,
        memory_free=smallest.memory_free,
        bandwidth=sheet.device.bandwidth * part,
        rates={dtype: rate * part for dtype, rate in sheet.device.rates.items()},
        source=sheet.device.source if own else reckoned,
    )
    return Machines(
        device=device,
        per_node=len(hardware.gpus),
        nodes=nodes,
        host_memory=hardware.memory_available,
        cores=hardware.cores.usable,
        within_node=link_rate(hardware.links, hardware.gpus, sheet.host_link),
        between_nodes=sheet.network,
        host_link=sheet.host_link,
        disk=USUAL_DISK,
        source=f"this machine: {len(hardware.gpus)} x {smallest.name}" + _on_nodes(nodes),
        shm=hardware.shm_total,
    )


def _of_host(hardware: Hardware, sheet: Sheet, nodes: int) -> Machines:
    """One rank a node that computes with all cores, or with Apple's GPU, which shares the memory of the machine."""
    apple = sheet.device.kind == "mps"
    cores = hardware.cores.usable
    memory = int(hardware.memory_total * apple_share(hardware.memory_total)) if apple else hardware.memory_total
    device: Device = replace(
        sheet.device,
        memory=memory,
        memory_free=min(memory, hardware.memory_available),
        rates=sheet.device.rates if apple else {name: rate * cores for name, rate in sheet.device.rates.items()},
        bandwidth=sheet.device.bandwidth if apple else sheet.device.bandwidth * min(cores, 10),
    )
    return Machines(
        device=device,
        per_node=1,
        nodes=nodes,
        host_memory=hardware.memory_available,
        cores=cores,
        within_node=sheet.link,
        between_nodes=sheet.network,
        host_link=sheet.host_link,
        disk=USUAL_DISK,
        source=f"this machine: {sheet.device.name}, {cores} core(s)" + _on_nodes(nodes),
        shm=hardware.shm_total,
    )


def _on_nodes(nodes: int) -> str:
    return f", on each of {nodes} nodes" if nodes > 1 else ""
