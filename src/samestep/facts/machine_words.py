"""Machines by words and by JSON: `h100:4`, `g5`, or the figures of a device that the table lacks."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from samestep.errors import PlanError
from samestep.facts.devices import PRESETS, SHEETS, Sheet, find_sheet
from samestep.facts.machines import USUAL_DISK, Device, Machines

_GIB, _GB, _TERA = 2**30, 1e9, 1e12
_KINDS = ("cuda", "mps", "cpu")
_DTYPES = ("float32", "tf32", "bfloat16", "float16")
_WHOLE = ("count", "cores")
_REQUIRED = ("name", "memory_gib", "bandwidth_gbs", "tflops")
_WITH_DEFAULT: Mapping[str, float] = {
    "count": 1,
    "link_gbs": 32,
    "host_link_gbs": 32,
    "network_gbs": 1.25,
    "host_memory_gib": 64,
    "cores": 8,
}
EXAMPLE = (
    '{"name": "mygpu", "count": 4, "memory_gib": 47.5, "bandwidth_gbs": 960, "tflops": {"bfloat16": 180, '
    '"float32": 90}, "link_gbs": 32}'
)
"""A device of one's own, as a complaint shows it."""


def machines_of(words: str, nodes: int = 1) -> Machines:
    """Machines as typed: NAME, NAME:COUNT, a preset, a file of JSON or JSON itself; COUNT is for one node.

    >>> machines_of("a100-40gb:2", nodes=3).devices
    6
    """
    if nodes < 1:
        raise PlanError(f"{nodes} nodes are no machines: give --nodes 1 or more")
    text = words.strip()
    if text.startswith("{"):
        return _of_json(text, "the JSON of --gpus", nodes)
    if text.endswith(".json"):
        return _of_json(_read(Path(text)), text, nodes)
    sheet, count = _named(text)
    if not re.fullmatch(r"[1-9]\d*", count):
        what, example = count or "nothing", f"{sheet.device.name}:4"
        raise PlanError(f"--gpus {words}: {what} is no number of devices: type, for example, {example}")
    each = int(count)
    _check_apple(sheet.device.kind, each, nodes, f"--gpus {text}")
    return Machines(
        device=sheet.device,
        per_node=each,
        nodes=nodes,
        host_memory=sheet.host_memory * each,
        cores=sheet.cores * each,
        within_node=sheet.link,
        between_nodes=sheet.network,
        host_link=sheet.host_link,
        disk=USUAL_DISK,
        source=f"words: {text}" + (f" on each of {nodes} nodes" if nodes > 1 else ""),
    )


def _named(text: str) -> tuple[Sheet, str]:
    """The device of a name, and the count behind it as it was typed."""
    name, colon, count = text.partition(":")
    if name in PRESETS and colon:
        device, usual = PRESETS[name]
        raise PlanError(
            f"--gpus {text}: {name} is a whole machine, {usual} x {device}: type {name} alone, with --nodes for "
            f"several, or {device}:COUNT for other numbers"
        )
    if name == "local":
        raise PlanError(f"--gpus {text}: local is what this machine has: type it alone, or name a device and a count")
    if name in PRESETS:
        name, count = PRESETS[name][0], str(PRESETS[name][1])
    sheet = find_sheet(name)
    if sheet is None:
        known = ", ".join((*SHEETS, "local", *PRESETS))
        raise PlanError(
            f"--gpus {text}: there is no device {name} in the table: use one of {known}, or give its figures as JSON, "
            f"or as a file of it, as in --gpus '{EXAMPLE}'"
        )
    return sheet, count if colon or count else "1"


def _check_apple(kind: str, count: int, nodes: int, where: str) -> None:
    if kind == "mps" and count * nodes > 1:
        raise PlanError(f"{where}: a run uses Apple's GPU with one rank, so there is one of it: type mps alone")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"--gpus {path} cannot be read ({error.strerror}): give a file with, for example, {EXAMPLE}"
        ) from error


def _of_json(text: str, where: str, nodes: int) -> Machines:
    try:
        told: object = json.loads(text)
    except ValueError as error:
        raise PlanError(f"{where} is no JSON ({error}): write, for example, {EXAMPLE}") from error
    if not isinstance(told, dict):
        raise PlanError(f"{where} is no JSON object: write, for example, {EXAMPLE}")
    fields = cast("dict[str, object]", told)
    _check(fields, where)
    numbers = dict(_WITH_DEFAULT)
    numbers |= {name: float(value) for name, value in fields.items() if isinstance(value, int | float)}
    memory, each = int(numbers["memory_gib"] * _GIB), int(numbers["count"])
    rates = cast("dict[str, float]", fields["tflops"])
    _check_apple(str(fields.get("kind", "cuda")), each, nodes, where)
    device = Device(
        name=str(fields["name"]),
        kind=str(fields.get("kind", "cuda")),
        memory=memory,
        memory_free=memory,
        bandwidth=numbers["bandwidth_gbs"] * _GB,
        rates={dtype: rate * _TERA for dtype, rate in rates.items()},
        source=where,
    )
    return Machines(
        device=device,
        per_node=each,
        nodes=nodes,
        host_memory=int(numbers["host_memory_gib"] * _GIB),
        cores=int(numbers["cores"]),
        within_node=numbers["link_gbs"] * _GB,
        between_nodes=numbers["network_gbs"] * _GB,
        host_link=numbers["host_link_gbs"] * _GB,
        disk=USUAL_DISK,
        source=where,
    )


def _check(fields: Mapping[str, object], where: str) -> None:
    known = (*_REQUIRED, "kind", *_WITH_DEFAULT)
    unknown = [name for name in fields if name not in known]
    missing = [name for name in _REQUIRED if name not in fields]
    if unknown or missing:
        what = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}, which no device has"
        raise PlanError(f"{where} {what}: the fields are {', '.join(known)}, as in {EXAMPLE}")
    for name in ("memory_gib", "bandwidth_gbs", *_WITH_DEFAULT):
        _check_number(name, fields.get(name, 1), where)
    if fields.get("kind", "cuda") not in _KINDS:
        raise PlanError(f"{where} has kind={fields['kind']!r}: it must be one of {', '.join(_KINDS)}")
    _check_rates(fields["tflops"], where)


def _check_number(name: str, value: object, where: str) -> None:
    whole = name in _WHOLE
    if not _above_zero(value) or (whole and not isinstance(value, int)):
        wanted = "a whole number from 1 up" if whole else "a number above 0"
        raise PlanError(f"{where} has {name}={value!r}: it must be {wanted}")


def _check_rates(rates: object, where: str) -> None:
    told = cast("dict[object, object]", rates) if isinstance(rates, dict) else {}
    if "float32" not in told or not all(dtype in _DTYPES and _above_zero(rate) for dtype, rate in told.items()):
        raise PlanError(
            f"{where} has tflops={rates!r}: give float32 at least, and what it has of {', '.join(_DTYPES[1:])}, each "
            "in dense TFLOP/s"
        )


def _above_zero(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
