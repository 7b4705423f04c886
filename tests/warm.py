"""Warm ranks for tests: processes that have imported torch and run functions as the ranks of a small world.

A launch with torchrun costs about 11 CPU seconds per test, a warm process a few milliseconds. The processes hold no
process group: a job finds the variables that torchrun sets and opens `Run` itself, so the tests cover the real start
and the real end. After a job its process must be in the same state as before. A process that is not, or that sent no
answer, is replaced before the next job.
"""

import faulthandler
import gc
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_all_start_methods, get_context, set_forkserver_preload, set_start_method
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

MAX_RANKS = 4
STACK_SIGNAL = signal.SIGRTMIN  # SIGUSR1 and SIGUSR2 ask a run to save and stop
START_SECONDS = 120.0  # an import of torch on a busy machine
# One process imports these, and every rank is forked from it: a start takes 0.3 CPU seconds instead of 4. None of them
# starts a thread, except OpenBLAS, which survives a fork. The last line is what DDP and FSDP import when first used.
PRELOADED = ["torch", "torch.distributed", "samestep.training.run", "samestep.loggers.run_files", "tensorboard"]
PRELOADED += ["transformers.modeling_outputs", "samestep.checkpoint.restore"]
PRELOADED += ["samestep.cli.main", "samestep.cli.run_command", "samestep.launch.launcher"]  # of forked launchers
PRELOADED += ["torch._dynamo", "torch._inductor.config", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
# After a rank has failed, the others get this long to fail by themselves. Then the failed process is killed, as a
# launcher would do, and the others get the second time to notice.
GRACE_SECONDS, NOTICE_SECONDS = 2.0, 30.0
CLEANUP_SECONDS = 5.0
LAUNCHER_PREFIXES = (
    "SLURM_",
    "PMI_",
    "OMPI_",
    "TORCHELASTIC_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "LOCAL_",
    "RANK",
    "WORLD_SIZE",
)


class RankFailed(AssertionError):
    """Ranks raised, died or hung; `errors` maps each of them to its traceback or stack, first failure first."""

    def __init__(self, errors: Mapping[int, str], size: int) -> None:
        self.errors = dict(errors)
        # what was raised comes first: logs are often cut inside of a long traceback
        raised = [f"rank {rank}: {' '.join(text.strip().splitlines()[-2:])}" for rank, text in errors.items()]
        super().__init__("\n".join([*raised, *(f"rank {rank} of {size}: {text}" for rank, text in errors.items())]))


@dataclass(frozen=True)
class Job:
    """What one process runs: a pickled (function, arguments), and its environment, folder and import path."""

    payload: bytes
    environment: dict[str, str]
    folder: Path
    path: list[str]
    seconds: float


@dataclass(frozen=True)
class Answer:
    """What one process sent back: a pickled value, or an error and whether the process needs to be cleaned up."""

    value: bytes | None = None
    error: str | None = None
    unusable: bool = False


def without_launcher_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove what an outer torchrun or SLURM job has set, so that tests start as one rank wherever they run."""
    return {name: value for name, value in environment.items() if not name.startswith(LAUNCHER_PREFIXES)}


def serve(pipe: "Connection[Any, Any]", stacks: Path) -> None:
    """Warm up, then run jobs until the other end of the pipe closes."""
    os.setsid()  # killing the session also kills what a job has started
    die_with_parent()
    # The start method of this process would also be that of its data workers; a rank of torchrun uses the default.
    set_start_method(get_all_start_methods()[0], force=True)
    seed_differently()
    with stacks.open("a") as file:
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
        warm_up()
        gc.freeze()  # otherwise the collection after every job scans torch's objects: 0.2 s
        pipe.send_bytes(pickle.dumps(Answer()))
        while True:
            try:
                job: Job = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            # In addition to the signal: Lightning restores Python's signal handlers after a fit and removes this one.
            faulthandler.dump_traceback_later(max(1.0, job.seconds - 1), file=file)
            answer = run_job(job)
            faulthandler.cancel_dump_traceback_later()
            os.truncate(stacks, 0)  # discard the stack of a slow job
            pipe.send_bytes(pickle.dumps(answer))


def die_with_parent() -> None:
    """Ask Linux to kill this process when pytest is killed, even during a job."""
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def seed_differently() -> None:
    """Give the generators of each rank a state of its own, as in processes that are not forked from one."""
    import numpy

    random.seed()
    numpy.random.seed()


def warm_up() -> None:
    """Load once what torch imports lazily: gloo, and what the first DDP needs."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    model(torch.ones(1, 1)).sum().backward()
    del model  # a DDP wrapper that outlives its process group can hang the next group
    gc.collect()
    dist.destroy_process_group()


def run_job(job: Job) -> Answer:
    """Run one job and restore the state of the process; one with an open process group is unusable."""
    import torch.distributed as dist

    sys.path[:] = job.path
    with job_environment(job):
        error = None
        try:
            function, arguments = pickle.loads(job.payload)
            value = pickle.dumps(function(*arguments))
        except BaseException:  # noqa: BLE001 the parent raises it
            error = traceback.format_exc()
        gc.collect()  # also ends what the job held, such as data workers
        if error is not None:
            return Answer(error=error, unusable=dist.is_initialized())
        if dist.is_initialized():
            return Answer(error=f"{function.__qualname__} returned with its process group still open", unusable=True)
        return Answer(value=value)


def destroy_group() -> None:
    """Destroy a group that a failed job left open: this takes milliseconds, a new process seconds."""
    import torch.distributed as dist

    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def job_environment(job: Job) -> Iterator[None]:
    """Set the variables and the folder of a job and turn warnings into errors; then restore everything, RNGs too."""
    import warnings

    import numpy
    import torch

    before, folder = dict(os.environ), Path.cwd()
    rng_states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    dtype, device, threads = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        replace_environment(job.environment)
        os.chdir(job.folder)
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("error")
            yield
    finally:
        replace_environment(before)
        os.chdir(folder)
        random.setstate(rng_states[0])
        numpy.random.set_state(rng_states[1])
        torch.set_rng_state(rng_states[2])
        torch.set_default_dtype(dtype)
        # setting a default device adds a mode to every later call, so change it only if the job did
        if torch.get_default_device() != device:
            torch.set_default_device(None)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])


