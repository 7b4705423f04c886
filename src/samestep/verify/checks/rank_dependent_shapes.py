"""State that changes on some ranks only.

What it compares: the shapes of the training batches within an epoch. It is reported if every rank has one shape in the
whole epoch, but not all ranks the same; batches of variable length differ within a rank. It compares the numbers and
texts that a dataset has as attributes, if the script changes them between epochs. It also compares whether a model is
in training mode, and the gradients with those of one rank: if they are equal first and differ from some step on, and
some ranks alone have executed a line that changes an attribute, this is the cause.

Fault: a callback under `@rank_zero_only`, or code under `if rank == 0:`, that changes the resolution of the dataset or
the weight of a loss. The other ranks keep the old one. Or a difficulty of the dataset that each rank sets from its own
loss, or `model.eval()` on rank 0, without `model.train()` after it.

Repair: change the state on every rank, and print on rank 0 only.
"""

import ast
from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.verify.check import Check, Worlds, first, pair_by, same_on_all
from samestep.verify.checks.unsynchronized_parameters import first_difference
from samestep.verify.control_flow import early_exit
from samestep.verify.gradient_fit import comparable_steps, fit_weights
from samestep.verify.source import (
    Function,
    attribute_assignments,
    find_calls,
    find_class,
    function_at,
    name_of,
    statement_at,
)

