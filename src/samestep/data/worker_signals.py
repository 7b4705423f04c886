"""Signals in data workers: they leave those of the job to their rank, serve it to its end, and end with it.

A cluster sends SIGTERM or a warning to every process of a job. A worker that died of it would take its rank with it in
the midst of the step after which a checkpoint is to be saved.
"""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import resource_tracker, util
from types import FrameType
from typing import Final

import torch

_OF_THE_JOB: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_SECONDS: Final = 0.25


class Shield:
    """Called in each data worker when it starts; a DataLoader's `worker_init_fn`."""

    def __init__(self) -> None:
        # Read by the workers, which hear no SIGTERM of their own rank either when that ends.
        self._ending = torch.zeros(1, dtype=torch.uint8).share_memory_()
        # Python runs this before it asks the workers to end and waits for them.
        util.Finalize(self, self._ending.fill_, args=(1,), exitpriority=0)
        self._collecting = gc.isenabled()

    def __call__(self, worker: int) -> None:
        """Shield this worker from its rank's signals and garbage, and let it end with its rank."""
        gc.freeze()  # all that came with the fork; see _garbage_kept
        if self._collecting:
            gc.enable()
        for number in _OF_THE_JOB:  # not SIG_IGN, which programs that a worker starts would inherit
            signal.signal(number, _leave_it_to_the_rank)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_JOB)
        threading.Thread(target=self._end_with, args=[os.getppid()], name="samestep worker watch", daemon=True).start()

    def _end_with(self, parent: int) -> None:
        while not self._ending.item() and os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os._exit(0)


@contextmanager
def held_back() -> Generator[None]:
    """Hold these signals and all garbage back while workers start, so that none dies of what its rank left behind.

    What is held back reaches this process afterwards. A server that forks workers (Python's forkserver) goes on holding
    the signals back: its end is its rank's, not a signal.
    """
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method == "forkserver":
        resource_tracker.ensure_running()  # else it starts meanwhile, and lets SIGTERM through before the server starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_JOB)
    try:
        with _garbage_kept():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _garbage_kept() -> Generator[None]:
    """Let no worker that is forked meanwhile collect what was garbage here; its `Shield` sets it aside for good.

    The wrapped model of an earlier Run is a cycle that holds its process group, whose end waits for threads. A worker
    has a copy of it and none of the threads: collecting it there hangs the worker, or kills it.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _leave_it_to_the_rank(number: int, frame: FrameType | None) -> None:
    """The rank has heard it as well, and decides."""
