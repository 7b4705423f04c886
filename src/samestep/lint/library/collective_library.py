"""torch.distributed: collectives, the rank, the number of ranks, process groups, and torch.multiprocessing.spawn."""

import copy
from typing import Final

from samestep.lint.events import source_text
from samestep.lint.library.call import Call, known_function, known_functions, known_method
from samestep.lint.project_calls import call_function
from samestep.lint.rank_names import COUNTER
from samestep.lint.values import (
    ChoiceValue,
    ContainerValue,
    FunctionValue,
    ModelValue,
    ServiceValue,
    Taint,
    TensorValue,
    Value,
    merge_taints,
    options_of,
)

GROUP_POSITIONS: Final[dict[str, int]] = {
    "all_reduce": 2, "all_reduce_coalesced": 2, "broadcast": 2, "broadcast_object_list": 2, "all_gather": 2,
    "all_gather_object": 2, "all_gather_into_tensor": 2, "gather": 3, "gather_object": 3, "scatter": 3,
    "scatter_object_list": 3, "reduce": 3, "reduce_scatter": 3, "reduce_scatter_tensor": 3, "all_to_all": 2,
    "all_to_all_single": 4, "barrier": 0, "monitored_barrier": 0, "new_group": 99, "new_subgroups": 1,
    "new_subgroups_by_enumeration": 99, "split_group": 0,
}  # fmt: skip
"""The collectives of torch.distributed, and the position of their argument `group`."""
COLLECTIVES: Final = frozenset(GROUP_POSITIONS)
REDUCE_TEXT: Final = "`reduce` gives its result to one rank only"
"""Of the taint of a tensor after `torch.distributed.reduce`."""
_EQUALIZING: Final = frozenset({  # afterwards all ranks have the same
    "all_reduce", "all_reduce_coalesced", "broadcast", "all_gather", "broadcast_object_list", "all_gather_object",
    "all_gather_into_tensor",
})  # fmt: skip
_OUTPUT_NAMES: Final = ("tensor", "tensor_list", "object_list", "output_tensor")
_INPUT_NAMES: Final = ("input_tensor", "obj")
_MUTED_PACKAGES: Final = ("torch", "einops", "functools", "numpy", "jax", "operator", "itertools")
_EXCHANGING: Final = ("reduce", "gather", "broadcast", "sync", "average_across", "all_mean", "dist_mean")
_STATE_PACKAGE: Final = "torch.distributed.checkpoint.state_dict"
_CHECKPOINT: Final = ("save", "load", "async_save", "save_state_dict", "load_state_dict")
_FSDP_METHODS: Final = (
    "full_optim_state_dict", "optim_state_dict", "sharded_optim_state_dict", "summon_full_params",
    "scatter_full_optim_state_dict",
)  # fmt: skip


@known_function("torch.distributed.get_rank", "torch.distributed.get_node_local_rank")
def _rank(call: Call) -> Value:
    text = f"`{source_text(call.node)}` is the rank"
    return Value(call.location, (Taint("rank", call.location, text, "local" in call.last),))


@known_function(
    "torch.distributed.get_world_size", "torch.distributed.is_initialized", "torch.distributed.is_available",
    "torch.distributed.is_torchelastic_launched", "torch.cuda.device_count",
)  # fmt: skip
def _world(call: Call) -> Value:
    return Value(call.location, is_world=True)


@known_function("torch.distributed.init_process_group", "torch.distributed.init_device_mesh")
def _init_group(call: Call) -> Value:
    call.emit("init_group")
    return Value(call.location)


@known_functions(lambda package, name: package == "torch.distributed" and name.endswith("Store"))
def _store(call: Call) -> Value:
    return ServiceValue(call.location, kind="store")


@known_method("store", "get", "add", "check", "multi_get", "compare_set")
def _read_store(call: Call, owner: Value) -> Value:
    """All ranks read the same store."""
    return Value(call.location)


# -- collectives