_MIN_BATCHES = 2
_MIN_STEPS = 2
_TOLERANCE, _LARGE = 2e-3, 1e-2  # relative differences of gradients
_OUTPUT = (
    "print", "log", "write", "save", "dump", "warn", "info", "debug", "close", "flush", "barrier", "add_scalar",
    "makedirs", "mkdir", "tqdm", "bar", "plot", "append", "remove", "unlink", "broadcast", "wait", "hist",
)  # fmt: skip
_DECORATORS = ("rank_zero_only", "on_main_process", "on_local_main_process", "main_process_only", "master_only")


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare the shapes of the batches, epoch by epoch."""
    ranks = worlds.many.ranks
    for number, epochs in enumerate(zip(*(trace.epochs_of("train") for trace in ranks), strict=False)):
        shapes = [{str([each[1:] for each in batch.shapes]) for batch in epoch.batches} for epoch in epochs]
        if any(len(epoch.batches) < _MIN_BATCHES for epoch in epochs) or any(len(each) != 1 for each in shapes):
            continue
        if len(set[str]().union(*shapes)) > 1:
            location = one_rank_change(worlds)
            if location is None:  # the data of the ranks has different shapes
                return
            text = ", ".join(f"rank {trace.rank}: {min(each)}" for trace, each in zip(ranks, shapes, strict=True))
            yield CHECK.finding(
                location,
                f"the ranks train on batches of different shapes from epoch {number} on ({text})",
                ranks=[trace.rank for trace, each in zip(ranks, shapes, strict=True) if each != shapes[0]],
            )
            return
    yield from _settings(worlds)
    yield from _modes(worlds)
    yield from _gradients(worlds)


def _settings(worlds: Worlds) -> Iterator[Finding]:
    """Compare the attributes of datasets that the script changes from outside, if they are equal in the first epoch."""
    equal = dict[str, int]()  # the last epoch in which the ranks have the same value, by attribute
    for number, epochs in enumerate(zip(*(trace.epochs_of("train") for trace in worlds.many), strict=False)):
        if not same_on_all(epoch.loader.dataset for epoch in epochs):
            return
        for name in epochs[0].settings:
            values = [epoch.settings.get(name, "") for epoch in epochs]
            if same_on_all(values):
                equal[name] = number
                continue
            location = _change(worlds, name, epochs[0].loader.dataset_class) if name in equal else None
            if location is not None:
                text = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
                yield CHECK.finding(
                    location,
                    f"`{name}` of {epochs[0].loader.dataset_class.rpartition('.')[2]} differs between the ranks in "
                    f"epoch {number} ({text}), and is equal in epoch {equal[name]}",
                    ranks=range(worlds.many.size),
                    repair="change it by a value that is equal on all ranks: reduce it, or broadcast that of rank 0",
                )
                return


def _change(worlds: Worlds, attribute: str, dataset: str) -> Location | None:
    """The executed line that changes an attribute of a dataset from outside: by itself, or by calling a method."""
    found = find_class(worlds.files, dataset.rpartition(".")[2])
    methods = {each.name for each in ast.walk(found[1]) if isinstance(each, ast.FunctionDef)} if found else set[str]()
    for file, statement in attribute_assignments(worlds.files, attribute):
        location, executed = Location(file, statement.lineno), worlds.executed()
        function = function_at(location)
        if (file, statement.lineno) not in executed:
            continue
        if found is None or statement not in ast.walk(found[1]):
            return location
        name = function.name if isinstance(function, Function) and not function.name.startswith("_") else ""
        calls = [(each, call) for each in worlds.files for call in find_calls(each, [name]) if name in methods]
        outside = [(each, call.lineno) for each, call in calls if call not in ast.walk(found[1])]
        for place in outside:
            if place in executed:
                return Location(*place)
    return None


def _modes(worlds: Worlds) -> Iterator[Finding]:
    """Compare whether the ranks train in training mode."""
    for steps in zip(*(trace.steps for trace in worlds.many), strict=False):
        for calls in pair_by([each.calls for each in steps], lambda call: call.site):
            if not same_on_all(call.training for call in calls):
                ranks = [rank for rank, call in enumerate(calls) if not call.training]
                yield CHECK.finding(
                    one_rank_change(worlds) or first(calls[0].site),
                    f"from step {steps[0].number} on the model is in evaluation mode on ranks "
                    f"{', '.join(map(str, ranks))}, and in training mode on the others",
                    ranks=ranks,
                    consequence="dropout and BatchNorm work on some ranks only",
                    repair="call model.train() after an evaluation on every rank that evaluates",
                )
                return


def _gradients(worlds: Worlds) -> Iterator[Finding]:
    """Look for a step from which on the gradients are not those of one rank any more, without a fit by weights."""
    if first_difference(worlds.many.ranks) is not None:  # other weights have other gradients
        return
    differences = list[tuple[int, float]]()
    for steps, reference in comparable_steps(worlds):
        fit = fit_weights(worlds.many[0], steps, reference)
        if fit is not None:
            is_explained = fit[1] < fit[2] / 5
            differences.append((steps[0].number, 0.0 if is_explained else fit[2]))
    large = [number for number, difference in differences if difference > _LARGE]
    small = [number for number, difference in differences if difference <= _TOLERANCE]
    if len(large) < _MIN_STEPS or not small or max(small) > min(large):
        return
    location = one_rank_change(worlds)
    if location is not None:
        size = max(difference for _, difference in differences)
        yield CHECK.finding(
            location,
            f"the gradient of the ranks is that of one rank until step {max(small)}, and differs by {100 * size:.0f} % "
            f"from step {min(large)} on for the same samples and weights",
            ranks=range(worlds.many.size),
            consequence="the ranks optimize different losses, and the result depends on which rank has which",
        )


def one_rank_change(worlds: Worlds) -> Location | None:
    """The line that changes state on some ranks only, by the lines that not all ranks have executed.

    If a decorator keeps its function from the other ranks, it is the line of the decorator. Of a function that only
    some ranks call, it is the line of the call; if the other ranks leave the function before, that of the condition.
    """
    ranks = worlds.many.ranks
    for trace in ranks:
        others = set[tuple[str, int]].intersection(*(each.executed for each in ranks if each is not trace))
        own = [Location(*each) for each in sorted(trace.executed - others)]
        changes = [each for each in own if (node := statement_at(each)) is not None and _changes_state(node, each.file)]
        guards = [guard for each in changes if (guard := _guard(each)) is not None]
        inside = [each for each in changes if _is_in_common_function(each, others)]
        if guards or inside or changes:
            location = (guards or inside or changes)[0]
            return location if guards else early_exit(location, others) or location
    return None


def _is_in_common_function(location: Location, executed: set[tuple[str, int]]) -> bool:
    """Whether other ranks have executed the function of a line too, without this line."""
    function = function_at(location)
    if not isinstance(function, Function):
        return True
    body = (node.lineno for node in function.body)
    return any((location.file, line) in executed for line in body)


def _changes_state(statement: ast.stmt, file: str) -> bool:
    """Whether a statement assigns an attribute or an item, or calls something for its effect, other than output."""
    if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return any(isinstance(each, ast.Attribute | ast.Subscript) for each in targets)
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    return not any(word in ast.unparse(statement.value.func).lower() for word in _OUTPUT)


def _guard(location: Location) -> Location | None:
    """The decorator that keeps a function from other ranks."""
    function = function_at(location)
    for decorator in function.decorator_list if isinstance(function, Function) else ():
        if name_of(decorator) in _DECORATORS:
            return Location(location.file, decorator.lineno, name_of(decorator))
    return None


CHECK = Check(
    "SS110",
    "state-changed-on-some-ranks",
    "error",
    "the ranks train on different data, and the result depends on which rank has which",
    "change state on every rank; do only output, such as printing and saving, on rank 0",
    find,
)
