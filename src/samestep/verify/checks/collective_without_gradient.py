"""A collective that cuts the gradient.

What it compares: the gradient of several ranks with that of one rank for the same samples and weights, and whether a
tensor with a gradient was passed to `dist.all_gather` or another collective of torch.distributed. These return tensors
without a gradient.

Fault: a contrastive loss over `dist.all_gather(buffers, features)`: no gradient flows to the features of the other
side. Or `dist.all_reduce(loss)` and `loss /= world_size` before `loss.backward()`: the gradient is divided by the
number of ranks, and DDP averages it as well.

Repair: `torch.distributed.nn.functional.all_gather`, or `run.gather(features)`. For the log, average a copy of the
loss: `loss.detach().clone()`.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.verify.check import Check, Worlds, first
from samestep.verify.gradient_fit import comparable_steps, fit_weights
from samestep.verify.source import division_by_ranks

_TOLERANCE = 1e-2
_MIN_STEPS = 2
_GATHERS = ("all_gather", "all_gather_into_tensor", "all_reduce", "gather", "reduce")


def find(worlds: Worlds) -> Iterator[Finding]:
    """Look for collectives of tensors with gradients in steps that differ from one rank."""
    traces = worlds.many.ranks[:1]
    calls = [call for trace in traces for call in trace.collectives if call.needs_grad and call.name in _GATHERS]
    if not calls:
        return
    trace = worlds.many[0]
    fits = [fit for steps, one in comparable_steps(worlds) if (fit := fit_weights(trace, steps, one)) is not None]
    different = [difference for _, _, difference in fits if difference > _TOLERANCE]
    if not different or len(different) < min(_MIN_STEPS, len(fits)):
        return
    location, size = first(calls[0].site), worlds.many.size
    seen = f"the gradient of {size} ranks differs by {100 * max(different):.0f} % from that of one rank for the same "
    is_reduced = calls[0].name in ("all_reduce", "reduce")
    is_divided = is_reduced and all(abs(each + 1 / size - 1) < _TOLERANCE for each in different)
    divided = division_by_ranks(location) if location is not None and is_divided else None
    if divided is not None:
        yield CHECK.finding(
            divided,
            "a value with a gradient is summed over the ranks in place and divided by their number, and its gradient "
            f"is averaged over the ranks as well: {seen}samples and weights",
            related=[location] if location else [],
            consequence="the gradient is divided by the number of ranks twice",
            repair="average a copy of the loss for the log: loss.detach().clone()",
        )
        return
    yield CHECK.finding(
        location,
        f"{calls[0].name} gets a tensor with a gradient and returns one without: {seen}samples and weights",
    )


CHECK = Check(
    "SS211",
    "collective-without-gradient",
    "error",
    "a part of the gradient is missing, and which part depends on the number of ranks",
    "gather with torch.distributed.nn.functional.all_gather or run.gather, which have a gradient",
    find,
)
