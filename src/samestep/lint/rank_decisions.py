"""Conditions in which ranks differ, and what depends on them: shared by the rules about collectives and metrics."""

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Final

from samestep.findings import Location
from samestep.lint.events import Event, Guard, Loop, are_opposite, source_text
from samestep.lint.library.collective_library import REDUCE_TEXT, is_for_subgroup
from samestep.lint.library.partitions import IS_PART
from samestep.lint.rule import Analysis, is_wrapped
from samestep.lint.values import (
    InstanceValue,
    LoaderValue,
    ModelValue,
    Taint,
    TensorValue,
    Value,
    computed_from,
    merge_taints,
    options_of,
)

_SIZES: Final = frozenset({"len", "size", "numel", "dim", "nelement"})
_SIZE_ATTRIBUTES: Final = frozenset({"shape", "ndim", "batch_size", "sync_gradients"})
_EXPECTED: Final = frozenset({
    "ImportError", "ModuleNotFoundError", "StopIteration", "KeyboardInterrupt", "FileNotFoundError", "AttributeError",
    "NotImplementedError", "TypeError", "KeyError", "SystemExit", "GeneratorExit", "FileExistsError",
})  # fmt: skip
_ENDS: Final = frozenset({"exit", "_exit", "abort", "quit", "kill", "exit_with_error", "fail"})
_ABOUT_RANKS: Final = re.compile(
    r"rank|main|master|zero|process|chief|primary|dist|init|world|ddp|avail|gpu", re.IGNORECASE
)
_WITHOUT_BUFFERS: Final = frozenset({
    "Linear", "Conv1d", "Conv2d", "Conv3d", "ReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "Softplus", "Softmax",
    "LayerNorm", "GroupNorm", "RMSNorm", "Dropout", "Dropout1d", "Dropout2d", "Embedding", "Flatten", "Unflatten",
    "MaxPool1d", "MaxPool2d", "AvgPool1d", "AvgPool2d", "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "Identity", "LSTM",
    "GRU", "RNN", "MultiheadAttention", "ConvTranspose2d", "ConvTranspose1d", "LeakyReLU", "ELU", "Upsample",
    "TransformerEncoderLayer", "TransformerDecoderLayer", "InstanceNorm2d", "PixelShuffle", "LogSoftmax", "Hardswish",
    "GLU", "Mish", "Softmin", "PReLU", "CELU", "SELU", "EmbeddingBag", "LSTMCell", "GRUCell", "RNNCell",
})  # fmt: skip
_CONTAINERS: Final = frozenset({"Sequential", "ModuleList", "ModuleDict"})
_WITH_BATCH_NORM: Final = (
    "resnet", "resnext", "densenet", "mobilenet", "efficientnet", "inception", "googlenet", "regnet", "mnasnet",
    "shufflenet", "_bn", "deeplab", "fcn_",
)  # fmt: skip


# -- conditions


def rank_guard(event: Event) -> Guard | None:
    """The innermost condition on the rank around an event; a loop whose length depends on the rank is not one."""
    guards = [each for each in event.guards if each.depends_on_rank and each.kind != "loop"]
    return next((each for each in reversed(guards) if not _depends_on_more(each)), None)


def _depends_on_more(guard: Guard) -> bool:
    """Whether a condition such as `if is_small and rank != 0: return` leaves open on which ranks the rest runs."""
    condition = guard.condition
    if not guard.is_negated or not isinstance(condition, ast.BoolOp) or not isinstance(condition.op, ast.And):
        return False
    return any(not _ABOUT_RANKS.search(source_text(each)) for each in condition.values)


def data_guard(event: Event) -> Guard | None:
    """The innermost condition around an event on what each rank computes from its own data, if none is on the rank."""
    differing = [each for each in event.guards if each.differs and each.kind != "loop"]
    own = [each for each in differing if not each.depends_on_rank and not is_about_sizes(each)]
    return own[-1] if own and len(own) == len(differing) else None


def is_about_sizes(guard: Guard) -> bool:
    """Whether a condition is only about the sizes of batches, which are usually the same on all ranks."""
    condition = guard.condition
    if condition is None:
        return False
    compared = [each for each in ast.walk(condition) if _is_size(each)]
    inside = {id(each) for size in compared for each in ast.walk(size)}
    names = [each for each in ast.walk(condition) if isinstance(each, ast.Name) and id(each) not in inside]
    return bool(compared) and not [each for each in names if isinstance(each.ctx, ast.Load) and not _is_constant(each)]


def _is_constant(name: ast.Name) -> bool:
    return name.id.isupper() or "batch" in name.id or name.id in ("args", "config", "cfg", "self", "hparams")


