"""Signals to the launcher: the first gives the ranks time to save or end, the second kills them at once."""

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from types import FrameType
from typing import Any

import psutil

from samestep.environment.processes import (
    OrphanGuard,
    adopt_orphans,
    kill_descendants,
    running,
    send_signal,
    terminate_descendants,
)

_WARNING_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNALS = (*_STOP_SIGNALS, *_WARNING_SIGNALS)
DUPLICATE_SIGNAL_SECONDS = 5.0
"""A second signal within this time is ignored: SLURM and the launcher may both forward the same one."""
_POLL_SECONDS = 0.1


class StoppedBySignal(BaseException):
    """A signal stopped the job; raised after all ranks have ended."""

    def __init__(self, text: str, sigval: signal.Signals) -> None:
        super().__init__(text)
        self.sigval = sigval


class SignalHandler:
    """Handles the launcher's signals while ranks run, and ends the processes that ranks leave behind.

    SIGTERM is forwarded and gives the ranks `grace_period` seconds to save and end. Ctrl-C and SIGHUP give them
    `shutdown_timeout` seconds to end. SIGUSR1 and SIGUSR2 are forwarded as warnings. A signal that was ignored before,
    as under `nohup`, stays ignored.
    """

    def __init__(self, shutdown_timeout: int, grace_period: int) -> None:
        self.shutdown_timeout, self.grace_period = shutdown_timeout, grace_period
        self.received: signal.Signals | None = None  # the first signal that stopped the launcher
        self.warning: signal.Signals | None = None  # the last warning that was forwarded
        self.time_limit_reached = False  # whether the time limit ended the ranks, and no signal before it
        self.rank_pids: frozenset[int] = frozenset()  # processes of the running ranks, as far as the agent knows
        self.killed_pids: set[int] = set()  # ranks that were killed because another rank had failed
        self.on_blocked_main_thread: Callable[[signal.Signals], int] = lambda number: 128 + number
        """Called if a signal arrives while native code blocks the main thread; returns the launcher's exit code."""
        self.exception: Callable[[str, signal.Signals], BaseException] | None = StoppedBySignal
        """The exception that a signal raises; with None a signal is only recorded."""
        self._received_at = self._deadline = 0.0
        self._earlier_pids: set[int] = set()
        self._earlier_handlers: dict[signal.Signals, Any] = {}
        self._wakeup_fd, self._earlier_wakeup_fd = -1, -1
        self._timers: list[threading.Timer] = []
        self._guard = OrphanGuard()

    def __enter__(self) -> "SignalHandler":
        adopt_orphans(True)
        self._guard.start()
        self._earlier_pids = {child.pid for child in psutil.Process().children(recursive=True)}
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._earlier_handlers[number] = signal.signal(number, self._handle)
        arrivals, self._wakeup_fd = os.pipe()
        os.set_blocking(self._wakeup_fd, False)
        self._earlier_wakeup_fd = signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
        threading.Thread(target=self._watch_arrivals, args=[arrivals], name="samestep signals", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        with ExitStack() as steps:  # every step runs, the last one here first, even if one of them raises
            steps.callback(adopt_orphans, False)
            for number, handler in self._earlier_handlers.items():
                steps.callback(signal.signal, number, handler)
            steps.callback(os.close, self._wakeup_fd)
            steps.callback(signal.set_wakeup_fd, self._earlier_wakeup_fd)
            for timer in self._timers:
                steps.callback(timer.cancel)
            steps.callback(self._guard.stop)
            steps.callback(self.end_descendants)

    def died_of_warning(self, codes: Collection[int]) -> signal.Signals | None:
        """The warning that was forwarded, if it ended a rank that does not handle it."""
        return self.warning if self.warning is not None and -self.warning in codes else None

    def raise_if_received(self) -> None:
        """Raise again if a signal was received, before anything new is started."""
        if self.received is not None and self.exception is not None:
            raise self.exception(f"stopping after {self.received.name}", self.received)

    def set_time_limit(self, seconds: float) -> None:
        """Kill the ranks that still run after this time; they know the limit and should have ended before."""
        self._call_after(seconds, self._on_time_limit)

    def kill_remaining_ranks(self) -> None:
        """Kill the ranks that still run after another rank has failed."""
        remaining = running(self.rank_pids)
        self.killed_pids |= remaining
        send_signal(remaining, signal.SIGKILL)

    def end_descendants(self) -> list[psutil.Process]:
        """Terminate processes that ranks started and did not end; a second signal shortens the wait. Returns them."""
        left = self.shutdown_timeout if self.received is None else max(0.0, self._deadline - time.monotonic())
        return terminate_descendants(self._earlier_pids, min(self.shutdown_timeout, left))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now, received = time.monotonic(), signal.Signals(number)
        if received in _WARNING_SIGNALS and self.rank_pids:
            self.warning = received
            send_signal(self.rank_pids, received)
        elif self.received is None:
            self._received_at = now
            self._stop(received, saving=received == signal.SIGTERM and bool(self.rank_pids))
        elif (
            received != signal.SIGTERM
            or self.received != received
            or now - self._received_at > DUPLICATE_SIGNAL_SECONDS
        ):
            kill_descendants(self._earlier_pids)

    def _stop(self, received: signal.Signals, saving: bool) -> None:
        self.received = received
        seconds = self.grace_period if saving else self.shutdown_timeout
        self._deadline = time.monotonic() + seconds
        # torch before 2.12 always waits 30 s for its ranks, so ranks that exceed their time are killed here.
        self._call_after(seconds, lambda: kill_descendants(self._earlier_pids))
        if saving:
            send_signal(self.rank_pids, received)  # the agent keeps monitoring them and sees how they end
        elif self.exception is not None:
            raise self.exception(f"received {received.name}", received)

    def _watch_arrivals(self, arrivals: int) -> None:
        """End this process if a stop signal arrives and the main thread does not run its handler.

        Python runs a handler between two bytecodes, and torch may resolve a host in native code for minutes. This does
        not happen while ranks run.
        """
        with os.fdopen(arrivals, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                deadline = time.monotonic() + self.shutdown_timeout
                while number[0] in _STOP_SIGNALS and self.received is None and not self.rank_pids:
                    if time.monotonic() > deadline:
                        kill_descendants(self._earlier_pids)
                        os._exit(self.on_blocked_main_thread(signal.Signals(number[0])))
                    time.sleep(_POLL_SECONDS)

    def _on_time_limit(self) -> None:
        self.time_limit_reached = self.received is None  # else the ranks end because of the signal
        if self.rank_pids:
            kill_descendants(self._earlier_pids)
        else:  # no rank has started yet; the launcher may be waiting for other nodes
            os.kill(os.getpid(), signal.SIGTERM)

    def _call_after(self, seconds: float, function: Callable[[], object]) -> None:
        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), function)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)


def keep_exit_code() -> None:
    """Ignore signals but SIGKILL from the end of the main module on, while torch is unloaded, which takes a second."""
    for number in _SIGNALS:
        # SIG_IGN and not a function: Python removes functions before it unloads its modules.
        atexit.register(signal.signal, number, signal.SIG_IGN)
