"""The lifecycle of a run: start on all ranks, end after success, end early, end after a failure."""

import faulthandler
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from samestep import __version__
from samestep.context import RunConfig, RunContext, seed_all_ranks
from samestep.data.ledger import describe_files, next_generation
from samestep.distributed.collectives import PaddingFilter
from samestep.distributed.communicator import Communicator, wait_for_keys
from samestep.distributed.device import BackendChoice, agree_on_backend, choose_device, describe_rank
from samestep.distributed.once import once
from samestep.distributed.rank_status import failed_line, raised_line
from samestep.distributed.rank_warnings import show_once
from samestep.environment.processes import LAUNCHER, OPEN_RUN, LauncherWatch, find_parent_rank, open_run_variable
from samestep.environment.world import (
    PRECISION,
    World,
    comparison_folder,
    deadline,
    export,
    last_step,
    profiled_steps,
    read_environ,
    read_world,
    refuse_if_only_imported,
    requested_precision,
    run_folder,
    run_folder_is_explicit,
)
from samestep.errors import OUT_OF_MEMORY, CommunicationError, LogError, SamestepError, WorldError
from samestep.launch.signal_handler import keep_exit_code
from samestep.loggers.console import open_console
from samestep.loggers.loggers import Loggers
from samestep.messages import WarnOnce, info_to
from samestep.parallel.precision import Acceleration, check_precision, detect_support
from samestep.teacher.teacher import Teacher
from samestep.training.auto_plan import RunPlan, format_comparison
from samestep.training.mistakes import add_hint
from samestep.training.preemption import Preemption, StoppedEarly
from samestep.training.rank_times import Stragglers
from samestep.training.run_description import (
    CodeVersion,
    describe_configuration,
    describe_end,
    describe_start,
    device_name,
    link_launcher_folder,
)
from samestep.training.step_loop import StepLoop

_NOT_STARTED = "this run is not started: use `with Run(...) as run:`, or call run.start() first"
_CLOSED = "this run is closed: use it inside `with Run(...) as run:`, before run.close(), or create another Run"
_FIRST_STEPS = 20  # what fits in the first steps usually keeps fitting, unless samples differ in size
# How a rank words that a peer ran out of memory, and how the CPU allocator words it.
_OUT_OF_MEMORY_TEXTS = ("failed: OutOfMemoryError", "DefaultCPUAllocator: can't allocate memory")


