"""Datasets, samplers, loaders, splits, parts of ranks, seeds and random draws."""

from typing import Final

from samestep.findings import Location
from samestep.lint.events import source_text
from samestep.lint.library.call import Call, known_attribute, known_function, known_functions, known_method
from samestep.lint.library.partitions import IS_PART, SPLITS, join_taints, take_part
from samestep.lint.project_calls import call_function
from samestep.lint.rank_names import COUNTER
from samestep.lint.values import (
    ContainerValue,
    FunctionValue,
    InstanceValue,
    IteratorValue,
    LoaderValue,
    SamplerValue,
    Taint,
    TensorValue,
    Value,
    merge_taints,
    options_of,
)

DRAWS: Final = frozenset({
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial",
    "randperm",
})  # fmt: skip
_GENERATORS: Final = ("seed", "manual_seed", "default_rng", "RandomState", "Random", "SystemRandom", "Generator")
_UNSEEDED: Final = ("default_rng", "RandomState", "Random", "SystemRandom")
UNSEEDED: Final = "so each process draws another number"
"""The end of the text of a taint."""
_CHOICES: Final = ("random", "randint", "randrange", "uniform", "choice", "rand")
_SAMPLER_OPTIONS: Final = ("num_replicas", "rank", "shuffle", "seed", "drop_last")
_LOADER_OPTIONS: Final = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn")

# -- samplers and loaders


@known_functions(lambda package, name: bool(package) and name.endswith("Sampler"))
def _sampler(call: Call) -> Value:
    dataset = call.get("dataset", 0) or call.get("data_source", 0) or call.get("sampler", 0)
    is_distributed = "Distributed" in call.last
    inner = [each for each in options_of(dataset) if isinstance(each, SamplerValue) and each.is_distributed]
    taints = () if is_distributed else merge_taints([*call.arguments[1:], *call.keywords.values(), dataset])
    if inner:
        own = Taint("rank", call.location, "the sampler inside gives each rank its own part")
        taints = join_taints([Value(taints=taints)], (own,))
    value = SamplerValue(call.location, taints, kind=call.last, dataset=dataset, options=dict(call.keywords))
    if is_distributed:
        for name, argument in zip(_SAMPLER_OPTIONS, call.arguments[1:], strict=False):
            value.options.setdefault(name, argument)
    call.emit("sampler", sampler=value, length=length_of(call, dataset) if is_distributed else None)
    return value


def length_of(call: Call, dataset: Value | None) -> int | None:
    """The number of samples of a dataset, if the script says it."""
    found = {_one_length(call, option) for option in options_of(dataset)}
    return found.pop() if len(found) == 1 else None


def _one_length(call: Call, dataset: Value) -> int | None:
    if isinstance(dataset, ContainerValue):
        return dataset.length
    if not isinstance(dataset, InstanceValue):
        return None
    if dataset.qualname.endswith(("TensorDataset", "Subset")):
        parts = [*dataset.arguments.values()][dataset.qualname.endswith("Subset") :]
        lengths = [each.length for each in parts if isinstance(each, TensorValue | ContainerValue)]
        return next((each for each in lengths if each is not None), None)
    method = dataset.class_value.method("__len__", dataset) if dataset.class_value is not None else None
    if method is None:
        return None
    with call.run.inside(context="dataset"):
        length = call_function(call.run, method, [], {}, call.node)
    return length.constant if isinstance(length.constant, int) else None


@known_functions(lambda package, name: name.endswith("DataLoader"))
def _loader(call: Call) -> Value:
    options = dict(call.keywords)
    for name, argument in zip(_LOADER_OPTIONS, call.arguments, strict=False):
        options.setdefault(name, argument)
    sampler, batch_sampler = options.get("sampler"), options.get("batch_sampler")
    if sampler is None or sampler.constant is None:
        own = [each for each in options_of(batch_sampler) if isinstance(each, SamplerValue)]
        sampler = own[0] if own else sampler
    value = LoaderValue(call.location, dataset=options.get("dataset"), sampler=sampler, options=options)
    call.emit("loader", loader=value)
    for target in (*options_of(value.dataset), *options_of(sampler), *options_of(batch_sampler)):
        _iterate(call, value, target)
    _start_worker(call, options.get("worker_init_fn"))
    return value


