"""A run from its start to its end: what was asked for, what is open while it lives, what is left when it is over."""

import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

import numpy as np
import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from samestep import __version__
from samestep.data.ledger import next_generation
from samestep.distributed.communicator import Communicator
from samestep.distributed.device import choose_device, see_accelerators
from samestep.environment.world import (
    deadline,
    read_environ,
    read_world,
    refuse_if_only_imported,
    run_folder,
    run_folder_is_explicit,
)
from samestep.errors import CommunicationError, LogError
from samestep.launch.failure_report import OUT_OF_MEMORY
from samestep.launch.processes import LAUNCHER, LauncherWatch
from samestep.launch.signal_handler import keep_exit_code
from samestep.loggers.console import open_console
from samestep.loggers.loggers import open_loggers
from samestep.messages import WarnOnce, info_to
from samestep.parallel.acceleration import Acceleration
from samestep.parallel.precision import Precision, check_precision, see_arithmetic
from samestep.training.auto_plan import compare, tell
from samestep.training.metric_sync import Writer
from samestep.training.preemption import Preemption, StoppedEarly
from samestep.training.step_engine import RunEngine

_STRIDE = 0xD1B54A32D192ED03  # odd too, and far from the other
_SPREAD = 0x9E3779B97F4A7C15  # odd, from the golden ratio: neighbouring ranks land far apart


def seed_all_ranks(seed: int) -> None:
    """Make every rank draw the same numbers, so that models are built alike."""
    _seed_all(seed)


def seed_per_rank(seed: int, rank: int) -> None:
    """Make each rank draw its own numbers, so that noise such as dropout differs between ranks."""
    _seed_all((seed + (rank + 1) * _SPREAD) % (1 << 63))


def reseed_per_rank(seed: int, rank: int, step: int) -> None:
    """Make each rank draw its own numbers from `step` on, others than it drew from the start."""
    seed_per_rank((seed + step * _STRIDE) % (1 << 63), rank)


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)  # every CUDA device as well


_FIRST_STEPS = 20  # what fits so often fits for good, unless samples differ in size: then a person should look
# How a rank puts it that another one ran out of memory, and how the CPU's allocator puts it.
_TOLD = ("failed: OutOfMemoryError", "DefaultCPUAllocator: can't allocate memory")


class TooLarge(SystemExit):
    """Ends this rank with the code that lets the launcher start all of them anew with half the micro-batch."""

    def __init__(self) -> None:
        super().__init__(OUT_OF_MEMORY)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this rank, or another one that it waited for, had not enough memory."""
    notes: list[str] = getattr(error, "__notes__", [])
    return isinstance(error, torch.OutOfMemoryError) or any(
        word in text for word in _TOLD for text in (str(error), *notes)
    )


def half_may_help(stepped: int, rows: int) -> bool:
    """Whether a smaller micro-batch is the answer: in the first steps, with more than one row, under our launcher."""
    return stepped < _FIRST_STEPS and rows > 1 and LAUNCHER in read_environ()


def advise(stepped: int, rows: int) -> str:
    """What to do about it where starting anew would not help or nobody is there to do it."""
    if rows > 1:
        when = f"in step {stepped + 1} of this process" if stepped < _FIRST_STEPS else f"after {stepped} steps"
        return (
            f"out of memory {when}, with {rows} row(s) in a micro-batch: pass run.shard(..., micro_batch="
            f"{-(-rows // 2)}), which learns the same; `samestep run` halves it by itself in the first steps"
        )
    return (
        "out of memory with one row in a micro-batch: cut the model, run.wrap(model, 'fsdp'), compute activations "
        "twice, run.wrap(model, checkpoint=(Block,)), or ask `samestep plan` what would fit"
    )


_NOT_STARTED = "this run is not started: use `with Run(...) as run:`, or call run.start() first"


@dataclass(frozen=True)
class RunConfig:
    """What the user asked for in Run(...)."""

    global_batch: int
    """Samples in a step, over all ranks."""
    seed: int
    """Where weights, order and luck come from."""
    folder: str | Path | None
    """Where logs go; None: a folder that was typed, or that of run.checkpoint, or the launcher's own, or a new one."""
    backend: str | None
    """What connects the ranks; None: chosen."""
    start_timeout: float
    """Seconds to wait for other ranks until the first step is done."""
    step_timeout: float
    """Seconds to wait for them from then on."""
    replica_check_every: int
    """Steps between two comparisons of the replicas; 0: none."""
    precision: Precision
    """What is computed in."""
    compile: bool
    """Whether models are compiled."""
    ledger: bool
    """Whether every sample that counts is written down."""


