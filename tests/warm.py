"""Warm ranks for tests: processes that have loaded torch and wait for functions to run as ranks of a small world.

A launch costs about eleven CPU seconds a test, a warm process some milliseconds. The processes hold no process group: a
job finds the variables that torchrun sets and opens `Run` itself, so that the real start and the real end are tested.
After a job its process must be as it was before; one that is not, or gave no answer, is replaced before the next job.
"""

import faulthandler
import gc
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_all_start_methods, get_context, set_start_method
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

MOST = 4
STACKS = signal.SIGRTMIN  # SIGUSR1 and SIGUSR2 are warnings to a run
START_SECONDS = 120.0  # importing torch four times on a busy machine takes its time
# Once a rank has failed, the others first get this long to fail by themselves; then the failed one is ended, as its own
# process would have ended, and they get as long again to notice.
GRACE_SECONDS = 2.0
MEND_SECONDS = 3.0
LAUNCHERS = ("SLURM_", "PMI_", "OMPI_", "TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_", "LOCAL_", "RANK", "WORLD_SIZE")


class RankFailed(AssertionError):
    """Ranks raised, died or hung; `errors` holds for each of them, first failure first, its own traceback or stack."""

    def __init__(self, errors: Mapping[int, str], size: int) -> None:
        self.errors = dict(errors)
        super().__init__("\n".join(f"rank {rank} of {size}: {text}" for rank, text in errors.items()))


@dataclass(frozen=True)
class Job:
    """What one process is to run, a pickled (function, arguments), and the surroundings it finds."""

    work: bytes
    environment: dict[str, str]
    folder: Path
    path: list[str]
    seconds: float


@dataclass(frozen=True)
class Answer:
    """What one process gave back: a pickled value or the text of an error, and whether it can take another job."""

    value: bytes | None = None
    error: str | None = None
    spent: bool = False


def forget_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out what an outer torchrun or SLURM job has set, so that tests start from one rank wherever they run."""
    return {name: value for name, value in environment.items() if not name.startswith(LAUNCHERS)}


def serve(pipe: "Connection[Any, Any]", stacks: Path) -> None:
    """Warm up, then run jobs until the other end of the pipe closes."""
    os.setsid()  # so that whatever a job starts can be ended with this process
    die_with_parent()
    # A spawned process would spawn its data workers too, for seconds each; a rank of torchrun has the platform's way.
    set_start_method(get_all_start_methods()[0], force=True)
    with stacks.open("a") as file:
        faulthandler.register(STACKS, file=file, all_threads=True)
        warm_up()
        gc.freeze()  # else the collection after every job looks at all that torch has loaded: a fifth of a second
        pipe.send_bytes(pickle.dumps(Answer()))
        while True:
            try:
                job: Job = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            # Not by the signal alone: Lightning puts Python's handlers back after a fit, and takes this one away.
            faulthandler.dump_traceback_later(max(1.0, job.seconds - 1), file=file)
            answer = perform(job)
            faulthandler.cancel_dump_traceback_later()
            os.truncate(stacks, 0)  # of a job that was slow, not hung
            pipe.send_bytes(pickle.dumps(answer))


def die_with_parent() -> None:
    """Ask Linux to end this process when pytest is killed, even in the midst of a job."""
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def warm_up() -> None:
    """Pay once for what torch loads late: gloo, and what the first DDP imports."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    model(torch.ones(1, 1)).sum().backward()
    del model  # a wrapper that outlives its group can hang the next one
    gc.collect()
    dist.destroy_process_group()


def perform(job: Job) -> Answer:
    """Run one job and leave the process as it was; what cannot be left so makes the process spent."""
    import torch.distributed as dist

    sys.path[:] = job.path
    with surroundings(job):
        error = None
        try:
            function, arguments = pickle.loads(job.work)
            value = pickle.dumps(function(*arguments))
        except BaseException:  # noqa: BLE001 the parent raises it
            error = traceback.format_exc()
        gc.collect()  # what a job held, such as data workers, goes with it, also where it failed
        if error is not None:
            return Answer(error=error, spent=dist.is_initialized())
        if dist.is_initialized():
            return Answer(error=f"{function.__qualname__} returned with its process group still open", spent=True)
        return Answer(value=value)


