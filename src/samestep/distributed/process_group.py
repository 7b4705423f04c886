"""The store and the process groups of a run: rendezvous of all ranks, then gloo or NCCL, and a watch for hangs."""

import atexit
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import lru_cache
from hashlib import sha256
from itertools import chain
from types import TracebackType
from typing import Final
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from samestep.distributed.rank_status import ORDER_RULE, running_line
from samestep.environment.network import ANSWER_SECONDS, accepts_connections, connect_unless_silent, find_route_problem
from samestep.environment.processes import allow_open_files, files_of_rank
from samestep.environment.world import World, read_environ
from samestep.errors import CommunicationError, RankMissing, WorldError
from samestep.hang import rank_probe
from samestep.messages import format_list
from samestep.torch_private import collective_counts, nccl_waits, small_nccl_options

_RECORDER_SIZES: Final = (
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
)  # of newer and older versions of torch
_NCCL_AND_GLOO: Final = "cpu:gloo,cuda:nccl"
_FIRST_PAUSE: Final = 0.002
_LOOK_SECONDS: Final = 1.0  # how often a rank counts its collectives, without a message to the store
_OFTEN_SECONDS, _REPORT_SECONDS = 30.0, 10.0  # how long a rank that may hang reports often, and how often afterwards
_MARGIN_SECONDS: Final = 4.0  # after the timeout: gloo raises by itself, and NCCL aborts the process later
_READ_SECONDS: Final = 5.0  # that the rank which hosts the store gives the others to read the outcome
_SHOWN: Final = 8
_LONGEST_PAUSE: Final = 0.25  # a thousand ranks that poll for the last one must not overload the store


def connect_store(world: World, timeout: float) -> dist.Store:
    """The key-value store of all ranks, hosted by torchrun's agent or by rank 0."""
    hosts = world.is_main and not world.agent_store
    _allow_connections(world, hosts)
    if problem := find_route_problem(world.address, world.port, min(timeout, ANSWER_SECONDS)):
        raise WorldError(
            f"rank {world.rank} cannot reach rank 0: {problem}; set MASTER_ADDR to an address of rank 0's machine that "
            "every rank can reach, 127.0.0.1 if all ranks run on one machine"
        )
    try:
        return _open_store(world.address, world.port, hosts, timeout)
    except RuntimeError as error:
        what = (
            f"rank 0 cannot listen on {world.address}:{world.port}: set MASTER_PORT to a free port"
            if hosts
            else f"rank {world.rank} cannot connect to rank 0 at {world.address}:{world.port} within {timeout:g} s: "
            "check that rank 0 has started, that MASTER_ADDR and MASTER_PORT are right, and that no firewall blocks "
            "the port"
        )
        raise WorldError(f"{what} ({str(error).splitlines()[0]})") from error


def _allow_connections(world: World, hosts_store: bool) -> None:
    if problem := allow_open_files(files_of_rank(world.size, hosts_store)):
        raise WorldError(f"rank {world.rank} cannot connect {world.size} ranks: {problem}")


@lru_cache(maxsize=1)
def _open_store(address: str, port: int, hosts: bool, timeout: float) -> dist.Store:
    """Cached: the store outlives a run, since peers may still read from it and the next run of this process uses it."""
    left = timeout if hosts else max(1.0, timeout - _wait_for_listener(address, port, timeout))

    def connect() -> dist.TCPStore:
        return dist.TCPStore(
            address, port, is_master=hosts, timeout=timedelta(seconds=left), wait_for_workers=False, multi_tenant=True
        )

    cause: RuntimeError | None = None
    try:
        store = connect() if hosts else connect_unless_silent(connect, address, port, min(timeout, ANSWER_SECONDS))
    except RuntimeError as error:
        if hosts or not accepts_connections(address, port):
            raise
        store, cause = None, error
    if store is None:
        answer = f"torch says: {str(cause).splitlines()[0]}" if cause else "no answer"
        raise WorldError(
            f"the process that listens at {address}:{port} is not rank 0 of this job, since it does not answer like a "
            f"store of torch ({answer}): set MASTER_PORT to a port that no other service uses, the same on every rank"
        ) from cause
    store.set_timeout(timedelta(seconds=timeout))
    return store


