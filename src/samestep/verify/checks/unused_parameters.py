"""Parameters without a gradient in some steps.

What it compares: nothing; DDP itself ends the run if a parameter has no gradient in a step. This check finds out where.

Fault: classifier-free guidance that skips the text encoder in some steps, with DDP's default
`find_unused_parameters=False`.

Repair: `DDP(model, find_unused_parameters=True)`, `strategy="ddp_find_unused_parameters_true"` in Lightning, or a loss
that uses every parameter: `loss + 0 * sum(p.sum() for p in unused)`.
"""

import re
from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.messages import format_list
from samestep.verify.check import Check, Worlds, first
from samestep.verify.rank_trace import RankTrace
from samestep.verify.source import argument, attribute_assignments, call_named, origin

_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_MESSAGES = (
    "Expected to have finished reduction in the prior iteration",
    "parameters that were not used in producing the loss",
)


def find(worlds: Worlds) -> Iterator[Finding]:
    """Look for DDP's error."""
    failed = [trace for trace in worlds.many if any(text in trace.ending.message for text in _MESSAGES)]
    if not failed:
        return
    trace = failed[0]
    step = len(trace.steps)
    unused = _unused(trace)
    trained = {name.removeprefix("module.") for name, _, _ in trace.names.values()}
    never = [name for name in unused if name not in trained]
    evidence = [f"without a gradient in step {step - 1}: {format_list(unused, 6)}"] if unused else []
    if never:
        yield CHECK.finding(
            _assignment(worlds, never[0]) or _location(trace),
            f"{len(never)} parameters that no optimizer trains require a gradient and get none, which DDP does not "
            f"allow ({format_list(never, 3)})",
            evidence,
            [trace.rank],
            repair="freeze them with requires_grad_(False) before DDP is created",
        )
        return
    yield CHECK.finding(
        _location(trace),
        f"a parameter had no gradient before step {step}, which DDP does not allow",
        evidence,
        [trace.rank],
    )


def _unused(trace: RankTrace) -> list[str]:
    """The parameters without a gradient in the last step: by DDP's message, or by what the optimizer has."""
    wrapped = [event for event in trace.of("wrap") if event["state"] == "end"]
    found = _INDICES.search(trace.ending.message)
    if found is not None and wrapped:
        names = wrapped[-1]["parameters"]
        return [names[int(index)] for index in found[1].split() if int(index) < len(names)]
    last = set(trace.steps[-1].local) if trace.steps else set[int]()
    return [
        trace.names[number][0].removeprefix("module.")
        for number in sorted(trace.covered - last)
        if number in trace.names
    ]


def _assignment(worlds: Worlds, name: str) -> Location | None:
    """The line that creates the part of the model that a parameter belongs to."""
    found = attribute_assignments(worlds.files, name.split(".")[0])
    return Location(found[0][0], found[0][1].lineno) if found else None


def _location(trace: RankTrace) -> Location | None:
    """The line that sets the strategy of a Trainer, or wraps the model."""
    for event in (*trace.of("trainer"), *trace.of("fabric")):
        location = first(event["site"])
        call = call_named(location, ["Trainer", "Fabric"]) if location else None
        if location is not None and call is not None:
            value = argument(call, "strategy")
            return origin(location, value) if value is not None else location
    wrapped = trace.of("wrap")
    return first(wrapped[0]["site"]) if wrapped else first(trace.ending.site)


CHECK = Check(
    "SS204",
    "unused-parameters",
    "error",
    "the run ends with an error, or hangs if only some ranks leave the parameter out",
    "pass find_unused_parameters=True to DDP, or let every parameter take part in the loss of every step",
    find,
)