class Lifecycle:
    """Starts and ends a run; between start and end it holds the run's context and step loop."""

    def __init__(self, config: RunConfig) -> None:
        config.check()
        config = replace(config, global_batch=int(config.global_batch), seed=int(config.seed))  # not numpy's
        refuse_if_only_imported("a Run was created")
        check_precision(config.precision)
        self._precision_variable = PRECISION if requested_precision() else ""
        if self._precision_variable:
            config = replace(config, precision=check_precision(requested_precision(), PRECISION))
        if (folder := comparison_folder()) is not None:
            config = replace(config, folder=folder)
        self.config, self.padding = config, PaddingFilter()
        self.world = read_world()
        cuda, mps = torch.cuda.device_count(), torch.backends.mps.is_available()  # neither creates a CUDA context
        self.device = choose_device(self.world, cuda, mps, config.backend)
        self.backend = BackendChoice("none", "not started")
        self.comm = Communicator(self.world, config.start_timeout, config.step_timeout)
        self.plans: list[RunPlan] = []
        self.teachers: list[Teacher] = []
        self.checkpoint_folders: list[Path] = []
        self._loop: StepLoop | None = None
        self._has_ended = self._files_closed = False
        self._last_context: RunContext | None = None
        self._requested_folder = Path(config.folder).expanduser() if config.folder is not None else run_folder()
        explicit = self._requested_folder is not None and run_folder_is_explicit()
        self._folder_is_final = config.folder is not None or explicit
        self._loggers: Loggers | None = None
        self._preemption: Preemption | None = None
        self._ledger_files = dict[str, object]()
        self._log_capture = ExitStack()
        self._error: BaseException | None = None  # that ends the run, until its files are closed
        self._informed_of = 0  # the id of the error that was posted; the error itself would keep its frames alive
        self._warnings = WarnOnce()
        self._watch = LauncherWatch(self.world.rank, read_environ())
        self._pid = os.getpid()
        self._started_at = time.monotonic()

    @property
    def loop(self) -> StepLoop:
        """The step loop; exists between start and end."""
        if self._loop is None:
            raise CommunicationError(_CLOSED if self._has_ended else _NOT_STARTED)
        return self._loop

    @property
    def context(self) -> RunContext:
        """The run context; exists between start and end."""
        return self.loop.context

    @property
    def folder(self) -> Path:
        """The folder of the run's files; known after the end as well."""
        if self._last_context is None:
            raise CommunicationError(_NOT_STARTED)
        return self._last_context.folder

    def start(self) -> None:
        """Connect the ranks and open what they need."""
        if self._has_ended:
            raise CommunicationError(_CLOSED)
        if self._loop is not None:
            raise CommunicationError("this run was already started: start a Run once, by `with` or by start()")
        device = self.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # before anything is allocated, or it would land on GPU 0
        _refuse_child_of_rank(self.world)
        self._watch.start()
        self._log_capture.callback(_show_crashes())
        try:
            self.comm.open(device, self._agree_on_backend, self.close_after_hang)
            export({OPEN_RUN: open_run_variable(self.world.rank, self.world.size, self.world.port)})
            hosts, devices = _check_same_config(self.comm, self.config, device_name(device))
            seed_all_ranks(self.config.seed)
            context = self._open_context(once(self.comm, _choose_folder, self._requested_folder))
            self._loop, self._last_context = StepLoop(context), context
            context.record("start", **describe_start(context, hosts, devices))
            if self.world.is_main:
                link_launcher_folder(context.folder)
                context.on_close.append(CodeVersion(context.record).close)
            self._preemption = Preemption(context, deadline(), last_step())
            context.callbacks.append(self._preemption)  # its saves include checkpoints that are due at the same step
            stragglers = Stragglers(context, hosts)
            context.callbacks.append(stragglers)
            context.on_close.append(stragglers.close)
            self._preemption.signals.install()
            _profile_steps_of_environment(self._loop)
        except BaseException as error:
            self.fail(error)  # `with` does not call __exit__ if __enter__ fails
            raise
        if self.backend.warning:
            self._warnings.warn_once(self.backend.warning)
        elif self.backend.is_shared:
            self.print(f"samestep uses {self.backend.backend}: {self.backend.reason}")

    def _agree_on_backend(self, store: dist.Store) -> str:
        own = describe_rank(self.world, self.device, self.config.backend)
        self.backend = agree_on_backend(
            store, self.world.size, own, lambda keys: wait_for_keys(self.comm, keys, "Run.start")
        )
        return self.backend.backend

    def _open_context(self, folder: Path) -> RunContext:
        config, device = self.config, self.device
        if self.world.is_main:
            self._loggers = _create_loggers(config, lambda: self.context, self._warnings.warn_once)
        self._log_capture.enter_context(info_to(self.print))
        self._log_capture.enter_context(show_once(self.comm, self.print, self._record_warning))
        support = detect_support(device, config.precision, config.compile, self._precision_variable)
        acceleration = Acceleration(self.comm, support, self.print)
        return RunContext(config, self.comm, device, folder, self._loggers, acceleration, self.padding, self.summary)

    def leave(self, error: BaseException | None) -> None:
        """End as `with` does: after success, early, or after an exception."""
        if os.getpid() != self._pid:  # a child that the script has forked: the run is that of its parent
            return
        if isinstance(error, StoppedEarly):
            self.end(error)
        elif error is None or (isinstance(error, SystemExit) and not error.code):
            self.end(exit_line=None if error is None else raised_line(error))
        else:
            self._inform_peers(error)
            if self._loop is not None:
                add_hint(error, self.device, self.context.acceleration.precision.name)
            retry = self._handle_out_of_memory(error)
            self.fail(error)
            if retry:
                raise SystemExit(OUT_OF_MEMORY) from error  # the launcher restarts all ranks with half the micro-batch

    def end(self, early: StoppedEarly | None = None, exit_line: str | None = None) -> None:
        """End after success, or early on all ranks: write what is pending, wait for all ranks, disconnect.

        `exit_line` is the line that called sys.exit(0).
        """
        if self._has_ended or os.getpid() != self._pid:
            return
        try:
            context = self.context
            self.comm.leave(exit_line)
            if early is None:
                context.replicas.check("at the end of the run", context.progress.steps_of_process)
            for plan in self.plans:
                if plan.traced and (
                    text := format_comparison(plan.comparison(context.device, list(self.loop.step_starts)))
                ):
                    context.print(text)
            for callback in context.callbacks:
                callback.on_run_end(failed=False)
            context.flush_metrics("Run.close")
            self._release(failed=False, early=early is not None)
            if self.config.ledger:
                self._ledger_files = context.gather_ledgers("Run.close", None)[1]
            self._close_files("finished" if early is None else early.status)
            self.comm.close()
            self._watch.stop()
            export({OPEN_RUN: None})
            self._remove_signal_handlers(exiting=early is not None)
            if self._watch.launched:
                keep_exit_code()
            if early is not None:
                get_error_handler().record_exception(early)  # for the launcher, which reports what was saved
        except BaseException as error:
            self.fail(error)
            raise
        self._loop, self._has_ended = None, True

    def fail(self, error: BaseException) -> None:
        """End after an exception: inform the other ranks and the launcher; destroy no group that peers may wait in."""
        self._inform_peers(error)
        self._has_ended, self._error = True, error
        if isinstance(error, Exception):
            with suppress(OSError):  # a full disk, or a log folder that was removed: the error is in the log as well
                get_error_handler().record_exception(error)  # for the launcher, which shows it last
        try:
            self._close_after_failure()
        except Exception as second:  # noqa: BLE001  # it must not replace the cause
            error.add_note(f"closing the run failed too: {type(second).__name__}: {second}")

    def _close_after_failure(self) -> None:
        with ExitStack() as closing:  # runs in reverse order, each whatever another raises
            closing.callback(setattr, self, "_loop", None)
            closing.callback(export, {OPEN_RUN: None})
            closing.callback(self.comm.mark_closed)
            closing.callback(self._remove_signal_handlers, exiting=False)
            closing.callback(self._close_files, "failed")
            if self._loop is not None:
                if self.comm.alone:  # no other rank has a part in what was logged last
                    closing.callback(_write_pending_metrics, self.context)
                closing.callback(self._release, failed=True)

    def close_after_hang(self) -> None:
        """Close files as after a failure, in a thread, while the main thread of the rank may wait for its GPU."""
        if self._has_ended:
            return
        with ExitStack() as closing:  # runs in reverse order, each whatever another raises
            closing.callback(self._close_files, "failed")
            for ledger in self._loop.context.ledgers if self._loop is not None else ():
                closing.callback(ledger.close, failed=True)

    def move_folder(self, folder: Path) -> None:
        """Write logs and ledgers to `folder`, unless the user chose a folder or something is already written."""
        context = self.context
        final = self._folder_is_final or (self._loggers is not None and self._loggers.has_files)
        if context.once(lambda: final):
            return
        context.folder, self._folder_is_final = folder, True
        if self.world.is_main:
            link_launcher_folder(folder)
        for ledger in context.ledgers:
            ledger.folder, ledger.generation = folder, context.once(next_generation, folder, ledger.name)

    def summary(self, status: str) -> dict[str, object]:
        """The summary of this run, for summary.json and checkpoints."""
        progress = self._loop.context.progress if self._loop else None
        device = self.device
        starts = list(self._loop.step_starts) if self._loop else []
        return {
            "status": status,
            "versions": {"samestep": __version__, "torch": torch.__version__},
            "world_size": self.world.size,
            "nodes": self.world.nodes,
            "backend": self.comm.backend,
            "device": str(device),
            "global_batch": self.config.global_batch,
            "seed": self.config.seed,
            "steps": progress.steps if progress else 0,
            "samples": progress.samples if progress else 0,
            "seconds": round(time.monotonic() - self._started_at, 3),
            "metrics": self._loggers.last if self._loggers else {},
            "choices": self._loop.context.acceleration.choices() if self._loop else {},
            "plan": [plan.summary(device, starts) for plan in self.plans] if self._loop else [],
            "teacher": [teacher.summary() for teacher in self.teachers] if self._loop else [],
        }

    def _inform_peers(self, error: BaseException) -> None:
        """Post the error for the other ranks, and add their status to one of torch, which does not know it."""
        if id(error) == self._informed_of:
            return
        self._informed_of = id(error)
        self.comm.abandon(f"{type(error).__name__}: {error}".splitlines()[0] + failed_line(error))
        if isinstance(error, RuntimeError) and (note := self.comm.peers_note(error)):
            error.add_note(note)
        if self.comm.is_group_destroyed and not isinstance(error, SamestepError):
            error.add_note(
                "the script has called dist.destroy_process_group() inside of `with Run`, which needs the process "
                "groups until it ends: remove that call, or move it after `with Run`"
            )

    def _handle_out_of_memory(self, error: BaseException) -> bool:
        """Whether the launcher should retry with half the micro-batch after this error; if not, add advice to it."""
        if self._loop is None or not is_out_of_memory(error):
            return False
        steps, rows = self.context.progress.steps_of_process, self.context.largest_micro_batch
        if steps < _FIRST_STEPS and rows > 1 and LAUNCHER in read_environ():
            return True
        if rows:
            error.add_note(out_of_memory_advice(steps, rows))
        return False

    def _release(self, failed: bool, early: bool = False) -> None:
        """Stop watching optimizers, close the ledgers and restore torch's settings, without a collective."""
        context, loop = self.context, self.loop
        with ExitStack() as closing:  # runs in reverse order, each whatever another raises
            closing.callback(context.acceleration.close)
            for function in context.on_close:
                closing.callback(function)
            for ledger in context.ledgers:
                closing.callback(ledger.close, failed, early)
            for callback in context.callbacks if failed else ():
                closing.callback(callback.on_run_end, failed=True)
            closing.callback(loop.detach)

    def print(self, text: str) -> None:
        """Print on rank 0 and keep the text in the text log, until it is closed."""
        if self._loggers is not None and not self._files_closed:
            self._loggers.print(text)
        elif self._loggers is not None:
            open_console(sys.stdout).print(text)  # the stream of now: the script may have replaced it

    def _record_warning(self, text: str, category: str, file: str, line: int) -> None:
        if self._loggers is not None and not self._files_closed:
            self._loggers.record("warning", {"text": text, "category": category, "file": file, "line": line})

    def _remove_signal_handlers(self, exiting: bool) -> None:
        if self._preemption is not None:
            self._preemption.signals.remove(exiting)

    def _close_files(self, status: str) -> None:
        self._log_capture.close()
        self._files_closed = True
        if self._loggers is not None:
            known = self._loop is not None and self.config.ledger
            ledger = _describe_ledgers(self.context, self._ledger_files, self.checkpoint_folders) if known else {}
            wanted = self._loggers.is_open or bool(ledger.get("ledger"))  # a ledger is compared with the summary
            steps = self._loop.context.progress.steps if self._loop is not None else 0
            self._loggers.record("end", describe_end(status, steps, self._error))
            self._error = None  # it would keep its frames alive
            longest_wait = math.inf if self.comm.alone else self.comm.timeout / 2  # the other ranks wait for this one
            self._loggers.close(self.summary(status) | ledger if wanted else {}, longest_wait)