@known_functions(lambda package, name: package == "torch.distributed" and name in COLLECTIVES)
def _collective(call: Call) -> Value:
    outputs = [*call.arguments[:1], *(call.keywords[name] for name in _OUTPUT_NAMES if name in call.keywords)]
    inputs = [*call.arguments[1:2], *(call.keywords[name] for name in _INPUT_NAMES if name in call.keywords)]
    tensors = [*outputs, *inputs]
    call.emit(
        "collective", name=call.last, tensors=tensors, arguments=call.arguments, keywords=call.keywords,
        taints=merge_taints(tensors),
    )  # fmt: skip
    if call.last == "broadcast_object_list":
        for each in outputs:
            _receive(each)
    if call.last in _EQUALIZING:
        for value in outputs:
            equalize(value)
    elif call.last == "reduce":
        for value in outputs:
            _taint(value, Taint("data", call.location, REDUCE_TEXT))
    return Value(call.location, name=call.last)


def _receive(objects: Value) -> None:
    """The items of a list become other objects, so that a name of what a rank has sent keeps the rank's own one."""
    for option in options_of(objects):
        if isinstance(option, ContainerValue):
            for key, item in option.items.items():
                received = copy.copy(item)
                received.sent, received.name = item, ""
                option.items[key] = received


def equalize(value: Value) -> None:
    """All ranks have the same value from now on."""
    value.taints = ()
    if isinstance(value, ChoiceValue):
        value.condition_taints = ()
    for option in options_of(value):
        option.taints = ()
        for each in (option, *(option.values() if isinstance(option, ContainerValue) else ())):
            each.taints, each.clock = (), None
            if isinstance(each, TensorValue):
                each.is_reduced = True
            elif isinstance(each, ContainerValue):
                each.is_unordered, each.order_from = False, None


def _taint(value: Value, taint: Taint) -> None:
    """From now on, a value differs between ranks for this reason only."""
    value.taints = (taint,)
    for option in options_of(value):
        option.taints = (taint,)


def is_for_subgroup(name: str, arguments: list[Value], keywords: dict[str, Value]) -> bool:
    """Whether a collective names a group, whose members may be some of the ranks."""
    local = keywords.get("use_local_synchronization")
    if name == "new_group" and local is not None and local.constant is True:
        return True  # only its members create it
    position = GROUP_POSITIONS.get(name, 99)
    group = keywords.get("group") or (arguments[position] if position < len(arguments) else None)
    return group is not None and group.constant is not None


@known_functions(
    lambda package, name: (
        package == "torch.distributed.nn.functional" or package == "torch.distributed._functional_collectives"
    )
)
def _differentiable(call: Call) -> Value:
    """Collectives with a gradient return their result."""
    value = call.arguments[0] if call.arguments else Value()
    call.emit("collective", name=call.last, tensors=[], arguments=call.arguments, keywords=call.keywords)
    return TensorValue(call.location, is_reduced=True, parts=(value,), needs_grad=call.run.no_grad == 0)


@known_functions(
    lambda package, name: (
        (name in _EXCHANGING or (any(part in name.lower() for part in _EXCHANGING) and name[:1].islower()))
        and package.split(".")[0] not in _MUTED_PACKAGES
    )
)
def _unknown_exchange(call: Call) -> Value:
    """A function of an unknown package that reduces or gathers by its name: its result may be equal on all ranks."""
    call.emit("call", name=call.name, arguments=call.arguments, keywords=call.keywords)
    for value in call.arguments:
        equalize(value)
    return TensorValue(call.location, is_reduced=True, parts=tuple(call.arguments), name=call.name)


@known_method("value", "all_reduce", "allreduce", "all_gather", "allgather", "broadcast", "all_reduce_mean")
@known_method("instance", "all_reduce", "allreduce", "all_gather", "allgather", "broadcast", "all_reduce_mean")
def _unknown_communicator(call: Call, owner: Value) -> Value:
    return _unknown_exchange(call)


# -- sharded state


