"""What each rank spends its time on and what it uses, about once per second: the records of times.jsonl."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import psutil
import torch

from samestep.distributed.step_times import PHASES, Phase, StepInterval
from samestep.environment.gpus import GpuUtilization, identify_gpu

_MOST_RANKS: Final = 16  # with a number of their own in each record
_DIGITS: Final = 4
_ON_HOST: Final[tuple[Phase, ...]] = ("logging", "checkpoint", "evaluation")
"""Phases in which the host decides how long they take, on a GPU too."""
_FIELDS: Final = ("memory_bytes", "cpu_cores", "gpu_percent")


@dataclass(frozen=True)
class RankUsage:
    """What a rank uses."""

    memory: float  # bytes: the peak of its GPU since the start, or the memory of its process
    cores: float  # CPU seconds of its process per second
    gpu: float  # percent of the last second in which its GPU was busy; NaN if unknown


class Usage:
    """Measures what this rank uses between two metric syncs."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._process = device, psutil.Process()
        self._measured_at, self._cpu_seconds = time.perf_counter(), time.process_time()
        self._gpu = GpuUtilization(identify_gpu(device.index)) if self._on_gpu else None

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def take(self) -> RankUsage:
        """What was used since the last call."""
        now, cpu_seconds = time.perf_counter(), time.process_time()
        cores = (cpu_seconds - self._cpu_seconds) / max(now - self._measured_at, 1e-6)
        self._measured_at, self._cpu_seconds = now, cpu_seconds
        memory = torch.cuda.max_memory_allocated(self._device) if self._on_gpu else self._process.memory_info().rss
        return RankUsage(float(memory), cores, self._gpu.percent if self._gpu is not None else math.nan)

    def close(self) -> None:
        """Stop asking the driver."""
        if self._gpu is not None:
            self._gpu.close()


def spent(interval: StepInterval, waits: Sequence[float]) -> tuple[Mapping[Phase, float], float]:
    """The seconds of an interval by phase, and those in which this rank waited for others.

    On a GPU, one step of the interval tells how its phases divide the time, since the host is ahead of the device. What
    only the host does, such as writing a checkpoint, is measured there.
    """
    known = [wait for wait in waits if not math.isnan(wait)]
    waited = math.fsum(known) / len(known) * len(waits) if known else 0.0
    device = interval.device_phases
    total = sum(device.values()) if device is not None else 0.0
    if device is None or total <= 0.0:
        return interval.phases, waited
    own = waits[interval.marked_step] if interval.marked_step < len(waits) else 0.0
    left = own = 0.0 if math.isnan(own) else own
    phases = dict(interval.phases)
    for phase in ("backward", "forward"):  # ranks wait for each other in these
        removed = min(left, device[phase])
        device[phase], left = device[phase] - removed, left - removed
    rest = max(0.0, interval.seconds - sum(phases[phase] for phase in _ON_HOST)) / total
    shares: dict[Phase, float] = {phase: device[phase] * rest for phase in PHASES if phase not in _ON_HOST}
    return phases | shares, (own - left) * rest


def pack_usage(interval: StepInterval, waits: Sequence[float], usage: RankUsage) -> list[float]:
    """The times and the use of one rank as numbers."""
    phases, waited = spent(interval, waits)
    times = [float(interval.count), interval.seconds, *(phases[phase] for phase in PHASES), waited]
    return [*times, usage.memory, usage.cores, usage.gpu]


def usage_record(rows: np.ndarray) -> dict[str, object]:
    """A record of times.jsonl from what `pack_usage` has packed, a row per rank; empty if no step is known."""
    steps, seconds = rows[0, :2]
    if not steps:
        return {}
    columns = rows[:, 2:].T
    phases = {phase: _by_rank(column) for phase, column in zip(PHASES, columns, strict=False) if column.any()}
    named = dict(zip(("communication", *_FIELDS), map(_by_rank, columns[len(PHASES) :]), strict=True))
    known = {name: values for name, values in named.items() if values is not None}
    return {"steps": int(steps), "seconds": _rounded(float(seconds)), "phases": phases, **known}


def _by_rank(values: np.ndarray) -> object:
    """One number per rank, or a summary of many ranks; None if no rank knows it."""
    if np.isnan(values).all():
        return None
    if len(values) <= _MOST_RANKS:
        return [None if math.isnan(value) else _rounded(value) for value in values.tolist()]
    summary = {"min": np.nanmin(values), "mean": np.nanmean(values), "max": np.nanmax(values)}
    return {name: _rounded(float(value)) for name, value in summary.items()} | {
        "rank_of_max": int(np.nanargmax(values))
    }


def _rounded(value: float) -> float:
    """With four digits, and as an integer if it is one.

    >>> _rounded(0.123456), _rounded(2147483648.0)
    (0.1235, 2147000000)
    """
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() else short
