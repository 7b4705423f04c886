"""Measure what this machine reaches in under a minute: matrix products, copies, kernel launches, all-reduce."""

import hashlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional

from samestep.disk import describe_os_error, write_atomically
from samestep.environment.world import cache_folder
from samestep.errors import PlanError
from samestep.planner.cluster_spec import ClusterSpec
from samestep.planner.step_recorder import MemoryTracker, OpCounter

_MIB = 2**20
_MATRIX_SIZES = {
    "cuda": (256, 512, 1024, 2048, 4096, 8192),
    "mps": (256, 512, 1024, 2048, 4096),
    "cpu": (64, 128, 256, 512, 1024),
}
_COPY_BYTES = {"cuda": 512 * _MIB, "mps": 128 * _MIB, "cpu": 64 * _MIB}  # larger than the caches
_SECONDS_PER_FIGURE = 0.15
_WIDTH, _LAYERS, _LAUNCH_STEPS = 16, 12, 10
_FIRST_CAPABILITY_WITH_TF32 = 8


@dataclass(frozen=True)
class Calibration:
    """Measured FLOP/s and bandwidths of one device model."""

    device: str  # name that CUDA reports for the device, or "cpu" or "mps"
    device_count: int  # devices that took part in the all-reduce
    matmul_flops: Mapping[str, tuple[tuple[float, float], ...]]  # (operations per product, FLOP/s) by dtype
    copy_bandwidth: float  # bytes per second read and written by a copy in device memory
    host_bandwidth: float  # bytes per second from pinned host memory to the device
    all_reduce_bandwidth: float | None  # bytes per second that each device sends; None with a single device
    launch_seconds: float  # host time to launch one operation
    date: str  # day of the measurement, such as 2025-01-31


def apply_calibration(cluster: ClusterSpec, calibration: Calibration | None) -> ClusterSpec:
    """`cluster` with measured numbers instead of those of data sheets; unchanged without a calibration."""
    if calibration is None:
        return cluster
    device = replace(
        cluster.device,
        measured_flops=calibration.matmul_flops,
        copy_bandwidth=calibration.copy_bandwidth,
        launch_seconds=calibration.launch_seconds,
        source=f"{cluster.device.source}; measured on {calibration.date}",
    )
    cluster = replace(cluster, device=device, host_bandwidth=calibration.host_bandwidth)
    if calibration.all_reduce_bandwidth is None or calibration.device_count != cluster.devices_per_node:
        return cluster
    return replace(cluster, intra_node_bandwidth=calibration.all_reduce_bandwidth, all_reduce_measured=True)


def calibration_path(device: str, environ: Mapping[str, str]) -> Path:
    """File of a device's calibration. Each device model has its own, since different nodes may share a home folder."""
    return cache_folder(environ) / f"calibration-{hashlib.sha256(device.encode()).hexdigest()[:16]}.json"


def read_calibration(device: str, environ: Mapping[str, str]) -> Calibration | None:
    """The saved calibration of this device; None if it is missing or invalid."""
    try:
        fields = json.loads(calibration_path(device, environ).read_text(encoding="utf-8"))
        flops = {
            str(dtype): tuple((float(work), float(rate)) for work, rate in points)
            for dtype, points in fields.pop("matmul_flops").items()
        }
        calibration = Calibration(matmul_flops=flops, **fields)
        rates = [calibration.copy_bandwidth, calibration.host_bandwidth, calibration.launch_seconds]
        rates += [number for points in flops.values() for point in points for number in point]
        if not all(0 < rate < math.inf for rate in (*rates, calibration.all_reduce_bandwidth or 1.0)):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # never measured, or another file format
        return None
    return calibration if calibration.device == device and all(flops.values()) else None


def create_calibration_folder(environ: Mapping[str, str]) -> None:
    """Create the folder in which calibrations are saved; raises if it cannot be written, before measuring."""
    folder = cache_folder(environ)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PlanError(
            f"The calibration cannot be saved to {folder} ({describe_os_error(error)}). Set XDG_CACHE_HOME to a folder "
            "that you can write to."
        ) from error


def save_calibration(calibration: Calibration, environ: Mapping[str, str]) -> Path:
    """Save the calibration for later plans; returns the path."""
    create_calibration_folder(environ)
    path = calibration_path(calibration.device, environ)
    write_atomically(path, json.dumps(asdict(calibration), indent=2))
    return path


