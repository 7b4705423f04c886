"""The model is trained without its wrapper.

What it compares: which modules are called with gradients, and whether the gradients are the same on all ranks after the
backward pass. Calls of `model.module` for evaluation or saving are not reported.

Fault: `ddp_model = DDP(model)`, and then `loss = criterion(model(x), y)`. DDP exchanges gradients only if it is called
itself.

Repair: call the wrapper: `criterion(ddp_model(x), y)`.
"""

from collections.abc import Iterator, Sequence

from samestep.findings import Finding
from samestep.verify.check import Check, Worlds, first, same_on_all
from samestep.verify.rank_trace import RankTrace
from samestep.verify.trace_events import Call, OptimizerStep


def find(worlds: Worlds) -> Iterator[Finding]:
    """Report the first step whose gradients differ because a wrapper was not called."""
    ranks = worlds.many.ranks
    found = find_bypassed(ranks)
    if found is None:
        return
    step, raw = found
    name = ranks[0].modules[raw.module]["class"]
    wrapped = [event for event in ranks[0].of("wrap") if event.get("inner") in (None, raw.module)]
    inner = {ranks[0].modules[event["inner"]]["class"] for event in ranks[0].of("wrap") if "inner" in event}
    classes = tuple(f"{each}." for each in {name, *inner})  # whose methods a line outside of them has called
    outside = [frame for frame in raw.site if not frame.function.startswith(classes)]
    yield CHECK.finding(
        first(tuple(outside) or raw.site),
        f"{name} is called directly in step {step.number}, not through its DDP wrapper, and the gradients differ "
        "between the ranks",
        ranks=range(len(ranks)),
        related=[wrapped[0]["site"][0]] if wrapped and wrapped[0]["site"] else [],
    )


def find_bypassed(ranks: Sequence[RankTrace]) -> tuple[OptimizerStep, Call] | None:
    """The first step in which DDP covers parameters but was not called, and the call of the module instead.

    Other models of the script, such as the generator of a GAN, may be called through their wrappers in the same step.
    """
    wrappers = {
        event["inner"]: event["module"] for trace in ranks[:1] for event in trace.of("wrap") if "inner" in event
    }
    for steps in zip(*(trace.steps for trace in ranks), strict=False):
        trace, step = ranks[0], steps[0]
        covered = [number for number in step.applied if number in trace.covered]
        if not covered or same_on_all(str(each.applied) for each in steps):
            continue
        calls = [call for call in step.calls if call.training]
        owners = {trace.names[number][2] for number in covered if number in trace.names}
        called = {call.module for call in calls}
        for call in calls:
            if call.module in owners and call.module in wrappers and wrappers[call.module] not in called:
                return step, call
        if calls and not any(call.wrapper in ("ddp", "fsdp") for call in calls):
            return step, calls[0]
    return None


CHECK = Check(
    "SS202",
    "bypassed-wrapper",
    "error",
    "gradients are not exchanged: each rank trains its own model, and only that of one rank is saved",
    "call the DDP wrapper in the training loop; use model.module for evaluation and saving only",
    find,
)