def _wait_for_listener(address: str, port: int, timeout: float) -> float:
    """Poll until the port accepts connections; returns the seconds waited.

    TCPStore sleeps a full second after a refused connection. Any other error is left for TCPStore to report.
    """
    since, pause = time.monotonic(), _FIRST_PAUSE
    while (waited := time.monotonic() - since) < timeout:
        try:
            socket.create_connection((address, port), timeout=timeout - waited).close()
            break
        except ConnectionRefusedError:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        except OSError:
            break
    return waited


def rendezvous(store: dist.Store, rank: int, size: int, timeout: float) -> str:
    """Wait for all ranks; returns a name for this generation, the same on all of them and never used before.

    A store may outlive the processes that used it, and no launcher numbers the generations: of two nodes, the one whose
    rank was killed counts a restart and the other only sees a membership change. So every rank posts a random token,
    rank 0 publishes a membership list of the tokens it finds, and the generation is complete once every rank has found
    its token in the list and confirmed it. The token of a dead process is never confirmed. When its successor posts a
    new token, rank 0 publishes a new list.
    """
    board = dist.PrefixStore(f"samestep/rendezvous/{size}", store)
    try:
        return _agree_on_generation(board, rank, size, timeout)
    except RuntimeError as error:
        raise WorldError(
            f"rank {rank} waited for {size} ranks and lost the store of rank 0 ({str(error).splitlines()[0]}): rank 0 "
            "has exited, so look for its last lines, and check that WORLD_SIZE is the same on every rank"
        ) from error


def _agree_on_generation(board: dist.Store, rank: int, size: int, timeout: float) -> str:
    token = uuid4().hex
    board.set(f"token/{rank}", token)
    since, pause, members, confirmed = time.monotonic(), _FIRST_PAUSE, b"", ""
    while True:
        if rank == 0:
            members = _publish_membership(board, size, members)
        if board.check([f"generation/{token}"]):
            name = board.get(f"generation/{token}").decode()
            confirmations = board.add(f"confirmed/{name}", int(name != confirmed))
            if confirmations == size:
                return name
            confirmed = name
        if time.monotonic() - since > timeout:
            raise _rendezvous_timeout(board, rank, size, timeout)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _publish_membership(board: dist.Store, size: int, before: bytes) -> bytes:
    """On rank 0: if the tokens have changed, publish the name of the generation to each of them."""
    keys = [f"token/{rank}" for rank in range(size)]
    if not board.check(keys):
        return before
    tokens = board.multi_get(keys)
    members = b"".join(tokens)
    if members != before:
        name = sha256(members).hexdigest()[:32]
        for token in tokens:
            board.set(f"generation/{token.decode()}", name)
    return members


def _rendezvous_timeout(board: dist.Store, rank: int, size: int, timeout: float) -> WorldError:
    absent = [each for each in range(size) if not board.check([f"token/{each}"])]
    shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    who = f"rank(s) {shown} did not connect" if absent else "one of them connected and has exited"
    return WorldError(
        f"rank {rank} waited {timeout:g} s for {size} ranks, and {who}: look for their last lines, check that "
        "WORLD_SIZE processes were started, or raise the timeout with Run(start_timeout=...)"
    )


def check_existing_group(world: World) -> None:
    """Raise if the script has created a process group that a run of this world cannot use, or cannot add others to."""
    if not dist.is_initialized():
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (world.rank, world.size):
        raise WorldError(
            f"the script created a process group in which this process is rank {rank} of {size}, and the environment "
            f"variables say rank {world.rank} of {world.size}: remove dist.init_process_group and mp.spawn, and start "
            f"the ranks with `samestep run --nproc-per-node {size} train.py`"
        )
    if size > 1:
        _allow_connections(world, world.is_main)