def calibrate(device: torch.device, report: Callable[[str], None] = lambda _: None) -> Calibration:
    """Measure `device`, and the all-reduce over all GPUs of this machine if there are several."""
    report("matrix products")
    flops = {name: _matmul_flops(device, dtype, tf32) for name, dtype, tf32 in _dtypes(device)}
    report("copies")
    size = _COPY_BYTES[device.type]
    on_device = torch.zeros(size, dtype=torch.uint8, device=device)
    on_host = torch.zeros(size // 2, dtype=torch.uint8, pin_memory=device.type == "cuda")
    copy, host = 2 * _copy_bandwidth(on_device, device), _copy_bandwidth(on_host, device)
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    all_reduce = None
    if count > 1:
        report(f"all-reduce over {count} GPUs")
        all_reduce = all_reduce_bandwidth(count, "nccl", 256 * _MIB)
    return Calibration(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        device_count=count,
        matmul_flops=flops,
        copy_bandwidth=copy,
        host_bandwidth=host,
        all_reduce_bandwidth=all_reduce,
        launch_seconds=_launch_seconds(device),
        date=date.today().isoformat(),
    )


def _dtypes(device: torch.device) -> Iterator[tuple[str, torch.dtype, bool]]:
    """What to measure: name, dtype, and whether products in fp32 may use TF32.

    bfloat16 is not measured on the CPU, since some virtual machines crash on it.
    """
    yield "float32", torch.float32, False
    if device.type != "cuda":
        return
    yield "float16", torch.float16, False
    if torch.version.cuda and torch.cuda.get_device_capability(device)[0] >= _FIRST_CAPABILITY_WITH_TF32:
        yield "tf32", torch.float32, True
        yield "bfloat16", torch.bfloat16, False


def _matmul_flops(device: torch.device, dtype: torch.dtype, tf32: bool) -> tuple[tuple[float, float], ...]:
    points: list[tuple[float, float]] = []
    with _matmul_precision("high" if tf32 else "highest"):
        for size in _MATRIX_SIZES[device.type]:
            left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
            out = torch.empty_like(left)
            work = 2.0 * size**3
            seconds = _seconds(lambda a=left, b=right, o=out: torch.mm(a, b, out=o), device)
            points.append((work, work / seconds))
    return tuple(points)


@contextmanager
def _matmul_precision(precision: str) -> Generator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _copy_bandwidth(source: torch.Tensor, device: torch.device) -> float:
    target = torch.empty_like(source, device=device)
    return source.nbytes / _seconds(lambda: target.copy_(source, non_blocking=True), device)


def all_reduce_bandwidth(count: int, backend: str, size: int) -> float:
    """Bytes per second that each of `count` processes sends during an all-reduce of `size` bytes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_all_reduce_rank, (count, backend, size, folder), nprocs=count)  # pyright: ignore[reportPrivateImportUsage]  # torch does not export it
        seconds = float((Path(folder) / "seconds").read_text())
    return 2 * (count - 1) / count * size / seconds


def _all_reduce_rank(rank: int, count: int, backend: str, size: int, folder: str) -> None:
    """One of the processes; rank 0 writes the time of an all-reduce to a file."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", count), rank=rank, world_size=count)
    tensor = torch.zeros(size // 4, device=device)
    # a fixed number instead of a fixed time: every rank must take part in every all-reduce
    seconds = min(_time_once(partial(dist.all_reduce, tensor), device) for _ in range(8))
    if rank == 0:
        Path(folder, "seconds").write_text(repr(seconds))
    dist.destroy_process_group()


def _launch_seconds(device: torch.device) -> float:
    """Host time for one operation of a training step, including Python, autograd and autocast.

    The model is so small that any device waits for the host.
    """
    model = nn.Sequential(*(_Block() for _ in range(_LAYERS))).to(device)
    batch = torch.zeros(2, 4, _WIDTH, device=device)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext():
            loss = model(batch).sum()
        loss.backward()

    step()
    counter = OpCounter()
    with MemoryTracker(cuda=False, counter=counter):
        step()
    launched = sum(op.count for op in counter.ops())
    return min(_time_once(step, device) for _ in range(_LAUNCH_STEPS)) / launched


class _Block(nn.Module):
    """A small transformer block, with the usual ratio of operations to Python code."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 3 * _WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Dropout(0.1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Attention, then the MLP."""
        query, key, value = self.qkv(self.norm(batch)).chunk(3, -1)
        batch = batch + functional.scaled_dot_product_attention(query, key, value)
        return batch + self.mlp(batch)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of `work`, averaged over many runs in a row so that launch and synchronization do not count."""
    once = max(_time_once(work, device), 1e-7)
    times = max(3, min(10_000, int(_SECONDS_PER_FIGURE / once)))
    return _time_once(lambda: [work() for _ in range(times)], device) / times


def _time_once(work: Callable[[], object], device: torch.device) -> float:
    work()  # the first call loads kernels
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all operations."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
