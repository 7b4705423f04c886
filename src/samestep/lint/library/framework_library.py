"""Lightning, Fabric, Accelerate, torchmetrics and samestep."""

from dataclasses import replace
from typing import Final

from samestep.findings import Location
from samestep.lint.library.call import Call, known_attribute, known_function, known_functions, known_method
from samestep.lint.library.collective_library import equalize
from samestep.lint.project_calls import call_function
from samestep.lint.values import (
    ContainerValue,
    FunctionValue,
    InstanceValue,
    LoaderValue,
    ModelValue,
    OptimizerValue,
    ServiceValue,
    Taint,
    TensorValue,
    Value,
    choose,
    merge_taints,
    options_of,
)

LIGHTNING_CLASSES: Final = ("LightningModule", "LightningDataModule", "Callback")
HOOKS: Final = {
    "training_step": "train", "validation_step": "eval", "test_step": "eval", "predict_step": "eval",
    "on_train_batch_end": "train", "on_train_batch_start": "train", "on_train_epoch_end": "train",
    "on_train_epoch_start": "train", "on_validation_epoch_end": "eval", "on_validation_epoch_start": "eval",
    "on_validation_end": "eval", "on_validation_batch_end": "eval", "on_test_epoch_end": "eval",
    "on_train_start": "train", "on_train_end": "train", "on_fit_start": "train", "on_fit_end": "train",
    "on_save_checkpoint": "train", "configure_optimizers": "train", "setup": "train", "prepare_data": "train",
    "train_dataloader": "train", "val_dataloader": "eval", "test_dataloader": "eval",
    "on_before_optimizer_step": "train", "training_epoch_end": "train", "validation_epoch_end": "eval",
    "on_test_end": "eval", "optimizer_step": "train",
}  # fmt: skip
"""Methods that Lightning calls, and whether it computes gradients in them."""
_RANK_ATTRIBUTES: Final = (
    "is_main_process", "is_local_main_process", "process_index", "local_process_index", "is_global_zero", "global_rank",
    "local_rank", "node_rank", "is_last_process",
)  # fmt: skip
_SERVICES: Final = {
    "accelerate.Accelerator": "accelerator", "accelerate.PartialState": "accelerator", "lightning.Trainer": "trainer",
    "lightning.Fabric": "fabric", "samestep.Run": "samestep",
}  # fmt: skip


@known_function(*_SERVICES)
def _service(call: Call) -> Value:
    value = ServiceValue(call.location, kind=_SERVICES[call.name], options=dict(call.keywords))
    call.emit(value.kind, service=value)
    return value


@known_functions(lambda package, name: package.split(".")[0] == "torchmetrics" and name[:1].isupper())
def _metric(call: Call) -> Value:
    return ServiceValue(call.location, kind="metric", options=dict(call.keywords))


@known_function("evaluate.load", "evaluate.combine", "datasets.load_metric")
def _evaluation(call: Call) -> Value:
    """A metric of Hugging Face, which computes from what this process adds to it."""
    return ServiceValue(call.location, kind="evaluation", options=dict(call.keywords))


@known_function("accelerate.load_checkpoint_and_dispatch", "accelerate.dispatch_model")
def _dispatch(call: Call) -> Value:
    call.emit("pretrained", keywords=call.keywords)
    return call.get("model", 0) or Value(call.location)


# -- attributes


@known_attribute("accelerator", *_RANK_ATTRIBUTES)
@known_attribute("fabric", *_RANK_ATTRIBUTES)
@known_attribute("trainer", *_RANK_ATTRIBUTES)
@known_attribute("samestep", *_RANK_ATTRIBUTES, "is_main", "rank")
def _rank_attribute(owner: Value, name: str, location: Location) -> Value:
    return Value(location, (Taint("rank", location, f"`{name}` depends on the rank", name.startswith("local")),))


@known_attribute("accelerator", "num_processes")
@known_attribute("fabric", "world_size")
@known_attribute("trainer", "world_size")
@known_attribute("samestep", "world_size")
def _world_attribute(owner: Value, name: str, location: Location) -> Value:
    return Value(location, is_world=True)


