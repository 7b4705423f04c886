"""Modules, models, wrappers, optimizers, schedulers, loss scaling, clipping and state dicts."""

import ast
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from samestep.findings import Location
from samestep.lint.abstract_interpreter import Interpreter
from samestep.lint.library.call import Call, known_attribute, known_function, known_functions, known_method
from samestep.lint.library.operations import join_parameters
from samestep.lint.project_calls import call_function
from samestep.lint.values import (
    ChoiceValue,
    ContainerValue,
    FunctionValue,
    InstanceValue,
    MethodValue,
    ModelValue,
    OptimizerValue,
    ParametersValue,
    ServiceValue,
    SuperValue,
    TensorContent,
    TensorValue,
    Value,
    merge_taints,
    options_of,
)

_LOSSES: Final = (
    "Loss", "cross_entropy", "mse_loss", "nll_loss", "l1_loss", "smooth_l1_loss", "binary_cross_entropy", "kl_div",
    "huber_loss", "binary_cross_entropy_with_logits", "cosine_embedding_loss", "triplet_margin_loss",
    "gaussian_nll_loss", "poisson_nll_loss", "soft_margin_loss", "margin_ranking_loss", "ctc_loss",
)  # fmt: skip
_WRAPPERS: Final = {
    "torch.nn.parallel.DistributedDataParallel": "ddp", "torch.distributed.fsdp.FullyShardedDataParallel": "fsdp",
}  # fmt: skip
_MODULE_PACKAGES: Final = ("torch.nn", "torchvision.models", "transformers", "timm")
_NOT_MODELS: Final = ("get_weight", "get_model_weights", "list_models")

# -- calls of models


def call_model(
    run: Interpreter, model: Value, arguments: list[Value], keywords: dict[str, Value], node: ast.Call
) -> Value:
    """Call a module: follow its forward if it is of the project."""
    inputs = [*arguments, *keywords.values()]
    computed = TensorValue(run.locate(node), merge_taints(inputs), needs_grad=run.no_grad == 0, parts=tuple(inputs))
    raw = model.raw if isinstance(model, ModelValue) else model
    if isinstance(raw, InstanceValue) and is_loss(raw.qualname.rpartition(".")[0], raw.class_name):
        return replace(computed, is_mean=_reduction(raw.arguments) == "mean")
    run.emit("model_call", node, model=model, arguments=arguments, is_nested="forward" in run.contexts)
    if not isinstance(raw, InstanceValue) or raw.class_value is None:
        return computed
    forward = raw.class_value.method("forward", raw)
    if forward is None:
        return computed
    with run.inside(context="forward"):
        result = call_function(run, forward, arguments, keywords, node)
    if isinstance(result, TensorValue):
        return replace(result, needs_grad=run.no_grad == 0, taints=merge_taints([result, computed]))
    return result if isinstance(result, ContainerValue) and result.items else computed


@known_function(
    "torch.utils.checkpoint.checkpoint", "torch.func.functional_call", "torch.nn.utils.stateless.functional_call"
)
def _call_argument(call: Call) -> Value:
    """Functions that call their first argument with the others."""
    function = next(iter(options_of(call.arguments[0])), None) if call.arguments else None
    arguments = call.arguments[1:] if call.last == "checkpoint" else call.arguments[2:]
    if isinstance(function, FunctionValue):
        return call_function(call.run, function, arguments, {}, call.node)
    if isinstance(function, ModelValue) or (isinstance(function, InstanceValue) and function.is_module):
        return call_model(call.run, function, arguments, {}, call.node)
    inputs = [each for each in call.inputs if isinstance(each, TensorValue)]
    needs_grad = call.run.no_grad == 0
    return TensorValue(call.location, call.taints, needs_grad=needs_grad, parts=tuple(inputs), name=call.name)


# -- wrappers


@known_function(*_WRAPPERS)
def _wrap(call: Call) -> Value:
    inner, kind = call.get("module", 0) or Value(), _WRAPPERS[call.name]
    options = dict(call.keywords)
    option = (options_of(inner) or [inner])[-1]
    value = ModelValue(call.location, option.taints, wrapper=kind, inner=option, options=options, name=call.last)
    call.emit("wrap", wrapper=kind, model=value, inner=inner)
    return value


@known_function("torch.distributed.fsdp.fully_shard")
def _fully_shard(call: Call) -> Value:
    inner = call.get("module", 0) or Value()
    call.emit("wrap", wrapper="fsdp", model=inner, inner=inner)
    return ModelValue(call.location, wrapper="fsdp", inner=inner, options=dict(call.keywords))