def _iterate(call: Call, loader: LoaderValue, target: Value) -> None:
    """Follow `__iter__` of a dataset or sampler of the project, whose result may or may not depend on the rank."""
    instance = target.options.get("instance") if isinstance(target, SamplerValue) else target
    if not isinstance(instance, InstanceValue) or instance.class_value is None:
        return
    method = instance.class_value.method("__iter__", instance)
    if method is None:
        return
    start = len(call.run.events)
    with call.run.inside(context="dataset"):
        result = call_function(call.run, method, [], {}, call.node)
    call.emit("iterate", target=target, loader=loader, start=start, result=result)


def _start_worker(call: Call, function: Value | None) -> None:
    """Follow `worker_init_fn`, which each worker of the loader calls with its number."""
    for option in options_of(function):
        if isinstance(option, FunctionValue):
            with call.run.inside(context="worker_init"):
                call_function(call.run, option, [Value(call.location, name="worker_id")], {}, call.node)


@known_attribute("loader", "sampler", "dataset", "batch_sampler")
def _loader_part(owner: Value, name: str, location: Location) -> Value | None:
    if not isinstance(owner, LoaderValue):
        return None
    parts = {"sampler": owner.sampler, "dataset": owner.dataset}
    return parts[name] if name in parts else owner.options.get(name)


@known_attribute("sampler", "sampler")
def _inner_sampler(owner: Value, name: str, location: Location) -> Value | None:
    return owner.dataset if isinstance(owner, SamplerValue) else None


@known_method("sampler", "set_epoch")
@known_method("loader", "set_epoch")
@known_method("instance", "set_epoch")
@known_method("value", "set_epoch")
def _set_epoch(call: Call, owner: Value) -> Value:
    call.emit("set_epoch", target=owner, epoch=call.get("epoch", 0))
    return Value(call.location)


# -- datasets, splits and parts


@known_function("torch.utils.data.random_split", "sklearn.model_selection.train_test_split")
def _split(call: Call) -> Value:
    generator = call.get("generator", 2) if call.last == "random_split" else call.get("random_state")
    call.emit("split", name=call.name, generator=generator, arguments=call.arguments, keywords=call.keywords)
    source = call.get("dataset", 0)
    taints = source.taints if source is not None else ()
    parts = [InstanceValue(call.location, taints, qualname="torch.utils.data.Subset") for _ in range(3)]
    return ContainerValue(call.location, items=dict(enumerate(parts)))


@known_function("torch.utils.data.Subset", "torch.utils.data.TensorDataset", "torch.utils.data.ConcatDataset")
def _dataset(call: Call) -> Value:
    if call.last == "Subset":
        indices = call.get("indices", 1)
        for option in options_of(indices):
            is_part = any(taint.text.endswith(IS_PART) for taint in option.taints)  # not a split, but the rank's part
            if option.name.rpartition(".")[2] in ("randperm", "permutation", "permuted", "shuffle") and not is_part:
                call.emit("split", name=option.name, generator=option, arguments=call.arguments, keywords=call.keywords)
    return InstanceValue(call.location, call.taints, qualname=call.name, arguments=call.named_arguments)


@known_method("any", "shard")
def _shard(call: Call, owner: Value) -> Value:
    """`dataset.shard(num_shards=..., index=...)` of Hugging Face datasets and tf.data."""
    index = call.get("index", 1) or Value()
    taints = join_taints([owner], (take_part(call.run, call.node, index, call.get("num_shards", 0) or Value(), owner,
                                             "stride"),)) if index.depends_on_rank else call.taints  # fmt: skip
    return Value(call.location, taints, name="shard")


@known_function("datasets.distributed.split_dataset_by_node")
def _split_by_node(call: Call) -> Value:
    rank, world = call.get("rank", 1) or Value(), call.get("world_size", 2) or Value()
    source = call.get("dataset", 0) or Value()
    return Value(call.location, (take_part(call.run, call.node, rank, world, source, "stride"),), name=call.name)


