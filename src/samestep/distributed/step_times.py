"""The times of this rank's steps: what the host spends them on, and how long the rank waits for the others."""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal, TypeVar

import torch

from samestep.distributed.communicator import Communicator
from samestep.torch_private import after_backward, around_reduction

T = TypeVar("T")
Phase = Literal["forward", "backward", "optimizer", "other", "data", "logging", "checkpoint", "evaluation"]
COMPUTING: Final[tuple[Phase, ...]] = ("forward", "backward", "optimizer", "other")
"""What computes; "other" is the rest of your loop, such as clipping gradients."""
PHASES: Final[tuple[Phase, ...]] = (*COMPUTING, "data", "logging", "checkpoint", "evaluation")
_END: Final = object()
_MOST_STEPS: Final = 4000  # kept between two syncs, which are at most 1,000 steps apart
_EventPair = tuple[torch.cuda.Event, torch.cuda.Event]
_Mark = tuple[Phase, torch.cuda.Event]


@dataclass
class StepInterval:
    """The steps between two metric syncs."""

    seconds: float  # from the end of the step before
    phases: dict[Phase, float]  # seconds of the host, without waiting for other ranks
    steps: list[tuple[float, list[_EventPair]]] = field(default_factory=list[tuple[float, list[_EventPair]]])
    """Of each step how long the host waited for other ranks, and when its GPU began and ended to wait."""
    count: int = 0
    """How many steps."""
    marks: list[_Mark] = field(default_factory=list[_Mark])
    """When the GPU began each phase of one of the steps, and when it ended this step."""
    marked_step: int = 0  # which of `steps`

    @property
    def device_phases(self) -> dict[Phase, float] | None:
        """How long the GPU was in each phase of the marked step, also while it waited; None if it is not known."""
        if not self.marks or not all(event.query() for _, event in self.marks):
            return None
        seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        for (phase, began), (_, ended) in pairwise(self.marks):
            seconds[phase] += began.elapsed_time(ended) / 1000
        return seconds