@known_function("torch.compile", "torch.jit.script", "torch.nn.SyncBatchNorm.convert_sync_batchnorm")
def _convert(call: Call) -> Value:
    """What is still the same model for the optimizer and for wrappers."""
    call.emit("call", name=call.name, arguments=call.arguments, keywords=call.keywords)
    return (call.get("model", 0) or call.get("module", 0)) or call.unknown_result()


@known_method("accelerator", "unwrap_model")
def _unwrap(call: Call, owner: Value) -> Value:
    model = call.get("model", 0)
    return model.raw if isinstance(model, ModelValue) else model or Value(call.location)


@known_function("copy.deepcopy", "copy.copy")
def _copy(call: Call) -> Value:
    source = call.get("x", 0)
    return call.unknown_result() if source is None else _copied(source, call)


def _copied(value: Value, call: Call) -> Value:
    """A copy of a module has its own parameters; of other objects what is known of them stays the same."""
    if isinstance(value, ChoiceValue):
        return replace(value, options=tuple(_copied(each, call) for each in value.options))
    if isinstance(value, MethodValue):  # an attribute, which may be a module that is not known
        return replace(value, location=call.location)
    if isinstance(value, ModelValue):
        return replace(value, location=call.location, inner=_copied(value.inner, call) if value.inner else None)
    if isinstance(value, InstanceValue) and value.is_module:
        attributes = {name: _copied(each, call) for name, each in value.attributes.items()}
        return replace(value, location=call.location, attributes=attributes)
    if isinstance(value, ContainerValue) and any(isinstance(each, InstanceValue) for each in value.values()):
        return replace(value, items={key: _copied(each, call) for key, each in value.items.items()})
    return replace(value) if isinstance(value, TensorValue) else value


@known_function("torch.optim.swa_utils.AveragedModel")
def _averaged(call: Call) -> Value:
    source = call.get("model", 0)
    inner = _copied(source, call) if source is not None else Value(call.location)
    return ModelValue(call.location, wrapper="average", inner=inner, options=dict(call.keywords))


# -- modules


def is_loss(package: str, name: str) -> bool:
    """Whether a function or class of torch computes a loss."""
    return package.startswith("torch.nn") and name.endswith(_LOSSES)


def _reduction(options: dict[str, Value]) -> str:
    value = options.get("reduction")
    return str(value.constant) if value is not None and value.is_known else "mean"


@known_functions(is_loss)
def _loss(call: Call) -> Value:
    if call.last[0].isupper():
        return InstanceValue(call.location, qualname=call.name, arguments=call.named_arguments)
    is_mean = _reduction(call.keywords) in ("mean", "batchmean")
    return TensorValue(
        call.location, call.taints, needs_grad=call.run.no_grad == 0, is_mean=is_mean, parts=tuple(call.inputs),
        name=call.name,
    )  # fmt: skip


@known_functions(lambda package, name: name == "from_pretrained")
def _pretrained(call: Call) -> Value:
    call.emit("pretrained", keywords=call.keywords)
    if any(part in call.name for part in ("Tokenizer", "Processor", "Config")):
        return Value(call.location)
    value = InstanceValue(call.location, qualname=call.name, arguments=dict(call.keywords))
    call.emit("create", instance=value)
    return value


@known_function("torch.nn.Parameter", "torch.nn.parameter.Parameter")
def _single_parameter(call: Call) -> Value:
    flag = call.get("requires_grad", 1)
    needs_grad = flag is None or flag.constant is not False
    return TensorValue(call.location, call.taints, content="parameter", needs_grad=needs_grad, name=call.name)


def _is_module(package: str, name: str) -> bool:
    is_inside = any(package == each or package.startswith(f"{each}.") for each in _MODULE_PACKAGES)
    if package.startswith("torch.nn.utils") or not is_inside:
        return False
    is_function = package.startswith("torchvision.models") and name not in _NOT_MODELS
    return name[:1].isupper() or name == "create_model" or is_function


@known_functions(_is_module)
def _module(call: Call) -> Value:
    arguments = call.named_arguments
    value = InstanceValue(
        call.location, call.taints, qualname=call.name, arguments=arguments, attributes=_modules_in(arguments.items())
    )
    call.emit("create", instance=value)
    return value


def _modules_in(values: Iterable[tuple[object, Value]]) -> dict[str, Value]:
    """Modules that are passed to a module: those of nn.Sequential, of a list for nn.ModuleList."""
    found = dict[str, Value]()
    for key, value in values:
        for option in options_of(value):
            if isinstance(option, ContainerValue):
                found |= _modules_in(option.items.items())
            elif isinstance(option, ModelValue | InstanceValue) or (isinstance(option, TensorValue) and option.content):
                found[str(key)] = option
    return found


