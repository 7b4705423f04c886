"""A teacher in a run: closed with it, and met by all ranks equally often where its calls need them."""

from dataclasses import replace
from pathlib import Path

import torch

from samestep.facts.calibration import calibrated, read_calibration
from samestep.facts.hardware import read_hardware
from samestep.facts.machine_live import machines_here
from samestep.facts.machines import Device
from samestep.facts.world import World, environment
from samestep.plan.teacher import Setting
from samestep.run.detect import detect_gpus, detect_links
from samestep.run.engine import RunEngine
from samestep.teacher.frozen import Build
from samestep.teacher.ground import Ground, Wish
from samestep.teacher.teacher import Teacher, open_teacher


def take_teacher(
    engine: RunEngine,
    ground: Ground,
    build: Build | str | Path,
    weights: str | Path | None,
    placement: str | None,
    wish: Wish,
) -> Teacher:
    """A teacher that ends with the run, also where that fails: other ranks may wait for what this one serves."""
    teacher = open_teacher(ground, build, weights, placement, wish)
    engine.teachers.append(teacher)
    engine.at_end.append(teacher.close)
    return teacher


def setting_here(world: World, device: torch.device, global_batch: int) -> Setting:
    """What a teacher is placed for: this machine once for each node, and the ranks on it.

    Memory that is free lacks what this process has taken already, its CUDA context among it.
    """
    cuda = device.type == "cuda"
    hardware = read_hardware(detect_gpus() if cuda else (), detect_links() if cuda else ())
    found = machines_here(hardware, world.nodes, device.type == "mps")
    name = torch.cuda.get_device_name(device) if cuda else found.device.kind
    found = calibrated(found, read_calibration(name, environment()))
    ranks, usable = world.local_size, hardware.cores.usable
    cores = min(usable, ranks * torch.get_num_threads())
    own = found.device if found.device.kind != "cpu" else _part(found.device, cores / usable / ranks)
    # A rank may see its own GPU only, so that a node has at least as many as it has ranks.
    found = replace(found, device=own, per_node=max(found.per_node, ranks), cores=cores)
    return Setting(found, world.size, global_batch, -(-global_batch // world.size))


def _part(device: Device, share: float) -> Device:
    """What one rank has of a processor that several compute on, or that it does not use in full."""
    return replace(
        device,
        memory=int(device.memory * share),
        rates={dtype: rate * share for dtype, rate in device.rates.items()},
        bandwidth=device.bandwidth * share,
        measured={
            dtype: tuple((work, rate * share) for work, rate in points) for dtype, points in device.measured.items()
        },
        streamed=None if device.streamed is None else device.streamed * share,
    )


def needs_all(engine: RunEngine) -> bool:
    """Whether the calls of a teacher need all ranks, so that an evaluation must give each equally many batches."""
    return any(teacher.lockstep for teacher in engine.teachers)
