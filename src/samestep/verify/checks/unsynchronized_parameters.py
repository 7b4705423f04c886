"""Parameters that are trained, but not exchanged.

What it compares: the weights of all ranks before every optimizer step, and the gradients before and after they are
exchanged. Sharded weights of FSDP differ by design and are not compared, others of the same model are. Weights of ranks
that average them from time to time (local SGD) are not compared.

Fault: a text encoder whose parameters are in the optimizer, but which is outside of `DDP(unet)`. Its weights drift
apart, and the checkpoint has those of rank 0.

Repair: wrap everything that is trained: `text_encoder = DDP(text_encoder)`, or one module with both parts.
"""

import ast
import math
from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.messages import format_list
from samestep.verify.check import Check, Worlds, first
from samestep.verify.gradient_fit import is_local_sgd
from samestep.verify.rank_trace import RankTrace
from samestep.verify.source import (
    argument,
    attribute_assignments,
    call_named,
    calls_at,
    find_calls,
    name_of,
    origin,
    tree_of,
)


def find(worlds: Worlds) -> Iterator[Finding]:
    """Find the first step in which weights differ, and those of them that DDP does not cover."""
    ranks = worlds.many.ranks
    found = first_difference(ranks)
    if found is None or found[0] == 0:
        return
    before, numbers = found
    step = previous_step(ranks[0], before)
    if not have_same_rates(ranks, before):
        return
    outside = [number for number in numbers if number not in ranks[0].covered]
    if not outside:
        return
    if not ranks[0].covered and _exchanges_gradients(ranks[0], before, outside):
        return
    names = format_list([parameter_name(ranks[0], number) for number in outside], 3)
    location, why = _early_exchange(worlds) or _cause(ranks[0], step, outside)
    yield CHECK.finding(
        location,
        f"{len(outside)} of {len(ranks[0].steps[step].weights)} trained parameters differ between the ranks after "
        f"step {step} ({names}): {why}",
        ranks=range(len(ranks)),
    )


def _early_exchange(worlds: Worlds) -> tuple[Location, str] | None:
    """The executed call of a function that exchanges gradients by hand, if it has found none."""
    if worlds.many[0].covered or any(call.name == "all_reduce" for call in worlds.many[0].collectives):
        return None
    for file in worlds.files:
        for function in ast.walk(tree_of(file)):
            if not isinstance(function, ast.FunctionDef) or not find_calls(file, ["all_reduce"], function):
                continue
            calls = [call for call in find_calls(file, [function.name]) if (file, call.lineno) in worlds.executed()]
            if calls and _uses_gradients(function):
                return Location(file, calls[0].lineno), f"{function.name} is called before there are gradients"
    return None


def _uses_gradients(function: ast.AST) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "grad" for node in ast.walk(function))


def _cause(trace: RankTrace, step: int, numbers: list[int]) -> tuple[Location | None, str]:
    """The line that leaves parameters out, and how."""
    optimizer = trace.optimizers[trace.steps[step].optimizer]
    wrapped = [event for event in trace.of("wrap") if event["state"] == "end"]
    changed = [event for event in trace.of("changed") if event["s"] <= step + 1]
    if wrapped and changed:
        function = wrapped[0]["site"][0].function if wrapped[0]["site"] else ""
        frames = [each for each in changed[-1]["site"] if each.function == function]
        location = frames[0] if frames else first(changed[-1]["site"])
        return location, f"they were {changed[-1]['what']} after DDP was created, which does not cover them"
    if wrapped and (unfrozen := _unfrozen_location(trace, wrapped[0]["p"])) is not None:
        return unfrozen, "they were unfrozen after DDP was created, which does not cover them"
    if trace.covered:
        return _parameters_location(optimizer["site"]), "DDP does not cover them"
    if trace.steps[step].is_sharded:
        if not any(number in trace.names for number in numbers):
            return _parameters_location(optimizer["site"]), "they are in no module, so that FSDP does not shard them"
        return _sharding_location(trace) or _parameters_location(optimizer["site"]), "FSDP does not shard them"
    prepared = [event["site"] for event in trace.of("accelerate") if event["name"] == "prepare" and event["site"]]
    if prepared:
        return first(prepared[0]), "the model is not passed to accelerator.prepare()"
    return _parameters_location(optimizer["site"]), "no DDP wrapper and no collective exchanges their gradients"


