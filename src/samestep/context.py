"""The run context: what all components of a started run share."""

import random
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import nn

from samestep.data.ledger import ShardLedger, describe_files
from samestep.distributed.collectives import PaddingFilter
from samestep.distributed.communicator import Communicator
from samestep.distributed.metric_sync import MetricSync, StepCallback
from samestep.distributed.once import Per, once
from samestep.distributed.step_times import StepTimes
from samestep.environment.world import World
from samestep.errors import ConfigError
from samestep.loggers.logger_thread import Logger, check_loggers
from samestep.loggers.loggers import Loggers
from samestep.messages import WarnOnce, shorten
from samestep.parallel.batchnorm import min_rows
from samestep.parallel.model_randomness import ModelRandomness
from samestep.parallel.precision import Acceleration, Precision
from samestep.parallel.replica_check import ReplicaCheck
from samestep.parallel.wrapped_model import WrappedModel

T = TypeVar("T")


@dataclass(frozen=True)
class RunConfig:
    """The arguments of `Run(...)`."""

    global_batch: int
    seed: int
    folder: str | Path | None
    backend: str | None
    start_timeout: float
    step_timeout: float
    replica_check_every: int
    precision: Precision
    compile: bool
    ledger: bool
    loggers: Sequence[Logger] | None = None
    config: object = None  # hyperparameters, for loggers and config.json

    def check(self) -> None:
        """Raise if a number is of the wrong type or out of range; scripts are not type-checked."""
        for name, kind, least, most, should in (
            ("global_batch", Integral, 1, None, "must be an integer of at least 1, e.g. global_batch=256"),
            ("seed", Integral, -(1 << 63), (1 << 63) - 1, "must be a 64-bit integer, e.g. seed=0"),
            ("replica_check_every", Integral, 0, None, "must be an integer number of steps, or 0 to turn it off"),
            ("start_timeout", Real, 1e-3, None, "must be a number of seconds above 0, e.g. start_timeout=1800"),
            ("step_timeout", Real, 1e-3, None, "must be a number of seconds above 0, e.g. step_timeout=300"),
        ):
            value: float = getattr(self, name)
            if not isinstance(value, kind) or not least <= value or (most is not None and value > most):
                raise ConfigError(f"{name}={value!r} {should}")
        check_loggers(self.loggers)
        read_hyperparameters(self.config)


def read_hyperparameters(config: object) -> dict[str, Any]:
    """The values of `Run(config=...)` by name: of a mapping, a dataclass, or the result of argparse.

    >>> read_hyperparameters({"lr": 0.1})
    {'lr': 0.1}
    """
    if config is None:
        return {}
    if is_dataclass(config) and not isinstance(config, type):
        return asdict(config)
    values: object = config if isinstance(config, Mapping) else getattr(config, "__dict__", None)
    if not isinstance(values, Mapping) or isinstance(config, type) or not all(isinstance(name, str) for name in values):
        raise ConfigError(
            f"config={shorten(repr(config))} has no names: pass a dict, a dataclass or the result of argparse, e.g. "
            'config={"lr": 3e-4}'
        )
    return dict(values)


@dataclass
class Progress:
    """Training progress; restored from a checkpoint."""

    epoch: int = 0  # the current epoch
    steps: int = 0  # completed optimizer steps since training began
    samples: int = 0  # trained samples since training began, over all ranks
    steps_of_process: int = 0  # completed optimizer steps of this process
    in_step: bool = False  # whether the user's loop body of a step is running


class LateChecks:
    """Errors that a value on the device decides, raised two steps later on a GPU so that no step waits for it.

    The delay is counted in steps, not in time, so that every rank raises in the same step.
    """

    _STEPS: Final = 2  # how long ago a step began whose checks are read; the GPU has work for the steps since then

    def __init__(self) -> None:
        self._pending: deque[tuple[int, torch.Tensor, torch.cuda.Event, Exception]] = deque()
        self._steps = 0

    def add(self, failed: torch.Tensor, error: Exception) -> None:
        """Raise `error` if `failed` is true: now if it is in host memory."""
        if failed.device.type != "cuda":
            if failed:
                raise error
            return
        host = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(failed, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(failed.device))
        self._pending.append((self._steps, host, copied, error))

    def end_step(self) -> None:
        """Count a step, and read the checks of earlier ones."""
        self._steps += 1
        if self._pending:
            self._read(self._steps - self._STEPS)

    def finish(self) -> None:
        """Read all checks."""
        self._read(self._steps)

    def _read(self, newest: int) -> None:
        while self._pending and self._pending[0][0] <= newest:
            _, failed, copied, error = self._pending.popleft()
            copied.synchronize()
            if failed:
                raise error


