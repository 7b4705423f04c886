"""The ranks evaluate different models.

What it compares: the parameters of the modules that the ranks evaluate between two steps. Buffers, such as the running
statistics of BatchNorm, differ between the ranks of DDP and are not compared.

Fault: an average of the weights (EMA) that only rank 0 updates, and that all ranks evaluate; or a frozen module that
every rank initializes with other random numbers.

Repair: update the average on every rank, or evaluate it on rank 0 only; broadcast frozen weights from rank 0.
"""

import ast
from collections.abc import Iterable, Iterator

from samestep.findings import Finding, Location
from samestep.verify.check import Check, Worlds, first, pair_by
from samestep.verify.checks.rank_dependent_shapes import one_rank_change
from samestep.verify.checks.unsynchronized_parameters import first_difference
from samestep.verify.source import assigned, assignment, calls_at
from samestep.verify.trace_events import Call


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare the hashes of evaluated modules, and of frozen ones that training uses."""
    ranks = worlds.many.ranks
    if len(ranks) < 2 or first_difference(ranks) is not None:
        return
    evaluations = zip(*(trace.evaluations for trace in ranks), strict=False)
    windows = [[each.calls for each in group] for group in evaluations if len({each.step for each in group}) == 1]
    windows += [[step.calls for step in group] for group in zip(*(trace.steps for trace in ranks), strict=False)]
    frozen = [_by_step(trace.frozen_calls) for trace in ranks]
    windows += [[each[step] for each in frozen] for step in frozen[0] if all(step in each for each in frozen)]
    yield from _different_buffers(worlds)
    for window in windows:
        for calls in pair_by(window, lambda call: call.site):
            names = {trace.modules[call.module]["class"] for trace, call in zip(ranks, calls, strict=True)}
            if len(names) == 1 and len({call.weights for call in calls}) > 1 and all(call.weights for call in calls):
                location = first(calls[0].site)
                call = _call_of(location) if location is not None else None
                verb = "use the frozen" if calls[0].grad else "evaluate"
                yield CHECK.finding(
                    one_rank_change(worlds) or (assigned(location, call.func) if location and call else location),
                    f"the ranks {verb} {min(names)} with different weights after step {calls[0].step}",
                    ranks=range(len(ranks)),
                    related=[location] if location else [],
                )
                return


def _by_step(calls: Iterable[Call]) -> dict[int, list[Call]]:
    found = dict[int, list[Call]]()
    for call in calls:
        found.setdefault(call.step, []).append(call)
    return found


def _different_buffers(worlds: Worlds) -> Iterator[Finding]:
    """Buffers that DDP does not broadcast (broadcast_buffers=False), in evaluations of all ranks."""
    ranks = worlds.many.ranks
    private = [event for event in ranks[0].of("wrap") if event["state"] == "end" and not event["broadcasts"]]
    for evaluations in zip(*(trace.evaluations for trace in ranks), strict=False) if private else ():
        for calls in pair_by([each.calls for each in evaluations], lambda call: call.site):
            if len({call.buffers for call in calls}) > 1 and len({call.weights for call in calls}) == 1:
                yield CHECK.finding(
                    first(private[0]["site"]),
                    f"the ranks evaluate the model with different buffers after step {calls[0].step}: "
                    "broadcast_buffers=False",
                    ranks=range(len(ranks)),
                    repair="leave broadcast_buffers=True, use SyncBatchNorm, or reduce the buffers before you "
                    "evaluate and save",
                )
                return


def _call_of(location: Location) -> ast.Call | None:
    """The call of a module by its name on a line: the innermost one, whose arguments contain no other."""
    calls = [
        call for call in calls_at(location) if isinstance(call.func, ast.Name) and assignment(location, call.func.id)
    ]
    return calls[-1] if calls else None


CHECK = Check(
    "SS208",
    "different-evaluated-weights",
    "error",
    "the metric is a mixture of several models, and the saved model is not the one that was measured",
    "do the same on all ranks with weights that all ranks use: update an EMA on every rank, broadcast frozen weights",
    find,
)