def _sharding_location(trace: RankTrace) -> Location | None:
    """The last executed line that shards a module."""
    calls = [
        Location(file, call.lineno)
        for file in {file for file, _, _ in trace.codes.values()}
        for call in find_calls(file, ["fully_shard"])
        if (file, call.lineno) in trace.executed
    ]
    return max(calls, default=None)


def _unfrozen_location(trace: RankTrace, position: int) -> Location | None:
    """The line with `requires_grad = True` that was executed first after a position."""
    begin, lines = trace.lines
    executed = dict.fromkeys(trace.locate(each) for each in lines[max(0, position - begin) :])
    unfreezing = {
        (file, statement.lineno)
        for file, statement in attribute_assignments({each.file for each in executed}, "requires_grad")
        if isinstance(statement.value, ast.Constant) and statement.value.value is True
    }
    return next((each for each in executed if (each.file, each.line) in unfreezing), None)


def first_difference(ranks: list[RankTrace]) -> tuple[int, list[int]] | None:
    """The first step before which weights differ between ranks, and the numbers of these parameters.

    None if the ranks train on their own and average their weights from time to time (local SGD).
    """
    if len(ranks) < 2 or any(trace.of("join") for trace in ranks):  # a rank without data does not step
        return None
    if is_local_sgd(ranks):
        return None
    for number, steps in enumerate(zip(*(trace.steps for trace in ranks), strict=False)):
        if len({step.optimizer for step in steps}) > 1:
            continue
        parameters = ranks[0].optimizers[steps[0].optimizer]["parameters"]
        differing = [
            parameters[index] if index < len(parameters) else index
            for index, hashes in enumerate(zip(*(step.weights for step in steps), strict=False))
            if len(set(hashes)) > 1
        ]
        sharded = set[int]().union(*(step.sharded for step in steps))
        if whole := [each for each in differing if each not in sharded]:
            return number, whole
    return None


def previous_step(trace: RankTrace, number: int) -> int:
    """The number of the step before this one that the same optimizer made; another one cannot change its weights."""
    optimizer = trace.steps[number].optimizer
    earlier = [step.number for step in trace.steps[:number] if step.optimizer == optimizer]
    return earlier[-1] if earlier else number - 1


def have_same_rates(ranks: list[RankTrace], step: int) -> bool:
    """Whether the learning rates of all steps before this one are equal on all ranks."""
    return all(
        len({str(each.lr) for each in steps}) == 1
        for steps in zip(*(trace.steps[:step] for trace in ranks), strict=False)
    )


def parameter_name(trace: RankTrace, number: int) -> str:
    """The name of a parameter in its module, or its shape."""
    name = trace.names.get(number)
    if name is None:
        return f"a parameter of shape {trace.shapes.get(number, '?')}"
    module = trace.modules.get(name[2], {})
    if module.get("wrapper") == "ddp":
        return name[0].removeprefix("module.")
    return f"{module.get('class', '')}.{name[0]}".lstrip(".")


def _exchanges_gradients(trace: RankTrace, step: int, numbers: list[int]) -> bool:
    """Whether the script calls collectives in its steps with tensors that may contain the gradients of parameters."""
    largest = max(math.prod(trace.shapes.get(number, [])) for number in numbers)
    return any(
        call.step < step
        and call.name in ("all_reduce", "reduce", "all_gather")
        and (call.source is None or math.prod(call.source[0]) >= largest)
        for call in trace.collectives
    )


def _parameters_location(site: tuple[Location, ...]) -> Location | None:
    """The line that collects the parameters of an optimizer."""
    location = first(site)
    if location is None:
        return None
    calls = [call for call in calls_at(location) if name_of(call) != "parameters"]
    call = call_named(location, ["AdamW", "Adam", "SGD"]) or next(iter(calls), None)
    return origin(location, argument(call, "params", 0)) if call is not None else location


CHECK = Check(
    "SS201",
    "unsynchronized-parameters",
    "error",
    "these weights differ on every rank, each rank trains another model, and a checkpoint holds that of one rank",
    "wrap every module that is trained with DDP, or train one module that contains all of them",
    find,
)