@known_method("value", "__init__")
def _base_constructor(call: Call, owner: Value) -> Value:
    """`super().__init__(nn.Linear(...), ...)` in a class that derives from nn.Sequential."""
    instance = owner.owner if isinstance(owner, SuperValue) else None
    if instance is not None:
        for name, module in _modules_in(call.named_arguments.items()).items():
            call.run.set_attribute(instance, name, module)
    return Value(call.location)


@known_method("model", "append", "add_module", "register_module", "insert", "extend", "update")
@known_method("lightning", "add_module", "register_module")
def _add_module(call: Call, owner: Value) -> Value:
    call.emit("call", name=call.last, arguments=call.arguments, keywords=call.keywords, owner=owner)
    name = call.get("name", 0)
    for key, module in _modules_in(call.named_arguments.items()).items():
        if isinstance(owner, InstanceValue):
            is_named = name is not None and isinstance(name.constant, str)
            own = str(name.constant) if name is not None and is_named else f"[{len(owner.attributes)}]{key}"
            call.run.set_attribute(owner, own, module)
    return owner


@known_method("model", "register_buffer", "register_parameter")
@known_method("lightning", "register_buffer", "register_parameter")
def _register_tensor(call: Call, owner: Value) -> Value:
    call.emit("call", name=call.last, arguments=call.arguments, keywords=call.keywords, owner=owner)
    name, tensor = call.get("name", 0), call.get("tensor", 1) or call.get("param", 1)
    if isinstance(owner, InstanceValue) and name is not None and isinstance(name.constant, str):
        content: TensorContent = "buffer" if call.last == "register_buffer" else "parameter"
        source = tensor if isinstance(tensor, TensorValue) else TensorValue()
        value = replace(source, location=call.location, content=content, models=(owner,))
        call.run.set_attribute(owner, name.constant, value)
    return Value(call.location)


@known_method("model", "children", "modules", "values", "named_children", "named_modules", "items")
def _children(call: Call, owner: Value) -> Value:
    raw = owner.raw if isinstance(owner, ModelValue) else owner
    found = list(raw.children) if isinstance(raw, InstanceValue) else []
    if call.last in ("modules", "named_modules"):
        found.insert(0, raw)
    if not found or call.last in ("children", "modules", "values"):
        return ContainerValue(call.location, items=dict(enumerate(found)))
    pairs = ContainerValue(items={0: Value(), 1: found[0]}, length=2)
    return ContainerValue(call.location, items={0: pairs})


# -- parameters and states


@known_method("model", "parameters", "named_parameters", "buffers", "named_buffers")
@known_method("lightning", "parameters", "named_parameters", "buffers", "named_buffers")
def _parameters(call: Call, owner: Value) -> Value:
    content: TensorContent = "buffer" if "buffers" in call.last else "parameter"
    call.emit("parameters", owner=owner)
    return ParametersValue(
        call.location, models=(owner,), origins=(call.location,), content=content,
        is_named=call.last.startswith("named"),
    )  # fmt: skip


@known_method("parameters", "values", "items", "keys", "copy")
def _views(call: Call, owner: Value) -> Value:
    if not isinstance(owner, ParametersValue) or call.last == "keys":
        return Value(call.location)
    return replace(owner, is_named=call.last == "items")


@known_function("filter")
def _filter(call: Call) -> Value:
    return call.arguments[1] if len(call.arguments) > 1 else call.unknown_result()


@known_function("itertools.chain")
def _chain(call: Call) -> Value:
    if any(isinstance(each, ParametersValue) for each in call.arguments):
        return join_parameters(call.location, call.arguments)
    items = [
        item for each in call.arguments for item in (each.values() if isinstance(each, ContainerValue) else [each])
    ]
    return ContainerValue(call.location, call.taints, items=dict(enumerate(items)))


@known_method("model", "to", "cuda", "cpu", "half", "float", "double", "bfloat16", "apply", "share_memory", "to_empty")
@known_method("lightning", "to", "cuda", "apply")
def _same(call: Call, owner: Value) -> Value:
    if call.last in ("cuda", "to"):
        call.emit("to_device", owner=owner, device=call.get("device", 0))
    return owner


@known_method("model", "train", "eval")
@known_method("lightning", "train", "eval")
def _set_mode(call: Call, owner: Value) -> Value:
    call.emit("mode", model=owner, mode=call.last)
    return owner


@known_method("model", "requires_grad_")
@known_method("lightning", "requires_grad_")
@known_method("tensor", "requires_grad_")
@known_method("value", "requires_grad_")
@known_method("parameters", "requires_grad_")
def _freeze(call: Call, owner: Value) -> Value:
    flag = call.get("requires_grad", 0)
    call.emit("freeze" if flag is not None and flag.constant is False else "unfreeze", owner=owner)
    return owner


@known_method("lightning", "freeze", "unfreeze")
def _freeze_all(call: Call, owner: Value) -> Value:
    call.emit(call.last, owner=owner)
    return Value(call.location)


