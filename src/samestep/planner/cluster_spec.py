"""ClusterSpec by words and by JSON: `h100:4`, `g5`, or the figures of a device that the table lacks."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from samestep.errors import PlanError

HOST_MARGIN = 0.1
"""The part of a node's memory that a plan leaves to the system and to what nobody counted."""
USUAL_DISK = 2e9
"""Bytes a second that an NVMe disk of a node usually reads, where nobody has measured it."""


@dataclass(frozen=True)
class DeviceSpec:
    """One accelerator, or the share of a CPU that one rank has."""

    name: str
    """As in the table of known devices, or as its maker calls it."""
    kind: str
    """One of cuda, mps and cpu."""
    memory: int
    """Bytes it has for a run."""
    memory_free: int
    """Bytes of them that nobody has taken."""
    bandwidth: float
    """Bytes a second between its memory and its cores."""
    rates: Mapping[str, float]
    """Peak operations a second of a matrix product by dtype: float32, tf32, bfloat16, float16."""
    source: str
    """Where the figures come from: a data sheet, this machine, a calibration."""
    launch: float | None = None
    """Seconds of the host for one operation, as a calibration saw; work shorter than that leaves the device idle."""
    measured: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    """By dtype, what a calibration saw: (operations in one product, operations a second), smallest product first."""
    streamed: float | None = None
    """Bytes a second that a calibration saw in a copy; None: reckoned from `bandwidth`."""


@dataclass(frozen=True)
class ClusterSpec:
    """What a run would have: `nodes` times `per_node` equal devices and what joins them."""

    device: DeviceSpec
    """One of the devices; where they differ, the smallest."""
    per_node: int
    """Devices in a node."""
    nodes: int
    """Nodes."""
    host_memory: int
    """Bytes of host memory in a node that a run may use."""
    cores: int
    """Processor cores in a node."""
    within_node: float
    """Bytes a second that one device can send to others of its node."""
    between_nodes: float
    """Bytes a second that one device can send to other nodes."""
    host_link: float
    """Bytes a second between host memory and one device."""
    disk: float
    """Bytes a second from a node's disk."""
    source: str
    """Words, this machine, or SLURM, with what was read."""
    efficiency: float = 0.5
    """The part of a device's peak rate that large matrix products reach in practice; a calibration measures it."""
    links_measured: bool = False
    """Whether `within_node` was reached in an all-reduce, not printed on a sheet."""
    shm: int | None = None
    """Bytes of /dev/shm in a node; None where nobody looked."""

    @property
    def devices(self) -> int:
        """All devices, hence ranks."""
        return self.per_node * self.nodes

    def of_size(self, per_node: int, nodes: int) -> "ClusterSpec":
        """The same devices, so many in a node and so many nodes; memory and cores of a node grow with its devices."""
        host, cores = self.host_memory // self.per_node * per_node, max(1, self.cores // self.per_node * per_node)
        return replace(self, per_node=per_node, nodes=nodes, host_memory=host, cores=cores)

    @property
    def words(self) -> str:
        """How they are called in a sentence, as in `2 x 4 x h100`, two nodes of four."""
        return f"{f'{self.nodes} x ' if self.nodes > 1 else ''}{self.per_node} x {self.device.name}"


_GIB, _GB, _TERA = 2**30, 1e9, 1e12
_PCIE = {3: 16 * _GB, 4: 32 * _GB, 5: 64 * _GB}  # 16 lanes, one direction, as PCI-SIG gives them
_MEMORY = "memory as torch reports it"
_APPLE_LARGE = 36 * _GIB  # from here on Metal lends a GPU a larger part of the machine's memory


@dataclass(frozen=True)
class Sheet:
    """What is known of one device and of the nodes it is usually built into."""

    device: DeviceSpec
    """The device."""
    link: float
    """Bytes a second to its peers in the node, one direction."""
    host_link: float
    """Bytes a second to host memory, one direction."""
    network: float
    """Bytes a second to other nodes, for each device; usual, not certain."""
    host_memory: int
    """Bytes of host memory beside each device; usual, not certain."""
    cores: int
    """Processor cores beside each device; usual, not certain."""
    pattern: str
    """A regular expression for the name that CUDA gives it."""