def _create_loggers(config: RunConfig, context: Callable[[], RunContext], warn: Callable[[str], None]) -> Loggers:
    """The loggers of a run whose context is needed later, when the first of their files is opened."""
    console, folder = open_console(sys.stdout), lambda: context().folder
    is_trial = last_step() is not None  # of `samestep parity`: not an experiment that a tracker should show
    given = () if is_trial and config.loggers is not None else config.loggers
    return Loggers(console, folder, warn, given, lambda: describe_configuration(context()))


def _profile_steps_of_environment(loop: StepLoop) -> None:
    if (steps := profiled_steps()) is not None:
        from samestep.training.profiler import open_profiler  # imported by runs that use it

        open_profiler(loop, steps)


def _describe_ledgers(context: RunContext, files: dict[str, object], folders: list[Path]) -> dict[str, object]:
    """What `samestep audit` compares the ledger with; after a failure (no `files`) that of this rank is all it has."""
    here = context.folder.resolve()  # folders inside of it have relative paths, so that a run can be moved
    resolved = [each.resolve() for each in folders]
    names = [str(each.relative_to(here) if each.is_relative_to(here) else each) for each in resolved]
    return {
        "ledger": files or describe_files([[ledger.state() for ledger in context.ledgers]]),
        "checkpoints": names,
    }