def _is_size(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        function = node.func
        return (function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")) in _SIZES
    return isinstance(node, ast.Attribute) and node.attr in _SIZE_ATTRIBUTES


def comes_from_reduce(taints: Iterable[Taint]) -> bool:
    """Whether something differs because `dist.reduce` gives its result to one rank."""
    return any(taint.text == REDUCE_TEXT for taint in taints)


def catches_failures(handler: ast.ExceptHandler) -> bool:
    """Whether a handler is for failures that may happen on one rank, not for a missing package or the end of data."""
    kind = handler.type
    parts = kind.elts if isinstance(kind, ast.Tuple) else [kind] if kind is not None else []
    names = [each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in parts]
    return not names or any(name not in _EXPECTED for name in names)


def swallows(handler: ast.ExceptHandler) -> bool:
    """Whether a rank continues after a failure as if nothing had happened."""
    if not catches_failures(handler):
        return False
    for node in handler.body:
        for each in ast.walk(node):
            if isinstance(each, ast.Raise):
                return False
            if isinstance(each, ast.Call) and getattr(each.func, "attr", getattr(each.func, "id", "")) in _ENDS:
                return False
    return True


# -- what needs all ranks


def is_matched(analysis: Analysis, event: Event, others: Iterable[Event]) -> bool:
    """Whether the other ranks do the same in the other branch, or under another condition of the same function."""
    guards = [each for each in event.guards if each.differs]
    for other in others:
        if other is event or other.data.get("name") != event.data.get("name"):
            continue
        theirs = [each for each in other.guards if each.differs]
        if any(are_opposite(one, their) for one in guards for their in theirs):
            return True
        if any(_is_beside(one, their) for one in guards[-1:] for their in theirs[-1:]):
            return True
    return False


def _is_beside(one: Guard, other: Guard) -> bool:
    """Two conditions on the rank in one function, such as those before and after what rank 0 does first."""
    return (
        one.node is not other.node
        and one.depends_on_rank
        and other.depends_on_rank
        and one.location.function == other.location.function
        and one.location.file == other.location.file
        and (one.text, one.is_negated) != (other.text, other.is_negated)
    )


def collectives(analysis: Analysis) -> list[Event]:
    """Collectives of all ranks, also those inside of state dicts of FSDP and of Lightning's log."""
    found = [
        event for event in analysis.of("collective") if not is_for_subgroup(event.name, event.arguments, event.keywords)
    ]
    found += [event for event in analysis.of("state_dict") if event.wrapper == "fsdp"]
    found += [event for event in analysis.of("log") if syncs_log(event)]
    return sorted(found, key=lambda each: each.order)


def syncs_log(event: Event) -> bool:
    """Whether `self.log` of Lightning reduces its value over all ranks."""
    value = event.keywords.get("sync_dist")
    return value is not None and value.constant is True


def collective_name(event: Event) -> str:
    """What a collective is called in the source."""
    if event.kind == "log":
        return f"self.{event.method}(sync_dist=True)"
    return "state_dict" if event.kind == "state_dict" else str(event.name)


def exchanging_events(analysis: Analysis) -> list[Event]:
    """What needs all ranks: collectives, and steps of wrapped models."""
    found = collectives(analysis)
    found += [event for event in analysis.of("model_call") if is_wrapped(event.model) and event.is_grad]
    wraps = [*analysis.wrapped, *analysis.of("prepare")]
    if wraps:
        first = min(each.order for each in wraps)
        found += [each for each in analysis.of("backward") if each.order > first or "uncalled" in each.contexts]
    return found


def exchanging_loops(analysis: Analysis) -> dict[int, Event]:
    """Loops in which ranks need each other, by their identity, with the first such event."""
    found = dict[int, Event]()
    for event in sorted(exchanging_events(analysis), key=lambda each: each.order):
        for loop in event.loops:
            found.setdefault(id(loop), event)
    return found


def own_loops(event: Event) -> Iterator[Loop]:
    """The loops around an event in its own function, the innermost first."""
    for loop in reversed(event.loops):
        if loop.location.file == event.location.file and loop.location.function == event.location.function:
            yield loop


def evaluates_here(analysis: Analysis, event: Event) -> bool:
    """Whether the function of an event reads data itself, and is not just called with what was computed."""
    return not event.frames or any(
        other.frames == event.frames and other.location.function == event.location.function
        for other in analysis.of("loop", "model_call")
        if other.kind == "model_call" or other.loop.loader is not None
    )


def call_that_passes(analysis: Analysis, event: Event) -> Location:
    """The line of an event, or of the call of the small function that it is in, which gets a value as an argument."""
    return event.location if evaluates_here(analysis, event) else event.frames[-1]


def leaves_loop(analysis: Analysis, guard: Guard) -> bool:
    """Whether the ranks for which a condition does not hold leave a loop, which is another fault."""
    return any(
        each.node is guard.node and each.is_negated != guard.is_negated
        for event in analysis.of("break", "return")
        if event.kind == "break" or any(True for _ in own_loops(event))
        for each in event.guards
    )


# -- data


def sharded_evaluation(analysis: Analysis) -> set[Location]:
    """Loops in which each rank evaluates its own samples."""
    found, trained = set[Location](), set[Location]()
    for event in analysis.of("loop", "model_call", "backward", "call"):
        loop = next((each for each in reversed(event.loops) if each.loader is not None), None)
        if loop is None or loop.loader is None:
            continue
        if event.kind == "backward":
            trained.add(loop.location)
        elif loop.loader.is_sharded and not event.is_grad:
            found.add(loop.location)
    return found - trained


def evaluation_taint(taints: Iterable[Taint], loops: set[Location]) -> Taint | None:
    """Why a value is a metric of one rank: the samples that it evaluates are its own."""
    return next((each for each in taints if each.loop in loops), None)


def has_buffers(value: Value | None, around: tuple[Value, ...] = ()) -> bool | None:
    """Whether a module has buffers, which DDP sends to all ranks in the forward pass; None if that is not known.

    `around` are the modules that it is inside of: an attribute may be one of them.
    """
    raw = value.raw if isinstance(value, ModelValue) else value
    if not isinstance(raw, InstanceValue):
        return None
    around = (*around, raw)
    if raw.class_value is None:
        return _external_buffers(raw, around)
    names = {
        getattr(each, "attr", "") or getattr(each, "id", "") for each in ast.walk(raw.class_value.node or ast.Pass())
    }
    if "register_buffer" in names or any("BatchNorm" in name for name in names):
        return True
    return _any_buffers((e for e in raw.attributes.values() if isinstance(e, InstanceValue | ModelValue)), around)


def may_have_buffers(value: Value | None) -> bool:
    """Whether the file of a module of the project mentions buffers, if those of the module itself are not known."""
    raw = value.raw if isinstance(value, ModelValue) else value
    module = raw.class_value.module if isinstance(raw, InstanceValue) and raw.class_value is not None else None
    return module is not None and any(word in module.file.text for word in ("register_buffer", "BatchNorm"))


def _external_buffers(raw: InstanceValue, around: tuple[Value, ...]) -> bool | None:
    name = raw.class_name
    if "BatchNorm" in name or any(part in name.lower() for part in _WITH_BATCH_NORM):
        return True
    if name in _WITHOUT_BUFFERS:
        return False
    if name not in _CONTAINERS:
        return None
    parts = [option for each in raw.arguments.values() for option in options_of(each)]
    return _any_buffers(parts, around) if parts else None


def _any_buffers(parts: Iterable[Value], around: tuple[Value, ...]) -> bool | None:
    raw = (each.raw if isinstance(each, ModelValue) else each for each in parts)
    known = [has_buffers(each, around) for each in raw if not any(each is outer for outer in around)]
    return True if True in known else None if None in known else False


def uneven_shards(analysis: Analysis) -> set[tuple[str, int]]:
    """Lines of loaders and slices that give the ranks different numbers of samples, or may do."""
    found = {
        (event.location.file, event.location.line) for event in analysis.of("shard") if event.how in ("stride", "range")
    }
    for event in analysis.of("loader"):
        loader: LoaderValue = event.loader
        taints = merge_taints([loader.dataset, loader.sampler])
        if loader.location is not None and any((each.location.file, each.location.line) in found for each in taints):
            found.add((loader.location.file, loader.location.line))
    return found


def metric_origin(value: Value) -> TensorValue | None:
    """The quotient or mean that a value derives from, as it was first computed; None if it is not one."""
    if not any(isinstance(each, TensorValue) and (each.is_ratio or each.is_mean) for each in options_of(value)):
        return None
    found: TensorValue | None = None
    for each in computed_from(value):
        if isinstance(each, TensorValue) and each.is_ratio and each.location is not None:
            found = each
    if found is not None:
        return found
    return next((each for each in options_of(value) if isinstance(each, TensorValue)), None)


# -- learning rates


def learning_rate_decisions(analysis: Analysis) -> Iterator[tuple[Location, str, tuple[Taint, ...]]]:
    """Where a learning rate is set from a value that differs between ranks: the line, what it is, and why."""
    for event in analysis.of("scheduler_step"):
        metric: Value | None = event.metric
        if metric is not None and metric.differs and rank_guard(event) is None:
            yield event.location, "the value for the scheduler", metric.taints
    for event in analysis.of("optimizer"):
        rate = event.optimizer.options.get("lr")
        if rate is not None and rate.differs:
            yield event.location, "the learning rate", rate.taints
    for event in analysis.of("assign_item"):
        if event.key is None or event.key.constant != "lr" or _is_copied(event):
            continue
        conditions = [
            guard for guard in event.guards if guard.kind != "loop"
        ]  # a loop over own samples decides nothing
        guards = [taint for guard in conditions for taint in guard.taints]
        taints = (*event.value.taints, *guards) if event.value is not None else tuple(guards)
        if any(taint.kind == "data" or taint.text.endswith(IS_PART) for taint in taints):
            yield call_that_passes(analysis, event), "the learning rate", taints


def _is_copied(event: Event) -> bool:
    """Whether a learning rate is only written down: `report["lr"] = optimizer.param_groups[0]["lr"]`."""
    match event.node:
        case ast.Assign(value=ast.Subscript(slice=ast.Constant(value="lr"))):
            return True
        case _:
            return False
