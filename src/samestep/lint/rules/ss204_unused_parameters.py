"""Parameters without a gradient in some steps.

DDP waits in each backward pass for the gradients of all parameters that require one. A submodule that a forward pass
skips at random or because of its data, or that is only used under `torch.no_grad()`, has none: the next step ends with
an error, or hangs if only some ranks skip it. Freeze what is not trained, or pass `find_unused_parameters=True`.

Bad:

```python
import random

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = nn.Linear(8, 8)
        self.body = nn.Linear(8, 8)

    def forward(self, x, text):
        if random.random() > 0.1:
            x = x + self.text(text)
        return self.body(x)


dist.init_process_group("nccl")
model = DDP(Denoiser())  # SS204


def compute_loss(x, text):
    return model(x, text).square().mean()
```

Good:

```python
import random

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = nn.Linear(8, 8)
        self.body = nn.Linear(8, 8)

    def forward(self, x, text):
        if random.random() > 0.1:
            x = x + self.text(text)
        return self.body(x)


dist.init_process_group("nccl")
model = DDP(Denoiser(), find_unused_parameters=True)


def compute_loss(x, text):
    return model(x, text).square().mean()
```

Source: pytorch/pytorch#22049, Lightning-AI/pytorch-lightning#12190.
"""

import ast
from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.lint.events import Event, Guard
from samestep.lint.module_trees import Freezing, contains, exchanges, has_parameters, is_module, key_of, parts_of
from samestep.lint.rule import Analysis, Rule, is_wrapped
from samestep.lint.source_files import SourceFile
from samestep.lint.submodule_uses import is_used_with_gradient
from samestep.lint.training_steps import resolve
from samestep.lint.values import InstanceValue, TensorValue, Value, options_of

