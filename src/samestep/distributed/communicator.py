"""The communicator: small exchanges between all ranks, which name the rank that is missing instead of hanging."""

import pickle
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from samestep.distributed.process_group import (
    backends_to_add,
    check_existing_group,
    connect_store,
    init_process_group,
    new_group,
    new_small_group,
    rendezvous,
    store_beside_group,
    watch_hangs,
)
from samestep.distributed.rank_status import (
    ORDER_RULE,
    RankStatus,
    StatusBoard,
    call_site,
    is_timeout,
    poll_pause,
    running_line,
)
from samestep.environment.world import World
from samestep.errors import CommunicationError
from samestep.torch_private import set_group_timeout, wait_until_released

T = TypeVar("T")
Vector = list[float] | torch.Tensor
_FRAME_WORDS = 256  # every exchange has this size in 8-byte words, so that different collectives match and are detected
_LABEL_WORDS = 8  # the first 64 bytes name the collective and the line that called it
_CAPACITY = _FRAME_WORDS - _LABEL_WORDS - 1  # values per frame
_CHECK_SECONDS = 1.0  # how long a rank waits before it reads the status of its peers
_MAX_CHECK_SECONDS = 5.0  # after a long wait: all ranks share one store
_REPORTS_PER_SECOND = 100  # that a rank reads which waits in `find_differences`
_MAX_POLL_SECONDS = 0.25  # a rank that no longer waits must post so before a peer has checked twice


