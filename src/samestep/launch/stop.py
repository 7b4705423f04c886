"""Stopping by a signal: the first is passed on to the ranks with time to end, the second ends them at once."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from samestep.launch.processes import adopt_orphans, children, end_children, kill_children

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asked the launcher to stop while no rank was there to pass it on to."""


class Stop:
    """Holds the launcher's signals while ranks run; afterwards none of their processes is left.

    A signal that was ignored before, as under `nohup`, stays ignored.
    """

    def __init__(self, patience: float) -> None:
        self.received: signal.Signals | None = None
        self.patience = patience
        self._spare: set[int] = set()
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
        self._raise: Callable[[str, signal.Signals], BaseException] | None = lambda text, _: Stopped(text)

    def __enter__(self) -> "Stop":
        adopt_orphans()
        self._spare = children()
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def raise_as(self, make: Callable[[str, signal.Signals], BaseException]) -> None:
        """From now on a signal raises what `make` gives, which the running agent understands."""
        self._raise = make

    def end_leftovers(self) -> int:
        """End what the ranks started and did not end; returns how many processes had to be killed."""
        self._raise = None
        return end_children(self._spare, 0.0 if self.received else self.patience)

    def check(self) -> None:
        """Raise once more if a signal came: nothing new may be started."""
        if self.received is not None and self._raise is not None:
            raise self._raise(f"stopping after {self.received.name}", self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            kill_children(self._spare)
            return
        self.received = signal.Signals(number)
        # torch before 2.12 waits 30 s for its ranks, whatever it is told; ranks that outlive the patience end here.
        killer = threading.Timer(self.patience, kill_children, [self._spare])
        killer.daemon = True
        killer.start()
        if self._raise is not None:
            raise self._raise(f"received {self.received.name}", self.received)