def replace_environment(environment: Mapping[str, str]) -> None:
    """Set the variables of this process to exactly these."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


class WarmProcess:
    """One process that waits for jobs."""

    def __init__(self, stacks: Path) -> None:
        self.stacks = stacks
        set_forkserver_preload(PRELOADED)
        context = get_context("forkserver")
        self.pipe, there = context.Pipe()
        # not a daemon: daemons may not have children, which a DataLoader starts
        self.process: BaseProcess = context.Process(target=serve, args=(there, stacks), daemon=False)
        self.process.start()
        there.close()

    def send(self, job: Job) -> None:
        """Send a job; `receive` notices if the process has died."""
        try:
            self.pipe.send_bytes(pickle.dumps(job))
        except BrokenPipeError:
            return

    def receive(self) -> Answer:
        """Read the answer from the pipe, or report how the process ended."""
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(timeout=5)
            code = self.process.exitcode
            cause = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
            return Answer(error=f"the process died ({cause})", unusable=True)

    def stack(self) -> str:
        """Return the stack of each thread of the process."""
        pid = self.process.pid
        if pid is None or not self.process.is_alive():
            return "(no stack: the process is gone)"
        if not self.stacks.read_text():
            os.kill(pid, STACK_SIGNAL)
        deadline = time.monotonic() + 2
        while not (text := self.stacks.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.05)  # the first thread has been written, the others follow
        return self.stacks.read_text() if text else "(no stack: the process did not react to the signal)"

    def kill(self) -> None:
        """Kill the process and everything it has started."""
        if (pid := self.process.pid) is not None:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                self.process.kill()  # it has not called setsid yet
        self.process.join()
        self.process.close()
        self.pipe.close()


class Ranks:
    """Runs a module-level function on 1 to 4 ranks: `ranks(2, function, *arguments)` returns the results in rank order.

    `nodes` is the number of nodes that the ranks see in their environment variables.
    """

    def __init__(self, folder: Path, timeout: float = 150.0) -> None:
        self.folder, self.timeout = folder, timeout
        self._processes: list[WarmProcess | None] = [None] * MAX_RANKS
        self._starts = 0

    def __call__(
        self, size: int, function: Callable[..., Any], *arguments: Any, nodes: int = 1, timeout: float | None = None
    ) -> list[Any]:
        """Run a function that must succeed on every rank; raise RankFailed if it does not."""
        answers = self._answers(size, function, arguments, nodes, timeout or self.timeout, stop_early=True)
        errors = {rank: answer.error for rank, answer in answers.items() if answer.error is not None}
        if errors:
            raise RankFailed(errors, size)
        return [pickle.loads(answers[rank].value or b"") for rank in range(size)]

    def errors(
        self, size: int, function: Callable[..., Any], *arguments: Any, nodes: int = 1, timeout: float | None = None
    ) -> list[str]:
        """Run a function that must raise on every rank; return the tracebacks in rank order."""
        answers = self._answers(size, function, arguments, nodes, timeout or self.timeout, stop_early=False)
        returned = sorted(rank for rank, answer in answers.items() if answer.error is None)
        if returned:
            raised = {rank: answer.error for rank, answer in answers.items() if answer.error is not None}
            raise AssertionError(f"ranks {returned} of {size} returned, but every rank should raise; raised: {raised}")
        return [answers[rank].error or "" for rank in range(size)]

    @property
    def pids(self) -> set[int]:
        """The processes of the pool, which a test may leave running."""
        return {warm.process.pid for warm in self._processes if warm and warm.process.pid is not None}

    def stop(self) -> None:
        """Kill all processes; the next job starts new ones."""
        for rank in range(MAX_RANKS):
            self._kill(rank)

    def _answers(
        self,
        size: int,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        nodes: int,
        timeout: float,
        *,
        stop_early: bool,
    ) -> dict[int, Answer]:
        if "<" in function.__qualname__:
            raise TypeError(f"{function.__qualname__} cannot be sent to another process: define it at module level")
        payload, port = pickle.dumps((function, arguments)), free_port()
        outer_environment = without_launcher_variables(os.environ)
        try:
            processes = self._start(size)
            start = time.monotonic()
            for rank, process in enumerate(processes):
                environment = {**outer_environment, **torchrun_variables(rank, size, nodes, port)}
                process.send(Job(payload, environment, Path.cwd(), list(sys.path), timeout))
            answers = self._gather(processes, timeout, stop_early=stop_early)
        except BaseException:
            self.stop()  # a late answer must not be read as the answer of the next job
            raise
        for rank, process in enumerate(processes):
            if rank not in answers:
                hung = f"sent no answer in {time.monotonic() - start:.1f} s; its stack:\n{process.stack()}"
                answers[rank] = Answer(error=hung, unusable=True)
        self._clean_up([rank for rank, answer in answers.items() if answer.unusable])
        return answers

    def _clean_up(self, unusable: list[int]) -> None:
        """Let failed ranks destroy their process group, which no rank needs any more; kill those that cannot."""
        processes = {rank: process for rank in unusable if (process := self._processes[rank]) is not None}
        payload, environment = pickle.dumps((destroy_group, ())), without_launcher_variables(os.environ)
        for process in processes.values():
            process.send(Job(payload, environment, Path.cwd(), list(sys.path), CLEANUP_SECONDS))
        ready = self._gather(list(processes.values()), CLEANUP_SECONDS, stop_early=False)
        for index, rank in enumerate(processes):
            if index not in ready or ready[index].error is not None:
                self._kill(rank)

    def _gather(self, processes: list[WarmProcess], timeout: float, *, stop_early: bool) -> dict[int, Answer]:
        """Collect answers as they arrive; with `stop_early`, do not wait for the whole timeout after a failure."""
        answers: dict[int, Answer] = {}
        deadline, kill_failed_at = time.monotonic() + timeout, None
        waiting = {process.pipe: rank for rank, process in enumerate(processes)}
        while waiting and (now := time.monotonic()) < deadline:
            if kill_failed_at is not None and now >= kill_failed_at:
                for rank in [rank for rank, answer in answers.items() if answer.unusable]:
                    self._kill(rank)
                kill_failed_at, deadline = None, min(deadline, now + NOTICE_SECONDS)
                continue
            for pipe in wait(list(waiting), timeout=(kill_failed_at or deadline) - now):
                rank = waiting.pop(pipe)
                answers[rank] = processes[rank].receive()
                if answers[rank].error is not None and stop_early and kill_failed_at is None:
                    kill_failed_at = min(deadline, now + GRACE_SECONDS)
        return answers

    def _start(self, size: int) -> list[WarmProcess]:
        if not 1 <= size <= MAX_RANKS:
            raise ValueError(f"{size} ranks requested, but the pool has 1 to {MAX_RANKS}")
        new: list[WarmProcess] = []
        for rank in range(size):
            if self._processes[rank] is None:
                self._starts += 1
                process = self._processes[rank] = WarmProcess(self.folder / f"stacks-{self._starts}")
                new.append(process)
        ready = self._gather(new, START_SECONDS, stop_early=False)
        if failed := [answer.error for answer in ready.values() if answer.error] or len(ready) < len(new):
            self.stop()
            raise RankFailed({0: f"the warm processes did not start: {failed}"}, size)
        return [process for process in self._processes[:size] if process is not None]

    def _kill(self, rank: int) -> None:
        process, self._processes[rank] = self._processes[rank], None
        if process is not None:
            process.kill()


def torchrun_variables(rank: int, size: int, nodes: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for one rank; none for a world of one."""
    if size == 1:
        return {}
    if size % nodes:
        raise ValueError(f"{size} ranks cannot be divided evenly among {nodes} nodes")
    local = size // nodes
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local),
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """Find a port that no other test and no outgoing connection takes before the caller does.

    The ports of this worker of pytest follow each other, below those that Linux gives to outgoing connections.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    while True:
        port = 12000 + 2000 * worker + next(_PORT_NUMBERS) % 2000
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


_PORT_NUMBERS = count(random.SystemRandom().randrange(2000))  # another pytest may run on this machine
