"""The model is trained without its wrapper.

What it compares: which modules are called with gradients, and whether the gradients are the same on all ranks after the
backward pass. Calls of `model.module` for evaluation or saving are not reported.

Fault: `ddp_model = DDP(model)`, and then `loss = criterion(model(x), y)`. DDP exchanges gradients only if it is called
itself.

Repair: call the wrapper: `criterion(ddp_model(x), y)`.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.verify.check import Check, Worlds, first
from samestep.verify.rank_trace import RankTrace


def find(worlds: Worlds) -> Iterator[Finding]:
    """Find steps in which DDP covers the parameters, but was not called."""
    ranks = worlds.many.ranks
    for steps in zip(*(trace.steps for trace in ranks), strict=False):
        trace, step = ranks[0], steps[0]
        calls = [call for call in step.calls if call.training]
        is_covered = any(number in trace.covered for number in step.applied)
        if not calls or not is_covered or any(call.wrapper in ("ddp", "fsdp") for call in calls):
            continue
        if len({str(each.applied) for each in steps}) == 1:
            continue
        raw = next((call for call in calls if call.wrapper == "inside ddp"), calls[0])
        name = trace.modules[raw.module]["class"]
        wrapped = trace.of("wrap")
        outside = [frame for frame in raw.site if not frame.function.startswith(f"{name}.")]
        yield CHECK.finding(
            first(tuple(outside) or raw.site),
            f"{name} is called directly in step {step.number}, not through its DDP wrapper, and the gradients differ "
            "between the ranks",
            ranks=range(len(ranks)),
            related=[wrapped[0]["site"][0]] if wrapped and wrapped[0]["site"] else [],
        )
        return


def is_bypassed(trace: RankTrace) -> bool:
    """Whether a rank trains a module whose wrapper it does not call."""
    return any(
        step.calls and not any(call.wrapper in ("ddp", "fsdp") for call in step.calls) for step in trace.steps
    ) and bool(trace.covered)


CHECK = Check(
    "SS202",
    "bypassed-wrapper",
    "error",
    "gradients are not exchanged: each rank trains its own model, and only that of one rank is saved",
    "call the DDP wrapper in the training loop; use model.module for evaluation and saving only",
    find,
)
