"""Versions and GPUs as torch, nvidia-smi and the driver report them, and how busy a GPU is; imports torch."""

import ctypes
import math
import os
import re
import socket
import subprocess
import threading
import warnings
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.cuda import nccl

from samestep.environment.hardware import Gpu, GpuLink, Software
from samestep.environment.world import read_environ

_TIMEOUT_SECONDS = 5
_NVML: Final = "libnvidia-ml.so.1"  # part of NVIDIA's driver, so no package is needed
_UTILIZATION_SECONDS: Final = 1.0  # between two questions; NVML itself averages over up to a second
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_PAIR = re.compile(r"GPU\d+ GPU\d+ (NV\d+|PIX|PXB|PHB|NODE|SYS)")


def detect_software() -> Software:
    """The versions that this process uses, and whether CUDA works."""
    # torch warns about what goes into `cuda_error` here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        usable = torch.cuda.is_available()
    return Software(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        rocm=torch.version.hip,
        cuda_error=None if usable or not torch.backends.cuda.is_built() else _cuda_error(),
        nccl=".".join(map(str, nccl_version())) or None,
        gloo=dist.is_available() and dist.is_gloo_available(),
        mps=torch.backends.mps.is_available(),
    )


def detect_gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process may use.

    Free memory comes from nvidia-smi if it is installed: torch needs a few hundred MiB of a GPU to query it, and fails
    if another process uses all of it.
    """
    reported, gpus = _query_memory(), list[Gpu]()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        smi, capability = reported.get(_uuid(index)), (properties.major, properties.minor)
        free = smi[1] if smi else _free_memory(index)
        gpus.append(Gpu(index, properties.name, properties.total_memory, free, capability))
    return tuple(gpus)


def identify_gpu(index: int) -> str:
    """The UUID of a visible GPU: the same for all processes that use it, whatever index it has in them."""
    uuid = _uuid(index) or f"{socket.gethostname()}:{index}"
    return gpu_name(uuid, read_environ().get("CUDA_VISIBLE_DEVICES"), index)


def gpu_name(uuid: str, visible: str | None, index: int) -> str:
    """A GPU by its UUID. A MIG instance counts as a GPU, named as in CUDA_VISIBLE_DEVICES.

    CUDA may report the UUID of the GPU that a MIG instance is a part of.

    >>> gpu_name("5ba3", None, 0), gpu_name("5ba3", "GPU-5ba3,MIG-0a1b", 1)
    ('GPU-5ba3', 'MIG-0a1b')
    """
    listed = (visible or "").split(",")
    named = listed[index].strip() if index < len(listed) else ""
    return named if named.startswith("MIG-") else f"GPU-{uuid.removeprefix('GPU-')}"


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL in use; empty if this torch has none.

    torch reports the version that it was built with, but the library may be a newer one (LD_PRELOAD).
    """
    if not (dist.is_available() and dist.is_nccl_available()):
        return ()
    number = ctypes.c_int(0)
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        library.ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # NCCL is a part of torch's library
        return tuple(part for part in nccl.version() if isinstance(part, int))
    return parse_nccl_version(number.value)


def parse_nccl_version(number: int) -> tuple[int, ...]:
    """The version from NCCL's number for it; empty for 0.

    >>> parse_nccl_version(23203), parse_nccl_version(2708)
    ((2, 32, 3), (2, 7, 8))
    """
    major = 10000 if number >= 10000 else 1000  # before 2.9
    return (number // major, number % major // 100, number % 100) if number else ()


def detect_links() -> tuple[GpuLink, ...]:
    """The links between the GPUs that this process may use; empty if nvidia-smi does not report them."""
    if torch.cuda.device_count() < 2:
        return ()
    reported, indices = _query_memory(), range(torch.cuda.device_count())
    visible = {reported[uuid][0]: index for index in indices if (uuid := _uuid(index)) in reported}
    links = parse_links(_run_smi("topo", "-m")).items()
    pairs = {(visible[a], visible[b]): kind for (a, b), kind in links if a in visible and b in visible}
    return tuple(GpuLink(min(pair), max(pair), kind) for pair, kind in sorted(pairs.items()))


def parse_memory(text: str) -> dict[str, tuple[int, int]]:
    """Index and free bytes by uuid, from lines of `index, uuid, free MiB`; a GPU without a memory value is omitted.

    nvidia-smi also lists, and counts, GPUs that are hidden from this process.

    >>> parse_memory("0, GPU-5ba3, 80000")
    {'5ba3': (0, 83886080000)}
    """
    rows = [[cell.strip() for cell in row.split(",")] for row in text.splitlines()]
    return {
        row[1].removeprefix("GPU-"): (int(row[0]), int(row[2]) * 2**20)
        for row in rows
        if len(row) == 3 and row[0].isdecimal() and row[2].isdecimal()
    }


def parse_links(text: str) -> dict[tuple[int, int], str]:
    """The upper half of the matrix that `nvidia-smi topo -m` prints, by the GPU indices of the machine."""
    rows = [[cell.strip() for cell in row.split("\t")] for row in _COLOR.sub("", text).splitlines()]
    header = next((row for row in rows if "GPU0" in row[1:]), [])
    cells = [(row[0], name, cell) for row in rows for name, cell in zip(header, row, strict=False)]
    # The matrix also has rows and columns for network cards.
    links = {(int(a[3:]), int(b[3:])): cell for a, b, cell in cells if _PAIR.fullmatch(f"{a} {b} {cell}")}
    return {pair: kind for pair, kind in links.items() if pair[0] < pair[1]}


def _free_memory(index: int) -> int:
    try:
        return torch.cuda.mem_get_info(index)[0]
    except RuntimeError as error:
        if "out of memory" in str(error):
            return 0
        raise


def _uuid(index: int) -> str:
    return str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))


def _cuda_error() -> str:
    """Why CUDA does not work: `is_available` gives no reason, but initializing CUDA does."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return "torch.cuda.is_available() is false"


def _query_memory() -> dict[str, tuple[int, int]]:
    return parse_memory(_run_smi("--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"))


def _run_smi(*arguments: str) -> str:
    """The output of nvidia-smi; empty if it is missing or fails, since it only adds to what torch reports."""
    try:
        command = ["nvidia-smi", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuUtilization:
    """The share of time in which kernels ran on one GPU, in percent; NaN if the driver does not say.

    A thread asks the driver, so that training never waits for it.
    """

    def __init__(self, uuid: str, library: Any = None) -> None:
        self.percent = math.nan
        self._closed = threading.Event()
        try:
            nvml = ctypes.CDLL(_NVML) if library is None else library
        except OSError:  # an AMD GPU, or a container without this part of the driver
            return
        threading.Thread(target=self._poll, args=(nvml, uuid), name="samestep gpu", daemon=True).start()

    def close(self) -> None:
        """Stop asking."""
        self._closed.set()

    def _poll(self, nvml: Any, uuid: str) -> None:
        handle, found = ctypes.c_void_p(), _Utilization()
        name = uuid.encode()
        failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle))  # 0 is success
        if failed:
            return
        while not self._closed.wait(_UTILIZATION_SECONDS):
            failed = nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(found))
            self.percent = math.nan if failed else float(found.gpu)