_VALUES = ("any", "all", "item", "sum", "max", "min", "nonzero", "count_nonzero")
_END = 10**9


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for submodules that a forward pass may leave out, in models of which DDP expects all gradients."""
    if any(_finds_unused(event.keywords) for event in analysis.of("call")):
        return
    yield from _skipped_submodules(analysis)
    yield from _untrained_submodules(analysis)
    yield from _chosen_submodules(analysis)


def _finds_unused(options: dict[str, Value]) -> bool:
    return any(name in options and options[name].constant is not False for name in _UNUSED_OPTIONS)


_UNUSED_OPTIONS = ("find_unused_parameters", "static_graph")

# -- submodules that are called under a condition


def _skipped_submodules(analysis: Analysis) -> Iterator[Finding]:
    draws = {event.node for event in analysis.of("draw")}
    calls = [event for event in analysis.of("model_call") if event.is_grad and _is_inside(event)]
    freezing = Freezing(analysis)
    for call in calls:
        guard = _choosing_guard(analysis, call, draws)
        if guard is None:
            continue
        for module in options_of(call.model):
            same = [each for each in calls if any(key_of(other) == key_of(module) for other in options_of(each.model))]
            is_always = any(not any(_is_same(each, guard) for each in other.guards) for other in same)
            if is_always or not has_parameters(module) or freezing.is_frozen(module, _END):
                continue
            location = _wrapping_line(analysis, call, module)
            if location is None or _reads_parameters(analysis, call, guard):
                continue
            yield RULE.finding(
                location,
                "DDP expects a gradient of every parameter, but the forward pass skips a submodule in some steps",
                evidence=[
                    f"the submodule is called ({call.location})",
                    f"only if {'not ' if guard.is_negated else ''}`{guard.text}` ({guard.location})",
                ],
                related=[call.location],
            )


def _is_same(guard: Guard, other: Guard) -> bool:
    return guard.node is other.node and guard.is_negated == other.is_negated


def _is_inside(call: Event) -> bool:
    return "forward" in call.contexts or "hook:training_step" in call.contexts


def _choosing_guard(analysis: Analysis, call: Event, draws: set[ast.AST]) -> Guard | None:
    """A condition on random numbers or on the values of a batch, in the forward pass itself."""
    for guard in call.guards:
        if guard.location.function == "<module>" or guard.condition is None:
            continue
        condition = resolve(analysis, guard.condition, guard.location)
        nodes = list(ast.walk(condition)) if condition is not None else []
        if any(node in draws for node in nodes):
            return guard
        names = [
            node.func.attr for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        ]
        depends_on_data = any(taint.kind == "data" for taint in guard.taints)
        is_own = guard.depends_on_rank and not analysis.wrapped
        if is_own or (depends_on_data and any(name in _VALUES for name in names)):
            return guard
    return None


def _wrapping_line(analysis: Analysis, call: Event, module: Value) -> Location | None:
    """Where the model gets its wrapper; None if the wrapper looks for unused parameters, or if there is none."""
    for wrap in analysis.wrapped:
        if any(contains(tree, module) for tree in options_of(wrap.inner)):
            return None if wrap.wrapper != "ddp" or _finds_unused(wrap.model.options) else wrap.location
    for prepare in analysis.of("prepare"):
        values = [option for each in prepare.arguments for option in options_of(each)]
        if any(is_module(each) and contains(each, module) for each in values):
            return prepare.location
    for event in exchanges(analysis, "gradient") if not analysis.wrapped else ():
        if any(".grad" in guard.text for guard in event.guards):
            return event.location  # `if p.grad is None: continue` leaves out what this rank has not used
    return _trainer_line(analysis) if "hook:training_step" in call.contexts else None


def _trainer_line(analysis: Analysis) -> Location | None:
    for event in analysis.of("trainer"):
        strategy = event.service.options.get("strategy")
        if strategy is None:
            continue
        for option in options_of(strategy):
            if option.constant in ("ddp", "ddp_spawn", "ddp_notebook"):
                return option.location or event.location
    return None


def _reads_parameters(analysis: Analysis, call: Event, guard: Guard) -> bool:
    """Whether the function reads parameters itself: `loss + 0 * sum(p.sum() for p in ...)`."""
    function = next(
        (
            node
            for file in analysis.files
            if str(file.path) == guard.location.file
            for node in ast.walk(file.tree)
            if isinstance(node, ast.FunctionDef) and node.lineno <= guard.location.line <= (node.end_lineno or 0)
            and node.name == guard.location.function
        ),
        None,
    )  # fmt: skip
    return function is not None and any(
        isinstance(node, ast.Attribute) and node.attr in ("parameters", "named_parameters")
        for node in ast.walk(function)
    )


# -- submodules that never get a gradient


def _untrained_submodules(analysis: Analysis) -> Iterator[Finding]:
    freezing = Freezing(analysis)
    if freezing.has_unknown:
        return
    for wrap in analysis.wrapped:
        if wrap.wrapper != "ddp" or _finds_unused(wrap.model.options):
            continue
        for part in (each for tree in options_of(wrap.inner) for each in parts_of(tree)):
            if not isinstance(part, InstanceValue):
                continue
            for name, child in list(part.attributes.items()):
                is_trainable = _is_trainable(child) and freezing.was_frozen(child, wrap.order) is None
                if not is_trainable or is_used_with_gradient(analysis, part, name):
                    continue
                location = _assignment(analysis, part, name)
                if location is not None:
                    yield RULE.finding(
                        location,
                        f"`{name}` requires gradients, but the forward pass never computes them",
                        evidence=[f"DDP expects a gradient of every parameter ({wrap.location})"],
                        related=[wrap.location],
                        repair=f"freeze it before DDP wraps the model: `self.{name}.requires_grad_(False)`",
                    )


# -- submodules of which a call chooses one


def _chosen_submodules(analysis: Analysis) -> Iterator[Finding]:
    """`self.heads[task](x)` in a forward pass with the argument `task`: the other heads get no gradient."""
    for wrap in analysis.wrapped:
        if wrap.wrapper != "ddp" or _finds_unused(wrap.model.options) or not _is_called_once(analysis):
            continue
        for part in (each for tree in options_of(wrap.inner) for each in parts_of(tree)):
            for name, child in part.attributes.items() if isinstance(part, InstanceValue) else ():
                use = _choice(part, name) if _has_several(child) else None
                if use is not None and not Freezing(analysis).is_frozen(child, _END):
                    yield RULE.finding(
                        wrap.location,
                        f"DDP expects a gradient of every parameter, but each call uses one of `{name}` only",
                        evidence=[f"the forward pass chooses it by an argument ({use})"],
                        related=[use],
                    )


def _has_several(child: Value) -> bool:
    """Whether it is a ModuleDict or ModuleList of several modules with parameters."""
    if not isinstance(child, InstanceValue) or child.class_name not in ("ModuleDict", "ModuleList"):
        return False
    return len([each for each in child.children if has_parameters(each)]) > 1


def _choice(owner: Value, name: str) -> Location | None:
    """Where a method chooses one of the modules by one of its arguments, if nothing else uses them."""
    class_value = owner.class_value if isinstance(owner, InstanceValue) else None
    definition, module = (class_value.node, class_value.module) if class_value is not None else (None, None)
    if definition is None or module is None:
        return None
    nodes = [each for each in ast.walk(definition) if isinstance(each, ast.Attribute) and each.attr == name]
    uses = [each for each in nodes if isinstance(each.ctx, ast.Load)]
    if not uses or not all(_is_chosen_by_argument(module.file, each) for each in uses):
        return None
    return module.file.locate(uses[0], "forward")


def _is_chosen_by_argument(file: SourceFile, use: ast.Attribute) -> bool:
    around = file.parents.get(use)
    index = around.slice if isinstance(around, ast.Subscript) and around.value is use else None
    node: ast.AST | None = use
    while node is not None and not isinstance(node, ast.FunctionDef):
        node = file.parents.get(node)
    names = [each.arg for each in (*node.args.args, *node.args.kwonlyargs)] if node is not None else []
    return isinstance(index, ast.Name) and index.id in names


def _is_called_once(analysis: Analysis) -> bool:
    """Whether each backward pass follows one call of the wrapped model, so that a step uses one of the modules."""
    calls = [each for each in analysis.of("model_call") if is_wrapped(each.model) and each.is_grad]
    before, last = -1, None
    for backward in analysis.of("backward"):
        own = [each for each in calls if before < each.order < backward.order]
        if not own and backward.node is last:
            continue  # of a loss that is one of several
        last = backward.node
        if len(own) != 1 or own[0].loops != backward.loops:
            return False
        before = backward.order
    return before >= 0


def _is_trainable(child: Value) -> bool:
    if isinstance(child, TensorValue):
        return child.content == "parameter" and child.needs_grad
    return isinstance(child, InstanceValue) and child.is_module and has_parameters(child)


def _assignment(analysis: Analysis, owner: Value, name: str) -> Location | None:
    for event in analysis.of("assign_attribute"):
        if event.name == name and any(key_of(each) == key_of(owner) for each in options_of(event.owner)):
            return event.location
    return None


RULE = Rule(
    "SS204",
    "unused-parameters",
    "error",
    "the run ends with an error, or hangs if only some ranks leave the parameter out",
    '`DDP(model, find_unused_parameters=True)`, or `strategy="ddp_find_unused_parameters_true"` in Lightning',
    find,
)
