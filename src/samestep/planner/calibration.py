"""What this machine does, measured in under a minute: matrix products, copies, the start of operations, all-reduce."""

import hashlib
import json
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

from samestep.disk import write_atomically
from samestep.environment.world import cache_folder
from samestep.planner.cluster_spec import ClusterSpec
from samestep.planner.memory_tracker import Tracker, exact, no_workspace
from samestep.planner.operations import Work


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


def apply_calibration(machines: ClusterSpec, calibration: Calibration | None) -> ClusterSpec:
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


def save_calibration(calibration: Calibration, environ: Mapping[str, str]) -> Path:
    """Write it down for later; returns where."""
    path = calibration_path(calibration.device, environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(calibration), indent=2))
    return path


_MIB = 2**20
_SIZES = {
    "cuda": (256, 512, 1024, 2048, 4096, 8192),
    "mps": (256, 512, 1024, 2048, 4096),
    "cpu": (64, 128, 256, 512, 1024),
}
_COPIED = {"cuda": 512 * _MIB, "mps": 128 * _MIB, "cpu": 64 * _MIB}  # more than caches hold
_SPAN = 0.15  # seconds that one figure is measured for
_WIDTH, _LAYERS, _STARTS = 16, 12, 10
_FIRST_WITH_TF32 = 8


def calibrate(device: torch.device, say: Callable[[str], None] = lambda _: None) -> Calibration:
    """Measure `device`, and between all GPUs of this machine where there are several."""
    say("matrix products")
    products = {name: _products(device, dtype, high) for name, dtype, high in _dtypes(device)}
    say("copies")
    copied, host = _copy_rate(device), _host_rate(device)
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    reduced = None
    if count > 1:
        say(f"all-reduce over {count} GPUs")
        reduced = all_reduce_rate(count, "nccl", 256 * _MIB)
    return Calibration(
        device=device_name(device),
        count=count,
        products=products,
        copy=copied,
        host_link=host,
        all_reduce=reduced,
        launch=_launch(device),
        when=date.today().isoformat(),
    )


def device_name(device: torch.device) -> str:
    """What a calibration is kept under."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def all_reduce_rate(count: int, backend: str, size: int) -> float:
    """Bytes a second that each of `count` processes sends while all reduce `size` bytes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_reduce, (count, backend, size, folder), nprocs=count)  # pyright: ignore[reportPrivateImportUsage]  # torch's way
        seconds = float((Path(folder) / "seconds").read_text())
    return 2 * (count - 1) / count * size / seconds


def _reduce(rank: int, count: int, backend: str, size: int, folder: str) -> None:
    """One of the processes; the first writes down how long an all-reduce took."""
    store = dist.FileStore(f"{folder}/store", count)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    tensor = torch.zeros(size // 4, device=device)
    # every process must take part equally often, so the number is fixed, not the time
    seconds = min(_once(partial(dist.all_reduce, tensor), device) for _ in range(8))
    if rank == 0:
        Path(folder, "seconds").write_text(repr(seconds))
    dist.destroy_process_group()


def _dtypes(device: torch.device) -> Iterator[tuple[str, torch.dtype, bool]]:
    """What is measured: the name, the dtype, whether products in fp32 may use TF32.

    Not bfloat16 on the CPU: some virtual machines die of it.
    """
    yield "float32", torch.float32, False
    if device.type != "cuda":
        return
    yield "float16", torch.float16, False
    if torch.version.cuda and torch.cuda.get_device_capability(device)[0] >= _FIRST_WITH_TF32:
        yield "tf32", torch.float32, True
        yield "bfloat16", torch.bfloat16, False


def _products(device: torch.device, dtype: torch.dtype, tf32: bool) -> tuple[tuple[float, float], ...]:
    points: list[tuple[float, float]] = []
    with _fp32_products("high" if tf32 else "highest"):
        for size in _SIZES[device.type]:
            left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
            out = torch.empty_like(left)
            work = 2.0 * size**3
            seconds = _seconds(lambda a=left, b=right, o=out: torch.mm(a, b, out=o), device)
            points.append((work, work / seconds))
    return tuple(points)


@contextmanager
def _fp32_products(wanted: str) -> Generator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _copy_rate(device: torch.device) -> float:
    size = _COPIED[device.type]
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device)


def _host_rate(device: torch.device) -> float:
    size = _COPIED[device.type] // 2
    source = torch.zeros(size, dtype=torch.uint8)
    source = source.pin_memory() if device.type == "cuda" else source
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return size / _seconds(lambda: target.copy_(source, non_blocking=True), device)


def _launch(device: torch.device) -> float:
    """Seconds of the host for one operation of a training step, with the Python, autograd and autocast around it.

    Measured over the steps of a model so small that any device waits for the host.
    """
    model = nn.Sequential(*(_Block() for _ in range(_LAYERS))).to(device)
    batch = torch.zeros(2, 4, _WIDTH, device=device)
    step = partial(_small_step, model, batch)
    step()
    work = Work()
    with Tracker(exact, no_workspace, work):
        step()
    started = sum(op.count for op in work.ops())
    return min(_once(step, device) for _ in range(_STARTS)) / started


class _Block(nn.Module):
    """As of a transformer: operations and Python in the usual proportion."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.join = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 3 * _WIDTH)
        self.feed = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Dropout(0.1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Attention and what follows it, each added to what came in."""
        query, key, value = self.join(self.norm(batch)).chunk(3, -1)
        batch = batch + functional.scaled_dot_product_attention(query, key, value)
        return batch + self.feed(batch)


def _small_step(model: nn.Module, batch: torch.Tensor) -> None:
    with torch.autocast("cuda", torch.bfloat16) if batch.device.type == "cuda" else nullcontext():
        loss = model(batch).sum()
    loss.backward()


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of `work`, done many times in a row so that starting and waiting do not count."""
    once = max(_once(work, device), 1e-7)
    times = max(3, min(10_000, int(_SPAN / once)))

    def many() -> None:
        """Often enough to be measured."""
        for _ in range(times):
            work()

    return _once(many, device) / times


def _once(work: Callable[[], object], device: torch.device) -> float:
    work()  # the first time loads kernels
    _wait(device)
    since = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - since


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
