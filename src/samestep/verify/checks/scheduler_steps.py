"""A learning rate per epoch that depends on the number of ranks.

What it compares: the learning rates at the beginning of every epoch on several ranks with those on one rank, if the
script steps a scheduler of Accelerate once per epoch. Accelerate advances a prepared scheduler by the number of ranks,
which is meant for schedulers that are stepped with every batch.

Fault: `scheduler = accelerator.prepare(MultiStepLR(...))`, and `scheduler.step()` at the end of an epoch: the
milestones come twice as early on two ranks.

Repair: do not pass a scheduler to `prepare` that is stepped once per epoch.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.verify.check import Check, Worlds, first
from samestep.verify.rank_trace import RankTrace

_TOLERANCE = 1e-6


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare learning rates by epoch."""
    if worlds.one is None or not worlds.one.ranks or not worlds.many.ranks:
        return
    trace, one = worlds.many[0], worlds.one[0]
    calls, epochs = trace.of("scheduler_call"), trace.epochs_of("train")
    if not calls or len(calls) > len(epochs):
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
