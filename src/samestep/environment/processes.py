"""Process trees: how the launcher ends everything it started, and how a rank notices that its launcher is gone."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from samestep.errors import LaunchError
from samestep.messages import read_integer

LAUNCHER: Final = "SAMESTEP_LAUNCHER"
"""The variable that `samestep run` sets for its ranks: its process id and PID namespace."""
OPEN_RUN: Final = "SAMESTEP_OPEN_RUN"
"""The variable that a rank sets for its children while its run is open."""

_PR_SET_CHILD_SUBREAPER = 36
_KILL_ROUNDS = 3
# Variables that torchrun and srun set for their ranks. The nearest ancestor without such a variable is the launcher;
# processes in between, such as a shell, inherit it.
_RANK_VARIABLES: Final = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID")
_USUAL_FILES: Final = 4096
_GLOO_SOCKETS: Final = 3  # that a rank opens to every other rank
_FILES_OF_RANK: Final = 34  # besides its connections to other ranks
_FILES_OF_LAUNCHER, _FILES_PER_RANK = 32, 8  # its log files and pipes, its store and the ranks that use it
_SCRIPT_FILES: Final = 1024  # for files that the script opens itself, such as those of its dataset
_POLL_SECONDS: Final = 0.5
_START_TOLERANCE: Final = 5.0  # seconds: boot time and start time are not read at the same moment
_NOTICE_SECONDS: Final = 2.0  # that ranks get to notice that their launcher is gone, and to say so
_GUARD_SECONDS: Final = 5.0  # that the guard gets to end
# Waits on stdin until the launcher closes it or has died. A byte says that the launcher has ended its processes itself.
_GUARD_CODE: Final = """
import os, signal, sys, time
mark, seconds = sys.argv[1].encode(), float(sys.argv[2])
found = [] if sys.stdin.buffer.read(1) else [os.getpid()]
while found:
    time.sleep(seconds)
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        if int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\\0"):
                    os.kill(int(name), signal.SIGKILL)
                    found.append(name)
        except OSError:  # it has ended, or belongs to another user
            continue
"""
_STDERR: Final = 2  # not sys.stderr, whose lock may be held by a thread that prints


def check_current_folder() -> None:
    """Raise if the current folder was deleted, in which MKL ends the process when torch is imported."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise LaunchError("the current folder does not exist any more: change to another one with `cd`") from error


def files_of_rank(size: int, hosts_store: bool = False) -> int:
    """The most files that one of `size` ranks opens, sockets included.

    gloo connects every rank with every other one, once for each process group: the default group and those of samestep
    for small values and for training (with NCCL, this one has its own sockets).

    >>> files_of_rank(8), files_of_rank(1024)
    (58, 3106)
    """
    return _FILES_OF_RANK + (4 if hosts_store else _GLOO_SOCKETS) * size


def files_of_launcher(ranks: int) -> int:
    """The most files that `samestep run` opens for this number of ranks on its node, sockets included."""
    return _FILES_OF_LAUNCHER + _FILES_PER_RANK * ranks


def files_of_job(ranks: int, ranks_of_node: int | None = None) -> int:
    """The most files that a process of a job opens: its launcher, or the rank that hosts the store.

    >>> files_of_job(1), files_of_job(2), files_of_job(1024, 8)
    (40, 48, 4130)
    """
    of_node = ranks if ranks_of_node is None else ranks_of_node
    return max(files_of_rank(ranks, hosts_store=True), files_of_launcher(of_node))