def store_beside_group(world: World, group: dist.ProcessGroup, timeout: float) -> dist.Store:
    """A store for ranks whose script created a process group: rank 0 hosts it and sends the port through `group`."""
    hosted, port, problem = None, 0, ""
    if world.is_main:
        try:
            hosted = _store_at(world.address, 0, True, timeout)
            port = hosted.port
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
    message: list[tuple[int, str]] = [(port, problem)]
    dist.broadcast_object_list(message, src=0, group=group, device=torch.device("cpu"))
    port, problem = message[0]
    if problem:
        raise WorldError(
            f"rank 0 cannot open a store at {world.address}, on a free port, for a Run in the process group of the "
            f"script: set MASTER_ADDR to an address of rank 0's machine that every rank can reach ({problem})"
        )
    try:
        return hosted or _store_at(world.address, port, False, timeout)
    except RuntimeError as error:
        raise WorldError(
            f"rank {world.rank} cannot connect to the store of rank 0 at {world.address}:{port} within {timeout:g} s: "
            "a Run in the process group of the script uses a free port of rank 0, so check that MASTER_ADDR is right "
            f"and that no firewall blocks its ports, or remove dist.init_process_group ({str(error).splitlines()[0]})"
        ) from error


def _store_at(address: str, port: int, hosts: bool, timeout: float) -> dist.TCPStore:
    seconds = timedelta(seconds=timeout)
    return dist.TCPStore(address, port, is_master=hosts, timeout=seconds, wait_for_workers=False)


def init_process_group(store: dist.Store, world: World, backend: str, device: torch.device, timeout: float) -> None:
    """Create the default process group: NCCL for CUDA tensors and gloo for CPU tensors, or gloo for both."""
    dist.init_process_group(
        _NCCL_AND_GLOO if backend == "nccl" else backend,
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout),
        device_id=device if backend == "nccl" else None,
    )


def backends_to_add(existing: str | None, backend: str) -> str | None:
    """The backends of a group for tensors of training; None if the default group serves.

    With gloo, the default group is left to the script. With NCCL it serves, since a second one takes memory of the GPU,
    unless the script created it (`existing`) without a backend for CPU tensors or without NCCL.

    >>> backends_to_add(None, "nccl"), backends_to_add("cuda:nccl", "nccl"), backends_to_add(None, "gloo")
    (None, 'cpu:gloo,cuda:nccl', 'gloo')
    """
    if backend != "nccl":
        return backend
    serves = existing is None or ("cpu:" in existing and "cuda:nccl" in existing)
    return None if serves else _NCCL_AND_GLOO


def new_group(backends: str, timeout: float) -> dist.ProcessGroup:
    """Another group of all ranks; a collective of all ranks.

    In one group, a collective of samestep on one rank could match another one of the script on another rank, and gloo
    aborts a process that receives more bytes than it has allocated.
    """
    group = dist.new_group(backend=backends, timeout=timedelta(seconds=timeout))
    assert isinstance(group, dist.ProcessGroup), "all ranks are members"
    return group


def new_small_group(timeout: float) -> dist.ProcessGroup:
    """Another group of all ranks over NCCL, for scalars: one block of threads takes little memory of the GPU."""
    limit = timedelta(seconds=timeout)
    group = dist.new_group(backend="nccl", timeout=limit, pg_options=small_nccl_options(limit))
    assert isinstance(group, dist.ProcessGroup), "all ranks are members"
    return group


@dataclass(frozen=True)
class ProgressReport:
    """What a rank reports that has called no collective for longer than a timeout."""

    rank: int
    counts: Mapping[str, Sequence[float]]  # of each process group: the collectives it has called, and its timeout
    idle: float  # seconds since it called the last one
    waits: bool | None  # whether a collective that it has called is not complete; None if that is not known
    line: str  # the line of the script that it runs


@dataclass(frozen=True)
class Hang:
    """Which ranks wait, and for whom."""

    waiting: list[int]
    absent: dict[int, str]  # the line of each rank that has not called the collective that the others wait in
    seconds: float
    is_certain: bool = True  # whether torch says that a rank waits; otherwise only the counts differ

    def error(self, own: ProgressReport) -> CommunicationError:
        """The error of one rank: of a rank that the others wait for, or of one that waits."""
        if own.rank in self.absent:
            return CommunicationError(
                f"rank {own.rank} has not called a collective in which {len(self.waiting)} other rank(s) have waited "
                f"for {self.seconds:.0f} s: it is at {own.line}. If it is still progressing, raise the timeout with "
                f"Run(step_timeout=...); otherwise {ORDER_RULE}"
            )
        return RankMissing(
            f"rank {own.rank} has waited at {own.line} for {self.seconds:.0f} s, because {len(self.absent)} rank(s) "
            f"have not called the same collective: {self._absent_lines()}"
        )

    def notice(self) -> str:
        """What to print if it is not certain."""
        return (
            f"samestep: the run may hang: rank(s) {format_list(self.waiting, _SHOWN)} have called more "
            f"collectives over NCCL than others, and the last one {self.seconds:.0f} s ago: {self._absent_lines()}. "
            "Without its flight recorder torch does not say whether they wait, so NCCL ends the run if they do: set "
            "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 so that samestep ends it with the cause"
        )

    def _absent_lines(self) -> str:
        return "; ".join(f"rank {rank} is at {line}" for rank, line in sorted(self.absent.items())[:_SHOWN])


