"""A schedule of the learning rate that depends on the number of ranks.

What it compares: in scripts that use Accelerate, the learning rates of the steps on several ranks with those on one
rank that makes the same steps, and at the beginning of every epoch, if a prepared scheduler is stepped once per epoch.
Accelerate advances a prepared scheduler by the number of ranks. Schedules whose length the script computes from the
number of ranks are not compared.

Fault: `scheduler = accelerator.prepare(MultiStepLR(...))`, and `scheduler.step()` at the end of an epoch: the
milestones come twice as early on two ranks. Or a scheduler that is not prepared, for `len(loader)` steps per epoch as
they are before `prepare` divides the loader: on two ranks it ends half way.

Repair: do not pass a scheduler to `prepare` that is stepped once per epoch, and use `len(loader)` after `prepare`.
"""

from collections.abc import Iterator
from dataclasses import replace

from samestep.findings import Finding, Location
from samestep.verify.check import Check, Worlds, first
from samestep.verify.rank_trace import RankTrace
from samestep.verify.source import find_calls, function_at, is_about_ranks, statement_at, statements_behind

_TOLERANCE = 1e-6
_LARGE = 0.05  # a relative difference between the schedules
_MIN_STEPS = 2


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare learning rates by epoch."""
    if worlds.one is None or not worlds.one.ranks or not worlds.many.ranks:
        return
    trace, one = worlds.many[0], worlds.one[0]
    calls, epochs = trace.of("scheduler_call"), trace.epochs_of("train")
    if not calls or len(calls) > len(epochs):
        yield from _compare_steps(worlds, trace, one)
        return
    rates = [(a, b) for a, b in zip(_rates(trace), _rates(one), strict=False) if a and b]
    if not rates:
        return
    ratios = [a / b for a, b in rates]
    if max(ratios) - min(ratios) > _TOLERANCE * max(ratios):
        epoch = next(number for number, ratio in enumerate(ratios) if abs(ratio - ratios[0]) > _TOLERANCE * ratios[0])
        prepared = [event["site"] for event in trace.of("accelerate") if event["name"] == "prepare"]
        yield CHECK.finding(
            first(prepared[0]) if prepared else first(calls[0]["site"]),
            f"the learning rate of epoch {epoch} is {rates[epoch][0]:.3g} on {worlds.many.size} ranks and "
            f"{rates[epoch][1]:.3g} on one: the prepared scheduler advances by the number of ranks, but is stepped "
            "once per epoch",
            related=[each for each in [first(calls[0]["site"])] if each],
        )


def _compare_steps(worlds: Worlds, trace: RankTrace, one: RankTrace) -> Iterator[Finding]:
    """Compare the learning rates of all steps of a script with Accelerate."""
    prepared = [event["site"] for event in trace.of("accelerate") if event["name"] == "prepare" and event["site"]]
    schedulers = [event["site"] for event in trace.of("new_scheduler") if event["site"]]
    counts = [[each.trained for each in world.epochs_of("train")] for world in (trace, one)]
    if not prepared or not schedulers or counts[0] != counts[1] or len(trace.steps) != len(one.steps):
        return
    rates = [(a.lr[0], b.lr[0]) for a, b in zip(trace.steps, one.steps, strict=True) if a.lr and b.lr]
    known = [(number, a, b) for number, (a, b) in enumerate(rates) if a and b]
    location = schedulers[0][0]
    if not known or _uses_ranks(location):
        return
    _, start, one_start = known[0]
    changed = [each for each in known if abs(each[1] / each[2] * one_start / start - 1) > _LARGE]
    if len(changed) < _MIN_STEPS:
        return
    number, rate, expected = changed[-1]
    yield CHECK.finding(
        _early_length(worlds, prepared[0][0]) or location,
        f"the learning rate of step {number} is {rate:.3g} on {worlds.many.size} ranks and {expected:.3g} on one, "
        f"although both make the same {len(rates)} steps: the length of the schedule is not that of the loader",
        related=[location],
        repair="compute the length of the schedule from len(loader) after accelerator.prepare(), and do not prepare "
        "the scheduler",
    )


def _uses_ranks(location: Location) -> bool:
    """Whether the script computes the arguments of a scheduler from the number of ranks."""
    statement = statement_at(location)
    if statement is None:
        return False
    return any(map(is_about_ranks, (statement, *statements_behind(location, statement))))


def _early_length(worlds: Worlds, prepared: Location) -> Location | None:
    """The last executed line with the length of something in the function that calls prepare, before it does."""
    lengths = [
        call.lineno
        for call in find_calls(prepared.file, ["len"], function_at(prepared))
        if call.lineno < prepared.line and (prepared.file, call.lineno) in worlds.executed()
    ]
    return replace(prepared, line=max(lengths)) if lengths else None


def _rates(trace: RankTrace) -> list[float | None]:
    """The learning rate of the first step of each epoch."""
    found = dict[int, float | None]()
    for step in trace.steps:
        epochs = [each.epoch for each in step.backwards if each.epoch is not None]
        if epochs and step.lr:
            found.setdefault(epochs[0], step.lr[0])
    return list(found.values())


CHECK = Check(
    "SS605",
    "scheduler-steps",
    "error",
    "the schedule depends on the number of ranks",
    "leave a scheduler that is stepped once per epoch out of accelerator.prepare()",
    find,
)