def most_ranks(limit: int) -> int:
    """How many ranks `samestep run` can start on one node, if a process may open `limit` files.

    >>> most_ranks(39), most_ranks(40), most_ranks(47), most_ranks(48)
    (0, 1, 1, 2)
    """
    return max(0, (limit - _FILES_OF_LAUNCHER) // _FILES_PER_RANK)


def open_files_limit() -> int | None:
    """How many files a process may open after it has raised its own limit; None for any number."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def allow_open_files(needed: int) -> str:
    """Let this process open as many files as it needs, sockets included; returns why it may not, or an empty text."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ""
    highest = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    if highest >= needed:
        limit = min(highest, max(needed + _SCRIPT_FILES, _USUAL_FILES))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return ""
    return f"this process may open {hard} files and needs up to {needed}, sockets included: run `ulimit -n 4096` before"


def adopt_orphans(enabled: bool) -> None:
    """Make this process the parent of every descendant whose own parent dies, so that none can escape.

    Linux only. Elsewhere a data worker whose rank was killed is no longer found.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(enabled), 0, 0, 0)


def running(pids: Collection[int]) -> set[int]:
    """Those of these descendants that have not ended."""
    return {process.pid for process in _running_descendants() if process.pid in pids}


def exit_code(pid: int) -> int | None:
    """The exit code of a child, negative for a signal; None while it runs, and 0 if its exit status was collected.

    Its exit status is left for the parent to collect. Linux only: elsewhere the result is None.
    """
    ended = None
    try:
        if sys.platform == "linux":
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def terminate_descendants(exclude: Collection[int], timeout: float) -> list[psutil.Process]:
    """Send SIGTERM to every descendant not in `exclude`, wait `timeout` seconds, then kill what is left; returns them.

    A process that is stuck in the kernel, for example on a hung network drive, survives SIGKILL; the call gives up on
    it after a few seconds. A process of another user, for example of `sudo`, survives too; the call does not wait for
    it. `process_is_gone` tells which are left.
    """
    found = kill_descendants(exclude, signal.SIGTERM)
    psutil.wait_procs(filter(_may_signal, found), timeout=timeout)
    for _ in range(_KILL_ROUNDS):  # a process may have started another one just before it ended
        processes = [process for process in kill_descendants(exclude) if _may_signal(process)]
        if not processes:
            break
        psutil.wait_procs(processes, timeout=1.0)
    # Collect the exit status of ended children, adopted ones too: the init process of a container may not do it.
    for child in psutil.Process().children():
        if child.pid not in exclude and process_is_gone(child):
            with suppress(ChildProcessError):  # collected already
                os.waitpid(child.pid, os.WNOHANG)
    return found


def kill_descendants(exclude: Collection[int] = (), number: signal.Signals = signal.SIGKILL) -> list[psutil.Process]:
    """Send SIGKILL, or another signal, to every descendant not in `exclude`, without waiting; returns them."""
    processes = _running_descendants(exclude)
    send_signal([process.pid for process in processes], number)
    return processes


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes, some of which may have ended; SIGTERM also lets a stopped process continue.

    Processes of other users are skipped.
    """
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
            if number == signal.SIGTERM:
                os.kill(pid, signal.SIGCONT)


def _may_signal(process: psutil.Process) -> bool:
    try:
        os.kill(process.pid, 0)
    except PermissionError:
        return False
    except ProcessLookupError:  # it has ended
        pass
    return True


def _running_descendants(exclude: Collection[int] = ()) -> list[psutil.Process]:
    descendants = psutil.Process().children(recursive=True)
    return [process for process in descendants if process.pid not in exclude and not process_is_gone(process)]


def process_is_gone(process: psutil.Process | int) -> bool:
    """Whether a process has ended, including one whose exit status was not collected; a bare pid counts as gone."""
    if isinstance(process, int):
        return True
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def seconds_from_boot(pid: int) -> float:
    """When a process started, in seconds since boot: the time of day changes when the clock is set.

    Raises psutil.NoSuchProcess if there is no such process.
    """
    boot = psutil.boot_time()  # first: older versions of psutil add the boot time that they have read last
    return psutil.Process(pid).create_time() - boot


def process_runs(pid: int, started: float) -> bool:
    """Whether the process that started `started` seconds after boot runs: another one may have its id by now."""
    try:
        is_same = abs(seconds_from_boot(pid) - started) <= _START_TOLERANCE
        return is_same and not process_is_gone(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


class OrphanGuard:
    """A small process that outlives a launcher that is killed, and then kills what the launcher has started.

    Ranks watch their launcher by themselves, but native code may hold their GIL, and their children do not watch it.
    The guard finds all of them by the launcher's variable in their environment. Linux only.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, in a separate session, so that a signal to the launcher's group does not end it."""
        if sys.platform == "linux":
            mark = f"{LAUNCHER}={own_variable()}"
            # An earlier launch of this process, or a launcher whose rank this process is, has set the variable.
            environ = {name: value for name, value in os.environ.items() if name != LAUNCHER}
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _GUARD_CODE, mark, str(_NOTICE_SECONDS)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", env=environ,
                start_new_session=True,
            )  # fmt: skip

    def stop(self) -> None:
        """End the process: the launcher has ended all others."""
        if self._process is not None:
            try:
                self._process.communicate(b".", timeout=_GUARD_SECONDS)
            except BrokenPipeError:  # someone has killed it
                pass
            except subprocess.TimeoutExpired:  # someone has stopped it
                self._process.kill()
                self._process.communicate()
            self._process = None


class LauncherWatch:
    """A thread that ends this rank and its descendants if the launcher is gone, since nothing would restart or stop it.

    The thread needs the GIL: native code that holds it for minutes delays the end by as long, except under `samestep
    run`, whose OrphanGuard kills the rank.
    """

    def __init__(self, rank: int, environ: Mapping[str, str]) -> None:
        self._rank, self._environ = rank, environ
        self.launched = False  # whether this rank has a launcher, which kills ranks that do not end
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start watching if there is a launcher. If it is gone already, this process ends at once."""
        if (launcher := find_launcher(self._environ)) is not None:
            self.launched = True
            threading.Thread(target=self._watch, args=[launcher], name="samestep launcher watch", daemon=True).start()

    def stop(self) -> None:
        """Stop watching: this process may outlive its launcher."""
        self._stopped.set()

    def _watch(self, launcher: psutil.Process | int) -> None:
        while not process_is_gone(launcher):
            if self._stopped.wait(_POLL_SECONDS):
                return
        pid = launcher if isinstance(launcher, int) else launcher.pid
        text = (
            f"samestep: rank {self._rank} exits because its launcher (process {pid}) is gone and cannot restart it or "
            "report a failure; the last checkpoint is intact: start the job again to resume\n"
        )
        with suppress(OSError):  # the reader of this rank's stderr may be gone as well
            os.write(_STDERR, text.encode())
        kill_descendants()
        os._exit(1)  # exit handlers could wait for other ranks


def end_with_parent(pid: int) -> None:
    """Send SIGTERM to this launcher once its parent, which waits for the result, has ended: a thread watches it."""

    def watch() -> None:
        while os.getppid() == pid:
            time.sleep(_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="samestep parent watch", daemon=True).start()


def launcher_variable() -> dict[str, str]:
    """The variable by which the ranks of this process recognize it as their launcher."""
    return {LAUNCHER: own_variable()}


def own_variable() -> str:
    """This process, as the variables of its children name it: its process id and PID namespace."""
    return f"{os.getpid()} {process_namespace()}"


def open_run_variable(rank: int, size: int, port: int) -> str:
    """The value of OPEN_RUN: this process, its rank, the world size and the port."""
    return f"{own_variable()} {rank}/{size}/{port}"


def find_parent_rank(environ: Mapping[str, str], rank: int, size: int, port: int) -> int | None:
    """The process id of the ancestor that is this rank of the same world and has an open run; None if there is none.

    A launcher that a rank has started sets other values for its own ranks.
    """
    pid, _, rest = environ.get(OPEN_RUN, "").partition(" ")
    number = read_integer(pid)
    if number is None or rest != open_run_variable(rank, size, port).partition(" ")[2]:
        return None
    return number if number in {process.pid for process in psutil.Process().parents()} else None


def find_launcher(environ: Mapping[str, str]) -> psutil.Process | int | None:
    """The process that started this rank, its bare pid if it is gone already, or None if it is unknown.

    A process that no launcher started, or whose variables were set by hand, has none: its parent is a shell, which may
    exit.
    """
    ancestors = psutil.Process().parents()
    pid, _, namespace = environ.get(LAUNCHER, "").partition(" ")
    number = read_integer(pid)
    if number is not None and namespace == process_namespace():  # in another container the pid means another process
        return next((process for process in ancestors if process.pid == number), number)
    name = next((name for name in _RANK_VARIABLES if name in environ), None)
    if name is None:
        return None
    return next((process for process in ancestors if _variable(process, name) != environ[name]), None)


def process_namespace() -> str:
    """The PID namespace of this process; empty if the system has none."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _variable(process: psutil.Process, name: str) -> str | None:
    try:
        return process.environ().get(name)
    except (psutil.Error, OSError):  # another user's process, such as slurmd
        return None