@known_function("range")
def _range(call: Call) -> Value:
    """`range(rank, n, world)` and `range(rank * share, (rank + 1) * share)` are the indices of a rank."""
    taints = call.taints
    if len(call.arguments) > 1 and call.arguments[0].depends_on_rank:
        lower, upper = call.arguments[:2]
        is_stride = len(call.arguments) > 2
        how = "stride" if is_stride else "floor" if lower.is_floored and upper.is_floored else "range"
        world = call.arguments[2] if is_stride else Value()
        taints = join_taints(call.arguments, (take_part(call.run, call.node, lower, world, upper, how),))
    limits = [each.constant for each in call.arguments]
    length = len(range(*limits)) if limits and all(isinstance(each, int) for each in limits) else None
    return ContainerValue(
        call.location, taints, items={0: Value(call.location, taints, name=COUNTER)}, length=length, name="range",
    )  # fmt: skip


@known_function(*SPLITS)
def _divide(call: Call) -> Value:
    return TensorValue(call.location, call.taints, parts=tuple(call.inputs), name=call.name)


@known_function("slice")
def _slice(call: Call) -> Value:
    """`slice(rank, None, world)` is an index that takes the part of a rank."""
    return Value(call.location, _range(call).taints)


@known_function("itertools.islice")
def _islice(call: Call) -> Value:
    taints = merge_taints(call.arguments)
    if len(call.arguments) > 3 and call.arguments[1].depends_on_rank:
        source, rank, world = call.arguments[0], call.arguments[1], call.arguments[3]
        taints = join_taints(call.arguments, (take_part(call.run, call.node, rank, world, source, "stride"),))
    return IteratorValue(call.location, taints, kind=call.last, sources=tuple(call.arguments[:1]))


# -- seeds and random draws


@known_function(
    "torch.manual_seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all", "torch.random.manual_seed",
    "lightning.seed_everything", "accelerate.utils.set_seed", "transformers.set_seed",
    "transformers.trainer_utils.set_seed", "lightning.utilities.seed.seed_everything",
)  # fmt: skip
def _seed(call: Call) -> Value:
    _emit_seed(call)
    return Value(call.location)


@known_function("torch.set_rng_state", "torch.random.set_rng_state", "torch.cuda.set_rng_state")
def _restore_state(call: Call) -> Value:
    """A state from a checkpoint: if all ranks load the same one, they draw the same numbers from then on."""
    state = call.get("new_state", 0) or Value()
    if state.name == "torch.load":
        call.emit("seed", value=state, which=call.name)
    return Value(call.location)


@known_method("fabric", "seed_everything")
def _fabric_seed(call: Call, owner: Value) -> Value:
    _emit_seed(call, "lightning.seed_everything")
    return Value(call.location)


def _emit_seed(call: Call, which: str = "") -> None:
    value = call.get("seed", 0) or Value()
    device_specific = call.get("device_specific", 1)
    if device_specific is not None and device_specific.constant is True:
        own = Taint("rank", call.location, "`device_specific=True` adds the rank to the seed")
        value = Value(value.location, join_taints([value], (own,)))
    call.emit("seed", value=value, which=which or call.name)


@known_method("value", "manual_seed", "seed")
def _seed_generator(call: Call, owner: Value) -> Value:
    """`generator.manual_seed(...)`: what it draws from now on depends on the seed."""
    owner.taints = merge_taints([owner, *call.arguments])
    call.emit("seed_generator", owner=owner, value=call.get("seed", 0) or Value())
    return owner


@known_method("value", "shuffle")
def _shuffle_with(call: Call, owner: Value) -> Value:
    """`random.Random(seed).shuffle(items)`: the order depends on the generator."""
    for value in call.arguments[:1]:
        value.taints, value.clock = merge_taints([value, owner]), value.clock or owner.clock
        if owner.differs or owner.clock is not None:
            _shuffle(call, value)
    return Value(call.location)


@known_functions(
    lambda package, name: (
        (package.split(".")[0] == "torch" and name in DRAWS)
        or package in ("random", "numpy.random")
        or package.startswith("numpy.random.")
    )
)
def _draw(call: Call) -> Value:
    if call.last in _GENERATORS:
        if call.last == "seed":
            _emit_seed(call)
        return _generator(call)
    call.emit("draw", name=call.name, arguments=call.arguments, generator=call.get("generator"))
    if call.last == "shuffle":
        for value in call.arguments[:1]:
            _shuffle(call, value)
    taints = join_taints(call.inputs, _own_choice(call))
    return TensorValue(call.location, taints, is_noise=True, length=first_length(call), name=call.name)


def _own_choice(call: Call) -> tuple[Taint, ...]:
    """Why each process draws another number, outside of a dataset: nothing seeds `random` or numpy on all ranks."""
    library = "numpy" if call.package == "numpy.random" else call.package
    if (
        library not in ("random", "numpy")
        or call.last not in _CHOICES
        or {"dataset", "uncalled"} & {*call.run.contexts}
    ):
        return ()
    for event in reversed(call.run.events):
        is_call = event.kind == "call" and "seed" in str(event.name).lower()  # of a package, which may seed all
        is_seed = event.kind == "seed" and (
            event.which.startswith(library) or event.which.endswith(("seed_everything", "set_seed"))
        )
        if is_call or (is_seed and "worker_init" not in event.contexts):
            return event.value.taints if is_seed else ()
    return (Taint("data", call.location, f"nothing seeds `{library}`, {UNSEEDED}"),)


@known_method("value", "permutation", "permuted")
def _permute_with(call: Call, owner: Value) -> Value:
    """`numpy.random.default_rng(seed).permutation(n)`: the order depends on the generator."""
    name, taints = f"Generator.{call.last}", merge_taints([owner, *call.arguments])
    return TensorValue(call.location, taints, is_noise=True, name=name, clock=owner.clock)


@known_method("value", "randn", "rand", "normal", "standard_normal", "uniform", "integers", "random", "random_sample")
def _draw_with(call: Call, owner: Value) -> Value:
    """`numpy.random.default_rng(seed).normal()`."""
    if owner.name.rpartition(".")[2] not in ("default_rng", "RandomState", "Random"):
        call.emit("call", name=call.name, arguments=call.arguments, keywords=call.keywords, owner=owner)
        return call.unknown_result(owner)
    call.emit("own_draw", name=call.name, owner=owner)
    return call.unknown_result(owner)


def _generator(call: Call) -> Value:
    """A generator; one without a seed draws other numbers in every process."""
    taints, clock = call.taints, next((each.clock for each in call.inputs if each.clock is not None), None)
    if call.last in _UNSEEDED and all(each.constant is None for each in call.inputs):
        taints = (Taint("data", call.location, f"`{source_text(call.node)}` has no seed"),)
    return Value(call.location, taints, name=call.name, clock=clock)


def _shuffle(call: Call, value: Value) -> None:
    """A list that is shuffled in place keeps the name of what shuffled it, and the line."""
    value.name = call.name
    if isinstance(value, ContainerValue) and not value.is_unordered:
        value.order_from = call.location


def first_length(call: Call) -> int | None:
    """The length of the first dimension of a tensor that is created by its sizes."""
    sizes = call.arguments
    if call.last == "randint":
        shape = call.get("size", 2 if len(call.arguments) > 2 else 1)
        sizes = [shape] if shape is not None else []
    elif call.last.endswith("_like"):
        return sizes[0].length if sizes and isinstance(sizes[0], TensorValue) else None
    elif call.last == "arange":
        sizes = sizes if len(sizes) == 1 else []
    first = sizes[0] if sizes else None
    if isinstance(first, ContainerValue):
        first = first.items.get(0) if call.last != "tensor" else Value(constant=first.length)
    size = first.constant if first is not None else None
    return size if isinstance(size, int) and not isinstance(size, bool) else None