@known_attribute("lightning", "trainer")
@known_attribute("instance", "trainer")
def _own_trainer(owner: Value, name: str, location: Location) -> Value:
    return ServiceValue(location, kind="trainer")


@known_attribute("trainer", "strategy", "training_type_plugin")
@known_attribute("fabric", "strategy")
def _strategy(owner: Value, name: str, location: Location) -> Value:
    return ServiceValue(location, kind="strategy")


# -- preparing models, optimizers and loaders


@known_method("accelerator", "prepare", "prepare_model", "prepare_data_loader", "prepare_optimizer")
@known_method("fabric", "setup", "setup_module", "setup_dataloaders", "setup_optimizers")
def _prepare(call: Call, owner: Value) -> Value:
    results = [_prepared(value, call.location) for value in call.arguments]
    call.emit("prepare", arguments=call.arguments, results=results, service=owner)
    if len(results) == 1:
        return results[0]
    return ContainerValue(call.location, items=dict(enumerate(results)), length=len(results))


def _prepared(value: Value, location: Location) -> Value:
    option = next(iter(options_of(value)), value)
    if isinstance(option, LoaderValue | OptimizerValue):
        return replace(option, is_prepared=True)
    if isinstance(option, ModelValue) or (isinstance(option, InstanceValue) and option.is_module):
        return ModelValue(location, wrapper="prepared", inner=option)
    return option


@known_method("fabric", "launch")
def _launch(call: Call, owner: Value) -> Value:
    """`fabric.launch(train, ...)` calls the function with the Fabric first."""
    results = [
        call_function(call.run, option, [owner, *call.arguments[1:]], call.keywords, call.node)
        for option in options_of(call.get("function", 0))
        if isinstance(option, FunctionValue)
    ]
    return choose(results) if results else Value(call.location)


@known_method("trainer", "fit", "validate", "test")
def _fit(call: Call, owner: Value) -> Value:
    call.emit("fit", trainer=owner, arguments=call.arguments, keywords=call.keywords)
    return Value(call.location)


# -- gradients


@known_method("accelerator", "backward")
@known_method("fabric", "backward")
@known_method("lightning", "manual_backward")
def _backward(call: Call, owner: Value) -> Value:
    kind = owner.kind if isinstance(owner, ServiceValue) else ""
    position = 1 if kind == "" and len(call.arguments) > 1 else 0
    call.emit("backward", loss=call.get("loss", position) or Value(), via=kind, service=owner)
    return Value(call.location)


@known_method("lightning", "optimizers")
def _optimizers(call: Call, owner: Value) -> Value:
    return OptimizerValue(call.location)


@known_method("accelerator", "clip_grad_norm_", "clip_grad_value_")
def _clip(call: Call, owner: Value) -> Value:
    call.emit("clip", parameters=call.get("parameters", 0))
    return TensorValue(call.location)


@known_method("accelerator", "accumulate", "no_sync", "autocast", "join_uneven_inputs")
@known_method("fabric", "no_backward_sync", "autocast")
def _context(call: Call, owner: Value) -> Value:
    call.emit("enter", name=call.last, owner=owner)
    return Value(call.location, name=call.last)


# -- collectives and metrics


@known_method("accelerator", "gather", "gather_for_metrics", "reduce", "pad_across_processes")
@known_method("fabric", "all_gather", "all_reduce", "broadcast")
@known_method("strategy", "all_gather", "all_reduce", "broadcast", "reduce", "reduce_boolean_decision")
@known_method("lightning", "all_gather")
def _gather(call: Call, owner: Value) -> Value:
    value = next(iter(call.inputs), Value())
    call.emit(
        "collective", name=call.last, tensors=[value], arguments=call.arguments, keywords=call.keywords, service=owner,
        taints=value.taints,
    )  # fmt: skip
    if isinstance(value, ContainerValue):
        items = {key: _gathered(call, item) for key, item in value.items.items()}
        return ContainerValue(call.location, items=dict(items), length=value.length)
    return _gathered(call, value)