def _write_pending_metrics(context: RunContext) -> None:
    with suppress(RuntimeError):  # after an error of the GPU its tensors cannot be read
        context.metrics.flush("Run.close")


def _show_crashes() -> Callable[[], object]:
    """Print the stack of the script if native code ends this process, as gloo and NCCL do; returns how to undo it."""
    if faulthandler.is_enabled():
        return lambda: None
    with suppress(OSError, ValueError, AttributeError, RuntimeError):  # stderr is closed or has no file
        faulthandler.enable()
    return faulthandler.disable


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this rank, or a peer that it waited for, ran out of memory."""
    notes: list[str] = getattr(error, "__notes__", [])
    return isinstance(error, torch.OutOfMemoryError) or any(
        known in text for known in _OUT_OF_MEMORY_TEXTS for text in (str(error), *notes)
    )


def out_of_memory_advice(steps: int, rows: int) -> str:
    """What to do if a retry would not help, or no launcher is there to do it."""
    if rows > 1:
        when = f"in step {steps + 1} of this process" if steps < _FIRST_STEPS else f"after {steps} steps"
        return (
            f"out of memory {when} with {rows} row(s) per micro-batch: pass run.shard(..., micro_batch="
            f"{-(-rows // 2)}), which gives the same training result; `samestep run` halves it by itself in the first "
            "steps"
        )
    return (
        "out of memory with one row per micro-batch: shard the model with run.wrap(model, 'fsdp'), recompute "
        "activations with run.wrap(model, activation_checkpointing=(Block,)), or see what fits with `samestep plan`"
    )


def _refuse_child_of_rank(world: World) -> None:
    """Raise if a rank with an open run has started this process, which has inherited the rank's variables."""
    pid = find_parent_rank(read_environ(), world.rank, world.size, world.port) if world.size > 1 else None
    if pid is not None:
        raise WorldError(
            f"rank {world.rank} (process {pid}) started this process while its run is open, and this process inherited "
            f"RANK={world.rank} and WORLD_SIZE={world.size}, so it would wait for other ranks: start it as a single "
            "process, with `env -u RANK -u WORLD_SIZE -u LOCAL_RANK python tool.py`, or after the run has ended"
        )


