"""A learning rate that depends on the rank.

What it compares: the values that each rank passes to ReduceLROnPlateau, and the learning rates of all ranks in each
step.

Fault: `scheduler.step(val_loss)` with the validation loss of each rank's own shard. The learning rate falls on one
rank and not on the others, and the weights drift apart.

Repair: reduce the value over all ranks first, or broadcast that of rank 0.
"""

import ast
from collections.abc import Iterator
from dataclasses import replace

from samestep.findings import Finding, Location
from samestep.verify.check import Check, Worlds, first, same_on_all
from samestep.verify.source import find_calls, key_assignments, parents, statement_at
from samestep.verify.trace_events import OptimizerStep


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare schedulers and learning rates."""
    ranks = worlds.many.ranks
    if len(ranks) < 2:
        return
    for events in zip(*(trace.of("scheduler") for trace in ranks), strict=False):
        values = [event["metric"] for event in events]
        if all(value is not None for value in values) and not same_on_all(f"{value:.9g}" for value in values):
            text = ", ".join(f"rank {rank}: {value:.6g}" for rank, value in enumerate(values))
            yield CHECK.finding(
                first(events[0]["site"]),
                f"{events[0]['name']} gets another value on every rank ({text})",
                ranks=range(len(ranks)),
            )
            return
    for steps in zip(*(trace.steps for trace in ranks), strict=False):
        if same_on_all(str(step.lr) for step in steps):
            continue
        text = ", ".join(f"rank {rank}: {step.lr[0]}" for rank, step in enumerate(steps))
        seen = f"the learning rate of step {steps[0].number} differs between the ranks ({text})"
        reduced = [call.site for call in ranks[0].collectives if call.name == "reduce" and call.step <= steps[0].number]
        if reduced:
            yield CHECK.finding(
                first(reduced[-1]),
                f"{seen}: dist.reduce leaves the result on one rank only",
                ranks=range(len(ranks)),
                repair="use dist.all_reduce if every rank uses the result",
            )
        else:
            yield CHECK.finding(
                _changing_location(worlds, steps[0]),
                seen,
                ranks=range(len(ranks)),
                repair="use the same learning rate on every rank: do not derive it from the rank or from values of one "
                "rank",
            )
        return


def _changing_location(worlds: Worlds, step: OptimizerStep) -> Location | None:
    """The line that changes the learning rate, if there is only one; else that of the optimizer."""
    trace = worlds.many[0]
    stepping = [(file, call.lineno) for file in worlds.files for call in find_calls(file, ["step"])]
    executed = [rank.executed for rank in worlds.many]
    alone = [each for each in stepping if len({each in lines for lines in executed}) > 1]
    if alone:  # some ranks do not step a scheduler
        return Location(*alone[0])
    optimizer = first(trace.optimizers[step.optimizer]["site"])
    if step.number == 0:
        return optimizer
    assigned = [
        _condition(Location(file, line))
        if any((file, line) not in lines for lines in executed)
        else Location(file, line)
        for file in worlds.files
        for line in key_assignments(file, "lr")
        if any((file, line) in lines for lines in executed)
    ]
    created = [location for event in trace.of("new_scheduler") if (location := first(event["site"])) is not None]
    changing = [*assigned, *dict.fromkeys(created)]
    return changing[0] if len(changing) == 1 else optimizer


def _condition(location: Location) -> Location:
    """The condition around a line, by which only some ranks execute it."""
    statement = statement_at(location)
    around = [node for node in parents(statement) if isinstance(node, ast.If)] if statement is not None else []
    return replace(location, line=around[0].lineno) if around else location


CHECK = Check(
    "SS404",
    "rank-dependent-learning-rate",
    "error",
    "the ranks take different steps, and their weights drift apart",
    "pass a value that is equal on all ranks: reduce it, or broadcast that of rank 0",
    find,
)
