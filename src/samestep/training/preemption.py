"""Preemption: a signal or a time limit ends the run at a step boundary, on all ranks, after a save."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Final

from samestep.context import RunContext
from samestep.data.loader import ignore_signal
from samestep.distributed.metric_sync import StepCallback
from samestep.errors import PREEMPTED, STOPPED
from samestep.launch.signal_handler import DUPLICATE_SIGNAL_SECONDS

CAUSES: Final = ("", "SIGUSR1", "SIGUSR2", "the time limit", "SIGTERM")
"""Why a run ends early, by the value that ranks exchange; the highest of all ranks counts."""
WARNING, TIME_LIMIT = 2, 3
"""Values up to WARNING are warnings that leave time: SIGUSR1 and SIGUSR2."""
_HANDLED: Final = {signal.SIGUSR1: 1, signal.SIGUSR2: 2, signal.SIGTERM: 4}
_MIN_MARGIN_SECONDS, _MAX_MARGIN_SECONDS = 5.0, 30.0  # processes need seconds to exit on a busy machine
_MARGIN: Final = 0.05  # fraction of the time that was left at the start


class StoppedEarly(SystemExit):
    """Ends the process at a step boundary, on all ranks; `with Run` closes its files as after success."""

    def __init__(self, code: int, status: str, text: str) -> None:
        super().__init__(code)
        self.status, self._text = status, text

    def __str__(self) -> str:
        return self._text


class SignalRecorder:
    """Records SIGTERM, SIGUSR1 and SIGUSR2; a second signal ends the process as if there were no handler.

    A signal for which the script has installed a handler is left to the script.
    """

    def __init__(self) -> None:
        self.received = 0
        self._first: dict[bool, float] = {}
        self._before: dict[signal.Signals, Any] = {}
        self._process = 0

    def install(self) -> None:
        """Install the handlers; Python allows that in the main thread only, elsewhere nothing is recorded."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._process = os.getpid()
        for number in _HANDLED:
            before = signal.getsignal(number)
            if before is ignore_signal or isinstance(getattr(before, "__self__", None), SignalRecorder):
                before = signal.SIG_DFL  # left by an earlier run of this process that ended early or failed
            if before in (signal.SIG_DFL, signal.SIG_IGN):
                self._before[number] = before
                signal.signal(number, self._record)

    def remove(self, exiting: bool) -> None:
        """Restore the handlers; a process that is exiting ignores the signals instead.

        torch's agent sends SIGTERM to all ranks when the first has exited, and their exit codes say what happened.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._record:  # otherwise the script has installed its own since
                signal.signal(number, ignore_signal if exiting else before)
        self._before = {}

    def _record(self, number: int, frame: FrameType | None) -> None:
        now, is_warning = time.monotonic(), number != signal.SIGTERM
        if os.getpid() != self._process:  # a process that the script forked, which runs no steps
            _terminate(number, self._before.get(signal.Signals(number), signal.SIG_DFL))
        elif now - self._first.setdefault(is_warning, now) > DUPLICATE_SIGNAL_SECONDS:
            _terminate(number, signal.SIG_DFL)
        self.received = max(self.received, _HANDLED[signal.Signals(number)])


class TimeLimit:
    """Decides when to start saving, so that the run ends before the deadline.

    It reserves twice the time of a save, the longest time between two checks so far (an evaluation may come again), and
    a margin of a twentieth of the time that was left at the start, from 5 to 30 seconds.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._margin = max(_MIN_MARGIN_SECONDS, min(_MAX_MARGIN_SECONDS, _MARGIN * (deadline - time.time())))
        self._last_check: float | None = None
        self._longest = 0.0

    def check(self, save_seconds: float) -> bool:
        """Whether to save now; called at every sync."""
        now = time.time()
        if self._last_check is not None:
            self._longest = max(self._longest, now - self._last_check)
        self._last_check = now
        return self.is_near(save_seconds)

    def is_near(self, save_seconds: float) -> bool:
        """The same from another thread, without counting as a check."""
        return time.time() + self._margin + self._longest + 2 * save_seconds >= self._deadline


class Preemption(StepCallback):
    """A step callback that ends the run early once any rank has received a signal or the time limit is near."""

    def __init__(self, context: RunContext, deadline: float | None, last_step: int | None = None) -> None:
        self._context, self._last_step = context, last_step
        self._limit = None if deadline is None else TimeLimit(deadline)
        self._agreed = self._handled = 0
        self.signals = SignalRecorder()

    def sync_value(self) -> float:
        """What this rank has received, by its number."""
        if self._limit is not None and self._limit.check(self._total_save_seconds()):
            return float(max(TIME_LIMIT, self.signals.received))
        return float(self.signals.received)

    def wants_sync(self) -> bool:
        """Whether this rank has received something that the others do not know of."""
        near = self._limit is not None and self._limit.is_near(self._total_save_seconds())
        return self.signals.received > self._agreed or (near and self._agreed < TIME_LIMIT)

    def on_sync(self, values: Sequence[float]) -> None:
        """Agree on the highest value; the next step boundary acts on it, on all ranks."""
        self._agreed = max(self._agreed, *(int(value) for value in values))

    def on_step_end(self, steps: int) -> None:
        """Save and end the run, if that was agreed; end it after the last step of `samestep parity`."""
        if self._last_step is not None and steps >= self._last_step:
            raise StoppedEarly(0, "finished", f"ended at step {steps}")
        if self._agreed <= self._handled:
            return
        self._handled, cause = self._agreed, CAUSES[self._agreed]
        callbacks = self._context.callbacks
        saved = [name for callback in callbacks if (name := callback.save_before_exit()) is not None]
        self._context.record("preempted", cause=cause, saved=saved, steps=steps)
        if saved:
            self._context.print(f"{cause}: saved {', '.join(saved)}; the run ends here, start it again to resume")
            raise StoppedEarly(PREEMPTED, "preempted", f"saved step {steps}")
        no_checkpoint = "this run has no checkpoint to save (run.checkpoint makes one)"
        if self._agreed > WARNING:
            self._context.print(f"{cause}: {no_checkpoint}; it ends at step {steps} and its training is lost")
            raise StoppedEarly(STOPPED, "stopped", f"ended at step {steps} with nothing saved")
        self._context.print(f"{cause}: {no_checkpoint}, so it continues")

    def _total_save_seconds(self) -> float:
        """All callbacks save before the run ends, one after the other."""
        return sum(callback.save_seconds() for callback in self._context.callbacks)


def _terminate(number: int, handler: Any) -> None:
    """Let the signal do what it would have done without samestep."""
    signal.signal(number, handler)
    with suppress(ProcessLookupError):
        os.kill(os.getpid(), number)
