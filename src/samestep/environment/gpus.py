"""What torch and nvidia-smi tell of this machine: versions, GPUs, and what joins them."""

import platform
import re
import shutil
import subprocess
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.cuda import nccl

from samestep.environment.hardware import Gpu, GpuLink, Software

_PATIENCE_SECONDS = 5
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PAIR = re.compile(r"GPU\d+ GPU\d+ (NV\d+|PIX|PXB|PHB|NODE|SYS)")


@dataclass(frozen=True)
class SmiGpu:
    """One GPU as nvidia-smi tells of it, which also sees those that are hidden from this process."""

    index: int
    """Its number among all GPUs of the machine."""
    memory_free: int
    """Bytes that nobody has taken."""


def detect_software() -> Software:
    """The versions of this process, asking CUDA whether it works."""
    # Torch warns of what goes into `cuda_error` here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        usable = torch.cuda.is_available()
    return Software(
        python=platform.python_version(),
        system=platform.platform(),
        torch=torch.__version__,
        cuda=torch.version.cuda or torch.version.hip,
        cuda_error=None if usable or not torch.backends.cuda.is_built() else _cuda_error(),
        nccl=".".join(map(str, nccl.version())) if dist.is_available() and dist.is_nccl_available() else None,
        gloo=dist.is_available() and dist.is_gloo_available(),
        mps=torch.backends.mps.is_available(),
    )


def detect_gpus() -> tuple[Gpu, ...]:
    """The GPUs this process may use.

    Free memory is asked of nvidia-smi where it is there: torch must take some hundred MiB of a GPU to ask, and cannot
    where another process holds it all.
    """
    seen = parse_memory(_ask_smi("--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"))
    return tuple(_gpu(index, seen) for index in range(torch.cuda.device_count()))


def detect_links() -> tuple[GpuLink, ...]:
    """What joins the GPUs this process may use; nothing where nvidia-smi does not tell."""
    if torch.cuda.device_count() < 2:
        return ()
    seen = parse_memory(_ask_smi("--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"))
    visible = {seen[uuid].index: index for index in range(torch.cuda.device_count()) if (uuid := _uuid(index)) in seen}
    pairs = {
        (visible[first], visible[second]): kind
        for (first, second), kind in parse_links(_ask_smi("topo", "-m")).items()
        if first in visible and second in visible
    }
    return tuple(GpuLink(min(pair), max(pair), kind) for pair, kind in sorted(pairs.items()))


def parse_memory(text: str) -> dict[str, SmiGpu]:
    """Lines of `index, uuid, free MiB` by uuid; a GPU that does not tell its memory is left out.

    >>> parse_memory("0, GPU-5ba3, 80000")
    {'5ba3': SmiGpu(index=0, memory_free=83886080000)}
    """
    rows = [[cell.strip() for cell in row.split(",")] for row in text.splitlines()]
    return {
        row[1].removeprefix("GPU-"): SmiGpu(int(row[0]), int(row[2]) * 2**20)
        for row in rows
        if len(row) == 3 and row[0].isdecimal() and row[2].isdecimal()
    }


def parse_links(text: str) -> dict[tuple[int, int], str]:
    """The upper half of the matrix that `nvidia-smi topo -m` prints, by the machine's own numbers of the GPUs."""
    rows = [[cell.strip() for cell in row.split("\t")] for row in _COLOUR.sub("", text).splitlines()]
    heads = next((row for row in rows if "GPU0" in row[1:]), [])
    cells = [(row[0], head, cell) for row in rows for head, cell in zip(heads, row, strict=False)]
    # Network cards have rows and columns too; and what stands on the diagonal is no link.
    links = {(int(a[3:]), int(b[3:])): cell for a, b, cell in cells if _PAIR.fullmatch(f"{a} {b} {cell}")}
    return {pair: kind for pair, kind in links.items() if pair[0] < pair[1]}


def _gpu(index: int, seen: Mapping[str, SmiGpu]) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    told = seen.get(_uuid(index))
    return Gpu(
        index=index,
        name=properties.name,
        memory_total=properties.total_memory,
        memory_free=told.memory_free if told else _free(index),
        capability=(properties.major, properties.minor),
    )


def _free(index: int) -> int:
    try:
        return torch.cuda.mem_get_info(index)[0]
    except RuntimeError as error:
        if "out of memory" in str(error):
            return 0
        raise


def _uuid(index: int) -> str:
    return str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))


def _cuda_error() -> str:
    """Why CUDA does not work: `is_available` says no without a reason, and starting it gives one."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return "torch.cuda.is_available() is false"


def _ask_smi(*arguments: str) -> str:
    """What nvidia-smi answers, or nothing where it is missing or fails: it only adds to what torch tells."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        asked = subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout
