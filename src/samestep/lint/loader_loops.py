"""Which loaders a script trains on and evaluates, and whether each rank reads its own part of them."""

import re
from collections.abc import Sequence
from typing import Final, Literal

from samestep.findings import Location
from samestep.lint.events import Event, Loop
from samestep.lint.rule import Analysis
from samestep.lint.values import (
    ClassValue,
    ContainerValue,
    ExternalValue,
    InstanceValue,
    LoaderValue,
    SamplerValue,
    Value,
    options_of,
    sources_of,
)

Division = Literal["part", "all", ""]
"""Whether a rank reads its own part or all of the data; empty if that is not known."""
_MODEL_PARALLEL: Final = re.compile(
    r"parallelize_module|PipelineStage|pipeline_parallel|tensor_parallel|\.rpc\.|megatron"
)
_DIVIDING: Final = re.compile(r"shard|split|distribut|webdataset|get_rank|process_index|by_node", re.IGNORECASE)
_SEEDS_ALL: Final = ("seed_everything", "set_seed")
_REPLACED: Final = (
    "RandomSampler",
    "SequentialSampler",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
    "BatchSampler",
)
_PLAIN_BASES: Final = (
    "Dataset", "IterableDataset", "Sampler", "BatchSampler", "Generic", "ABC", "object", "Protocol", "DataPipe",
)  # fmt: skip


def is_data_parallel(analysis: Analysis) -> bool:
    """Whether ranks train copies of a model on different data: not pipelines, and not tensor parallelism."""
    if any(_MODEL_PARALLEL.search(event.name or "") for event in analysis.of("call")):
        return False
    trains_together = analysis.wrapped or analysis.of("prepare", "fit")
    return bool(trains_together) or any(
        event.name in ("all_reduce", "all_reduce_coalesced") and event.loops for event in analysis.of("collective")
    )


def training_loops(analysis: Analysis) -> list[tuple[Event, Loop, list[LoaderValue]]]:
    """Loops that all ranks train in, with the loaders that they may read."""
    found = list[tuple[Event, Loop, list[LoaderValue]]]()
    for event in analysis.of("loop"):
        loop: Loop = event.loop
        loaders = _loaders(loop.iterable)
        if loaders and event.rank_guard is None and "uncalled" not in event.contexts:
            role = role_of(analysis, loop)
            if role == "train" or (role == "" and event.is_grad and _passes_on(analysis, loop)):
                found.append((event, loop, loaders))
    return found + _stepwise_loops(analysis)


def _stepwise_loops(analysis: Analysis) -> list[tuple[Event, Loop, list[LoaderValue]]]:
    """Loops that take batches with `next(iterator)`."""
    found = list[tuple[Event, Loop, list[LoaderValue]]]()
    for event in analysis.of("next"):
        loaders = _loaders(event.source)
        trains = event.loops and any(event.loops[-1] in each.loops for each in analysis.of("backward"))
        if loaders and trains and event.rank_guard is None and "uncalled" not in event.contexts:
            found.append((event, event.loops[-1], loaders))
    return found


def _loaders(value: Value | None) -> list[LoaderValue]:
    sources = list(sources_of(value))
    loaders = [each for each in sources if isinstance(each, LoaderValue)]
    return loaders if len(loaders) == len(sources) or not isinstance(value, LoaderValue) else []


def role_of(analysis: Analysis, loop: Loop) -> str:
    """What a loop over a loader does: "train", "eval" or ""."""
    roles = {role for event, _, role in analysis.loader_loops if event.loop is loop}
    return roles.pop() if len(roles) == 1 else ""


def _passes_on(analysis: Analysis, loop: Loop) -> bool:
    """Whether a loop is that of a generator that yields the batches, for ever."""
    is_endless = any(event.loop is loop and len(event.loops) > 1 for event in analysis.of("loop"))
    return is_endless and any(loop in event.loops for event in analysis.of("yield"))


def evaluation_loaders(analysis: Analysis) -> list[tuple[Event, LoaderValue]]:
    """Loops that all ranks evaluate in."""
    return [
        (event, loader)
        for event, loader, role in analysis.loader_loops
        if role == "eval" and event.rank_guard is None and "uncalled" not in event.contexts
    ]


def is_iterable(value: Value | None) -> bool:
    """Whether a dataset of the project is an IterableDataset."""
    return any(
        isinstance(each, InstanceValue)
        and each.class_value is not None
        and each.class_value.derives_from("IterableDataset")
        for each in options_of(value)
    )


def division(analysis: Analysis, loader: LoaderValue) -> Division:
    """Whether a loader gives each rank its own part of the data."""
    if loader.is_prepared and not (analysis.of("fabric") and is_iterable(loader.dataset)):
        return "part"
    samplers = [each for each in options_of(loader.sampler) if each.constant is not None]
    batch_sampler = loader.options.get("batch_sampler")
    if not samplers and batch_sampler is not None and batch_sampler.constant is not None:
        return _any_part([_of_indices(analysis, each) for each in options_of(batch_sampler)])
    if samplers:
        return _any_part([_of_sampler(analysis, each) for each in samplers])
    return _any_part([_of_dataset(analysis, each, loader) for each in options_of(loader.dataset)])


def _any_part(found: Sequence[Division]) -> Division:
    if "part" in found:
        return "part"
    return "all" if found and all(each == "all" for each in found) else ""