class Lifecycle:
    """What is open while a run lives: the link between its ranks, the engine that follows its steps, its files."""

    def __init__(self, asked: RunConfig) -> None:
        _check_asked(asked)
        refuse_if_only_imported("a Run was created")
        check_precision(asked.precision)
        self.asked = asked
        self.world = read_world()
        self.choice = choose_device(self.world, see_accelerators(), asked.backend)
        self.link = Communicator(self.world, self.choice.backend, asked.start_timeout, asked.step_timeout)
        self.writer: Writer | None = None
        self._engine: RunEngine | None = None
        self._wished_folder = Path(asked.folder).expanduser() if asked.folder is not None else run_folder()
        self._settled = asked.folder is not None or (self._wished_folder is not None and run_folder_is_explicit())
        self._folder: Path | None = None
        self._voice, self._notes = WarnOnce(), ExitStack()
        self._preemption: Preemption | None = None
        self._too_large = False
        self._watch = LauncherWatch(self.world.rank, read_environ())
        self._began = time.monotonic()

    @property
    def engine(self) -> RunEngine:
        """What follows the steps; there is one between start and end."""
        if self._engine is None:
            raise CommunicationError(_NOT_STARTED)
        return self._engine

    @property
    def folder(self) -> Path:
        """Where this run's files lie, the same on every rank."""
        if self._folder is None:
            raise CommunicationError(_NOT_STARTED)
        return self._folder

    def start(self, once: Callable[..., Path]) -> None:
        """Connect the ranks and open what they need."""
        if self._engine is not None:
            raise CommunicationError("this run was started already: a Run is started once, by `with` or by start()")
        device, asked = self.choice.device, self.asked
        if device.type == "cuda":
            torch.cuda.set_device(device)  # before anything is allocated, or it would land on the first GPU
        self._watch.start()
        self.link.open(device)
        try:
            _check_alike(self.link, asked)
            seed_all_ranks(asked.seed)
            self._folder = once(_choose_folder, self._wished_folder)
            if self.world.is_main:
                console = open_console(sys.stdout)
                self.writer = Writer(lambda: open_loggers(self.folder, console, self._voice.warn_once), console)
            self._notes.enter_context(info_to(self.say))
            speed = Acceleration(self.link, see_arithmetic(device, asked.precision, asked.compile), self.say)
            self._engine = RunEngine(self.link, device, self.writer, asked.replica_check_every, speed)
            self._preemption = Preemption(self._engine.pulse.riders, self.say, deadline())
            self._engine.pulse.riders.append(self._preemption)
            self._preemption.signals.listen()
        except BaseException as error:
            self.fail(error)  # `with` does not reach its end where it fails to begin
            raise
        if self.choice.warning:
            self._voice.warn_once(self.choice.warning)

    def end(self, early: StoppedEarly | None = None) -> None:
        """End after success, or early on all ranks alike: write what is pending, wait for all ranks, disconnect."""
        try:
            self._compare_plans()
            self.engine.close()
            self._close_files("finished" if early is None else early.status, self.engine)
            self.link.close()
            self._watch.stop()
            self._hear_no_more(ending=early is not None)
            if self._watch.launched:
                keep_exit_code()
            if early is not None:
                get_error_handler().record_exception(early)  # for the launcher, which tells what was saved
        except BaseException as error:
            self.fail(error)
            raise
        self._engine = None

    def leave(self, error: BaseException | None) -> None:
        """End as `with` does: after success, early, or after an exception."""
        if isinstance(error, StoppedEarly):
            self.end(error)
        elif error is None or (isinstance(error, SystemExit) and not error.code):
            self.end()
        else:
            self._look_at_memory(error)
            self.fail(error)
            if self._too_large:
                raise TooLarge from error

    def _look_at_memory(self, error: BaseException) -> None:
        """Where memory ran out: let the launcher try half the micro-batch, or say what to do."""
        engine = self._engine
        if engine is None or not is_out_of_memory(error):
            return
        self._too_large = half_may_help(engine.stepped, engine.rows)
        if not self._too_large and engine.rows:
            error.add_note(advise(engine.stepped, engine.rows))

    def fail(self, error: BaseException) -> None:
        """End after an exception: tell the other ranks and the launcher, destroy nothing that others may wait in."""
        if isinstance(error, RuntimeError) and (told := self.link.tell_peers()):
            error.add_note(told)  # torch does not know which rank it waited for
        self.link.abandon(f"{type(error).__name__}: {error}".splitlines()[0])  # first of all: others may wait
        if isinstance(error, Exception):
            get_error_handler().record_exception(error)  # for the launcher, which shows it last
        engine, self._engine = self._engine, None
        with ExitStack() as ending:
            ending.callback(self._hear_no_more, ending=False)
            ending.callback(self._close_files, "failed", engine)
            if engine is not None:
                ending.callback(engine.detach, failed=True)

    def say(self, text: str) -> None:
        """Print on the first rank."""
        if self.writer is not None:
            self.writer.say(text)

    def move_to(self, folder: Path, once: Callable[..., object]) -> None:
        """Let logs and ledgers lie in `folder`, unless the user chose a place or something is written."""
        settled = self._settled or (self.writer is not None and self.writer.opened)
        if once(lambda: settled):
            return
        self._folder, self._settled = folder, True
        for account in self.engine.accounts:
            account.folder, account.generation = folder, int(str(once(next_generation, folder, account.name)))

    def times_logged(self, name: str) -> int:
        """How often a name was logged up to now, as far as this rank writes it."""
        return self.writer.times[name] if self.writer is not None else 0

    def summary(self, status: str, engine: RunEngine | None = None) -> dict[str, object]:
        """What is worth keeping of this run."""
        engine = engine or self._engine
        return {
            "status": status,
            "version": __version__,
            "torch": torch.__version__,
            "world_size": self.world.size,
            "nodes": self.world.nodes,
            "backend": self.choice.backend,
            "device": str(self.choice.device),
            "global_batch": self.asked.global_batch,
            "seed": self.asked.seed,
            "steps": engine.steps if engine else 0,
            "samples": engine.samples if engine else 0,
            "seconds": round(time.monotonic() - self._began, 3),
            "metrics": self.writer.last if self.writer else {},
            "choices": engine.speed.choices() if engine else {},
            "plan": self._plans(engine) if engine else [],
            "teacher": [teacher.summary() for teacher in engine.teachers] if engine else [],
        }

    def _plans(self, engine: RunEngine) -> list[dict[str, object]]:
        """What was planned for each wrapped model, beside what came as far as it is known."""
        device, moments = self.choice.device, list(engine.moments)
        return [
            made.facts | {"compared": compare(made, device, moments) if made.counted else {}}
            for made in engine.decisions
        ]

    def _compare_plans(self) -> None:
        for made in self.engine.decisions:
            if made.counted and (told := tell(compare(made, self.choice.device, list(self.engine.moments)))):
                self.say(told)

    def _hear_no_more(self, ending: bool) -> None:
        if self._preemption is not None:
            self._preemption.signals.release(ending)

    def _close_files(self, status: str, engine: RunEngine | None) -> None:
        self._notes.close()
        if self.writer is not None:
            self.writer.close(self.summary(status, engine) if self.writer.opened else {})


