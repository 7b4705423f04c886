"""Ending early by a signal or a time limit: noted when it comes, agreed with the pulse, saved at a step boundary."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Final

from samestep.launch.failure_report import PREEMPTED, STOPPED
from samestep.training.metric_sync import StepCallback

# What ranks tell each other, by number: the highest counts. A warning leaves time, the two after it do not.
_CAUSES: Final = ("", "SIGUSR1", "SIGUSR2", "the time limit", "SIGTERM")
_WARNED, _TIME_IS_UP = 2, 3
_LISTENED: Final = {signal.SIGUSR1: 1, signal.SIGUSR2: 2, signal.SIGTERM: 4}
# A cluster and a launcher may both pass on what was sent once: what follows so soon is the same signal.
_ECHO_SECONDS: Final = 5.0
_LEAST_MARGIN_SECONDS, _MOST_MARGIN_SECONDS = 5.0, 30.0  # processes need seconds to end on a busy machine
_MARGIN: Final = 0.05  # of the time that there was


class StoppedEarly(SystemExit):
    """Ends the process at a step boundary, on all ranks alike; `with Run` closes its files as after success."""

    def __init__(self, code: int, status: str, text: str) -> None:
        super().__init__(code)
        self.status, self._text = status, text

    def __str__(self) -> str:
        return self._text


class Signals:
    """Notes SIGTERM, SIGUSR1 and SIGUSR2 and does nothing else; a second one ends the process as if nobody listened.

    A signal for which the script has a function of its own stays the script's.
    """

    def __init__(self) -> None:
        self.noted = 0
        self._first: dict[bool, float] = {}
        self._before: dict[signal.Signals, Any] = {}
        self._process = 0

    def listen(self) -> None:
        """Begin; Python lets the first thread of a process alone do so, and elsewhere nothing is heard."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._process = os.getpid()
        for number in _LISTENED:
            before = signal.getsignal(number)
            if before is _hear_nothing:
                before = signal.SIG_DFL  # of a run of this process that ended early, and somebody went on
            if before in (signal.SIG_DFL, signal.SIG_IGN):
                self._before[number] = before
                signal.signal(number, self._note)

    def release(self, ending: bool) -> None:
        """Put things back as they were; a process that is ending stays deaf.

        torch's agent sends SIGTERM to all ranks when the first has ended, and their exit codes tell what happened.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:  # else the script has a function of its own by now
                signal.signal(number, _hear_nothing if ending else before)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        now, warning = time.monotonic(), number != signal.SIGTERM
        if os.getpid() != self._process:  # a fork of the script's own, which knows nothing of steps
            _die_of(number, self._before.get(signal.Signals(number), signal.SIG_DFL))
        elif now - self._first.setdefault(warning, now) > _ECHO_SECONDS:
            _die_of(number, signal.SIG_DFL)
        self.noted = max(self.noted, _LISTENED[signal.Signals(number)])


class TimeLimit:
    """Knows when to begin to save so that all is over before the deadline.

    Kept free are: twice what saving takes, the longest time between two looks at the clock up to now (an evaluation may
    come again), and a margin of a twentieth of the time there was, from 5 to 30 seconds.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._margin = max(_LEAST_MARGIN_SECONDS, min(_MOST_MARGIN_SECONDS, _MARGIN * (deadline - time.time())))
        self._looked: float | None = None
        self._longest = 0.0

    def is_up(self, saving: float) -> bool:
        """Whether it is time, where saving takes so many seconds."""
        now = time.time()
        if self._looked is not None:
            self._longest = max(self._longest, now - self._looked)
        self._looked = now
        return self.is_near(saving)

    def is_near(self, saving: float) -> bool:
        """The same for one who only asks, and does not look at the clock for the run."""
        return time.time() + self._margin + self._longest + 2 * saving >= self._deadline


class Preemption:
    """A rider of the pulse that ends the run early once any rank was told to."""

    def __init__(self, riders: Sequence[StepCallback], say: Callable[[str], None], deadline: float | None) -> None:
        self._riders, self._say = riders, say
        self._limit = None if deadline is None else TimeLimit(deadline)
        self._agreed = self._told = 0
        self.signals = Signals()

    def word(self) -> float:
        """What this rank was told, by its number."""
        if self._limit is not None and self._limit.is_up(self._saving()):
            return float(max(_TIME_IS_UP, self.signals.noted))
        return float(self.signals.noted)

    def urgent(self) -> bool:
        """Whether this rank was told to end, or the time is up, and the others do not know."""
        near = self._limit is not None and self._limit.is_near(self._saving())
        return self.signals.noted > self._agreed or (near and self._agreed < _TIME_IS_UP)

    def heard(self, words: Sequence[float]) -> None:
        """Take note; the next step boundary acts on it, on all ranks."""
        self._agreed = max(self._agreed, *(int(word) for word in words))

    def reached(self, steps: int) -> None:
        """Called at every step boundary: save and end, where it was agreed."""
        if self._agreed <= self._told:
            return
        self._told, cause = self._agreed, _CAUSES[self._agreed]
        saved = [name for rider in self._riders if (name := rider.save_last()) is not None]
        if saved:
            self._say(f"{cause}: saved {', '.join(saved)}; the run ends here, start it again to go on")
            raise StoppedEarly(PREEMPTED, "preempted", f"saved step {steps}")
        nothing = "this run has no checkpoint to save (run.checkpoint makes one)"
        if self._agreed > _WARNED:
            self._say(f"{cause}: {nothing}; it ends at step {steps}, and what it has learnt is lost")
            raise StoppedEarly(STOPPED, "stopped", f"ended at step {steps} with nothing saved")
        self._say(f"{cause}: {nothing}, so it goes on")

    def _saving(self) -> float:
        """All of them save before the run ends, one after the other."""
        return sum(rider.saving() for rider in self._riders)

    def ended(self, failed: bool) -> None:
        """Called when the run ends."""

    def save_last(self) -> str | None:
        """Called before the run ends early."""
        return None

    def saving(self) -> float:
        """How long that may take."""
        return 0.0


def _hear_nothing(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which programs that this process starts would inherit."""


def _die_of(number: int, handler: Any) -> None:
    """Let the signal do what it would have done without us."""
    signal.signal(number, handler)
    with suppress(ProcessLookupError):
        os.kill(os.getpid(), number)