class StepTimes:
    """Measures what the steps of this rank are spent on; nothing is read from a GPU before it is there.

    A rank waits for the others where they meet: in an exchange of samestep, at the end of the backward pass, when the
    gradients of all ranks are added, and, with FSDP or synchronized BatchNorm, at the first of its collectives in a
    forward pass. Only durations on one rank are measured, so the clocks of the ranks need not agree.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._comm, self._on_gpu = comm, device.type == "cuda"
        self.phases: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        """Seconds that the host spent in each phase since the first step began, without waiting for other ranks."""
        self.steps = 0
        """How many steps have ended."""
        self.observer: Callable[[Phase], object] | None = None  # of each phase that begins; see run.profile
        self._phase: Phase = "other"
        self._since, self._waited = time.perf_counter(), comm.waited  # the same for `_phase`
        self._current = StepInterval(0.0, {})
        self._complete: StepInterval | None = None  # on a GPU: that before, which the GPU has worked off by now
        self._synced_at, self._synced_phases = self._since, dict(self.phases)
        self._step_waited = 0.0  # what `comm.waited` was at the end of the last step
        self._pairs: list[_EventPair] = []  # of the current step
        self._marks: list[_Mark] | None = None  # of the current step, if it is the marked one of its interval
        self._waiting: torch.cuda.Event | float | None = None  # since when, if this rank waits now
        self._unused: list[torch.cuda.Event] = []
        self._has_met = False  # whether ranks have met in the forward pass of this micro-batch

    def __deepcopy__(self, memo: dict[int, object]) -> "StepTimes":
        """Itself: the hooks of a copied model, such as a moving average, refer to it."""
        del memo
        return self

    def __reduce__(self) -> tuple[type["_NoTimes"], tuple[()]]:
        """A pickled module measures nothing where it is loaded."""
        return _NoTimes, ()

    def enter(self, phase: Phase) -> Phase:
        """Count the time from now on as that of `phase`; returns the phase before."""
        now, waited = time.perf_counter(), self._comm.waited
        self.phases[self._phase] += now - self._since - (waited - self._waited)
        before, self._phase, self._since, self._waited = self._phase, phase, now, waited
        if self.observer is not None:
            self.observer(phase)
        if self._marks is not None and phase != before:
            self._marks.append((phase, self._record()))
        return before

    @contextmanager
    def phase(self, phase: Phase) -> Generator[None]:
        """Count the time inside the block as that of `phase`."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def time_reads(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches; the time until each of them is there counts as that of data."""
        while True:
            before = self.enter("data")
            try:
                batch = next(batches, _END)
            finally:
                self.enter(before)
            if batch is _END:
                return
            yield batch  # pyright: ignore[reportReturnType]  # it is not _END
            del batch

    def begin_step(self) -> None:
        """Called when the loop body of a step begins; before the first step, forget what was measured."""
        self.enter("other")  # also if a loop for evaluation was left early and is not collected yet
        if not self.steps:
            self.phases.update(dict.fromkeys(PHASES, 0.0))
            self._synced_at, self._synced_phases = self._since, dict(self.phases)
            self._step_waited, self._pairs = self._waited, []
        if self._on_gpu and not self._current.marks:
            self._marks = [("other", self._record())]

    def begin_micro_batch(self) -> None:
        """Called before the forward pass of a micro-batch."""
        self._has_met = False
        self.enter("forward")

    def end_step(self) -> None:
        """Called after the loop body of a step."""
        self.steps += 1
        self.enter("other")
        interval = self._current
        interval.count += 1
        if self._marks is not None:
            interval.marks, interval.marked_step = [*self._marks, ("other", self._record())], len(interval.steps)
            self._marks = None
        if self._comm.alone:
            return
        if len(interval.steps) < _MOST_STEPS:
            interval.steps.append((self._comm.waited - self._step_waited, self._pairs))
        self._step_waited, self._pairs = self._comm.waited, []

    # Where the ranks meet

    def watch_backward(self, loss: torch.Tensor, reduces: bool) -> None:
        """Measure the backward pass of `loss`, and, if it `reduces`, how long it waits for other ranks' gradients."""
        loss.register_hook(self._start_reducing if reduces else self._start_backward)

    def _start_backward(self, _: torch.Tensor) -> None:
        self.enter("backward")
        after_backward(self._end_backward)

    def _start_reducing(self, _: torch.Tensor) -> None:
        self.enter("backward")
        around_reduction(self.start_waiting, self._end_reducing)

    def _end_reducing(self) -> None:
        self.stop_waiting()
        self._end_backward()

    def _end_backward(self) -> None:
        self.enter("other")

    def meet(self, *_: object) -> None:
        """A forward pass begins its first collective, unless it had one."""
        if not self._has_met and torch.is_grad_enabled():
            self.start_waiting()

    def have_met(self, *_: object) -> None:
        """The collective is over."""
        if not self._has_met and self._waiting is not None:
            self._has_met = True
            self.stop_waiting()

    def start_waiting(self) -> None:
        """This rank, or its GPU in the order of its work, begins to wait for other ranks."""
        self._waiting = self._record() if self._on_gpu else time.perf_counter()

    def stop_waiting(self) -> None:
        """The other ranks are there."""
        started, self._waiting = self._waiting, None
        if isinstance(started, float | int):
            self._comm.waited += time.perf_counter() - started
        elif started is not None:
            self._pairs.append((started, self._record()))

    def _record(self) -> torch.cuda.Event:
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    # What a metric sync takes

    def take(self) -> tuple[StepInterval, list[float]]:
        """The last interval whose times are known, and how long this rank waited in each of its steps; NaN: unknown.

        On a GPU this is the interval before the last one: the GPU is behind the host, and nothing waits for it.
        """
        self.enter(self._phase)
        current, now = self._current, self._since
        current.seconds = now - self._synced_at
        current.phases = {phase: self.phases[phase] - self._synced_phases[phase] for phase in PHASES}
        self._synced_at, self._synced_phases, self._current = now, dict(self.phases), StepInterval(0.0, {})
        if self._on_gpu:
            nothing = StepInterval(0.0, dict.fromkeys(PHASES, 0.0))
            current, self._complete = self._complete or nothing, current
        return current, [waited + sum(map(self._read, pairs)) for waited, pairs in current.steps]

    def _read(self, pair: _EventPair) -> float:
        """Seconds between two events; NaN if the GPU has not come to the second."""
        if not all(event.query() for event in pair):
            return float("nan")
        self._unused += pair
        return pair[0].elapsed_time(pair[1]) / 1000


class _NoTimes:
    """Takes the place of StepTimes in the hooks of a module that was pickled."""

    def meet(self, *_: object) -> None:
        """Do nothing."""

    def have_met(self, *_: object) -> None:
        """Do nothing."""
