"""The status board: what a rank that waits knows about the others, and what it asks of the store."""

import atexit
import gc
import json
import threading
import time
import weakref
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


def wait_for_location(board: StatusBoard, since: float) -> str:
    """Check as a rank does that waits, until the error would name a location."""
    for _ in range(1200):
        board.request_locations(board.missing(board.peers()), since)
        if " is now at " in (text := str(board.timeout_error(board.own, 0, 1, "start_timeout", board.peers()))):
            return text
        time.sleep(0.1)
    raise AssertionError("no rank has answered in two minutes")


def test_a_line_of_an_earlier_wait_is_not_reported_again(boards: Callable[..., list[StatusBoard]], monkeypatch):
    waiting, other = boards(2)
    monkeypatch.setattr(rank_status, "running_line", lambda: "train.py:1 in first")
    other.enter("run.mean", "train.py:0")
    other.change("past")
    waiting.enter("run.barrier", "train.py:7")
    assert "is now at train.py:1 in first" in wait_for_location(waiting, time.monotonic())
    monkeypatch.setattr(rank_status, "running_line", lambda: "train.py:2 in second")
    waiting.enter("run.barrier", "train.py:8")
    assert "is now at train.py:2 in second" in wait_for_location(waiting, time.monotonic())


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
    """A store in this process that counts the requests."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.requests = dict[str, bytes](), 0

    def set(self, key: str, value: str | bytes) -> None:
        self.requests += 1
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        self.requests += 1
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests += 1
        return [self.values[key] for key in keys]

    def add(self, key: str, value: int) -> int:
        self.requests += 1
        self.values[key] = str(int(self.values.get(key, b"0")) + value).encode()
        return int(self.values[key])

    def check(self, keys: list[str], timeout: timedelta | None = None) -> bool:
        self.requests += 1
        return all(key in self.values for key in keys)


def test_a_check_of_a_thousand_ranks_takes_few_requests():
    store, size = CountingStore(), 1000
    board = StatusBoard(store, 0, size)
    for rank in range(size):
        store.set(f"status/{rank}", json.dumps({"count": 1, "operation": "f", "call_site": "a:1", "state": "past"}))
        store.set(f"location/{rank}", f"1 train.py:{rank}")
    board.enter("run.mean", "a.py:1")
    before = store.requests
    peers = board.peers()
    assert len(board.missing(peers)) == size - 1
    assert not board.diverged(peers)
    board.request_locations(board.missing(peers), time.monotonic())
    assert store.requests - before < 40
    assert "rank 8 was last in f at a:1 and has left it, and is now at train.py:8" in str(
        board.timeout_error(board.own, 300, 300, "step_timeout", peers)
    )
    board.end(None)


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