def _gathered(call: Call, value: Value) -> TensorValue:
    return TensorValue(call.location, is_reduced=True, parts=(value,), name=call.last)


@known_functions(
    lambda package, name: (
        package.startswith("accelerate.utils")
        and name in ("gather", "gather_object", "broadcast", "broadcast_object_list", "reduce", "pad_across_processes")
    )
)
def _gather_function(call: Call) -> Value:
    result = _gather(call, ServiceValue(kind="accelerator"))
    if call.last == "broadcast_object_list":
        for value in call.arguments[:1]:
            equalize(value)
        return call.arguments[0] if call.arguments else result
    return result


@known_method("accelerator", "wait_for_everyone", "check_trigger")
@known_method("fabric", "barrier", "save", "save_checkpoint")
@known_method("strategy", "barrier")
@known_method("trainer", "barrier", "save_checkpoint")
def _wait(call: Call, owner: Value) -> Value:
    call.emit("collective", name=call.last, tensors=[], arguments=[], keywords=call.keywords, service=owner)
    return Value(call.location)


@known_function("accelerate.utils.wait_for_everyone", "torcheval.metrics.toolkit.sync_and_compute")
def _wait_function(call: Call) -> Value:
    call.emit("collective", name=call.last, tensors=[], arguments=[], keywords=call.keywords)
    return TensorValue(call.location, is_reduced=True)


@known_method("metric", "compute")
def _compute_metric(call: Call, owner: Value) -> Value:
    syncs = owner.options.get("sync_on_compute") if isinstance(owner, ServiceValue) else None
    if syncs is not None and syncs.constant is False:
        return TensorValue(call.location, owner.taints, is_ratio=True, name="metric.compute")
    group = owner.options.get("process_group") if isinstance(owner, ServiceValue) else None
    keywords = {} if group is None else {"group": group}
    call.emit("collective", name="compute", tensors=[], arguments=[], keywords=keywords, service=owner)
    return TensorValue(call.location, is_reduced=True, name="metric.compute")


@known_method("metric", "to", "cuda", "cpu", "clone", "train", "eval", "double", "float", "half", "set_dtype")
def _same_metric(call: Call, owner: Value) -> Value:
    return owner


@known_method("metric", "update")
def _update_metric(call: Call, owner: Value) -> Value:
    if isinstance(owner, ServiceValue) and "sync_on_compute" in owner.options:
        owner.taints = merge_taints([owner, *call.inputs])
    return TensorValue(call.location, merge_taints(call.arguments))


@known_functions(
    lambda package, name: (
        package.split(".")[0] in ("sklearn", "torchmetrics", "torcheval", "scipy") and name[:1].islower()
        and ("metrics" in package or "functional" in package or package.endswith("stats"))
    )
)  # fmt: skip
@known_function("numpy.mean", "numpy.average", "statistics.mean", "statistics.fmean", "numpy.nanmean", "numpy.median")
def _score(call: Call) -> Value:
    """A score or a mean of what is passed."""
    call.emit("call", name=call.name, arguments=call.arguments, keywords=call.keywords)
    return TensorValue(
        call.location, call.taints, is_mean=True, is_ratio=True, parts=tuple(call.inputs), name=call.name
    )


@known_method("evaluation", "add_batch", "add")
def _add_to_evaluation(call: Call, owner: Value) -> Value:
    owner.taints = merge_taints([owner, *call.inputs])
    return Value(call.location)


@known_method("evaluation", "compute")
def _compute_evaluation(call: Call, owner: Value) -> Value:
    return TensorValue(call.location, merge_taints([owner, *call.inputs]), is_ratio=True, name="evaluate.compute")


@known_method("lightning", "log", "log_dict")
def _log(call: Call, owner: Value) -> Value:
    is_one = call.last == "log"
    call.emit(
        "log", name=call.get("name", 0) if is_one else None, keywords=call.keywords, method=call.last,
        value=call.get("value", 1) if is_one else call.get("dictionary", 0),
    )  # fmt: skip
    return Value(call.location)