@known_method("model", "no_sync", "join")
def _context_of(call: Call, owner: Value) -> Value:
    call.emit("enter", name=call.last, owner=owner)
    return Value(call.location, name=call.last)


@known_method("model", "state_dict")
@known_method("lightning", "state_dict")
def _model_state(call: Call, owner: Value) -> Value:
    wrapper = owner.wrapper if isinstance(owner, ModelValue) else ""
    call.emit("state_dict", owner=owner, wrapper=wrapper)
    return ParametersValue(call.location, models=(owner,), origins=(call.location,), content="state", name="state_dict")


@known_method("optimizer", "state_dict")
def _optimizer_state(call: Call, owner: Value) -> Value:
    call.emit("state_dict", owner=owner, wrapper="")
    return Value(call.location, name="state_dict")


@known_method("model", "load_state_dict")
@known_method("lightning", "load_state_dict")
@known_method("optimizer", "load_state_dict")
@known_method("scheduler", "load_state_dict")
def _load_state(call: Call, owner: Value) -> Value:
    call.emit("load_state", owner=owner)
    return Value(call.location)


# -- optimizers and schedulers


@known_functions(
    lambda package, name: (
        package == "torch.optim.lr_scheduler"
        or name == "SWALR"
        or (package.split(".")[0] in ("transformers", "diffusers") and name.startswith("get_") and "schedule" in name)
    )
)
def _scheduler(call: Call) -> Value:
    optimizer = call.get("optimizer", 1 if call.last == "get_scheduler" else 0)
    options = {**call.named_arguments, "optimizer": optimizer or Value(), "kind": Value(constant=call.last)}
    value = ServiceValue(call.location, kind="scheduler", options=options)
    call.emit("scheduler", scheduler=value)
    return value


def _is_optimizer(package: str, name: str) -> bool:
    is_package = package.startswith("torch.optim") or package.endswith(("optim", "optimizers", "optimization"))
    is_class = name[:1].isupper() and not name.endswith(("Scheduler", "LR"))
    return is_package and is_class and "swa_utils" not in package


@known_functions(_is_optimizer)
def _optimizer(call: Call) -> Value:
    value = OptimizerValue(call.location, parameters=call.get("params", 0), options=dict(call.keywords), name=call.name)
    if len(call.arguments) > 1:
        value.options["lr"] = call.arguments[1]
    call.emit("optimizer", optimizer=value)
    return value


@known_attribute("optimizer", "param_groups")
def _groups(owner: Value, name: str, location: Location) -> Value | None:
    """One group that represents all of them."""
    if not isinstance(owner, OptimizerValue):
        return None
    items = {"params": owner.parameters or Value(location), "lr": owner.options.get("lr") or Value(location)}
    return ContainerValue(location, items={0: ContainerValue(location, items=dict(items))})


@known_method("optimizer", "step")
def _step(call: Call, owner: Value) -> Value:
    call.emit("optimizer_step", optimizer=owner)
    return Value(call.location)


@known_method("optimizer", "add_param_group")
def _add_group(call: Call, owner: Value) -> Value:
    call.emit("call", name=call.last, arguments=call.arguments, keywords=call.keywords, owner=owner)
    return Value(call.location)


@known_method("scheduler", "step")
def _scheduler_step(call: Call, owner: Value) -> Value:
    call.emit("scheduler_step", scheduler=owner, metric=call.get("metrics", 0))
    return Value(call.location)


@known_method("model", "zero_grad")
@known_method("lightning", "zero_grad")
@known_method("optimizer", "zero_grad")
def _zero_grad(call: Call, owner: Value) -> Value:
    call.emit("zero_grad", owner=owner)
    return Value(call.location)


@known_function("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_")
def _clip(call: Call) -> Value:
    call.emit("clip", parameters=call.get("parameters", 0))
    return TensorValue(call.location)


# -- loss scaling


@known_function("torch.cuda.amp.GradScaler", "torch.amp.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler")
def _scaler(call: Call) -> Value:
    return ServiceValue(call.location, kind="scaler", options=dict(call.keywords))


@known_method("scaler", "scale")
def _scale_loss(call: Call, owner: Value) -> Value:
    call.emit("call", name="scale", arguments=call.arguments, keywords=call.keywords, owner=owner)
    return call.arguments[0] if call.arguments else call.unknown_result()


@known_method("scaler", "step")
def _scaler_step(call: Call, owner: Value) -> Value:
    call.emit("call", name="step", arguments=call.arguments, keywords=call.keywords, owner=owner)
    optimizer = call.get("optimizer", 0)
    for option in options_of(optimizer):
        if isinstance(option, OptimizerValue):
            call.emit("optimizer_step", optimizer=option)
    return Value(call.location)
