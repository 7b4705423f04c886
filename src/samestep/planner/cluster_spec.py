"""Specifications of devices and clusters, and the parser of `--gpus h100:4`, presets and JSON device descriptions."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from samestep.environment.world import MAX_LOCAL_RANKS
from samestep.errors import PlanError
from samestep.messages import read_integer, shorten

HOST_MARGIN = 0.1
"""Fraction of a node's host memory that a plan leaves to the operating system and to other processes."""
DEFAULT_DISK_BANDWIDTH = 2e9
"""Bytes per second that an NVMe disk usually reads; used because disks are not measured."""


@dataclass(frozen=True)
class DeviceSpec:
    """One accelerator, or the part of a CPU that one rank uses."""

    name: str  # name in the table of known devices, or the name that the vendor gives it
    kind: str  # one of "cuda", "mps" and "cpu"
    memory: int  # bytes
    memory_free: int  # bytes that no process uses
    bandwidth: float  # peak memory bandwidth in bytes per second
    peak_flops: Mapping[str, float]  # peak dense FLOP/s of matrix products by dtype: float32, tf32, bfloat16, float16
    source: str  # where the numbers come from: a data sheet, this machine, a calibration
    launch_seconds: float | None = None  # measured host time to launch one operation; None: estimated
    copy_bandwidth: float | None = None  # measured bytes per second of a copy in device memory; None: estimated
    measured_flops: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    """Measured (operations per matrix product, FLOP/s) by dtype, smallest product first."""