def _check_same_config(comm: Communicator, config: RunConfig, device: str) -> tuple[list[str], list[str]]:
    """Raise if ranks have different arguments; returns the names of their hosts and devices."""
    own = f"global_batch={config.global_batch}, seed={config.seed}, ledger={config.ledger}"
    by_rank = comm.exchange_objects("Run.start", (own, socket.gethostname(), device))
    for rank, (other, _, _) in enumerate(by_rank):
        if other != own:
            raise CommunicationError(
                f"rank {comm.world.rank} has Run({own}) and rank {rank} has Run({other}): pass the same values on all "
                "ranks"
            )
    return [host for _, host, _ in by_rank], [name for _, _, name in by_rank]


def _choose_folder(requested: Path | None) -> Path:
    script = Path(sys.argv[0]).stem or "run"
    try:
        folder = (requested or Path("runs")).absolute()
    except FileNotFoundError as error:
        raise LogError(
            "the current folder does not exist any more, so the run folder cannot be created: change to another folder"
        ) from error
    return folder / f"{script}-{time.strftime('%Y%m%d-%H%M%S')}" if requested is None else _check_creatable(folder)


def _check_creatable(folder: Path) -> Path:
    """Raise if the folder cannot be created. A full disk is not an error here: it may have space later."""
    try:
        nearest = next(each for each in (folder, *folder.parents) if each.exists())
    except OSError as error:  # such as a name of more than 255 characters
        raise LogError(f"the run folder {folder} cannot be created: {error.strerror}; pass another folder") from error
    if not nearest.is_dir():
        raise LogError(f"the run folder {folder} cannot be created: {nearest} is a file; pass another folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise LogError(f"the run folder {folder} cannot be created: {nearest} is not writable; pass another folder")
    return folder
