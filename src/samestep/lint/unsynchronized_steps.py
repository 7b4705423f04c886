"""Steps of the optimizer after which the ranks have not exchanged their gradients, by counting through a loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from samestep.lint.events import Event
from samestep.lint.module_trees import exchanges
from samestep.lint.rule import Analysis
from samestep.lint.training_steps import (
    Accumulation,
    Counter,
    Synchronization,
    UnknownValueError,
    accumulations,
    step_of,
    synchronization,
)


@dataclass(frozen=True, eq=False)
class UnsynchronizedStep:
    """A step that follows a backward pass inside of `no_sync()`."""

    step: Event
    synchronization: Synchronization
    numbers: tuple[int, ...]
    """Of the micro-batches after which such steps are taken."""
    is_tail: bool
    """Whether this happens for the last, shorter group only."""


@lru_cache(maxsize=2)
def unsynchronized_steps(analysis: Analysis) -> list[UnsynchronizedStep]:
    """All of a script; those of which the conditions are not known are left out."""
    groups = {each.step.order: each for each in accumulations(analysis)}
    found = list[UnsynchronizedStep]()
    for step in analysis.of("optimizer_step"):
        group = groups.get(step.order)
        made = _check(analysis, group) if group is not None else _check_single(analysis, step)
        if made is not None:
            found.append(made)
    return found


def _check(analysis: Analysis, group: Accumulation) -> UnsynchronizedStep | None:
    """Count through the loop over the micro-batches of a step."""
    backwards = [
        each for each in analysis.of("backward") if group.loop in each.loops and step_of(analysis, each) is group.step
    ]
    syncs = [synchronization(analysis, each) for each in backwards]
    if (never := _never(analysis, syncs)) is not None:
        return UnsynchronizedStep(group.step, never, (), is_tail=False)
    inside = next((each for each in syncs if each is not None), None)
    counter = Counter(analysis, group.loop, group.is_inner)
    if inside is None or not counter.is_usable:
        return None
    last = counter.numbers[-1]
    try:
        steps = [
            number
            for number in counter.numbers
            if (number == last if group.is_inner else counter.runs(group.step.guards, number))
        ]
        wrong = [number for number in steps if not _is_synced(counter, backwards, syncs, number)]
    except UnknownValueError:
        return None
    if not wrong:
        return None
    is_tail = not group.is_inner and wrong == [last] and len(steps) > 1
    return UnsynchronizedStep(group.step, inside, tuple(wrong), is_tail)


def _check_single(analysis: Analysis, step: Event) -> UnsynchronizedStep | None:
    """A step after one backward pass, which is always inside of `no_sync()`."""
    backwards = [each for each in analysis.of("backward") if step_of(analysis, each) is step]
    syncs = [synchronization(analysis, each) for each in backwards]
    is_one = bool(backwards) and all(each.loops == step.loops and each.guards == step.guards for each in backwards)
    never = _never(analysis, syncs) if is_one else None
    return UnsynchronizedStep(step, never, (), is_tail=False) if never is not None else None


def _never(analysis: Analysis, syncs: Sequence[Synchronization | None]) -> Synchronization | None:
    """The first `no_sync()` if all backward passes of a step are inside of one and nothing else is exchanged."""
    if not syncs or any(each is None or each.condition is not None for each in syncs):
        return None
    return None if exchanges(analysis, "gradient", "parameter") else syncs[0]


def _is_synced(
    counter: Counter, backwards: Sequence[Event], syncs: Sequence[Synchronization | None], number: int
) -> bool:
    """Whether a backward pass exchanges gradients for a micro-batch."""
    for backward, sync in zip(backwards, syncs, strict=True):
        if not counter.runs(backward.guards, number):
            continue
        if sync is None:
            return True
        decides = number - sync.is_late
        if sync.condition is not None and counter.holds(sync.condition, sync.context, decides) != sync.is_negated:
            return True
    return False