def _of_indices(analysis: Analysis, value: Value) -> Division:
    if value.differs:
        return "part"
    return "all" if isinstance(value, ContainerValue) else ""


def _of_sampler(analysis: Analysis, sampler: Value) -> Division:
    if not isinstance(sampler, SamplerValue):
        return _of_indices(analysis, sampler)
    instance = sampler.options.get("instance")
    if isinstance(instance, InstanceValue) and instance.class_value is not None:
        given = [option for each in instance.attributes.values() for option in options_of(each)]
        inner = any(isinstance(each, SamplerValue) and _of_sampler(analysis, each) != "all" for each in given)
        if inner or instance.class_value.derives_from("DistributedSampler"):
            return "part"
        return _of_iteration(analysis, sampler, instance.class_value)
    if sampler.is_distributed or sampler.differs:
        return "part"
    if sampler.kind in ("BatchSampler",):
        return _any_part([_of_sampler(analysis, each) for each in options_of(sampler.dataset)])
    if sampler.kind in _REPLACED:
        return "part" if draws_with_replacement(sampler) and rank_seeds(analysis) else "all"
    return ""


def draws_with_replacement(sampler: SamplerValue) -> bool:
    """Whether a sampler may draw a sample several times."""
    replacement = sampler.options.get("replacement")
    is_default = replacement is None and sampler.kind == "WeightedRandomSampler"
    return is_default or (replacement is not None and replacement.constant is not False)


def seeds_of(analysis: Analysis, library: str, before: Event | None = None) -> list[Event]:
    """The seeds of the global generator of "torch", "numpy" or "random", in their order."""
    return [
        each
        for each in analysis.of("seed")
        if (before is None or each.order < before.order)
        and "worker_init" not in each.contexts
        and (each.which.startswith(library) or each.which.rpartition(".")[2] in _SEEDS_ALL)
    ]


def library_of(name: str) -> str:
    """Whose global generator a function draws from, by its full name."""
    if name.startswith(("torch", "random_split")):
        return "torch"
    return "random" if name.startswith("random.") else "numpy"


def rank_seeds(analysis: Analysis) -> list[Event]:
    """Global seeds that differ between ranks."""
    return [event for event in analysis.of("seed") if event.value.differs and "worker_init" not in event.contexts]


def _of_dataset(analysis: Analysis, dataset: Value, loader: LoaderValue) -> Division:
    if isinstance(dataset, InstanceValue) and dataset.class_value is not None:
        if dataset.class_value.derives_from("IterableDataset"):
            return _of_iteration(analysis, dataset, dataset.class_value)
        return "part" if dataset.differs else "all" if _has_plain_bases(dataset.class_value) else ""
    if dataset.differs:
        return "part"
    shuffle = loader.options.get("shuffle")
    is_known = isinstance(dataset, InstanceValue | ContainerValue) or dataset.name.startswith("torchvision.datasets.")
    return "all" if is_known or (shuffle is not None and shuffle.constant is True) else ""


def _has_plain_bases(class_value: ClassValue) -> bool:
    """Whether all of a class is in the project, but for the interfaces of torch."""
    bases = [each for each in class_value.ancestors() if not isinstance(each, ClassValue)]
    return all(isinstance(each, ExternalValue) and each.qualname.split(".")[-1] in _PLAIN_BASES for each in bases)


def iteration_events(analysis: Analysis, target: Value) -> list[Event] | None:
    """What `__iter__` of a dataset or sampler does; None if it is not known."""
    for event in analysis.of("iterate"):
        if event.target is target:
            return list(analysis.events[event.start : event.order])
    return None


def _of_iteration(analysis: Analysis, target: Value, class_value: ClassValue) -> Division:
    events = iteration_events(analysis, target)
    iterates = [each for each in analysis.of("iterate") if each.target is target]
    if events is None or not iterates or not _has_plain_bases(class_value):
        return ""
    outer = {id(guard) for guard in iterates[0].guards}
    if iterates[0].result.differs or any(_differs(event, outer) for event in events):
        return "part"
    if any(event.kind == "draw" for event in events) and rank_seeds(analysis):
        return "part"
    return "all"


def _differs(event: Event, outer: set[int]) -> bool:
    if event.kind == "call" and _DIVIDING.search(event.name or ""):
        return True
    if event.kind in ("yield", "return") and event.value is not None and event.value.differs:
        return True
    is_output = event.kind in ("yield", "return", "shard")
    guards = [guard for guard in event.guards if id(guard) not in outer and guard.differs]
    return event.kind == "shard" or (is_output and bool(guards))


def is_shuffled(sampler: SamplerValue) -> bool:
    """Whether a DistributedSampler shuffles; it does by default."""
    shuffle = sampler.options.get("shuffle")
    return shuffle is None or (shuffle.constant is True)


def where_wrapped(analysis: Analysis) -> list[str]:
    """That the script trains on several ranks, as evidence."""
    names = {"ddp": "DistributedDataParallel", "fsdp": "FSDP"}
    for event in analysis.wrapped[:1]:
        return [f"{names[event.wrapper]} trains the model on all ranks ({event.location})"]
    for event in analysis.of("accelerator", "fabric", "trainer", "init_group", "spawn")[:1]:
        return [f"the script runs on several ranks ({event.location})"]
    return []


def location_of(value: Value | None, default: Location) -> Location:
    """Where a value was created."""
    return value.location if value is not None and value.location is not None else default