def _cuda(
    name: str,
    gib: float,
    bandwidth: float,
    rates: Mapping[str, float],
    links: tuple[float | None, int, float],
    pattern: str,
    source: str,
    host_gib: int = 64,
) -> Sheet:
    """A GPU of NVIDIA: bandwidths in GB/s, rates in TFLOP/s; links are NVLink, generation of PCIe, network."""
    nvlink, generation, network = links
    memory = int(gib * _GIB)
    told = {dtype: rate * _TERA for dtype, rate in rates.items()}
    return Sheet(
        DeviceSpec(name, "cuda", memory, memory, bandwidth * _GB, told, f"{source}; {_MEMORY}"),
        link=nvlink * _GB if nvlink else _PCIE[generation],
        host_link=_PCIE[generation],
        network=network * _GB,
        host_memory=host_gib * _GIB,
        cores=8,
        pattern=pattern,
    )


def _tensor(half: float, tf32: float, single: float) -> dict[str, float]:
    return {"bfloat16": half, "float16": half, "tf32": tf32, "float32": single}


def _volta(half: float, single: float) -> dict[str, float]:
    """Tensor cores for float16 alone: neither bfloat16 nor TF32."""
    return {"float16": half, "float32": single}


_MPS = Sheet(
    DeviceSpec(
        "mps",
        "mps",
        16 * _GIB,
        16 * _GIB,
        273 * _GB,
        {"float32": 6.0 * _TERA, "float16": 6.0 * _TERA},
        "an Apple M4 Pro of 24 GiB, of which Metal recommends two thirds for a GPU; bandwidth by Apple's technical "
        "specifications, rates by 16 cores of 128 lanes at 1.47 GHz, which Apple does not publish",
        launch=2e-5,
    ),
    link=100 * _GB,
    host_link=100 * _GB,
    network=1.25 * _GB,
    host_memory=24 * _GIB,
    cores=12,
    pattern=r"(?!)",
)
_CPU = Sheet(
    DeviceSpec(
        "cpu",
        "cpu",
        4 * _GIB,
        4 * _GIB,
        10 * _GB,
        {"float32": 0.1 * _TERA, "bfloat16": 0.1 * _TERA, "float16": 0.1 * _TERA},
        "one core with AVX2 at 3 GHz (two products and sums of 8 numbers in a cycle), a tenth of a socket's bandwidth",
        launch=2e-6,
    ),
    link=5 * _GB,
    host_link=5 * _GB,
    network=1.25 * _GB,
    host_memory=4 * _GIB,
    cores=1,
    pattern=r"(?!)",
)

# Rates are dense: half of what sheets print with sparsity. NVLink is one direction: half of what sheets print.
_SHEETS = (
    _cuda(
        *("b200", 178.3, 8000, _tensor(2250, 1125, 75), (900, 5, 50), r"\bB200\b"),
        "NVIDIA HGX B200 data sheet (an eighth of it, 180 GB)",
        host_gib=256,
    ),
    _cuda(
        *("h200", 139.8, 4800, _tensor(989, 494, 67), (450, 5, 50), r"\bH200\b"),
        "NVIDIA H200 data sheet (SXM)",
        host_gib=256,
    ),
    _cuda(
        *("h100-pcie", 79.1, 2000, _tensor(756, 378, 51), (None, 5, 25), r"\bH100 PCIe\b"),
        "NVIDIA H100 data sheet (PCIe, without bridges)",
        host_gib=128,
    ),
    _cuda(
        *("h100-nvl", 93.0, 3938, _tensor(835, 417, 60), (None, 5, 25), r"\bH100 NVL\b"),
        "NVIDIA H100 data sheet (NVL, one of a pair, without the bridge between them)",
        host_gib=128,
    ),
    _cuda(
        *("h100", 79.1, 3350, _tensor(989, 494, 67), (450, 5, 50), r"\bH100\b"),
        "NVIDIA H100 data sheet (SXM, 80 GB)",
        host_gib=256,
    ),
    _cuda(
        *("a100-40gb", 39.4, 1555, _tensor(312, 156, 19.5), (300, 4, 25), r"\bA100.*40GB"),
        "NVIDIA A100 data sheet (SXM, 40 GB)",
        host_gib=128,
    ),
    _cuda(
        *("a100", 79.15, 2039, _tensor(312, 156, 19.5), (300, 4, 25), r"\bA100\b"),
        "NVIDIA A100 data sheet (SXM, 80 GB)",
        host_gib=256,
    ),
    _cuda(
        *("a10g", 22.0, 600, _tensor(70, 35, 35), (None, 4, 1.25), r"\bA10G\b"),
        "NVIDIA A10G data sheet, as in Amazon EC2 g5",
        host_gib=48,
    ),
    _cuda(
        *("v100-32gb", 31.7, 900, _volta(125, 15.7), (150, 3, 1.25), r"\bV100.*32GB"),
        "NVIDIA V100 data sheet (SXM2, 32 GB)",
    ),
    _cuda(
        *("v100", 15.7, 900, _volta(125, 15.7), (150, 3, 1.25), r"\bV100\b"),
        "NVIDIA V100 data sheet (SXM2, 16 GB)",
    ),
    _cuda(
        *("rtx4090", 23.6, 1008, _tensor(165, 82.6, 82.6), (None, 4, 1.25), r"\bRTX 4090\b"),
        "NVIDIA Ada GPU architecture whitepaper (float32 sums)",
    ),
    _cuda(
        *("rtx3090", 23.6, 936, _tensor(71, 35.6, 35.6), (None, 4, 1.25), r"\bRTX 3090\b"),
        "NVIDIA GA102 whitepaper (float32 sums, without a bridge)",
    ),
    _cuda(
        *("l40s", 44.4, 864, _tensor(362, 183, 91.6), (None, 4, 12.5), r"\bL40S\b"),
        "NVIDIA L40S data sheet",
        host_gib=96,
    ),
    _cuda(*("l4", 22.0, 300, _tensor(121, 60, 30.3), (None, 4, 1.25), r"\bL4\b"), "NVIDIA L4 data sheet"),
    _cuda(*("t4", 14.5, 320, _volta(65, 8.1), (None, 3, 1.25), r"\bT4\b"), "NVIDIA T4 data sheet"),
    _MPS,
    _CPU,
)