@known_functions(
    lambda package, name: package == _STATE_PACKAGE and name.startswith(("get_", "set_")) and name.endswith("dict")
)
def _distributed_state(call: Call) -> Value:
    call.emit("collective", name=call.last, tensors=[], arguments=call.arguments, keywords=call.keywords)
    return Value(call.location, name=call.last)


@known_functions(
    lambda package, name: (
        package.startswith("torch.distributed.checkpoint")
        and not package.startswith(_STATE_PACKAGE)
        and name in _CHECKPOINT
    )
)
def _distributed_checkpoint(call: Call) -> Value:
    alone = call.get("no_dist")
    if alone is None or alone.constant is False:
        name = f"checkpoint.{call.last}"
        call.emit("collective", name=name, tensors=[], arguments=call.arguments, keywords=call.keywords)
    return Value(call.location, name=call.last)


@known_functions(
    lambda package, name: package == "torch.distributed.fsdp.FullyShardedDataParallel" and name in _FSDP_METHODS
)
def _fsdp_state(call: Call) -> Value:
    call.emit("collective", name=call.last, tensors=[], arguments=call.arguments, keywords=call.keywords)
    return Value(call.location, name=call.last)


@known_method("tensor", "full_tensor", "redistribute")
@known_method("value", "full_tensor")
def _full_tensor(call: Call, owner: Value) -> Value:
    call.emit("collective", name=call.last, tensors=[owner], arguments=[], keywords={})
    return TensorValue(call.location)


@known_method("model", "clip_grad_norm_")
def _clip_sharded(call: Call, owner: Value) -> Value:
    """FSDP computes the norm of all shards."""
    call.emit("clip", parameters=owner)
    if isinstance(owner, ModelValue) and owner.wrapper == "fsdp":
        call.emit("collective", name=call.last, tensors=[], arguments=call.arguments, keywords=call.keywords)
    return TensorValue(call.location)


@known_function("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")
def _spawn(call: Call) -> Value:
    passed = call.get("args", 1)
    rank = Value(call.location, (Taint("rank", call.location, "mp.spawn passes the rank"),))
    count = call.get("nprocs", 2)
    rest = [_or_world(each, count) for each in passed.values()] if isinstance(passed, ContainerValue) else []
    call.emit("spawn", function=call.get("fn", 0))
    for function in options_of(call.get("fn", 0)):
        if isinstance(function, FunctionValue):
            with call.run.inside(context="spawn"):
                call_function(call.run, function, [rank, *rest], {}, call.node)
    return Value(call.location)


@known_function("multiprocessing.Process", "torch.multiprocessing.Process")
def _start_process(call: Call) -> Value:
    """A process per rank by hand: `for rank in range(world): Process(target=work, args=(rank, world))`."""
    run, passed, target = call.run, call.get("args", 3), call.get("target", 1)
    values = passed.values() if isinstance(passed, ContainerValue) else []
    if target is None or not any(each.name == COUNTER for each in values):
        return Value(call.location)
    rank = Value(call.location, (Taint("rank", call.location, "each process gets its number"),))
    arguments = [rank if each.name == COUNTER else each for each in values]
    first, loops, run.loops = len(run.events), run.loops, ()
    for function in options_of(target):
        if isinstance(function, FunctionValue):
            with run.inside(context="spawn"):
                call_function(run, function, arguments, {}, call.node)
    run.loops = loops
    if any(event.kind == "init_group" for event in run.events[first:]):
        call.emit("spawn", function=target)
    else:
        del run.events[first:]  # processes of another kind, such as readers of data
    return Value(call.location)


@known_method("any", "Process")
def _start_process_of_context(call: Call, owner: Value) -> Value:
    """`multiprocessing.get_context("spawn").Process(...)`."""
    del owner
    return _start_process(call)


def _or_world(argument: Value, count: Value | None) -> Value:
    """An argument of the ranks; the one that is equal to the number of processes is the number of ranks."""
    is_number = count is not None and isinstance(count.constant, int) and count.constant > 1
    is_same = is_number and count is not None and argument.constant == count.constant
    return Value(argument.location, argument.taints, is_world=True) if is_same else argument
