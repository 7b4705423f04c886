"""The metric sync: one small collective about once per second that averages metrics and carries control values."""

import math
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import torch
import torch.distributed as dist

from samestep.distributed.communicator import Communicator, PendingExchange, check_pause, pack_object, unpack_object
from samestep.distributed.rank_status import RankStatus, poll_pause
from samestep.loggers.loggers import Loggers, LogRow, MetricKey, check_metric_name, check_metric_value

_SYNC_SECONDS: Final = 1.0  # the shortest time between two syncs
_MAX_STEPS: Final = 1000  # the longest interval between two syncs
_THROUGHPUT_SECONDS: Final = 1.0  # a throughput measured over less time is noise
_OVERLAPPED_PART: Final = 4  # a sync is continued after this part of the steps between two syncs, at least one step
_HEADER: Final = 2  # interval, hash of the metric names
_OPERATION: Final = "the metric sync"
_COUNT: Final = "count of "  # before the name of a metric: how many values its sum has; no name has a blank
_SCALAR: Final = torch.Size(())
Records = dict[MetricKey, float]
MetricValues = dict[MetricKey, float | torch.Tensor]  # tensors stay on their device until they are taken


class StepCallback:
    """Follows the steps of a run; every rank must register the same callbacks in the same order."""

    def sync_value(self) -> float:
        """The control value that this rank sends with the next sync."""
        return 0.0

    def on_sync(self, values: Sequence[float]) -> None:
        """Called with the control values of all ranks, in rank order."""

    def sync_table(self) -> list[float]:
        """More values that this rank sends with the next sync, as many as every other rank."""
        return []

    def on_sync_table(self, table: torch.Tensor) -> Mapping[str, float]:
        """Called with these values, one row per rank; returns metrics for the record of the last step."""
        del table
        return {}

    def wants_sync(self) -> bool:
        """Whether this rank has a control value that should not wait; called from another thread."""
        return False

    def on_step_end(self, steps: int) -> None:
        """Called at every step boundary, after the sync if there is one; `steps` steps are complete."""

    def on_run_end(self, failed: bool) -> None:
        """Called when the run ends. If it failed, do not wait for other ranks."""

    def save_before_exit(self) -> str | None:
        """Called at a step boundary before the run ends early: save, and return the name of what was saved."""
        return None

    def save_seconds(self) -> float:
        """The estimated duration of `save_before_exit`."""
        return 0.0