def find_hang(reports: Sequence[ProgressReport]) -> Hang | None:
    """Who waits for whom: ranks that have called more collectives of a group than others, for longer than its timeout.

    All ranks of a group must call the same number of them. A rank that others wait for is behind in a group and ahead
    in none; one that is ahead waits itself. If all have called the same number, the network is down or they compute.
    Point-to-point calls between some ranks of a group count too, so that the counts of a healthy run may differ for
    good: a hang is certain only if torch says that a rank which is ahead waits.
    """
    lowest = dict[str, float]()
    for name, (count, _) in chain.from_iterable(report.counts.items() for report in reports):
        lowest[name] = min(count, lowest.get(name, count))
    waiting, called, absent, is_certain = dict[int, float](), dict[str, float](), dict[int, str](), False
    for report in (each for each in reports if each.waits is not False):
        ahead = {name: value for name, value in report.counts.items() if value[0] > lowest[name]}
        if ahead:
            waiting[report.rank] = report.idle
        for name, (count, timeout) in ahead.items():
            if report.idle > timeout + _MARGIN_SECONDS:
                called[name] = max(count, called.get(name, 0))
                is_certain = is_certain or report.waits is True
    for report in reports:
        is_ahead = any(count > lowest[name] for name, (count, _) in report.counts.items())
        if not is_ahead and any(count < called.get(name, 0) for name, (count, _) in report.counts.items()):
            absent[report.rank] = report.line
    return Hang(sorted(waiting), absent, max(waiting.values()), is_certain) if absent else None


