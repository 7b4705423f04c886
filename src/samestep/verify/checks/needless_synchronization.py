"""Gradients that are exchanged after every micro-batch.

What it compares: in how many of the backward passes of a step DDP exchanges gradients. One is enough.

Fault: gradient accumulation over 8 micro-batches without `model.no_sync()`: the network carries 8 times the data.

Repair: `with model.no_sync():` around all micro-batches but the last.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.verify.check import Check, Worlds, first


def find(worlds: Worlds) -> Iterator[Finding]:
    """Count the exchanges of each step."""
    if len(worlds.many.ranks) < 2:
        return
    trace = worlds.many[0]
    needless = [
        step
        for step in trace.steps
        if len(step.backwards) > 1
        and len({each.site for each in step.backwards}) == 1
        and len({tuple(call.hashes) for call in step.calls if call.training}) >= len(step.backwards)
        and all(each.syncs and all(each.syncs) for each in step.backwards)
        and any(call.wrapper == "ddp" for call in step.calls)
        and len({trace.epochs[batch.epoch].loader.number for batch in step.batches}) < 2  # losses of several tasks
        and not any(each.restarts for each in step.backwards[1:])  # batches that were skipped
    ]
    if needless and len(needless) >= len(trace.steps) / 2:
        count = len(needless[0].backwards)
        yield CHECK.finding(
            first(needless[0].backwards[0].site),
            f"DDP exchanges the gradients in each of {count} backward passes of a step, where the last one is enough",
        )


CHECK = Check(
    "SS604",
    "needless-synchronization",
    "warning",
    "the result is right, but each step sends the gradients several times",
    "run all micro-batches but the last inside of `with model.no_sync():`",
    find,
)