class MetricSync:
    """Averages logged values over the ranks about once per second, at step boundaries that all ranks agree on.

    Rank 0 measures the step time and sends the number of steps until the next sync, so that no rank decides alone. If
    steps become slow, a rank with an urgent control value requests an earlier sync.

    Training does not wait for it. A sync is started at one step boundary and its values are used at a later one, when
    they have arrived. What a GPU computes is copied to the host meanwhile and sent with the next sync.
    """

    def __init__(self, comm: Communicator, device: torch.device, loggers: Loggers | None) -> None:
        self._comm, self._device, self._loggers = comm, device, loggers
        self.pending = PendingMetrics()
        self.callbacks: list[StepCallback] = []
        self._interval, self._steps, self._last_sync = 1, 0, time.monotonic()  # steps since the last sync was started
        self._started: _StartedSync | None = None
        self._continue_at = 0  # after how many steps the sync that was started is continued
        self._copied: list[MetricBatch] = []  # on their way from a GPU
        self._rank0_values: MetricValues = {}
        self._samples, self._samples_since = 0, time.monotonic()
        self._early = EarlySync(comm, lambda callbacks=self.callbacks: any(each.wants_sync() for each in callbacks))

    def count_step(self) -> list[Records] | None:
        """Count a step; the records to write if a sync is complete."""
        self._steps += 1
        if self._early.at_boundary():
            return self.sync(_OPERATION)
        records = self._continue() if self._started is not None and self._steps >= self._continue_at else None
        if self._started is None and self._steps >= self._interval:
            self._start(_OPERATION, with_throughput=True, now=False)
            if self._comm.alone:
                records = self._finish()
        if records is not None:
            self._early.synced()
        return records

    def sync(self, operation: str, with_throughput: bool = True) -> list[Records]:
        """Exchange now, and wait for it: the records with everything that was logged since the last sync."""
        records = self._finish()
        self._start(operation, with_throughput, now=True)
        records += self._finish()
        self._early.synced()
        return records

    def _start(self, operation: str, with_throughput: bool, now: bool) -> None:
        """Start a sync; unless values are needed `now`, those of a GPU that are logged wait for the next one."""
        callbacks = tuple(self.callbacks)  # more may be added before the values arrive
        control = [each.sync_value() for each in callbacks]
        interval, batches = self._next_interval(), [*self._copied, self._take(with_throughput)]
        self._copied = batches[-1:] if self._device.type == "cuda" and not now else []
        batches = batches[: len(batches) - len(self._copied)]
        names = [[(*row, name) for row, name in batch.keys] for batch in batches]
        names_hash = float(zlib.crc32(repr(names).encode()))
        values = [value for batch in batches for value in batch.read()]
        tables = [
            each.sync_table() for each in callbacks
        ]  # on a GPU, what it has done before these values is known now
        sent = [float(interval), names_hash, *control, *chain(*tables), *values]
        pending = self._comm.start_exchange(operation, sent)
        self._started = _StartedSync(pending, batches, callbacks, names_hash, list(map(len, tables)))
        self._steps, self._last_sync = 0, time.monotonic()
        self._continue_at = max(1, self._interval // _OVERLAPPED_PART)

    def _continue(self) -> list[Records] | None:
        """The records of the sync that was started; None if it needs another collective, which is started now."""
        started = self._started
        assert started is not None
        parts = self._comm.continue_exchange(started.pending)
        if parts is None:
            self._continue_at += max(1, self._interval // _OVERLAPPED_PART)
            return None
        if not started.has_names:
            self._interval = int(parts[0][0])
            for index, callback in enumerate(started.callbacks, start=_HEADER):
                callback.on_sync([float(part[index]) for part in parts])
            header = self._read_tables(started, parts)
            if any(float(part[1]) != started.names_hash for part in parts):  # ranks logged different names
                named = [dict(zip(batch.keys, batch.read(), strict=True)) for batch in started.batches]
                pending = self._comm.start_exchange(started.pending.operation, pack_object(named))
                self._started = _StartedSync(pending, started.batches, (), 0.0, [], has_names=True)
                self._continue_at += max(1, self._interval // _OVERLAPPED_PART)
                return None
            by_rank = [split_batches(started.batches, part[header:].tolist()) for part in parts]
        else:
            by_rank = [unpack_object(part) for part in parts]
        self._started = None
        averages = [average(list(of_ranks)) for of_ranks in zip(*by_rank, strict=True)]
        return [
            {**batch.read_rank0_values(), **means, **batch.measured}
            for batch, means in zip(started.batches, averages, strict=True)
        ]

    def _read_tables(self, started: "_StartedSync", parts: list[torch.Tensor]) -> int:
        """Pass the tables of the ranks to the callbacks; returns how many values come before those of the metrics."""
        start = _HEADER + len(started.callbacks)
        for callback, width in zip(started.callbacks, started.widths, strict=True):
            if width:
                metrics = callback.on_sync_table(torch.stack([part[start : start + width] for part in parts]))
                batch = next((each for each in reversed(started.batches) if each.has_last_step), None)
                if batch is not None and batch.step_row is not None:
                    batch.measured.update({(batch.step_row, name): value for name, value in metrics.items()})
            start += width
        return start

    def _finish(self) -> list[Records]:
        """Wait for the sync that was started, if there is one."""
        records: list[Records] = []
        while self._started is not None:
            records += self._continue() or []
        return records

    def log(self, row: LogRow, values: Mapping[str, object]) -> None:
        """Keep values until the next sync. The norm of sharded gradients is sharded itself: a collective then."""
        for name, value in values.items():
            full_tensor = getattr(value, "full_tensor", None)  # a DTensor
            if callable(full_tensor):
                self._comm.exchange("run.log of a sharded tensor", [])  # names a rank that does not log it
                value = full_tensor()
            self.pending.add(row, name, value)

    def flush(self, operation: str) -> None:
        """Sync and write now, on all ranks."""
        # frequent flushes take the place of syncs at step boundaries, and must log the throughput as often
        measured = time.monotonic() - self._samples_since >= _THROUGHPUT_SECONDS
        self.write(self.sync(operation, with_throughput=measured))

    def write(self, records: list[Records]) -> None:
        """Write the records of a sync on rank 0."""
        for each in filter(None, records):
            if self._loggers is not None:
                self._loggers.write(each, self.pending.times)
            for position in {row.position for row, _ in each}:
                self.pending.times.pop(position, None)

    def _take(self, with_throughput: bool) -> "MetricBatch":
        """What was logged, and on rank 0 the throughput since it was last taken, for the record of the last step."""
        batch, self._rank0_values = self.pending.take(self._rank0_values), {}
        row = batch.step_row = self.pending.step_row
        if self._loggers is not None and with_throughput and self._samples and row is not None:
            now = time.monotonic()
            batch.measured[row, "train/samples_per_s"] = self._samples / max(now - self._samples_since, 1e-9)
            self._samples, self._samples_since = 0, now
            if self._device.type == "cuda":
                batch.measured[row, "train/memory_bytes"] = float(torch.cuda.max_memory_allocated(self._device))
        return batch

    def add_samples(self, count: int) -> None:
        """Count trained samples, for the throughput."""
        self._samples += count

    def add_rank0_value(self, key: MetricKey, value: float | torch.Tensor) -> None:
        """Add a value that is the same on all ranks, such as a learning rate; rank 0 writes its own."""
        if self._loggers is not None:
            self._rank0_values[key] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    def close(self) -> None:
        """Stop the thread."""
        self._early.close()

    def _next_interval(self) -> int:
        if not self._steps:
            return self._interval
        step_seconds = max((time.monotonic() - self._last_sync) / self._steps, 1e-6)
        steps = min(_MAX_STEPS, max(1, round(_SYNC_SECONDS / step_seconds)))
        return min(steps, 4 * self._interval)  # the first steps are not representative: grow slowly


@dataclass
class MetricBatch:
    """What this rank logged between two syncs; values of a GPU are still being copied to the host."""

    keys: list[MetricKey]  # of the values that are averaged over the ranks
    rank0_keys: list[MetricKey] = field(default_factory=list[MetricKey])  # the same on all ranks: rank 0 writes its own
    measured: Records = field(default_factory=Records)  # by rank 0, such as the throughput
    step_row: LogRow | None = None  # the record of the last step
    _values: list[float] = field(default_factory=list[float])
    _copies: list[tuple[list[int], torch.Tensor, torch.cuda.Event | None]] = field(default_factory=list[Any])

    def add(self, values: Sequence[float | torch.Tensor]) -> None:
        """Keep the values of `keys` and `rank0_keys`.

        Tensors are copied, those of one kind in one transfer that nothing waits for.
        """
        self._values = [0.0 if isinstance(value, torch.Tensor) else value for value in values]
        by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                by_kind.setdefault((value.device, value.dtype), []).append(index)
        for (device, _), indices in by_kind.items():
            stacked = torch.stack([value for index in indices if isinstance(value := values[index], torch.Tensor)])
            wide = stacked.double() if device.type != "mps" else stacked.float()
            event = None
            if device.type == "cuda":
                host = torch.empty(wide.shape, dtype=wide.dtype, pin_memory=True)
                host.copy_(wide, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                wide = host
            self._copies.append((indices, wide, event))

    @property
    def has_last_step(self) -> bool:
        """Whether it has a value of the last step, on rank 0: otherwise its record is that of an earlier batch."""
        return any(row == self.step_row for keys in (self.keys, self.rank0_keys) for row, _ in reversed(keys))

    def read(self) -> list[float]:
        """The values of `keys`; waits for the copies, which are complete if the batch is not of this step."""
        for indices, copied, event in self._copies:
            if event is not None:
                event.synchronize()
            for index, value in zip(indices, copied.tolist(), strict=True):
                self._values[index] = value
        self._copies.clear()
        return self._values[: len(self.keys)]

    def read_rank0_values(self) -> Records:
        """The values of `rank0_keys`."""
        count = len(self.read())
        return dict(zip(self.rank0_keys, self._values[count:], strict=True))


@dataclass
class _StartedSync:
    pending: PendingExchange
    batches: list[MetricBatch]
    callbacks: tuple[StepCallback, ...]  # whose control values are sent
    names_hash: float  # of all names and rows that are sent
    widths: list[int]  # how many values each callback sends in its table
    has_names: bool = False  # whether the exchange is the second one, which sends names too


def split_batches(batches: list[MetricBatch], values: list[float]) -> list[Records]:
    """The values of one rank by key, batch by batch."""
    count, left = sum(len(batch.keys) for batch in batches), iter(values)
    assert len(values) == count, f"{len(values)} values for {count} metrics: ranks have different callbacks"
    return [dict(zip(batch.keys, left, strict=False)) for batch in batches]  # each batch takes the next values


@dataclass
class PendingMetrics:
    """What this rank has logged since the last sync; tensors stay on their device."""

    values: MetricValues = field(default_factory=MetricValues)
    position: int = 0  # see LogRow
    step_row: LogRow | None = None
    """The record of the current or the last step."""
    times: dict[int, float] = field(default_factory=dict[int, float])
    """When the last value of a record was logged, in seconds since 1970, by the position of the record."""
    _repeats: Counter[MetricKey] = field(default_factory=Counter)

    def begin_step(self, step: int, epoch: int) -> LogRow:
        """Return the record of a new step; what is logged from now on is logged inside a step."""
        self.position += 1 + self.position % 2  # the steps of two shards may overlap
        self.step_row = LogRow(self.position, step, epoch)
        return self.step_row

    def end_step(self) -> None:
        """What is logged from now on is logged between two steps."""
        self.position += self.position % 2

    def add(self, row: LogRow, name: str, value: object) -> None:
        """Keep one value. A tensor is not read yet, since that would synchronize with the device.

        Inside a step the last value of a name counts. Between two steps every value is kept, in a separate record.
        """
        is_scalar = isinstance(value, torch.Tensor) and value.shape == _SCALAR and not value.is_complex()
        kept = (
            value.detach().clone() if is_scalar and isinstance(value, torch.Tensor) else check_metric_value(name, value)
        )
        key = row, check_metric_name(name)
        if row.between_steps and not name.startswith("train/"):
            self._repeats[key] += 1
            key = row._replace(repeat=self._repeats[key] - 1), name
        self.values[key] = kept
        self.times[row.position] = time.time()
        self.values.pop((row, _COUNT + name), None)

    def add_mean(self, row: LogRow, name: str, total: torch.Tensor, count: torch.Tensor | float) -> None:
        """Keep the sum and the count of a mean over all ranks."""
        self.values[row, name], self.values[row, _COUNT + name] = total, count
        self.times[row.position] = time.time()

    def take(self, rank0_values: MetricValues) -> MetricBatch:
        """All keys and values; nothing is pending afterwards."""
        batch = MetricBatch(list(self.values), list(rank0_values))
        batch.add([*self.values.values(), *rank0_values.values()])
        self.values, self._repeats = {}, Counter()
        return batch


def average(parts: list[Records]) -> Records:
    """The mean over the ranks that logged a value; equal values keep their exact bits.

    A value with a count is a sum: their mean is the sum over the ranks divided by the count over the ranks.
    """
    gathered: dict[MetricKey, list[float]] = {}
    for part in parts:
        for key, value in part.items():
            gathered.setdefault(key, []).append(value)
    means: dict[MetricKey, float] = {}
    for (row, name), values in gathered.items():
        counts = gathered.get((row, _COUNT + name))
        if counts is None and not name.startswith(_COUNT):
            means[row, name] = _mean(values)
        elif counts is not None and sum(counts):
            means[row, name] = _sum(values) / sum(counts)
    return means


def _mean(values: list[float]) -> float:
    if all(value == values[0] for value in values):
        return values[0]
    return _sum(values) / len(values)


def _sum(values: list[float]) -> float:
    return math.fsum(values) if all(math.isfinite(value) for value in values) else sum(values)


_LATE_SECONDS: Final = 2.0  # twice the usual time between two syncs
_POLL_SECONDS: Final = 1.0
_EARLY_OPERATION: Final = "the request for an early metric sync"


class EarlySync:
    """Lets a rank with an urgent control value request a sync before the interval is over, through the store.

    The interval is set by how fast steps were. If they suddenly take a hundred times longer, the next sync is minutes
    away, and a scheduler that sent a signal does not wait that long. So a thread polls the store while a sync is late:
    1. A rank with an urgent value sets ROUND/requested.
    2. Each rank that sees it posts its next step boundary and waits there.
    3. The last of them posts the highest boundary, which no rank has passed. The sync happens there.
    """

    def __init__(self, comm: Communicator, is_urgent: Callable[[], bool]) -> None:
        self._comm, self._is_urgent = comm, is_urgent
        self._store = None if comm.alone else dist.PrefixStore("early-sync", comm.store)
        self._boundary = self._round = 0
        self._promised_at, self._keys = 0.0, list[str]()  # when this round was promised, and what this rank posted
        self._promised: int | None = None
        self._agreed: int | None = None
        self._last_sync, self._coming = time.monotonic(), False
        self._changed = threading.Condition()
        self._closed = threading.Event()
        if self._store is not None:
            arguments = (weakref.ref(self), self._closed)
            threading.Thread(target=_poll, args=arguments, name="samestep early sync", daemon=True).start()

    def synced(self) -> None:
        """Note that a sync has happened; after one that was requested, no rank needs the keys of its round."""
        if self._coming and self._store is not None:
            while self._keys:
                self._store.delete_key(self._keys.pop())
        self._last_sync, self._coming = time.monotonic(), False

    def at_boundary(self) -> bool:
        """Count a step boundary; whether an early sync happens here, which is the same on all ranks."""
        if self._store is None:
            return self._is_late() and self._is_urgent()
        with self._changed:
            self._boundary += 1
            if self._promised is None or self._boundary < self._promised:
                return False
            since, seen = time.monotonic(), dict[int, RankStatus]()
            while self._agreed is None:
                if not self._changed.wait(check_pause(since, seen)):
                    seen = self._comm.check_peers(since, seen, self._comm.timeout, _EARLY_OPERATION)
            if self._boundary < self._agreed:
                return False
            self._coming = True  # no rank requests another sync before this one is complete
            self._promised, self._agreed, self._round = None, None, self._round + 1
            return True

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()

    def poll(self) -> float:
        """One turn of the thread; returns the seconds until the next."""
        if self._promised is None and self._is_late():
            self._promise()
        if self._promised is not None and self._agreed is None:
            self._agree()
            return poll_pause(self._promised_at)
        return _POLL_SECONDS

    def _is_late(self) -> bool:
        return not self._coming and time.monotonic() - self._last_sync > _LATE_SECONDS

    def _promise(self) -> None:
        assert self._store is not None
        request = f"{self._round}/requested"
        if self._is_urgent():
            self._store.set(request, "")
        elif not self._store.check([request]):
            return
        rank, size = self._comm.world.rank, self._comm.world.size
        self._promised_at, self._keys = time.monotonic(), [f"{self._round}/{rank}"]
        with self._changed:
            self._promised = self._boundary + 1
        self._store.set(f"{self._round}/{rank}", str(self._promised))
        if self._store.add(f"{self._round}/promised", 1) == size:
            boundaries = self._store.multi_get([f"{self._round}/{rank}" for rank in range(size)])
            self._keys += [request, f"{self._round}/promised", f"{self._round}/agreed"]
            self._store.set(f"{self._round}/agreed", str(max(map(int, boundaries))))

    def _agree(self) -> None:
        assert self._store is not None
        if self._store.check([f"{self._round}/agreed"]):
            furthest = int(self._store.get(f"{self._round}/agreed"))
            with self._changed:
                self._agreed = furthest
                self._changed.notify_all()


def _poll(reference: "weakref.ref[EarlySync]", closed: threading.Event) -> None:
    """The thread; the weak reference lets a run that was dropped without being closed be collected."""
    pause = _POLL_SECONDS
    while not closed.wait(pause):
        early = reference()
        if early is None:
            return
        try:
            pause = early.poll()
        except RuntimeError:  # the store exited with the rank that hosted it, and training notices that by itself
            return
        del early