def _check_asked(asked: RunConfig) -> None:
    """Raise where a number was asked for that is none of its kind; what scripts pass is not typed."""
    for name, kind, least, most, should in (
        ("global_batch", Integral, 1, None, "a number of samples: pass 1 or more, e.g. global_batch=256"),
        ("seed", Integral, -(1 << 63), (1 << 63) - 1, "a whole number of 64 bits: pass one, e.g. seed=0"),
        ("replica_check_every", Integral, 0, None, "a number of steps: pass 1 or more, or 0 for no comparison"),
        ("start_timeout", Real, 1e-3, None, "a number of seconds: pass one above 0, e.g. start_timeout=1800"),
        ("step_timeout", Real, 1e-3, None, "a number of seconds: pass one above 0, e.g. step_timeout=300"),
    ):
        value: float = getattr(asked, name)
        if not isinstance(value, kind) or not least <= value or (most is not None and value > most):
            raise CommunicationError(f"{name}={value!r} is not {should}")


def _check_alike(link: Communicator, asked: RunConfig) -> None:
    mine = [float(asked.global_batch), float(asked.seed)]
    for rank, theirs in enumerate(link.exchange("Run.start", mine)):
        if theirs.tolist() != mine:
            raise CommunicationError(
                f"rank {link.world.rank} has Run(global_batch={asked.global_batch}, seed={asked.seed}) and rank {rank} "
                f"has Run(global_batch={theirs[0]:.0f}, seed={theirs[1]:.0f}): a step is global, so both must be alike "
                "on all ranks"
            )


def _choose_folder(wish: Path | None) -> Path:
    if wish is not None:
        return _that_can_be_made(wish.absolute())
    script = Path(sys.argv[0]).stem or "run"
    return Path("runs").absolute() / f"{script}-{time.strftime('%Y%m%d-%H%M%S')}"


def _that_can_be_made(folder: Path) -> Path:
    """The folder, unless all that a run writes would be lost there; one whose disk is full now may have room later."""
    nearest = next(each for each in (folder, *folder.parents) if each.exists())
    if not nearest.is_dir():
        raise LogError(f"the run's folder {folder} cannot be made: {nearest} is a file; name another folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise LogError(f"the run's folder {folder} cannot be made: {nearest} may not be written; name another folder")
    return folder