@dataclass
class RunContext:
    """Config, world, device, communicator and loggers of a run, and what the script has registered with it."""

    config: RunConfig
    comm: Communicator
    device: torch.device
    folder: Path  # the folder of the run's files, the same on every rank
    loggers: Loggers | None  # console and log files; None on all ranks but rank 0
    acceleration: Acceleration  # precision, loss scale, compilation and fused optimizers
    padding: PaddingFilter  # drops padding rows from metrics during an evaluation
    summary: Callable[[str], dict[str, object]]
    """The summary of the run with the given status, for summary.json and checkpoints."""
    progress: Progress = field(default_factory=Progress)
    models: list[WrappedModel] = field(default_factory=list)  # what `run.wrap` returned
    ledgers: list[ShardLedger] = field(default_factory=list)  # one per shard and stream if the run keeps a ledger
    training_data: "weakref.WeakSet[Any]" = field(default_factory=weakref.WeakSet)
    """The shards and streams that training has read from."""
    on_close: list[Callable[[], object]] = field(default_factory=list)  # called when the run ends, also after a failure
    planned_micro_batch: int | None = None
    """The micro-batch size of the plan; None if there is no plan, or each rank's part of a step fits at once."""
    largest_micro_batch: int = 0  # rows of the largest micro-batch, for advice after an out-of-memory error
    loss_shapes: dict[tuple[str | None, int, int], tuple[int, torch.Size]] = field(default_factory=dict)
    """By shard, pass and call in the micro-batch: the epoch and the shape of the last losses without a mask."""
    lockstep: bool = False
    """Whether an evaluation must give all ranks the same number of batches, since the model needs all ranks."""

    state_gatherers: "weakref.WeakValueDictionary[int, Any]" = field(default_factory=weakref.WeakValueDictionary)
    """By its id, each object with `gather_state`, whose state is that of all ranks; a script may create many."""
    predicts: bool = False
    """Whether `run.predict` reads: then shards hand out batches that are the same on any number of ranks."""
    prediction: tuple[int, bool] | None = None
    """The number of the batch that such a shard has handed out, and whether it has samples."""

    def __post_init__(self) -> None:
        self.late_checks = LateChecks()
        self.metrics = MetricSync(self.comm, self.device, self.loggers)
        """Averages logged values over the ranks and carries control values."""
        self.on_close.append(self.metrics.close)
        self.times = StepTimes(self.comm, self.device)
        """What the steps of this rank are spent on."""
        self.randomness = ModelRandomness(
            self.config.seed, self.world.rank, self.device, self.warn_once, always=self.config.compile
        )
        """Keys what models draw by sample."""
        self.on_close.append(self.randomness.close)
        self.replicas = ReplicaCheck(self.comm, self.models, self.config.replica_check_every)
        """Compares weights, buffers and optimizer state of the ranks."""
        self._printed: set[str] = set()
        self._in_evaluation = False
        self._warnings = WarnOnce()

    @property
    def world(self) -> World:
        """This process among its peers."""
        return self.comm.world

    @property
    def callbacks(self) -> list[StepCallback]:
        """Called at every step boundary and metric sync, in this order."""
        return self.metrics.callbacks

    @property
    def min_rows(self) -> int:
        """The fewest rows that a micro-batch may have: 0 unless a model has BatchNorm, which must not see padding."""
        return max((min_rows(model.batchnorms) for model in self.models), default=0)

    @property
    def convert_to(self) -> torch.dtype | None:
        """The dtype of floating-point batches; None: the one they have."""
        return self.acceleration.precision.convert_to

    def find_wrapped(self, module: nn.Module) -> WrappedModel | None:
        """The wrapped model that `module` belongs to; None for one that was not wrapped, such as a moving average."""
        return next((known for known in self.models if module in (known.model, known.core, known.inner)), None)

    def print(self, text: str) -> None:
        """Print on rank 0 and keep the text in the text log."""
        if self.loggers is not None:
            self.loggers.print(text)

    def print_once(self, text: str) -> None:
        """Print, unless the same text was printed before."""
        if text not in self._printed:
            self._printed.add(text)
            self.print(text)

    def warn_once(self, text: str, subject: str = "") -> None:
        """Warn on rank 0, unless it has given the same warning before, or another one of the same `subject`."""
        if self.world.is_main:
            self._warnings.warn_once(text, subject)

    def record(self, event: str, **fields: object) -> None:
        """Record on rank 0 that something has happened, in events.jsonl."""
        if self.loggers is not None:
            self.loggers.record(event, fields)

    @contextmanager
    def evaluation(self) -> Generator[None]:
        """Count the time inside the block as evaluation, and record the outermost of nested blocks."""
        started, is_outermost, self._in_evaluation = time.monotonic(), not self._in_evaluation, True
        try:
            with self.times.phase("evaluation"):
                yield
        finally:
            self._in_evaluation = not is_outermost
            if is_outermost:
                seconds = round(time.monotonic() - started, 3)
                self.record(
                    "evaluation", step=max(0, self.progress.steps - 1), epoch=self.progress.epoch, seconds=seconds
                )

    def once(self, function: Callable[..., T], *args: object, per: Per = "run") -> T:
        """Run `function(*args)` on rank 0; every rank gets its return value, or raises its exception."""
        return once(self.comm, function, *args, per=per)

    def flush_metrics(self, operation: str) -> None:
        """Average and write what was logged, now; a collective."""
        self.late_checks.finish()
        self.metrics.flush(operation)

    def gather_ledgers(self, operation: str, value: T) -> tuple[T, dict[str, object]]:
        """The value of rank 0, and what the ledger files of all ranks contain (see `describe_files`); a collective."""
        states = [ledger.state() for ledger in self.ledgers]
        by_rank = self.comm.exchange_objects(operation, (value, states))
        return by_rank[0][0], describe_files([states for _, states in by_rank])

    def log_count(self, name: str) -> int:
        """How often a metric was logged, as rank 0 knows it."""
        return self.loggers.counts[name] if self.loggers is not None else 0


def seed_all_ranks(seed: int) -> None:
    """Seed the global generators the same on every rank, so that every rank builds the same model."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)  # every CUDA device as well


def next_seed(seed: int) -> int:
    """Another seed, so that what is drawn after a model was built does not repeat its initial weights."""
    return (seed + 0x9E3779B97F4A7C15) % (1 << 63)
