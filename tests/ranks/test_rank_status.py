"""The status board: what a rank that waits knows about the others, and what it asks of the store."""

import atexit
import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from samestep import Run
from samestep.distributed import communicator, rank_status
from samestep.distributed.communicator import check_pause
from samestep.distributed.rank_status import RankStatus, StatusBoard

THREAD = "samestep status"


@pytest.fixture
def boards():
    """Makes the boards of several ranks in one process."""
    made, store = list[StatusBoard](), dist.HashStore()

    def make(size: int, store: dist.Store = store) -> list[StatusBoard]:
        made.extend(StatusBoard(store, rank, size) for rank in range(size))
        return made

    yield make
    for board in made:
        board.end(None)


def wait_for_location(board: StatusBoard) -> str:
    """Check as a rank does that waits, until the error would name a location."""
    for _ in range(1200):
        board.look()
        if " is now at " in (text := str(board.timeout_error(board.own, 0, 1, "start_timeout", board.known))):
            return text
        time.sleep(0.1)
    raise AssertionError("no rank has answered in two minutes")


@pytest.mark.slow
def test_a_line_of_an_earlier_wait_is_not_reported_again(boards: Callable[..., list[StatusBoard]], monkeypatch):
    waiting, other = boards(2)
    monkeypatch.setattr(rank_status, "running_line", lambda: "train.py:1 in first")
    other.enter("run.mean", "train.py:0")
    other.change("past")
    waiting.enter("run.barrier", "train.py:7")
    assert "is now at train.py:1 in first" in wait_for_location(waiting)
    monkeypatch.setattr(rank_status, "running_line", lambda: "train.py:2 in second")
    waiting.enter("run.barrier", "train.py:8")
    assert "is now at train.py:2 in second" in wait_for_location(waiting)


def test_the_thread_ends_before_the_interpreter(boards: Callable[..., list[StatusBoard]], monkeypatch):
    at_exit = list[Callable[[], None]]()
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)
    (board,) = boards(1)
    (stop,) = at_exit
    stop()
    assert THREAD not in {thread.name for thread in threading.enumerate()}
    board.end(None)
    assert not at_exit
    at_exit.append(stop)  # the fixture ends it again


def fail_to_connect():
    def fail(*_: object) -> None:
        raise OSError("no route to host")

    before, communicator.init_process_group = communicator.init_process_group, fail
    try:
        with pytest.raises(OSError, match="no route to host"):
            Run(global_batch=4, start_timeout=60).start()
    finally:
        communicator.init_process_group = before
    return THREAD in {thread.name for thread in threading.enumerate()}


def test_a_run_that_cannot_connect_leaves_no_thread(ranks):
    assert ranks(2, fail_to_connect) == [False, False]


class CountingStore(dist.Store):
    """A store in this process that counts requests, the keys they name and the bytes they return, by thread or rank."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.requests, self.bytes, self.rank = dist.HashStore(), Counter[int](), 0, 0

    def _count(self, values: list[bytes]) -> list[bytes]:
        self.requests[self.rank] += 1
        self.bytes += sum(map(len, values))
        return values

    def set(self, key: str, value: str) -> None:
        self._count([])
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._count([self.store.get(key)])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._count(self.store.multi_get(keys))

    def add(self, key: str, value: int) -> int:
        self._count([])
        return self.store.add(key, value)

    def check(self, keys: list[str], timeout: timedelta | None = None) -> bool:
        self._count([])
        return self.store.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._count([self.store.compare_set(key, expected, desired)])[0]


@pytest.fixture
def large_world(monkeypatch):
    """The boards of many ranks in one process, without their threads, and the store that counts their requests."""
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)
    monkeypatch.setattr(threading.Thread, "join", lambda *_: None)
    store, made = CountingStore(), list[StatusBoard]()

    def make(size: int) -> tuple[CountingStore, list[StatusBoard]]:
        made.extend(StatusBoard(store, rank, size) for rank in range(size))
        return store, made

    yield make
    for board in made:
        board.end(None)


def check_all(store: CountingStore, waiting: list[StatusBoard]) -> list[bool]:
    """Every waiting rank checks its peers once, as they all do within a second or more."""
    store.requests.clear()
    store.bytes, seen = 0, []
    for store.rank, board in enumerate(waiting):
        seen.append(board.look())
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 4096])
def test_the_requests_of_a_waiting_rank_do_not_depend_on_the_number_of_ranks(large_world, size):
    store, boards = large_world(size)
    missing, waiting = boards[0], boards[1:]
    for board in boards:
        board.enter("run.mean", "a.py:1")
        board.change("past")
    for board in waiting:
        board.enter("run.barrier", "a.py:2")
    for number in range(1, 8):
        assert all(check_all(store, waiting)) or number == 1
        assert max(store.requests.values()) <= 8  # of the rank that reads for all
        assert sum(store.requests.values()) <= 2 * len(waiting) + 8  # in the time between two checks, a second or more
        assert store.bytes < 2500 * len(waiting)
        assert {board._summary for board in waiting} <= {number - 1, number}
        missing._store.set("location/0", f"{missing._store.add('location requests/0', 0)} train.py:{number}")
    text = str(waiting[-1].timeout_error(waiting[-1].own, 300, 300, "step_timeout", waiting[-1].known))
    assert "rank 0 was last in run.mean at a.py:1 and has left it, and is now at train.py:" in text
    assert not any(board.diverged(board.known) for board in waiting)


@pytest.mark.slow
def test_a_rank_of_thousands_that_has_diverged_is_named_by_all_others(large_world):
    store, boards = large_world(4096)
    for rank, board in enumerate(boards):
        board.enter("run.max" if rank == 1000 else "run.mean", "a.py:1")
    check_all(store, boards)
    check_all(store, boards)
    assert all(list(board.diverged(board.known)) == [1000] for rank, board in enumerate(boards) if rank != 1000)
    assert list(boards[1000].diverged(boards[1000].known)) == list(range(9))  # the first of them


def test_a_rank_that_dies_in_its_turn_to_read_is_replaced(large_world):
    store, boards = large_world(3)
    boards[0].look()
    store.store.compare_set("summary/turn", "1 by rank 0", "2 by rank 9")  # dies before it has posted the summary
    assert [boards[1].look(), boards[1].look(), boards[1].look()] == [True, False, True]
    assert (boards[1]._summary, boards[2].look(), boards[2]._summary) == (2, True, 2)


def test_of_a_thousand_ranks_that_fail_at_once_few_read_the_status_of_all(large_world):
    store, boards = large_world(1000)
    boards[7].end("ValueError: no such label")
    store.bytes = 0
    for board in boards:
        assert "rank 7 failed: ValueError: no such label" in board.peers_note(False) or board is boards[7]
    assert store.bytes < (16 * 130 + 1000 * 2) * 1000


def test_checks_are_frequent_at_first_and_when_a_peer_has_diverged():
    now, status = time.monotonic(), RankStatus(1, "run.mean", "a.py:1", "ended")
    assert check_pause(now, {}) == check_pause(now - 200, {1: status}) == 1
    assert check_pause(now - 24, {}) == pytest.approx(3, rel=0.3)
    assert check_pause(now - 200, {}) == 5


class Large:
    """Stands for the tensors in the frames of an exception."""


def fail_in(run: Run) -> "weakref.ref[Large]":
    large = Large()
    with suppress(ValueError), run:
        raise ValueError("no such label")
    return weakref.ref(large)


def test_a_failed_run_does_not_keep_the_frames_of_its_exception():
    run = Run(global_batch=4)
    large = fail_in(run)
    gc.collect()
    assert large() is None