DEVICE_SPECS: Mapping[str, Sheet] = {sheet.device.name: sheet for sheet in _SHEETS}
"""Every known device by its name."""

ALIASES: Mapping[str, str] = {
    "h100-80gb": "h100",
    "h100-sxm": "h100",
    "a100-80gb": "a100",
    "v100-16gb": "v100",
    "4090": "rtx4090",
    "3090": "rtx3090",
}
"""Other names people give them."""

PRESETS: Mapping[str, tuple[str, int]] = {"g5": ("a10g", 4), "p3": ("v100", 8)}
"""Names of whole machines: the device and how many of it in a node. `local` is what this machine has."""

# What a GPU that the table lacks is reckoned as until it is calibrated: the slowest known of its generation, and for
# GeForce after Ada, of which none is known, Ada's fastest.
_LIKE = dict(
    zip(
        ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)),
        ("v100", "t4", "a100-40gb", "a10g", "l4", "h100-pcie", "b200", "rtx4090"),
        strict=True,
    )
)


def find_sheet(word: str) -> Sheet | None:
    """The device of a name as people type it; None where it is not known.

    >>> find_sheet("A100-80GB").device.name
    'a100'
    """
    name = word.lower().replace("_", "-").removeprefix("nvidia-")
    return DEVICE_SPECS.get(ALIASES.get(name, name))


def sheet_like(cuda_name: str, capability: tuple[int, int]) -> tuple[Sheet, bool]:
    """The sheet of a GPU as CUDA names it, and whether it is its own; otherwise one of its generation.

    >>> sheet_like("NVIDIA H100 80GB HBM3", (9, 0))[0].device.name
    'h100'
    """
    for sheet in _SHEETS:
        if re.search(sheet.pattern, cuda_name):
            return sheet, True
    newest = max((known for known in _LIKE if known <= capability), default=(7, 0))
    return DEVICE_SPECS[_LIKE[newest]], False


def apple_share(memory: int) -> float:
    """The part of a machine's memory that Metal recommends as the working set of Apple's GPU.

    >>> apple_share(64 * 2**30)
    0.75
    """
    return 3 / 4 if memory >= _APPLE_LARGE else 2 / 3


def slice_of(cuda_name: str) -> float:
    """The part of a GPU's cores and bandwidth that a MIG slice has, by its name; 1 for a whole GPU.

    >>> slice_of("NVIDIA A100-SXM4-40GB MIG 3g.20gb") == 3 / 7
    True
    """
    match = re.search(r"MIG (\d)g\.", cuda_name)
    return int(match[1]) / 7 if match else 1.0


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


def parse_cluster_spec(words: str, nodes: int = 1) -> ClusterSpec:
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
    return ClusterSpec(
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
        known = ", ".join((*DEVICE_SPECS, "local", *PRESETS))
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


def _of_json(text: str, where: str, nodes: int) -> ClusterSpec:
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
    device = DeviceSpec(
        name=str(fields["name"]),
        kind=str(fields.get("kind", "cuda")),
        memory=memory,
        memory_free=memory,
        bandwidth=numbers["bandwidth_gbs"] * _GB,
        rates={dtype: rate * _TERA for dtype, rate in rates.items()},
        source=where,
    )
    return ClusterSpec(
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
