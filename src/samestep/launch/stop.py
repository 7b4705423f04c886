"""Stopping by a signal: the first is passed on to the ranks with time to end, the second ends them at once."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from samestep.launch.processes import adopt_orphans, children, end_children, kill_children

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_Exception = Callable[[str, signal.Signals], BaseException]


class Stopped(BaseException):
    """A signal asked the launcher to stop while no rank was there to pass it on to."""

    def __init__(self, text: str, sigval: signal.Signals) -> None:
        super().__init__(text)
        self.sigval = sigval


class Stop:
    """Holds the launcher's signals while ranks run, and ends what they leave behind.

    A signal that was ignored before, as under `nohup`, stays ignored.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.received: signal.Signals | None = None
        self._deadline = 0.0
        self._spare: set[int] = set()
        self._before: dict[signal.Signals, Any] = {}
        self._raise: _Exception | None = Stopped
        self._killer: threading.Timer | None = None

    def __enter__(self) -> "Stop":
        adopt_orphans(True)
        self._spare = children()
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._killer is not None:
            self._killer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        adopt_orphans(False)

    def raise_as(self, exception: _Exception | None) -> None:
        """From now on a signal raises this, which whoever runs now understands; with None it is only noted."""
        self._raise = exception

    def end_leftovers(self) -> None:
        """End what the ranks started and did not end; a second signal makes it quicker."""
        patience = self.patience if self.received is None else max(0.0, self._deadline - time.monotonic())
        end_children(self._spare, patience)

    def check(self) -> None:
        """Raise once more if a signal came: nothing new may be started."""
        if self.received is not None and self._raise is not None:
            raise self._raise(f"stopping after {self.received.name}", self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            kill_children(self._spare)
            return
        self.received = signal.Signals(number)
        self._deadline = time.monotonic() + self.patience
        # torch before 2.12 waits 30 s for its ranks, whatever it is told; ranks that outlive the patience end here.
        self._killer = threading.Timer(self.patience, kill_children, [self._spare])
        self._killer.daemon = True
        self._killer.start()
        if self._raise is not None:
            raise self._raise(f"received {self.received.name}", self.received)