class HangWatch:
    """A thread of a rank that explains and ends a hang over NCCL.

    gloo raises in a rank that waits too long. With NCCL the script of that rank waits for its GPU, cannot be
    interrupted, and NCCL aborts the process without the name of the other rank. So ranks that have called no collective
    for longer than the timeout report what they do, one of them finds out who waits for whom, and all of them end. If
    the hang is not certain, this one and rank 0, whose output the launcher shows, print what it has found, and NCCL
    ends the run.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        backend: str = "nccl",
        waits: Callable[[], bool | None] = nccl_waits,
        close_files: Callable[[], object] = lambda: None,
    ) -> None:
        self._store, self._rank, self._size, self._backend, self._waits = store, rank, size, backend, waits
        self._close_files = close_files  # of the run, before the process ends without it
        self._has_notified = False  # of a hang that is not certain, since the last collective
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="samestep hang watch", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # a thread inside the store aborts the process when the interpreter ends

    def stop(self) -> None:
        """End the thread; the rank takes part in no hang from now on."""
        if self._ended.is_set():
            return
        atexit.unregister(self.stop)
        self._ended.set()
        self._thread.join(_READ_SECONDS)
        with suppress(RuntimeError):  # the rank that hosts the store has exited
            self._withdraw()

    def _watch(self) -> None:
        counts, since, reported = collective_counts(self._backend), time.monotonic(), 0.0
        with suppress(RuntimeError):  # of the store, when the rank that hosts it has exited
            while not self._ended.wait(_LOOK_SECONDS):
                now, before, counts = time.monotonic(), counts, collective_counts(self._backend)
                if counts != before:
                    since = now
                    if reported:
                        self._withdraw()
                        reported = 0.0
                shortest = min((timeout for _, timeout in counts.values()), default=float("inf"))
                pause = 0.0 if now - since < shortest + _OFTEN_SECONDS else _REPORT_SECONDS
                if now - since > shortest and now - reported > pause:
                    reported = now
                    self._report(ProgressReport(self._rank, counts, now - since, self._waits(), running_line()))

    def _withdraw(self) -> None:
        """Remove what this rank has reported: it has called a collective, or ends."""
        self._has_notified = False
        self._store.set(f"hang/report/{self._rank}", "")  # not deleted: the reader would wait for a key that is missing
        if self._store.compare_set("hang/reader", str(self._rank), "") == b"":
            self._store.set("hang/notice", "")

    def _report(self, own: ProgressReport) -> None:
        """Report to the others; end this rank if they find a hang, or if this rank does in their place."""
        self._store.set(f"hang/report/{self._rank}", json.dumps(asdict(own)))
        reader = self._store.compare_set("hang/reader", "", str(self._rank)).decode()
        if reader == str(self._rank) and not self._store.check(["hang"]) and (hang := find_hang(self._read_reports())):
            if hang.is_certain:
                self._store.set("hang", json.dumps(asdict(hang)))
            else:
                self._store.set("hang/notice", hang.notice())
        if not self._has_notified and (self._rank == 0 or reader == str(self._rank)):
            self._print_notice()
        if self._store.check(["hang"]):
            found = json.loads(self._store.get("hang"))
            hang = Hang(found["waiting"], {int(rank): line for rank, line in found["absent"].items()}, found["seconds"])
            if not self._ended.is_set():
                self._end(hang.error(own), len(hang.waiting) + len(hang.absent))

    def _print_notice(self) -> None:
        if self._store.check(["hang/notice"]) and (notice := self._store.get("hang/notice").decode()):
            self._has_notified = True
            with suppress(OSError, ValueError):  # stderr is closed, or a full disk
                print(notice, file=sys.stderr, flush=True)

    def _read_reports(self) -> list[ProgressReport]:
        keys = [f"hang/report/{rank}" for rank in range(self._size)]
        keys = keys if self._store.check(keys) else [key for key in keys if self._store.check([key])]
        return [ProgressReport(**json.loads(text)) for text in self._store.multi_get(keys) if text]

    def _end(self, error: CommunicationError, readers: int) -> None:
        """Write the error as if the script had raised it, and end the process: its main thread may wait forever."""
        try:
            raise error.with_traceback(_main_thread_stack())
        except CommunicationError as raised:
            with suppress(OSError, ValueError):  # stderr is closed, or a full disk
                traceback.print_exc()
                sys.stderr.flush()
            with suppress(OSError):
                get_error_handler().record_exception(raised)  # for the launcher, which shows it last
        closing = threading.Thread(target=self._close, name="samestep end of a hang", daemon=True)
        closing.start()  # it may wait for a lock that the main thread holds
        try:
            deadline, have_read = time.monotonic() + _READ_SECONDS, self._store.add("hang/readers", 1)
            while self._rank == 0 and have_read < readers and time.monotonic() < deadline:  # it may host the store
                time.sleep(_LONGEST_PAUSE)
                have_read = self._store.add("hang/readers", 0)
        finally:
            closing.join(_READ_SECONDS)
            os._exit(1)

    def _close(self) -> None:
        with suppress(OSError, ValueError):  # stdout is closed, or a full disk
            sys.stdout.flush()
        self._close_files()


def watch_hangs(
    backend: str, store: dist.Store, rank: int, size: int, close_files: Callable[[], object]
) -> Callable[[], object]:
    """Let this rank be ended because of a hang, after `close_files`; returns a function that stops what was started.

    `samestep run` watches its ranks from outside, by torch's flight recorder. Without it, and under torchrun or srun,
    ranks over NCCL watch each other.
    """
    stops: list[Callable[[], object]] = []
    if rank_probe.is_running():
        stops.append(rank_probe.at_end(close_files))
    is_recording = "0" not in map(read_environ().get, _RECORDER_SIZES)
    if backend == "nccl" and not (rank_probe.is_running() and is_recording):
        stops.append(HangWatch(store, rank, size, close_files=close_files).stop)
    return lambda: [stop() for stop in stops]


def _main_thread_stack() -> TracebackType | None:
    """The stack of the main thread, as the traceback of an exception that its innermost line had raised."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]  # the only way
    stack = None
    while frame is not None:
        stack = TracebackType(stack, frame, max(frame.f_lasti, 0), frame.f_lineno or 1)
        frame = frame.f_back
    return stack
