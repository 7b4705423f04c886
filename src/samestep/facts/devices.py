"""The devices that a plan knows by name: memory, bandwidth, peak rates and links, each with its source."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.facts.machines import Device

_GIB, _GB, _TERA = 2**30, 1e9, 1e12
_PCIE = {3: 16 * _GB, 4: 32 * _GB, 5: 64 * _GB}  # 16 lanes, one direction, as PCI-SIG gives them
_MEMORY = "memory as torch reports it"
_APPLE_LARGE = 36 * _GIB  # from here on Metal lends a GPU a larger part of the machine's memory


@dataclass(frozen=True)
class Sheet:
    """What is known of one device and of the nodes it is usually built into."""

    device: Device
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
        Device(name, "cuda", memory, memory, bandwidth * _GB, told, f"{source}; {_MEMORY}"),
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
    Device(
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
    Device(
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

SHEETS: Mapping[str, Sheet] = {sheet.device.name: sheet for sheet in _SHEETS}
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
    return SHEETS.get(ALIASES.get(name, name))


def sheet_like(cuda_name: str, capability: tuple[int, int]) -> tuple[Sheet, bool]:
    """The sheet of a GPU as CUDA names it, and whether it is its own; otherwise one of its generation.

    >>> sheet_like("NVIDIA H100 80GB HBM3", (9, 0))[0].device.name
    'h100'
    """
    for sheet in _SHEETS:
        if re.search(sheet.pattern, cuda_name):
            return sheet, True
    newest = max((known for known in _LIKE if known <= capability), default=(7, 0))
    return SHEETS[_LIKE[newest]], False


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
