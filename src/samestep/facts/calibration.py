"""What a machine was measured to do, kept as JSON in the user's cache folder for later estimates."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from samestep.disk import replace_text
from samestep.facts.machines import Machines
from samestep.facts.world import cache_folder


@dataclass(frozen=True)
class Calibration:
    """Rates and bandwidths of one kind of machine, as measured."""

    device: str
    """The device as CUDA names it, or cpu or mps."""
    count: int
    """Devices that took part in the all-reduce."""
    products: Mapping[str, tuple[tuple[float, float], ...]]
    """By dtype: (operations in one product, operations a second), smallest product first."""
    copy: float
    """Bytes a second read and written by a copy within the device's memory."""
    host_link: float
    """Bytes a second from pinned host memory to the device."""
    all_reduce: float | None
    """Bytes a second that each device sends during an all-reduce; None where there is one device only."""
    launch: float
    """Seconds that the host takes to start one operation."""
    when: str
    """The date, as in 2025-01-31."""


def calibrated(machines: Machines, calibration: Calibration | None) -> Machines:
    """`machines` with what was measured in place of what sheets say; without a calibration as they are."""
    if calibration is None:
        return machines
    device = replace(
        machines.device,
        measured=calibration.products,
        streamed=calibration.copy,
        launch=calibration.launch,
        source=f"{machines.device.source}; measured on {calibration.when}",
    )
    found = replace(machines, device=device, host_link=calibration.host_link)
    if calibration.all_reduce is None or calibration.count != machines.per_node:
        return found
    return replace(found, within_node=calibration.all_reduce, links_measured=True)


def calibration_path(device: str, environ: Mapping[str, str]) -> Path:
    """Where the calibration of a device is kept: one file for each kind, as a home folder is shared by unlike nodes."""
    name = hashlib.sha256(device.encode()).hexdigest()[:16]
    return cache_folder(environ) / f"calibration-{name}.json"


def read_calibration(device: str, environ: Mapping[str, str]) -> Calibration | None:
    """What was kept for this device; None where nothing was, or something that is not a calibration of it."""
    try:
        told = json.loads(calibration_path(device, environ).read_text(encoding="utf-8"))
        products = {
            str(dtype): tuple((float(work), float(rate)) for work, rate in points)
            for dtype, points in told.pop("products").items()
        }
        found = Calibration(products=products, **told)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # never measured, or not our file: by the sheet
        return None
    return found if found.device == device else None


def keep_calibration(calibration: Calibration, environ: Mapping[str, str]) -> Path:
    """Write it down for later; returns where."""
    path = calibration_path(calibration.device, environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(asdict(calibration), indent=2))
    return path