@dataclass(frozen=True)
class ClusterSpec:
    """`nodes` nodes with `devices_per_node` equal devices each, and the bandwidths between them."""

    device: DeviceSpec  # if the devices differ, the one with the least free memory
    devices_per_node: int
    nodes: int
    host_memory: int  # bytes of host memory per node that a run may use
    cores: int  # CPU cores per node
    intra_node_bandwidth: float  # bytes per second that one device can send to other devices of its node
    inter_node_bandwidth: float  # bytes per second that one device can send to other nodes
    host_bandwidth: float  # bytes per second between host memory and one device
    disk_bandwidth: float  # bytes per second that a node reads from disk
    source: str  # how the cluster is known: the --gpus option, this machine, or a SLURM job
    efficiency: float = 0.5  # fraction of the peak FLOP/s that large matrix products reach without a calibration
    all_reduce_measured: bool = False  # whether `intra_node_bandwidth` comes from an all-reduce, not from a data sheet
    shm: int | None = None  # bytes of /dev/shm per node; None if unknown

    @property
    def devices(self) -> int:
        """Number of devices in all nodes, and so the number of ranks."""
        return self.devices_per_node * self.nodes

    @property
    def label(self) -> str:
        """Short description such as `2 x 4 x h100`: two nodes with four H100 each."""
        return f"{f'{self.nodes} x ' if self.nodes > 1 else ''}{self.devices_per_node} x {self.device.name}"

    def resized(self, devices_per_node: int, nodes: int) -> "ClusterSpec":
        """The same devices in other numbers; host memory and cores of a node grow with its devices."""
        host_memory = self.host_memory // self.devices_per_node * devices_per_node
        cores = max(1, self.cores // self.devices_per_node * devices_per_node)
        return replace(self, devices_per_node=devices_per_node, nodes=nodes, host_memory=host_memory, cores=cores)


_GIB, _GB, _TERA = 2**30, 1e9, 1e12
_PCIE_BANDWIDTH = {3: 16 * _GB, 4: 32 * _GB, 5: 64 * _GB}  # 16 lanes, one direction, as specified by PCI-SIG
_CORES_PER_GPU = 8

# FLOP/s are dense: half of what data sheets print with sparsity. NVLink is one direction: half of what they print.
# Network, host memory and cores per device are those of common nodes.
# Columns: name, memory in GiB as torch reports it, memory GB/s, TFLOP/s (16 bit, TF32, FP32), NVLink GB/s, PCIe
# generation, network GB/s, host GiB; then the pattern of the name that CUDA reports, and the source.
# fmt: off
_NVIDIA_GPUS = (
    (("b200", 178.3, 8000, (2250, 1125, 75), 900, 5, 50, 256),
     r"\bB200\b", "NVIDIA HGX B200 data sheet (an eighth of it, 180 GB)"),
    (("h200", 139.8, 4800, (989, 494, 67), 450, 5, 50, 256),
     r"\bH200\b", "NVIDIA H200 data sheet (SXM)"),
    (("h100-pcie", 79.1, 2000, (756, 378, 51), None, 5, 25, 128),
     r"\bH100 PCIe\b", "NVIDIA H100 data sheet (PCIe, without bridges)"),
    (("h100-nvl", 93.0, 3938, (835, 417, 60), None, 5, 25, 128),
     r"\bH100 NVL\b", "NVIDIA H100 data sheet (NVL, one of a pair, without the bridge between them)"),
    (("h100", 79.1, 3350, (989, 494, 67), 450, 5, 50, 256),
     r"\bH100\b", "NVIDIA H100 data sheet (SXM, 80 GB)"),
    (("a100-40gb", 39.4, 1555, (312, 156, 19.5), 300, 4, 25, 128),
     r"\bA100.*40GB", "NVIDIA A100 data sheet (SXM, 40 GB)"),
    (("a100", 79.15, 2039, (312, 156, 19.5), 300, 4, 25, 256),
     r"\bA100\b", "NVIDIA A100 data sheet (SXM, 80 GB)"),
    (("a10g", 22.0, 600, (70, 35, 35), None, 4, 1.25, 48),
     r"\bA10G\b", "NVIDIA A10G data sheet, as in Amazon EC2 g5"),
    (("v100-32gb", 31.7, 900, (125, None, 15.7), 150, 3, 1.25, 64),
     r"\bV100.*32GB", "NVIDIA V100 data sheet (SXM2, 32 GB)"),
    (("v100", 15.7, 900, (125, None, 15.7), 150, 3, 1.25, 64),
     r"\bV100\b", "NVIDIA V100 data sheet (SXM2, 16 GB)"),
    (("rtx4090", 23.6, 1008, (165, 82.6, 82.6), None, 4, 1.25, 64),
     r"\bRTX 4090\b", "NVIDIA Ada GPU architecture whitepaper (float32 accumulation)"),
    (("rtx3090", 23.6, 936, (71, 35.6, 35.6), None, 4, 1.25, 64),
     r"\bRTX 3090\b", "NVIDIA GA102 whitepaper (float32 accumulation, without a bridge)"),
    (("l40s", 44.4, 864, (362, 183, 91.6), None, 4, 12.5, 96),
     r"\bL40S\b", "NVIDIA L40S data sheet"),
    (("l4", 22.0, 300, (121, 60, 30.3), None, 4, 1.25, 64),
     r"\bL4\b", "NVIDIA L4 data sheet"),
    (("t4", 14.5, 320, (65, None, 8.1), None, 3, 1.25, 64),
     r"\bT4\b", "NVIDIA T4 data sheet"),
)
# fmt: on


def _nvidia_gpu(
    name: str,
    memory_gib: float,
    bandwidth: float,
    tflops: tuple[float, float | None, float],
    nvlink: float | None,
    pcie_generation: int,
    network: float,
    host_gib: int,
    *,
    source: str,
) -> ClusterSpec:
    half, tf32, single = tflops
    # Volta and Turing have tensor cores for float16 only
    rates = {"float16": half, "float32": single} | ({} if tf32 is None else {"bfloat16": half, "tf32": tf32})
    memory, pcie = int(memory_gib * _GIB), _PCIE_BANDWIDTH[pcie_generation]
    flops = {dtype: rate * _TERA for dtype, rate in rates.items()}
    source = f"{source}; memory as torch reports it"
    return _one_device(
        DeviceSpec(name, "cuda", memory, memory, bandwidth * _GB, flops, source),
        bandwidths=(nvlink * _GB if nvlink else pcie, pcie, network * _GB),
        host_memory=host_gib * _GIB,
        cores=_CORES_PER_GPU,
    )


def _one_device(
    device: DeviceSpec, bandwidths: tuple[float, float, float], host_memory: int, cores: int
) -> ClusterSpec:
    """A node with one device; `bandwidths` are those to other devices of the node, to the host and to other nodes."""
    return ClusterSpec(
        device=device,
        devices_per_node=1,
        nodes=1,
        host_memory=host_memory,
        cores=cores,
        intra_node_bandwidth=bandwidths[0],
        inter_node_bandwidth=bandwidths[2],
        host_bandwidth=bandwidths[1],
        disk_bandwidth=DEFAULT_DISK_BANDWIDTH,
        source="table of known devices",
    )


_MPS = DeviceSpec(
    *("mps", "mps", 16 * _GIB, 16 * _GIB, 273 * _GB, {"float32": 6.0 * _TERA, "float16": 6.0 * _TERA}),
    "Apple M4 Pro with 24 GiB, of which Metal recommends two thirds for the GPU; bandwidth from Apple's technical "
    "specifications, FLOP/s from 16 cores with 128 lanes at 1.47 GHz, which Apple does not publish",
    launch_seconds=2e-5,
)
_CPU = DeviceSpec(
    *("cpu", "cpu", 4 * _GIB, 4 * _GIB, 10 * _GB),
    {"float32": 0.1 * _TERA, "bfloat16": 0.1 * _TERA, "float16": 0.1 * _TERA},
    "one core with AVX2 at 3 GHz (two fused multiply-adds of 8 numbers per cycle), a tenth of a socket's bandwidth",
    launch_seconds=2e-6,
)
KNOWN_DEVICES: Mapping[str, ClusterSpec] = {
    **{row[0]: _nvidia_gpu(*row, source=source) for row, _, source in _NVIDIA_GPUS},
    "mps": _one_device(_MPS, (100 * _GB, 100 * _GB, 1.25 * _GB), 24 * _GIB, cores=12),
    "cpu": _one_device(_CPU, (5 * _GB, 5 * _GB, 1.25 * _GB), 4 * _GIB, cores=1),
}
"""Every known device by name, each as a node with one device."""

ALIASES: Mapping[str, str] = {
    "h100-80gb": "h100",
    "h100-sxm": "h100",
    "a100-80gb": "a100",
    "v100-16gb": "v100",
    "4090": "rtx4090",
    "3090": "rtx3090",
}
"""Other names of known devices."""

PRESETS: Mapping[str, tuple[str, int]] = {"g5": ("a10g", 4), "p3": ("v100", 8)}
"""Names of node types: the device and how many of it a node has."""

# An unknown GPU is estimated as the slowest known GPU with its compute capability until it is calibrated. Ada's
# fastest represents GeForce GPUs after Ada, of which none is known.
_BY_CAPABILITY = {
    (7, 0): "v100",
    (7, 5): "t4",
    (8, 0): "a100-40gb",
    (8, 6): "a10g",
    (8, 9): "l4",
    (9, 0): "h100-pcie",
    (10, 0): "b200",
    (12, 0): "rtx4090",
}


def find_device(name: str) -> ClusterSpec | None:
    """The known device with this name or alias, in any case, as a node with one device; None if it is unknown.

    >>> find_device("A100-80GB").device.name
    'a100'
    """
    name = name.lower().replace("_", "-").removeprefix("nvidia-")
    return KNOWN_DEVICES.get(ALIASES.get(name, name))


def match_gpu(cuda_name: str, capability: tuple[int, int]) -> tuple[ClusterSpec, bool]:
    """The known device that CUDA reports as `cuda_name`, and True; or a similar one by compute capability, and False.

    >>> match_gpu("NVIDIA H100 80GB HBM3", (9, 0))[0].device.name
    'h100'
    """
    for row, pattern, _ in _NVIDIA_GPUS:
        if re.search(pattern, cuda_name):
            return KNOWN_DEVICES[row[0]], True
    newest = max((known for known in _BY_CAPABILITY if known <= capability), default=(7, 0))
    return KNOWN_DEVICES[_BY_CAPABILITY[newest]], False


def metal_memory_fraction(memory: int) -> float:
    """Fraction of a machine's memory that Metal recommends as the working set of an Apple GPU.

    >>> metal_memory_fraction(64 * 2**30)
    0.75
    """
    return 3 / 4 if memory >= 36 * _GIB else 2 / 3


def mig_fraction(cuda_name: str) -> float:
    """Fraction of a GPU's cores and bandwidth that a MIG instance has, by its name; 1 for a full GPU.

    >>> mig_fraction("NVIDIA A100-SXM4-40GB MIG 3g.20gb") == 3 / 7
    True
    """
    match = re.search(r"MIG (\d)g\.", cuda_name)
    return int(match[1]) / 7 if match else 1.0


_KINDS = ("cuda", "mps", "cpu")
_MIN_NUMBER, _MAX_NUMBER = 1e-6, 1_000_000_000  # of GiB, GB/s, TFLOP/s, cores
_DTYPES = ("float32", "tf32", "bfloat16", "float16")
_INTEGERS = ("count", "cores")
_REQUIRED = ("name", "memory_gib", "bandwidth_gbs", "tflops")
_DEFAULTS: Mapping[str, float] = {
    "count": 1,
    "interconnect_gbs": 32,
    "host_gbs": 32,
    "network_gbs": 1.25,
    "host_memory_gib": 64,
    "cores": 8,
}
EXAMPLE = (
    '{"name": "mygpu", "count": 4, "memory_gib": 47.5, "bandwidth_gbs": 960, "tflops": {"bfloat16": 180, '
    '"float32": 90}, "interconnect_gbs": 32}'
)
"""A device description, as error messages show it."""


def parse_cluster_spec(text: str, nodes: int = 1) -> ClusterSpec:
    """Parse NAME, NAME:COUNT, a preset, a JSON object or the path of a .json file; COUNT is per node.

    >>> parse_cluster_spec("a100-40gb:2", nodes=3).devices
    6
    """
    if nodes < 1:
        raise PlanError(f"--nodes must be at least 1, got {nodes}.")
    text = text.strip()
    if text.startswith("{"):
        return _parse_json(text, "the JSON of --gpus", nodes)
    if text.endswith(".json"):
        return _parse_json(_read_file(Path(text)), text, nodes)
    device, count = _parse_name(text)
    _check_apple(device.device.kind, count, nodes, f"--gpus {text}")
    source = f"--gpus {text}" + (f" --nodes {nodes}" if nodes > 1 else "")
    return replace(device.resized(count, nodes), source=source)


def _parse_name(text: str) -> tuple[ClusterSpec, int]:
    """The known device, and its number per node."""
    name, colon, count = text.partition(":")
    if name == "local":
        raise PlanError(
            f"--gpus {text}: `local` means the GPUs of this machine and takes no count. Pass `local` alone, or the "
            "name of a device with a count."
        )
    if name in PRESETS:
        device, usual = PRESETS[name]
        if colon:
            raise PlanError(
                f"--gpus {text}: {name} is a node type with {usual} x {device} and takes no count. Pass {name} with "
                f"--nodes for several nodes, or {device}:COUNT."
            )
        return KNOWN_DEVICES[device], usual
    known = find_device(name)
    if known is None:
        names = ", ".join((*KNOWN_DEVICES, "local", *PRESETS))
        raise PlanError(
            f"--gpus {text}: unknown device {name!r}. Use one of {names}, or describe the device in JSON or in a .json "
            f"file, for example --gpus '{EXAMPLE}'"
        )
    number = (read_integer(count) or 0) if colon else 1
    if not 1 <= number <= MAX_LOCAL_RANKS:
        raise PlanError(
            f"--gpus {shorten(text)}: the number of devices per node must be from 1 to {MAX_LOCAL_RANKS}, got "
            f"{shorten(count)}. Pass for example {known.device.name}:4."
        )
    return known, number


def _check_apple(kind: str, count: int, nodes: int, source: str) -> None:
    if kind == "mps" and count * nodes > 1:
        raise PlanError(f"{source}: a run uses an Apple GPU with one rank only. Pass `mps` without a count.")


def _read_file(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():  # reading a named pipe would wait forever
            raise PlanError(f"--gpus {path} is not a file. Pass a file that contains, for example, {EXAMPLE}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not a text file" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise PlanError(
            f"--gpus {path} cannot be read ({reason}). Pass a file that contains, for example, {EXAMPLE}"
        ) from error


def _parse_json(text: str, source: str, nodes: int) -> ClusterSpec:
    try:
        parsed: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{source} is not valid JSON ({error}). Write, for example, {EXAMPLE}") from error
    if not isinstance(parsed, dict):
        raise PlanError(f"{source} is not a JSON object. Write, for example, {EXAMPLE}")
    fields = cast("dict[str, object]", parsed)
    _check_fields(fields, source)
    numbers = dict(_DEFAULTS)
    numbers |= {name: float(value) for name, value in fields.items() if isinstance(value, int | float)}
    kind, memory, count = str(fields.get("kind", "cuda")), int(numbers["memory_gib"] * _GIB), int(numbers["count"])
    _check_apple(kind, count, nodes, source)
    device = DeviceSpec(
        name=str(fields["name"]),
        kind=kind,
        memory=memory,
        memory_free=memory,
        bandwidth=numbers["bandwidth_gbs"] * _GB,
        peak_flops={dtype: rate * _TERA for dtype, rate in cast("dict[str, float]", fields["tflops"]).items()},
        source=source,
    )
    bandwidths = (numbers["interconnect_gbs"] * _GB, numbers["host_gbs"] * _GB, numbers["network_gbs"] * _GB)
    cluster = _one_device(device, bandwidths, int(numbers["host_memory_gib"] * _GIB), int(numbers["cores"]))
    return replace(cluster, devices_per_node=count, nodes=nodes, source=source)


def _check_fields(fields: Mapping[str, object], source: str) -> None:
    known = (*_REQUIRED, "kind", *_DEFAULTS)
    unknown = [name for name in fields if name not in known]
    missing = [name for name in _REQUIRED if name not in fields]
    if unknown or missing:
        problem = f"lacks {', '.join(missing)}" if missing else f"has unknown fields: {', '.join(unknown)}"
        raise PlanError(f"{source} {problem}. The fields are {', '.join(known)}, for example {EXAMPLE}")
    for name in ("memory_gib", "bandwidth_gbs", *_DEFAULTS):
        value, integer = fields.get(name, 1), name in _INTEGERS
        if not _is_positive(value) or (integer and not isinstance(value, int)):
            expected = "an integer from 1" if integer else f"a number from {_MIN_NUMBER}"
            raise PlanError(f"{source}: {name} must be {expected} to {_MAX_NUMBER:,}, got {value!r:.60}.")
    if not isinstance(fields["name"], str) or not fields["name"].strip():
        raise PlanError(f"{source}: name must be text that is not empty, got {fields['name']!r}.")
    if int(cast("int", fields.get("count", 1))) > MAX_LOCAL_RANKS:
        raise PlanError(f"{source}: count must be at most {MAX_LOCAL_RANKS}, got {fields['count']}.")
    if fields.get("kind", "cuda") not in _KINDS:
        raise PlanError(f"{source}: kind must be one of {', '.join(_KINDS)}, got {fields['kind']!r}.")
    tflops = fields["tflops"]
    rates = cast("dict[object, object]", tflops) if isinstance(tflops, dict) else {}
    if "float32" not in rates or not all(dtype in _DTYPES and _is_positive(rate) for dtype, rate in rates.items()):
        raise PlanError(
            f"{source}: tflops must map dtypes to dense TFLOP/s, got {tflops!r}. Give float32, and "
            f"{', '.join(_DTYPES[1:])} if the device supports them."
        )


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _MIN_NUMBER <= value <= _MAX_NUMBER
