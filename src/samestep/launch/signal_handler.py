"""Stopping by a signal: the first is passed on to the ranks with time to save or end, the second ends them at once."""

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from samestep.launch.processes import adopt_orphans, children, end_children, kill_children, living, signal_all

_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNALS = (*_ENDINGS, *_WARNINGS)
# A cluster may send SIGTERM to the launcher twice for one reason: what follows so soon is the same.
_ECHO_SECONDS = 5.0
_LOOK_SECONDS = 0.1
_Exception = Callable[[str, signal.Signals], BaseException]


class Stopped(BaseException):
    """A signal asked the launcher to stop while no rank was there to pass it on to."""

    def __init__(self, text: str, sigval: signal.Signals) -> None:
        super().__init__(text)
        self.sigval = sigval


class Stop:
    """Holds the launcher's signals while ranks run, and ends what they leave behind.

    SIGTERM gives ranks `grace` seconds to save and end; Ctrl-C and SIGHUP give them `patience`, to end only. SIGUSR1
    and SIGUSR2 are warnings: passed on, nothing more. A signal that was ignored before, as under `nohup`, stays so.
    """

    def __init__(self, patience: int, grace: int) -> None:
        self.patience, self.grace = patience, grace
        self.received: signal.Signals | None = None
        self.warned: signal.Signals | None = None
        self.time_is_over = False
        """Whether the time limit, and no signal before it, ends the ranks."""
        self.ranks: frozenset[int] = frozenset()
        """Processes of the ranks that live, as far as the agent knows."""
        self.ended: set[int] = set()
        """Those of them that were killed because another had failed."""
        self._since = self._deadline = 0.0
        self.if_deaf: Callable[[signal.Signals], int] = _shells_code
        """Says what ended the launcher, and gives its exit code, where its first thread cannot hear a signal."""
        self._spare: set[int] = set()
        self._before: dict[signal.Signals, Any] = {}
        self._arrivals, self._woken_before = -1, -1
        self._raise: _Exception | None = Stopped
        self._timers: list[threading.Timer] = []

    def __enter__(self) -> "Stop":
        adopt_orphans(True)
        self._spare = children()
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        heard, self._arrivals = os.pipe()
        os.set_blocking(self._arrivals, False)
        self._woken_before = signal.set_wakeup_fd(self._arrivals, warn_on_full_buffer=False)
        threading.Thread(target=self._hear, args=[heard], name="samestep signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for timer in self._timers:
            timer.cancel()
        signal.set_wakeup_fd(self._woken_before)
        os.close(self._arrivals)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        adopt_orphans(False)

    def raise_as(self, exception: _Exception | None) -> None:
        """From now on a signal raises this, which whoever runs now understands; with None it is only noted."""
        self._raise = exception

    def limit(self, seconds: float) -> None:
        """Kill the ranks that still live so many seconds from now; they know the limit and should have ended before."""
        self._after(seconds, self._end_time)

    def end_ranks(self) -> None:
        """Kill the ranks that still live, since another has failed."""
        late = living(self.ranks)
        self.ended |= late
        signal_all(late, signal.SIGKILL)

    def end_leftovers(self) -> None:
        """End what the ranks started and did not end; a second signal makes it quicker."""
        left = self.patience if self.received is None else max(0.0, self._deadline - time.monotonic())
        end_children(self._spare, min(self.patience, left))

    def check(self) -> None:
        """Raise once more if a signal came: nothing new may be started."""
        if self.received is not None and self._raise is not None:
            raise self._raise(f"stopping after {self.received.name}", self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now, received = time.monotonic(), signal.Signals(number)
        if received in _WARNINGS and self.ranks:
            self.warned = received
            signal_all(self.ranks, received)
        elif self.received is None:
            self._since = now
            self._begin(received, saving=received == signal.SIGTERM and bool(self.ranks))
        elif received != signal.SIGTERM or self.received != received or now - self._since > _ECHO_SECONDS:
            kill_children(self._spare)

    def _hear(self, arrivals: int) -> None:
        """End this process where a signal asks for it and its first thread does not run.

        Python calls a handler between two bytecodes, and torch looks for a host in native code for minutes. With ranks
        at work that does not happen.
        """
        with os.fdopen(arrivals, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                until = time.monotonic() + self.patience
                while number[0] in _ENDINGS and self.received is None and not self.ranks:
                    if time.monotonic() > until:
                        kill_children(self._spare)
                        os._exit(self.if_deaf(signal.Signals(number[0])))
                    time.sleep(_LOOK_SECONDS)

    def _begin(self, received: signal.Signals, saving: bool) -> None:
        self.received = received
        seconds = self.grace if saving else self.patience
        self._deadline = time.monotonic() + seconds
        # torch before 2.12 waits 30 s for its ranks, whatever it is told; ranks that outlive their time end here.
        self._after(seconds, lambda: kill_children(self._spare))
        if saving:
            signal_all(self.ranks, received)  # the agent goes on watching them, and sees how they end
        elif self._raise is not None:
            raise self._raise(f"received {received.name}", received)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), act)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _end_time(self) -> None:
        self.time_is_over = self.received is None  # else they end because of the signal, and it is only late
        if self.ranks:
            kill_children(self._spare)
        else:  # nobody is there to save anything; perhaps other nodes are waited for
            os.kill(os.getpid(), signal.SIGTERM)


def keep_exit_code() -> None:
    """Ignore signals once this process's own code is over: how it ended stands, and to unload torch takes a second.

    Whoever started it can still kill it.
    """
    atexit.register(_ignore_signals)


def _ignore_signals() -> None:
    for number in _SIGNALS:
        # SIG_IGN, since Python takes functions away before it unloads its modules
        signal.signal(number, signal.SIG_IGN)


def _shells_code(number: signal.Signals) -> int:
    return 128 + number
