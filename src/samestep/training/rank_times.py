"""The times of all ranks: what each spends and uses, how long it makes others wait, and a warning about a slow one."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import psutil
import torch
from torch import nn

from samestep.context import RunContext
from samestep.distributed.metric_sync import StepCallback
from samestep.distributed.step_times import COMPUTING, PHASES, Phase, StepInterval, StepTimes
from samestep.environment.gpus import GpuUtilization, identify_gpu
from samestep.hang import rank_probe
from samestep.loggers.run_files import WAIT_PREFIX
from samestep.messages import format_list, format_seconds
from samestep.parallel.batchnorm import SYNCHRONIZED
from samestep.parallel.wrapped_model import WrappedModel
from samestep.torch_private import is_fsdp

_SHARE: Final = 0.1  # of the time: a rank that makes the others wait for longer is named
_LEAST_SECONDS: Final = 1e-3  # per step: ranks leave a collective with differences of this order
_WINDOW_STEPS: Final = 20
_WINDOW_SECONDS: Final = 5.0  # what happens once, such as a compilation, must not fill a window
_MOST_RANKS: Final = 16  # with a metric or a number of their own
_DIGITS: Final = 4
_ON_HOST: Final[tuple[Phase, ...]] = ("logging", "checkpoint", "evaluation")
"""Phases in which the host decides how long they take, on a GPU too."""
_FIELDS: Final = ("memory_bytes", "cpu_cores", "gpu_percent")
_SAMPLES: Final = 24  # steps per sync whose waits the ranks compare one by one
_SHOWN: Final = 6
_HEADER: Final = 4 + len(PHASES)  # steps, seconds, phases, waited seconds, and in how many steps
_WIDTH: Final = _HEADER + _SAMPLES

_ACTIONS: Final[Mapping[str, str]] = {
    "compute": "computing",
    "data": "reading data",
    "logging": "writing logs",
    "checkpoint": "saving checkpoints",
    "evaluation": "evaluating",
}
_REMEDIES: Final[Mapping[str, str]] = {
    "compute": "look at its GPU with nvidia-smi (throttled by heat, or used by another process) and at the load of its "
    "node; check whether its samples are longer, and whether the script does more on this rank",
    "data": "pass a larger num_workers to run.shard, and check the disk or network from which its node reads; if some "
    "samples are expensive, prepare them before training",
    "logging": "check the disk of the run folder, or log fewer values",
    "checkpoint": "check what state_dict() of your objects does on this rank, and its disk; save less often",
    "evaluation": "give the ranks the same number of samples to evaluate, as `for batch in run.shard(...)` does",
}


class Stragglers(StepCallback):
    """Exchanges the times of the ranks with the metric sync; rank 0 records them, and names who makes others wait."""

    def __init__(self, context: RunContext, hosts: Sequence[str]) -> None:
        self._context, self._hosts = context, hosts
        self._usage = Usage(context.device)
        self._window: RankTimes | None = None
        self._slow: set[int] = set()  # in the window before
        self._named: set[int] = set()
        rank_probe.measures_waits(True)

    def sync_table(self) -> list[float]:
        """The times of this rank since the last sync, and what it uses."""
        interval, waits = self._context.times.take()
        return [*pack_interval(interval, waits), *pack_usage(interval, waits, self._usage.take())]

    def on_sync_table(self, table: torch.Tensor) -> Mapping[str, float]:
        """On rank 0: record the times, add them to the window, warn at its end, and return the metrics."""
        context = self._context
        if context.loggers is None:
            return {}
        rows = table.numpy()
        if record := usage_record(rows[:, _WIDTH:]):
            context.loggers.record_times(context.progress.steps - 1, record)
        if context.comm.alone:
            return {}
        times = RankTimes.from_rows(rows)
        self._window = times if self._window is None else self._window + times
        if self._window.steps >= _WINDOW_STEPS and self._window.seconds >= _WINDOW_SECONDS:
            self._end_window(self._window)
            self._window = None
        return wait_metrics(caused_waits(rows[:, _HEADER:_WIDTH]))

    def close(self) -> None:
        """Stop measuring."""
        rank_probe.measures_waits(False)
        self._usage.close()

    def _end_window(self, window: "RankTimes") -> None:
        late = window.late()
        slow = {rank for rank in range(len(late)) if window.is_slow(late[rank])}
        new = sorted((slow & self._slow) - self._named, key=lambda rank: -late[rank])
        self._slow, self._named = slow, self._named | set(new)
        if new:
            self._context.warn_once(straggler_message(window, new, self._hosts, self._context.device.type == "cuda"))


def watch_forward(times: StepTimes, wrapped: WrappedModel, compiled: bool) -> None:
    """Measure where ranks meet first in a forward pass, with FSDP or synchronized BatchNorm; not in compiled code."""
    for module in wrapped.inner.modules() if not compiled else ():
        if is_fsdp(module) and _has_own_shards(module):
            module.register_forward_pre_hook(times.meet, prepend=True)  # before that of FSDP
            module.register_forward_pre_hook(times.have_met)
        elif isinstance(module, SYNCHRONIZED) and wrapped.strategy != "single":
            module.register_forward_pre_hook(times.meet)
            module.register_forward_hook(times.have_met)


def _has_own_shards(module: nn.Module) -> bool:
    """Whether FSDP gathers weights for this module, beside those of sharded modules inside of it."""
    inner = {
        id(parameter)
        for part in module.modules()
        if part is not module and is_fsdp(part)
        for parameter in part.parameters()
    }
    return any(hasattr(parameter, "to_local") and id(parameter) not in inner for parameter in module.parameters())


def pack_interval(interval: StepInterval, waits: Sequence[float]) -> list[float]:
    """The times of one rank as numbers; of many steps, evenly chosen ones are sent one by one."""
    known = [wait for wait in waits if not math.isnan(wait)]
    chosen = waits[:: max(1, math.ceil(len(waits) / _SAMPLES))]
    phases = [interval.phases[phase] for phase in PHASES]
    missing = [math.nan] * (_SAMPLES - len(chosen))
    return [float(len(waits)), interval.seconds, *phases, math.fsum(known), float(len(known)), *chosen, *missing]


def caused_waits(waits: np.ndarray) -> np.ndarray | None:
    """By rank, how long it makes the others wait per step; None if no step is known.

    `waits` has a row per rank and a column per step, NaN for unknown ones. The rank that comes last waits least. All
    ranks wait that long for the exchange itself; what the others wait in addition, they wait for the last one.
    """
    waits = waits[:, ~np.isnan(waits).any(axis=0)]
    ranks, steps = waits.shape
    if not steps:
        return None
    last, least = waits.argmin(axis=0), waits.min(axis=0)
    caused = (waits.sum(axis=0) - least) / (ranks - 1) - least
    return np.bincount(last, weights=caused, minlength=ranks) / steps


def wait_metrics(caused: np.ndarray | None) -> dict[str, float]:
    """The metrics for what `caused_waits` returns: one per rank, or a summary of many ranks."""
    if caused is None:
        return {}
    if len(caused) <= _MOST_RANKS:
        return {f"{WAIT_PREFIX}{rank}": float(seconds) for rank, seconds in enumerate(caused)}
    summary = {"min": caused.min(), "mean": caused.mean(), "max": caused.max(), "slowest": caused.argmax()}
    return {f"{WAIT_PREFIX}{name}": float(value) for name, value in summary.items()}


@dataclass(frozen=True)
class RankTimes:
    """The times of all ranks over several steps; arrays have a value per rank."""

    steps: float
    seconds: float  # of rank 0
    phases: Mapping[Phase, np.ndarray]  # seconds
    waited: np.ndarray  # seconds in which the rank waited for others
    known: np.ndarray  # the number of steps for which that is known

    @classmethod
    def from_rows(cls, rows: np.ndarray) -> "RankTimes":
        """Read what `pack_interval` has packed, a row per rank."""
        phases: dict[Phase, np.ndarray] = {phase: rows[:, 2 + index] for index, phase in enumerate(PHASES)}
        return cls(float(rows[0, 0]), float(rows[0, 1]), phases, rows[:, _HEADER - 2], rows[:, _HEADER - 1])

    def __add__(self, other: "RankTimes") -> "RankTimes":
        phases: dict[Phase, np.ndarray] = {phase: self.phases[phase] + other.phases[phase] for phase in PHASES}
        return RankTimes(
            self.steps + other.steps,
            self.seconds + other.seconds,
            phases,
            self.waited + other.waited,
            self.known + other.known,
        )

    @property
    def step_seconds(self) -> float:
        """The mean time of a step."""
        return self.seconds / self.steps

    def late(self) -> np.ndarray:
        """By rank, how much less it waits per step than the others do: so long they wait for it.

        It is 0 on average if ranks take turns in being late: then no rank is the cause.
        """
        if not self.known.all():
            return np.zeros(len(self.known))
        return _excess(-self.waited / self.known)

    def is_slow(self, late: float) -> bool:
        """Whether the others wait for a rank long enough to name it."""
        return late >= _LEAST_SECONDS and late > _SHARE * self.step_seconds

    def slow_phase(self, rank: int) -> Phase | None:
        """In which phase a slow rank loses its time: where it spends more than the others; None: it computes.

        A GPU computes while its host does something else, so what the host takes for computing says nothing.
        """
        late = self.late()[rank] * self.steps
        others: list[Phase] = [phase for phase in PHASES if phase not in COMPUTING]
        excess: dict[Phase, float] = {phase: float(_excess(self.phases[phase])[rank]) for phase in others}
        phase: Phase = max(excess, key=excess.__getitem__)
        return phase if excess[phase] >= late / 2 else None

    def spent(self, phase: Phase | None, on_gpu: bool) -> np.ndarray:
        """By rank, the seconds per step in a phase, or computing; on a GPU that is all of a step but the waiting."""
        if phase is None and on_gpu:
            return self.step_seconds - self.waited / self.known
        return (
            sum((self.phases[each] for each in (COMPUTING if phase is None else (phase,))), np.zeros(())) / self.steps
        )


def _excess(values: np.ndarray) -> np.ndarray:
    """By rank, how far its value is above the mean of the others."""
    return values - (values.sum() - values) / (len(values) - 1)


def straggler_message(window: RankTimes, slow: Sequence[int], hosts: Sequence[str], on_gpu: bool) -> str:
    """Which rank makes the others wait, what it does meanwhile, and what to do; `slow` begins with the slowest."""
    rank, step = slow[0], window.step_seconds
    late, phase = float(window.late()[rank]), window.slow_phase(rank)
    spent = window.spent(phase, on_gpu)
    others = float(spent.sum() - spent[rank]) / (len(spent) - 1)
    node = f" (node {hosts[rank]})" if len(set(hosts)) > 1 else ""
    more = f", and so do rank(s) {format_list(sorted(slow[1:]), _SHOWN)} for a part of it" if slow[1:] else ""
    return (
        f"rank {rank}{node} makes the others wait for {format_seconds(late)} of every {format_seconds(step)} step "
        f"({late / step:.0%}){more}: it spends {format_seconds(float(spent[rank]))} per step "
        f"{_ACTIONS[phase or 'compute']}, the others {format_seconds(others)}; {_REMEDIES[phase or 'compute']}"
    )


# What a rank uses: the records of times.jsonl


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