def leave_group() -> None:
    """Drop a group that a failed job left open: it costs milliseconds, a new process seconds."""
    import torch.distributed as dist

    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def surroundings(job: Job) -> Iterator[None]:
    """Give a job its variables and folder, errors for warnings and always the same luck; then put all back."""
    import random
    import warnings

    import numpy
    import torch

    before, folder = dict(os.environ), Path.cwd()
    luck = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    dtype, device, threads = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    exact = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        replace_environment(job.environment)
        os.chdir(job.folder)
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("error")
            yield
    finally:
        replace_environment(before)
        os.chdir(folder)
        random.setstate(luck[0])
        numpy.random.set_state(luck[1])
        torch.set_rng_state(luck[2])
        torch.set_default_dtype(dtype)
        # setting a default device puts a mode around every later call, so only undo what was done
        if torch.get_default_device() != device:
            torch.set_default_device(None)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(exact[0], warn_only=exact[1])


def replace_environment(environment: Mapping[str, str]) -> None:
    """Make the variables of this process exactly these."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


class WarmProcess:
    """One process that waits for jobs."""

    def __init__(self, stacks: Path) -> None:
        self.stacks = stacks
        context = get_context("spawn")
        self.pipe, there = context.Pipe()
        # not a daemon, for those may not have the children that a DataLoader starts
        self.process: BaseProcess = context.Process(target=serve, args=(there, stacks), daemon=False)
        self.process.start()
        there.close()

    def take(self, job: Job) -> None:
        """Send a job; a process that has died is noticed when its answer is read."""
        try:
            self.pipe.send_bytes(pickle.dumps(job))
        except BrokenPipeError:
            return

    def answer(self) -> Answer:
        """Read the answer that is waiting in the pipe, or say how the process ended."""
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(timeout=5)
            code = self.process.exitcode
            cause = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
            return Answer(error=f"the process died ({cause})", spent=True)

    def stack(self) -> str:
        """Let the process write down where each of its threads stands."""
        pid = self.process.pid
        if pid is None or not self.process.is_alive():
            return "(no stack: the process is gone)"
        if not self.stacks.read_text():
            os.kill(pid, STACKS)
        deadline = time.monotonic() + 2
        while not (text := self.stacks.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.05)  # the first thread is there: let the others follow
        return self.stacks.read_text() if text else "(no stack: the process did not react to the signal for it)"

    def end(self) -> None:
        """Kill the process with everything it has started."""
        if (pid := self.process.pid) is not None:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                self.process.kill()  # not yet the leader of a group of its own
        self.process.join()
        self.process.close()
        self.pipe.close()


class Ranks:
    """Runs a module-level function on 1 to 4 ranks: `ranks(2, function, *arguments)` gives its results in rank order.

    `nodes` says on how many machines the ranks are to believe themselves, in equal parts.
    """

    def __init__(self, folder: Path, timeout: float = 40.0) -> None:
        self.folder, self.timeout = folder, timeout
        self._processes: list[WarmProcess | None] = [None] * MOST
        self._starts = 0

    def __call__(
        self, size: int, function: Callable[..., Any], *arguments: Any, nodes: int = 1, timeout: float | None = None
    ) -> list[Any]:
        """Run a function that is to succeed everywhere; raise RankFailed where it does not."""
        answers = self._answers(size, function, arguments, nodes, timeout or self.timeout, hurry=True)
        errors = {rank: answer.error for rank, answer in answers.items() if answer.error is not None}
        if errors:
            raise RankFailed(errors, size)
        return [pickle.loads(answers[rank].value or b"") for rank in range(size)]

    def errors(
        self, size: int, function: Callable[..., Any], *arguments: Any, nodes: int = 1, timeout: float | None = None
    ) -> list[str]:
        """Run a function that is to raise on every rank, and give the tracebacks in rank order."""
        answers = self._answers(size, function, arguments, nodes, timeout or self.timeout, hurry=False)
        returned = sorted(rank for rank, answer in answers.items() if answer.error is None)
        if returned:
            raised = {rank: answer.error for rank, answer in answers.items() if answer.error is not None}
            raise AssertionError(f"ranks {returned} of {size} returned where every rank was to raise; raised: {raised}")
        return [answers[rank].error or "" for rank in range(size)]

    @property
    def pids(self) -> set[int]:
        """The processes that wait for jobs now: a test may leave these behind."""
        return {held.process.pid for held in self._processes if held and held.process.pid is not None}

    def stop(self) -> None:
        """End all processes; the next job starts new ones."""
        for rank in range(MOST):
            self._drop(rank)

    def _answers(
        self,
        size: int,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        nodes: int,
        timeout: float,
        *,
        hurry: bool,
    ) -> dict[int, Answer]:
        if "<" in function.__qualname__:
            raise TypeError(f"{function.__qualname__} cannot travel to another process: define it at module level")
        work, port, around = pickle.dumps((function, arguments)), free_port(), forget_launchers(os.environ)
        try:
            processes = self._started(size)
            start = time.monotonic()
            for rank, process in enumerate(processes):
                environment = {**around, **variables(rank, size, nodes, port)}
                process.take(Job(work, environment, Path.cwd(), list(sys.path), timeout))
            answers = self._gather(processes, timeout, hurry=hurry)
        except BaseException:
            self.stop()  # an answer that comes too late must not be taken for that of the next job
            raise
        for rank, process in enumerate(processes):
            if rank not in answers:
                hung = f"gave no answer in {time.monotonic() - start:.1f} s and stands at\n{process.stack()}"
                answers[rank] = Answer(error=hung, spent=True)
        self._mend([rank for rank, answer in answers.items() if answer.spent])
        return answers

    def _mend(self, spent: list[int]) -> None:
        """Let failed ranks drop the group they left open, now that none of them needs it; end those that cannot."""
        held = {rank: process for rank in spent if (process := self._processes[rank]) is not None}
        work = pickle.dumps((leave_group, ()))
        for process in held.values():
            process.take(Job(work, forget_launchers(os.environ), Path.cwd(), list(sys.path), MEND_SECONDS))
        ready = self._gather(list(held.values()), MEND_SECONDS, hurry=False)
        for at, rank in enumerate(held):
            if at not in ready or ready[at].error is not None:
                self._drop(rank)

    def _gather(self, processes: list[WarmProcess], timeout: float, *, hurry: bool) -> dict[int, Answer]:
        """Collect answers as they come; after a failure in a hurry, do not wait the whole time for the rest."""
        answers: dict[int, Answer] = {}
        deadline, release = time.monotonic() + timeout, None
        waiting = {process.pipe: rank for rank, process in enumerate(processes)}
        while waiting and (now := time.monotonic()) < deadline:
            if release is not None and now >= release:
                for rank in [rank for rank, answer in answers.items() if answer.spent]:
                    self._drop(rank)
                release, deadline = None, min(deadline, now + GRACE_SECONDS)
                continue
            for pipe in wait(list(waiting), timeout=(release or deadline) - now):
                rank = waiting.pop(pipe)
                answers[rank] = processes[rank].answer()
                if answers[rank].error is not None and hurry and release is None:
                    release = min(deadline, now + GRACE_SECONDS)
        return answers

    def _started(self, size: int) -> list[WarmProcess]:
        if not 1 <= size <= MOST:
            raise ValueError(f"{size} ranks were asked for: there are 1 to {MOST}")
        new: list[WarmProcess] = []
        for rank in range(size):
            if self._processes[rank] is None:
                self._starts += 1
                held = self._processes[rank] = WarmProcess(self.folder / f"stacks-{self._starts}")
                new.append(held)
        ready = self._gather(new, START_SECONDS, hurry=False)
        if failed := [answer.error for answer in ready.values() if answer.error] or len(ready) < len(new):
            self.stop()
            raise RankFailed({0: f"the warm processes did not start: {failed}"}, size)
        return [held for held in self._processes[:size] if held is not None]

    def _drop(self, rank: int) -> None:
        held, self._processes[rank] = self._processes[rank], None
        if held is not None:
            held.end()


def variables(rank: int, size: int, nodes: int, port: int) -> dict[str, str]:
    """Give what torchrun would set for one rank; nothing at all for a world of one."""
    if size == 1:
        return {}
    if size % nodes:
        raise ValueError(f"{size} ranks do not spread evenly over {nodes} nodes")
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
    """Find a port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
