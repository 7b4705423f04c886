"""The machines that a run is on, for its plans: what is seen here, and what one rank has of it."""

from dataclasses import replace

import torch

from samestep.facts.calibration import calibrated, read_calibration
from samestep.facts.hardware import read_hardware
from samestep.facts.machine_live import machines_here
from samestep.facts.machines import Device, Machines
from samestep.facts.world import World, environment
from samestep.run.detect import detect_gpus, detect_links


def machines_seen(nodes: int) -> Machines:
    """This machine once for each node, with what a calibration has kept of it."""
    hardware = read_hardware(detect_gpus(), detect_links())
    found = machines_here(hardware, nodes, torch.backends.mps.is_available())
    name = torch.cuda.get_device_name() if found.device.kind == "cuda" else found.device.kind
    return calibrated(found, read_calibration(name, environment()))


def machines_of_ranks(world: World, sharing: int) -> Machines:
    """The same as each of `sharing` ranks has it that compute on one device: a part of its memory, speed and link."""
    found = machines_seen(world.nodes)
    cores = min(found.cores, world.local_size * torch.get_num_threads())
    used = cores / found.cores if found.device.kind == "cpu" else 1.0
    own = replace(_part(found.device, used / sharing), memory=found.device.memory // sharing)
    return replace(found, device=own, cores=cores, host_link=found.host_link / sharing)


def _part(device: Device, share: float) -> Device:
    """How fast one rank computes on a device that it shares with others, or does not use in full."""
    return replace(
        device,
        rates={dtype: rate * share for dtype, rate in device.rates.items()},
        bandwidth=device.bandwidth * share,
        measured={
            dtype: tuple((work, rate * share) for work, rate in points) for dtype, points in device.measured.items()
        },
        streamed=None if device.streamed is None else device.streamed * share,
    )