class Communicator:
    """Connects all ranks of a run. With one rank nothing is connected and every exchange returns its own values.

    Small values travel in frames of one fixed size on the CPU. Two ranks that call different collectives therefore
    match each other's frame, see the label in it, and both raise at once instead of hanging or mixing values.
    """

    once_of_process: ClassVar[str | None] = None
    """The `run.once` that this process runs now, in any of its runs."""

    def __init__(self, world: World, start_timeout: float, step_timeout: float) -> None:
        self.world = world
        self.backend = "none"
        """What connects the ranks: "gloo" or "nccl", once it is open; "none" for a single rank."""
        self.timeout = self.start_timeout = start_timeout
        self.once_calls = 0  # the number of `run.once` calls so far, the same on every rank
        self.once_keys: list[str] = []  # what this rank posted at the last of them
        self._step_timeout = step_timeout
        self._store: dist.Store | None = None
        self._board: StatusBoard | None = None
        self._stop_hang_watch: Callable[[], object] = lambda: None
        self.control_group: dist.ProcessGroup | None = None
        """The group over gloo for what is not a tensor of training."""
        self.group: dist.ProcessGroup | None = None
        """The group for tensors of training; None: the default group (see `backends_to_add`)."""
        self._subgroups: list[dist.ProcessGroup] = []  # for tensors of training, of some ranks
        self._scalar_group: dist.ProcessGroup | None = None
        self._timeout_option = "start_timeout"  # the option of Run that sets `timeout` now
        self._existing_group = self._is_open = self._is_closed = False
        self._inside_once: str | None = None
        self.waited = 0.0  # seconds that this rank has waited for others, as far as they are measured

    @property
    def alone(self) -> bool:
        """Whether this is the only rank."""
        return self.world.size == 1

    @property
    def is_group_destroyed(self) -> bool:
        """Whether the script has destroyed the process group that the run needs."""
        return self.control_group is not None and not dist.is_initialized()

    @property
    def store(self) -> dist.Store:
        """The key-value store that all ranks share; a single rank has none."""
        assert self._store is not None, "the communicator is not open, or there is one rank only"
        return self._store

    @property
    def board(self) -> StatusBoard:
        """What every rank is doing; a single rank has none."""
        assert self._board is not None, "the communicator is not open, or there is one rank only"
        return self._board

    def open(
        self,
        device: torch.device,
        agree_on_backend: Callable[[dist.Store], str],
        close_files: Callable[[], object] = lambda: None,
    ) -> None:
        """Connect the ranks, by the backend that all ranks agree on.

        A process group that already exists is used, and kept when the run ends; what it lacks is added to it. A thread
        calls `close_files` before it ends the process because of a hang.
        """
        if Communicator.once_of_process is not None:
            raise CommunicationError(
                f"a Run was started inside {self.once_of_process}, which one rank alone runs: its ranks would wait for "
                "each other; start it outside of run.once"
            )
        check_existing_group(self.world)
        self._is_open = True
        if self.alone:
            return
        rank, size, self._existing_group = self.world.rank, self.world.size, dist.is_initialized()
        if self._existing_group:  # it may have no backend for CPU tensors
            self.control_group = new_group("gloo", self.start_timeout)
            base = store_beside_group(self.world, self.control_group, self.start_timeout)
        else:
            base = connect_store(self.world, self.start_timeout)
        # torch's agent may keep the store across restarts: a new prefix hides the addresses of dead processes
        generation = f"samestep/{rendezvous(base, rank, size, self.start_timeout)}"
        self._store = dist.PrefixStore(f"{generation}/control", base)
        self._board = StatusBoard(self._store, rank, size)
        self.backend = agree_on_backend(self._store)
        existing = dist.get_backend_config() if self._existing_group else None
        if self.control_group is None:
            group_store = dist.PrefixStore(f"{generation}/group", base)
            init_process_group(group_store, self.world, self.backend, device, self.start_timeout)
            self.control_group = new_group("gloo", self.start_timeout)
        if backends := backends_to_add(existing, self.backend):
            self.group = new_group(backends, self.start_timeout)
        self._stop_hang_watch = watch_hangs(self.backend, self._store, rank, size, close_files)

    def close(self) -> None:
        """Disconnect after success: wait for all ranks, then destroy the process groups that `open` created."""
        if self._board is not None:
            self.exchange("Run.close", [])
        self.mark_closed()
        if self._board is None:
            return
        self._stop_hang_watch()
        self._board.end(None)
        # if the default group serves (group is None), it can send CPU tensors
        for group in (self.group, self.control_group):
            last = torch.zeros(1)  # rank 0 may host the store: it must not exit before all ranks have read from it
            dist.all_reduce(last, group=group)
            wait_until_released(last)
        if not self._existing_group:
            dist.destroy_process_group()
        else:
            for group in filter(None, (*self._subgroups, self.group, self.control_group)):
                dist.destroy_process_group(group)
        self._subgroups.clear()
        self._board = self._store = self.control_group = self.group = None

    def leave(self, exit_line: str | None = None) -> None:
        """Post that this rank leaves its run; after sys.exit(0) at `exit_line`, wait until all do, and raise if not."""
        if self._board is None:
            return
        self._board.leave()
        if exit_line is not None and (others := self._board.exit(exit_line, self.timeout)):
            raise CommunicationError(
                f"rank {self.world.rank} called sys.exit(0) at {exit_line} inside of `with Run`, but {others}: call "
                "sys.exit on every rank in the same step, or after the run"
            )

    def abandon(self, failure: str) -> None:
        """Leave after a failure: post the cause for the other ranks. Destroying a group here could deadlock them."""
        if self._board is not None:
            self._stop_hang_watch()
            with suppress(RuntimeError):  # the store exited with its host, and the other ranks notice that
                self._board.end(failure)

    def mark_closed(self) -> None:
        """Refuse collectives from now on."""
        self._is_open, self._is_closed = False, True

    def start_steps(self) -> None:
        """Switch from `start_timeout` to the shorter `step_timeout`, once the first step is complete."""
        if self._timeout_option == "step_timeout":
            return
        self._timeout_option, self.timeout = "step_timeout", self._step_timeout
        if not self.alone and dist.group.WORLD is not None:
            groups = (dist.group.WORLD, self.group, self.control_group, self._scalar_group, *self._subgroups)
            for group in filter(None, groups):
                set_group_timeout(self._step_timeout, group)

    def new_subgroup(self, partition: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """This rank's group for tensors of training, with the run's backend and timeouts; a collective of all ranks.

        `partition` has the ranks of each group, in the same order on every rank.
        """
        backend = "cpu:gloo,cuda:nccl" if self.backend == "nccl" else self.backend
        lists, timeout = [list(ranks) for ranks in partition], timedelta(seconds=self.timeout)
        group, _ = dist.new_subgroups_by_enumeration(lists, timeout=timeout, backend=backend)
        assert isinstance(group, dist.ProcessGroup), "every rank is in one of the groups"
        self._subgroups.append(group)
        return group

    def scalar_group(self, operation: str) -> dist.ProcessGroup:
        """The group over NCCL for scalars; a collective of all ranks when it is created, at the first call."""
        if self._scalar_group is None:
            self.exchange(f"the first {operation} with a mask", [])  # names a rank that does not call it
            self._scalar_group = new_small_group(self.timeout)
        return self._scalar_group

    def exchange(self, operation: str, values: Vector, site: str | None = None) -> list[torch.Tensor]:
        """All-gather float64 vectors, in rank order; one collective for up to 247 values per rank."""
        pending = self.start_exchange(operation, values, site)
        while (gathered := self.continue_exchange(pending)) is None:
            pass
        return gathered

    def exchange_objects(self, operation: str, value: T) -> list[T]:
        """Like `exchange` for any value that pickles; for small values that are exchanged rarely."""
        return [unpack_object(part) for part in self.exchange(operation, pack_object(value))]

    def start_exchange(self, operation: str, values: Vector, site: str | None = None) -> "PendingExchange":
        """Start an exchange without waiting for it; `site` replaces the line of the script that runs now.

        Every rank must start it, and later call `continue_exchange`, between the same two collectives.
        """
        self.refuse_inside_once(operation)
        mine = torch.as_tensor(values, dtype=torch.float64).reshape(-1)
        pending = PendingExchange(operation, f"{operation} at {site or call_site()}", mine)
        if not self.alone:
            pending.start(_pack(pending.label, mine), self.world.size, self.control_group)
        return pending

    def continue_exchange(self, pending: "PendingExchange") -> list[torch.Tensor] | None:
        """Wait for the collective that was started; returns the values of all ranks.

        If they do not fit into a frame, a second collective is started and None returned: call it again.
        """
        if self.alone:
            return [pending.mine]
        with self.collective(pending.operation):
            self._wait(pending.works[-1])
            if len(pending.works) == 1:
                pending.lengths = pending.check_frames(self.world.rank)
                if max(pending.lengths) > _CAPACITY:
                    pending.start(pending.padded(), self.world.size, self.control_group)
                    return None
            return pending.values()

    @contextmanager
    def collective(self, operation: str) -> Generator[str]:
        """Wrap a collective of all ranks: post it for the peers, and explain a failure by what they are doing."""
        self.refuse_inside_once(operation)
        if self._board is None:
            yield operation
            return
        site, since = call_site(), time.monotonic()
        self._board.enter(operation, site)
        try:
            yield f"{operation} at {site}"
        except RuntimeError as error:  # what torch raises for a lost peer or a timeout
            self._explain(error, time.monotonic() - since)
        self._board.change("past")

    @contextmanager
    def running_once(self, operation: str) -> Generator[None]:
        """Mark that this rank runs code for all ranks, so that it starts no collective meanwhile."""
        self._inside_once = Communicator.once_of_process = operation
        if self._board is not None:
            self._board.change("working")
        try:
            yield
        finally:
            self._inside_once = Communicator.once_of_process = None

    def refuse_inside_once(self, operation: str) -> None:
        """Raise if a collective cannot work: inside `run.once`, before or after the run, or without its group."""
        if not self._is_open:
            state = "closed" if self._is_closed else "not started"
            raise CommunicationError(
                f"{operation} at {call_site()} was called on a run that is {state}: call it inside `with Run(...) as "
                "run:`, or between run.start() and run.close()"
            )
        if self.is_group_destroyed:
            raise CommunicationError(
                f"{operation} at {call_site()} was called after dist.destroy_process_group(): the run needs the "
                "process groups until it ends, and destroys those that it has created; remove that call, or move it "
                "after `with Run`"
            )
        if self._inside_once is not None:
            raise _inside_once_error(operation, self._inside_once)

    def check_peers(
        self, since: float, before: dict[int, RankStatus], timeout: float, operation: str | None = None
    ) -> dict[int, RankStatus]:
        """Called while waiting: raise if a peer has diverged in two checks in a row, or if the timeout is over.

        Returns the peers that diverge now, to be passed as `before` at the next check.
        """
        assert self._board is not None
        own = self._board.own
        if operation is not None:
            own = replace(own, operation=operation, call_site=running_line().partition(" in ")[0], state="waiting")
        is_new = self._board.look()
        diverged = self._board.diverged(self._board.known) if is_new else before
        settled = {rank: status for rank, status in diverged.items() if before.get(rank) == status}
        if settled and is_new:
            raise self._board.diverged_error(own, settled)
        if (waited := time.monotonic() - since) > timeout:
            peers = self._board.peers_after_error()
            raise self._board.timeout_error(own, waited, self.timeout, self._timeout_option, peers)
        return diverged

    def peers_note(self, error: RuntimeError | None = None) -> str | None:
        """The status of the other ranks, for an error that torch raised by itself; None for a single rank."""
        hosts = self.world.is_main and (self._existing_group or not self.world.agent_store)
        return None if self._board is None else self._board.peers_note(is_timeout(error), hosts)

    def _wait(self, work: dist.Work) -> None:
        since, seen = time.monotonic(), dict[int, RankStatus]()
        while True:
            try:
                work.wait(timedelta(seconds=min(check_pause(since, seen), self.timeout / 4)))
            except RuntimeError as error:
                if "Operation timed out" not in str(error):
                    raise
                seen = self.check_peers(since, seen, self.timeout)
            else:
                self.waited += time.monotonic() - since
                return

    def _explain(self, error: RuntimeError, waited: float) -> NoReturn:
        assert self._board is not None
        own = self._board.own
        try:
            peers = self._board.peers_after_error()
        except RuntimeError:
            raise self._board.store_gone_error(own) from error
        if diverged := self._board.diverged(peers):
            raise self._board.diverged_error(own, diverged) from error
        raise self._board.timeout_error(own, waited, self.timeout, self._timeout_option, peers) from error


def _inside_once_error(operation: str, outer: str) -> CommunicationError:
    name = outer.partition("(")[0]
    part = "function" if name == "run.once" else "loop"
    return CommunicationError(
        f"{operation} at {call_site()} was called inside {outer}: only one rank runs that {part}, so the others never "
        f"reach this call; call {operation} outside of {name}"
    )


@dataclass
class PendingExchange:
    """An exchange that this rank has started; training continues while the frames travel."""

    operation: str
    label: str  # the operation and the line that called it
    mine: torch.Tensor
    works: list[dist.Work] = field(default_factory=list[dist.Work])
    gathered: list[torch.Tensor] = field(default_factory=list[torch.Tensor])  # by the last of the works
    lengths: list[int] = field(default_factory=list[int])  # values of each rank

    def start(self, payload: torch.Tensor, size: int, group: dist.ProcessGroup | None) -> None:
        """Start a collective."""
        self.gathered = [torch.empty_like(payload) for _ in range(size)]
        work = dist.all_gather(self.gathered, payload, group=group, async_op=True)
        assert work is not None
        self.works.append(work)

    def padded(self) -> torch.Tensor:
        """The values of this rank in a tensor that is as long on all ranks."""
        padded = torch.zeros(max(self.lengths), dtype=torch.float64)
        padded[: self.mine.numel()] = self.mine
        return padded.view(torch.int64)

    def values(self) -> list[torch.Tensor]:
        """The values of all ranks, from their frames or from what a second collective has gathered."""
        first = _LABEL_WORDS + 1 if len(self.works) == 1 else 0
        parts = zip(self.gathered, self.lengths, strict=True)
        return [part[first : first + length].view(torch.float64) for part, length in parts]

    def check_frames(self, own_rank: int) -> list[int]:
        """How many values each rank has sent; raises if one of them has called another collective."""
        for rank, frame in enumerate(self.gathered):
            theirs = frame[:_LABEL_WORDS].numpy().tobytes().rstrip(b"\0").decode(errors="replace")
            if theirs != _shorten(self.label):
                raise CommunicationError(
                    f"rank {own_rank} called {self.label} while rank {rank} called {theirs}: {ORDER_RULE}"
                )
        return [int(frame[_LABEL_WORDS]) for frame in self.gathered]


def sum_tensor(comm: Communicator, operation: str, value: torch.Tensor) -> torch.Tensor:
    """The sum of a scalar tensor over all ranks, on its device.

    Over NCCL neither the host nor the network is waited for. Its group is a separate one: a sum that one rank calls
    alone must not match the gradients of another rank.
    """
    if comm.alone:
        return value
    if comm.backend != "nccl" or value.device.type != "cuda":
        return value.new_tensor(sum(float(part[0]) for part in comm.exchange(operation, [float(value)])))
    total = value.clone()
    dist.all_reduce(total, group=comm.scalar_group(operation))
    return total


def gather_to_main(comm: Communicator, operation: str, data: bytes, lengths: list[int]) -> list[bytes]:
    """The bytes of all ranks in rank order on rank 0, nothing on the others; every rank knows all `lengths`."""
    if comm.alone or not max(lengths):
        return [data] if comm.alone else [b""] * comm.world.size * comm.world.is_main
    payload = torch.from_numpy(np.frombuffer(data.ljust(max(lengths), b"\0"), dtype=np.uint8).copy())
    gathered = [torch.empty_like(payload) for _ in lengths] if comm.world.is_main else None
    with comm.collective(operation):
        dist.gather(payload, gathered, dst=0, group=comm.control_group)
    return [part[:length].numpy().tobytes() for part, length in zip(gathered or (), lengths, strict=False)]


def pack_object(value: object) -> torch.Tensor:
    """A pickled value as float64 numbers, for an exchange."""
    data = pickle.dumps(value)
    return torch.from_numpy(np.frombuffer(data.ljust(-(-len(data) // 8) * 8, b"\0"), dtype=np.float64).copy())


def unpack_object(packed: torch.Tensor) -> Any:
    """The value that `pack_object` has packed."""
    return pickle.loads(packed.numpy().tobytes())


def check_pause(since: float, diverged: Mapping[int, RankStatus]) -> float:
    """Seconds until a rank that waits since `since` calls `check_peers` again: soon at first, and to confirm a peer."""
    waited = time.monotonic() - since
    return _CHECK_SECONDS if diverged else min(max(_CHECK_SECONDS, waited / 8), _MAX_CHECK_SECONDS)


def wait_for_keys(comm: Communicator, keys: list[str], operation: str | None = None) -> None:
    """Wait up to `start_timeout` until all keys are in the store; raises if a peer has diverged meanwhile."""
    since, seen = time.monotonic(), dict[int, RankStatus]()
    checked = since
    while not comm.store.check(keys):
        time.sleep(min(poll_pause(since), _MAX_POLL_SECONDS))
        if time.monotonic() - checked > check_pause(since, seen):
            seen, checked = comm.check_peers(since, seen, comm.start_timeout, operation), time.monotonic()


def find_differences(
    comm: Communicator, name: str, report: Callable[[], str], position: str, value: str, read: Callable[[str], str]
) -> dict[int, str]:
    """Compare what the ranks do at a position of the script, without a collective: some ranks may not come to it.

    Waits until every rank has come to it with the same value, or one does something else there: returns the reports of
    ranks with another value. Ranks that do not call this function post their reports when they are requested. `read`
    returns the value at the position from a report, or nothing if its rank has not come there.
    """
    board, size, key = comm.board, comm.world.size, f"{name}/{position}"
    board.reports[name] = report
    try:
        board.post_report(name)
        comm.store.add(key, 1)
        comm.store.add(f"{key}/{value}", 1)
        since, seen = time.monotonic(), dict[int, RankStatus]()
        checked = since
        while comm.store.add(f"{key}/{value}", 0) < size:
            all_here = comm.store.add(key, 0) == size
            if all_here or time.monotonic() - checked > max(check_pause(since, seen), size / _REPORTS_PER_SECOND):
                values = {rank: (read(text), text) for rank, text in board.read_reports(name).items()}
                if different := {rank: text for rank, (theirs, text) in values.items() if theirs not in ("", value)}:
                    return different
                board.request_reports(set(range(size)) - {comm.world.rank} - {r for r, (v, _) in values.items() if v})
                seen, checked = comm.check_peers(since, seen, comm.timeout, f"comparing {name}"), time.monotonic()
            time.sleep(min(poll_pause(since), _MAX_POLL_SECONDS))
    except dist.DistError as error:
        raise board.store_gone_error(board.own) from error
    return {}


def _pack(label: str, values: torch.Tensor) -> torch.Tensor:
    """A frame with a label and float64 values; if they do not fit, it holds only their number."""
    frame = torch.zeros(_FRAME_WORDS, dtype=torch.int64)  # integers keep every bit of the text and of the floats
    text = _shorten(label).encode().ljust(8 * _LABEL_WORDS, b"\0")
    frame[:_LABEL_WORDS] = torch.from_numpy(np.frombuffer(text, dtype=np.int64).copy())
    frame[_LABEL_WORDS] = values.numel()
    if values.numel() <= _CAPACITY:
        frame[_LABEL_WORDS + 1 : _LABEL_WORDS + 1 + values.numel()] = values.view(torch.int64)
    return frame


def _shorten(label: str) -> str:
    """At most 64 bytes; drops the middle, since the end holds the line number."""
    if len(label.encode()) <= 8 * _LABEL_WORDS:
        return label
    return f"{label[:24]}~{label[-36:]}".encode()[: 8 * _LABEL_WORDS].decode(errors="ignore")
