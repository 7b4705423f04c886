"""Ranks train on the same samples.

What it compares: the samples that the ranks read for training, epoch by epoch: their indices in the dataset, or, for
iterable datasets and data that is sliced by hand, a hash of their content. Pairs of ranks are compared too, unless the
script creates groups of ranks. Not reported are a few samples that a sampler repeats to give all ranks the same number,
samplers that draw with replacement, and batches of which each rank passes another part to the model.

Fault: `DataLoader(train_set, batch_size=32, shuffle=True)` under DDP. Every rank reads the whole dataset, so eight GPUs
do the work of one, and an epoch takes as long as on one GPU.

Repair: `DataLoader(train_set, batch_size=32, sampler=DistributedSampler(train_set))`, or `run.shard(train_set,
shuffle=True)` in samestep. An IterableDataset must skip the samples of other ranks and other data workers itself.
"""

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from samestep.findings import Finding, Location
from samestep.verify.check import Check, Worlds, first, same_on_all
from samestep.verify.checks.leaked_samples import split_line
from samestep.verify.checks.rank_dependent_samples import different_draw
from samestep.verify.rank_trace import RankTrace
from samestep.verify.source import (
    argument,
    assigned,
    call_named,
    find_calls,
    find_class,
    function_at,
    is_about_ranks,
    name_of,
    parents,
    sharding_statement,
    statement_at,
)
from samestep.verify.trace_events import Batch, Epoch, LoaderInfo

_LARGE_SHARE = 0.25  # of the samples of a rank that others have too; a sampler that pads repeats far fewer
_MIN_STEPS = 3
_SHUFFLES = ("shuffle", "randperm", "permutation", "sample")
_OVERLAP = "some samples count several times in an epoch, and others are not used"
_SAME_ORDER = (
    "let all ranks take their parts of the same order: shuffle with the same seed on every rank, such as "
    "random.Random(epoch).shuffle(indices)"
)
_WEIGHTED_REPAIR = (
    "let each rank draw with its own generator: WeightedRandomSampler(weights, len(weights) // world_size, "
    "generator=torch.Generator().manual_seed(seed + rank)); a DistributedSampler would ignore the weights"
)


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare the samples of the ranks."""
    ranks = worlds.many.ranks
    yield from _repeated_by_workers(worlds)
    if len(ranks) < 2:
        return
    for number, epochs in enumerate(zip(*(trace.epochs_of("train") for trace in ranks), strict=False)):
        samples = sample_lists(epochs)
        if not all(samples):
            continue
        for members in _groups(ranks):
            shared, smallest = _shared([samples[rank] for rank in members], epochs[0].loader.replacement)
            some = [epochs[rank] for rank in members]
            if shared and not is_sliced([ranks[rank] for rank in members], some):
                yield _describe(worlds, some, number, shared, smallest, members)
                return
    yield from _same_rows(worlds)


def _groups(ranks: Sequence[RankTrace]) -> list[list[int]]:
    """The ranks to compare: all together, then pairs, unless the script has groups that may share data on purpose."""
    everyone = list(range(len(ranks)))
    if len(ranks) < 3 or any(trace.of("subgroup") for trace in ranks):
        return [everyone]
    return [everyone, *([a, b] for a in everyone for b in everyone if a < b)]


def _shared(samples: Sequence[list[str]], replacement: bool) -> tuple[int, int]:
    """How many samples all of these ranks have read, if that is more than padding; and of how many."""
    shared = set(samples[0]).intersection(*samples[1:])
    smallest = min(len(set(each)) for each in samples)
    with_replacement = replacement or any(len(set(each)) < len(each) for each in samples)
    is_same = all(each == samples[0] for each in samples[1:])
    is_large = not with_replacement and len(shared) > max(len(samples) - 1, _LARGE_SHARE * smallest)
    return (len(shared) if is_same or is_large else 0), smallest


def is_sliced(ranks: Sequence[RankTrace], epochs: Sequence[Epoch]) -> bool:
    """Whether the ranks read the same batches, but each passes other rows of them to the model."""
    used, largest = list[set[str]](), list[int]()
    for trace, epoch in zip(ranks, epochs, strict=True):
        calls = [call for step in trace.steps for call in step.calls if call.epoch == epoch.number and call.hashes]
        rows = {row for call in calls for row in call.hashes}
        read = {row for batch in epoch.batches for leaf in batch.rows for row in leaf}
        used.append(rows & read or rows)
        largest.append(max((call.rows for call in calls), default=0) if not rows & read else 0)
    if not all(used) or any(a & b for number, a in enumerate(used) for b in used[number + 1 :]):
        return False
    # rows that are not those of the batch were changed, perhaps by noise: then they must be fewer
    sizes = [max(len(batch.samples) for batch in epoch.batches) for epoch in epochs]
    return all(rows < size for rows, size in zip(largest, sizes, strict=True))


def sample_lists(epochs: Sequence[Epoch]) -> list[list[str]]:
    """The samples of an epoch on each rank: by index, or by content if the ranks have different datasets."""
    contents = [dict(pair for batch in epoch.batches for pair in _numbered(batch)) for epoch in epochs]
    shared = set(contents[0]).intersection(*contents[1:]) if contents else set[int]()
    differ = shared and all(len({content[index] for content in contents}) > 1 for index in shared)
    everything = [set(content.values()) for content in contents]
    if differ and not set[str].intersection(*everything):
        return [epoch.contents for epoch in epochs]
    return [epoch.samples for epoch in epochs]


def _numbered(batch: Batch) -> Iterator[tuple[int, str]]:
    """Indices of the samples of a batch with their contents."""
    return zip(batch.indices or (), batch.contents, strict=False)


def _repeated_by_workers(worlds: Worlds) -> Iterator[Finding]:
    """Find streams that every data worker reads in full."""
    for trace in worlds.many.ranks[:1]:
        for epoch in trace.epochs_of("train"):
            workers, counts = epoch.loader.workers, Counter(epoch.samples)
            if not epoch.loader.is_iterable or workers < 2 or not counts:
                continue
            repeated = sum(count == workers for count in counts.values())
            if repeated >= 0.9 * len(counts):
                location, _ = _stream_location(worlds, epoch.loader)
                name = epoch.loader.dataset_class.rpartition(".")[2]
                yield CHECK.finding(
                    location,
                    f"each of {workers} data workers reads all samples of a rank: {repeated} of {len(counts)} samples "
                    f"come {workers} times per epoch, since the IterableDataset {name} does not use get_worker_info()",
                    repair="skip the samples of other data workers in __iter__: get_worker_info() has their number",
                )
                return


def _describe(worlds: Worlds, epochs: list[Epoch], number: int, shared: int, of: int, members: list[int]) -> Finding:
    loader = epochs[0].loader
    count = len(epochs)
    which = f"ranks {members[0]} and {members[1]}" if count == 2 else f"all {count} ranks"
    text = f"{which} trained on the same {shared} of {of} samples of epoch {number}"
    if loader.is_iterable:
        location, is_by_worker = _stream_location(worlds, loader)
        shuffle = _shuffle_before(location)
        if shuffle is not None and not same_on_all(set(epoch.samples) for epoch in epochs):
            return CHECK.finding(
                shuffle, f"{text}: they shuffle in different orders before each takes its part", ranks=members,
                consequence=_OVERLAP, repair=_SAME_ORDER,
            )  # fmt: skip
        used = "uses get_worker_info() but neither the rank nor the number of ranks"
        name = loader.dataset_class.rpartition(".")[2]
        return CHECK.finding(
            location, f"{text}: the IterableDataset {name} {used if is_by_worker else 'yields all samples'}",
            ranks=members,
            repair="skip the samples of other ranks in __iter__: number the data workers of all ranks, "
            "shard = rank * num_workers + worker, and yield every (world_size * num_workers)-th sample",
        )  # fmt: skip
    if loader.distributed is not None:
        values = [epoch.loader.distributed or {} for epoch in epochs]
        differing = [
            name for name in ("replicas", "rank", "seed", "shuffle") if len({each.get(name) for each in values}) > 1
        ]
        why = (
            "its samplers have the same rank"
            if "rank" not in differing
            else "the data or its order differs between the ranks"
        )
        if "seed" in differing:
            why = f"its samplers have different seeds ({', '.join(str(each['seed']) for each in values)})"
        drawn = (different_draw(worlds) or split_line(worlds)) if differing == ["rank"] else None
        return CHECK.finding(
            drawn or first(loader.sampler_site) or loader_location(worlds, loader), f"{text}: {why}", ranks=members
        )
    return CHECK.finding(
        _trainer_option(worlds)
        or _prepared(worlds)
        or _sampler_location(worlds, loader)
        or _sampler_argument(loader_location(worlds, loader)),
        f"{text}: the loader of {loader.dataset.partition(':')[0]} has a {_sampler_name(worlds, loader)}, which does "
        "not depend on the rank",
        ranks=members,
        repair=_WEIGHTED_REPAIR if loader.sampler == "WeightedRandomSampler" else "",
    )


def _sampler_name(worlds: Worlds, loader: LoaderInfo) -> str:
    return loader.batch_sampler if find_class(worlds.files, loader.batch_sampler) else loader.sampler


def _sampler_location(worlds: Worlds, loader: LoaderInfo) -> Location | None:
    """The statement of a sampler of the user that yields the indices."""
    for name in (loader.batch_sampler, loader.sampler):
        found = find_class(worlds.files, name)
        functions = [node for node in ast.walk(found[1]) if isinstance(node, ast.FunctionDef)] if found else []
        method = next((node for node in functions if node.name == "__iter__"), None)
        if found is not None and method is not None:
            results = [node for node in ast.walk(method) if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom)]
            return Location(found[0], results[-1].lineno if results else method.lineno, "__iter__")
    return None


def _sampler_argument(location: Location | None) -> Location | None:
    """The line that creates the sampler of a loader, or else that of the loader."""
    call = call_named(location, ["DataLoader"]) if location is not None else None
    sampler = argument(call, "sampler", 3) if call is not None else None
    return assigned(location, sampler) if location is not None and isinstance(sampler, ast.Name) else location


def _prepared(worlds: Worlds) -> Location | None:
    """The call of accelerator.prepare that the loader was not passed to."""
    events = [event for event in worlds.many[0].of("accelerate") if event["name"] == "prepare"]
    return first(events[0]["site"]) if events else None


def _trainer_option(worlds: Worlds) -> Location | None:
    """The Trainer whose option keeps it from replacing samplers."""
    for event in worlds.many[0].of("trainer"):
        location = first(event["site"])
        call = call_named(location, ["Trainer"]) if location else None
        option = argument(call, "use_distributed_sampler") or argument(call, "replace_sampler_ddp") if call else None
        if isinstance(option, ast.Constant) and option.value is False:
            return location
    return None


def loader_location(worlds: Worlds, loader: LoaderInfo) -> Location | None:
    """The line that creates a loader, also if a framework has created it again."""
    same = [each for each in worlds.many[0].loaders.values() if each.dataset == loader.dataset and each.site]
    direct = [each for each in same if "Loader(" in each.site[0].source or "Loader" in each.site[0].function]
    chosen = loader if loader.site and (loader in direct or not direct) else next(iter(direct or same), loader)
    return first(chosen.site)


def _shuffle_before(shard: Location | None) -> Location | None:
    """The line that shuffles before the statement that takes a rank's part, in the same function."""
    statement = statement_at(shard) if shard is not None else None
    if shard is None or statement is None or not is_about_ranks(statement):
        return None
    calls = find_calls(shard.file, _SHUFFLES, function_at(shard))
    lines = [call.lineno for call in calls if call.lineno <= shard.line]
    return replace(shard, line=lines[-1]) if lines else None


def _stream_location(worlds: Worlds, loader: LoaderInfo) -> tuple[Location | None, bool]:
    """The statement of __iter__ that shards, or else its first loop; and whether it shards by data worker."""
    found = find_class(worlds.files, loader.dataset_class.rpartition(".")[2])
    method = (
        next((node for node in ast.walk(found[1]) if getattr(node, "name", "") == "__iter__"), None) if found else None
    )
    if found is None or not isinstance(method, ast.FunctionDef):
        return first(loader.site), False
    file = found[0]
    infos = {
        target.id
        for node in ast.walk(method)
        if isinstance(node, ast.Assign) and name_of(node.value) == "get_worker_info"
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(method):
        if isinstance(node, ast.Name) and node.id in infos and isinstance(node.ctx, ast.Load):
            statement = next(each for each in parents(node) if isinstance(each, ast.stmt))
            return Location(file, statement.lineno, method.name), True
    shards = [
        node
        for node in ast.walk(method)
        if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef) and is_about_ranks(node)
    ]
    loops = [node for node in ast.walk(method) if isinstance(node, ast.For)]
    return Location(file, min((node.lineno for node in shards or loops), default=method.lineno), method.name), False


def _same_rows(worlds: Worlds) -> Iterator[Finding]:
    """Compare the inputs of the models, for data that does not come from a loader."""
    ranks = worlds.many.ranks
    if any(trace.epochs_of("train") for trace in ranks):
        return
    steps = [[call.hashes for call in step.calls if call.hashes and call.rows > 1] for step in ranks[0].steps]
    others = [
        [[call.hashes for call in step.calls if call.hashes and call.rows > 1] for step in trace.steps]
        for trace in ranks[1:]
    ]
    compared = min([len(steps), *map(len, others)])
    equal = sum(bool(steps[n]) and all(other[n] == steps[n] for other in others) for n in range(compared))
    if compared >= _MIN_STEPS and equal == compared and len({str(each) for each in steps}) > 1:
        call = next(call for step in ranks[0].steps for call in step.calls if call.hashes)
        yield CHECK.finding(
            _data_location(worlds) or first(call.site),
            f"all {len(ranks)} ranks passed the same rows to the model in each of {equal} steps",
            ranks=range(len(ranks)),
            related=call.site[:1],
            repair="let each rank read its own part: seed the generator that draws batches with seed + rank, or slice "
            "the data by rank",
        )
    elif not equal:
        yield from _overlapping_parts(worlds)


def _overlapping_parts(worlds: Worlds) -> Iterator[Finding]:
    """Compare the rows of ranks that take parts by hand, in the steps before a rank repeats a row of its own."""
    location = sharding_statement(worlds.files, worlds.executed())
    ranks = worlds.many.ranks
    if location is None:
        return
    by_rank = [_rows_of_first_part(trace, location) for trace in ranks]
    steps = min(map(len, by_rank))
    if steps < _MIN_STEPS or any(trace.of("subgroup") for trace in ranks):
        return
    parts = [{row for rows in each[:steps] for row in rows} for each in by_rank]
    shared, smallest = set[str].intersection(*parts), min(map(len, parts))
    if len(shared) > _LARGE_SHARE * smallest:
        yield CHECK.finding(
            location,
            f"the parts that the ranks take are not disjoint: in {steps} steps, {len(ranks)} ranks trained on the same "
            f"{len(shared)} of {smallest} samples",
            ranks=range(len(ranks)),
            consequence=_OVERLAP,
            repair=_SAME_ORDER,
        )


def _rows_of_first_part(trace: RankTrace, location: Location) -> list[list[str]]:
    """The rows that the model got in each step, before the rank takes its next part at a line, or repeats a row."""
    found, seen = list[list[str]](), set[str]()
    begin, lines = trace.lines
    place = location.file, location.line
    taken = [number for number, each in enumerate(map(trace.locate, lines)) if (each.file, each.line) == place]
    is_known = begin == 0 and len(taken) > 1
    for step in trace.steps:
        rows = [row for call in step.calls if call.rows > 1 for row in call.hashes]
        is_next = is_known and bool(step.backwards) and step.backwards[0].position > taken[1]
        if not rows or is_next or len(set(rows)) < len(rows) or not seen.isdisjoint(rows):
            break
        seen.update(rows)
        found.append(rows)
    return found


def _data_location(worlds: Worlds) -> Location | None:
    """The line that draws the batches, if one does so with random numbers."""
    draw = next((draw for draw in worlds.many[0].draws if draw.site and draw.step), None)
    return first(draw.site) if draw else None


CHECK = Check(
    "SS101",
    "duplicated-training-data",
    "error",
    "N ranks do the work of one: every sample counts N times, and an epoch takes as long as on one rank",
    "give the loader a DistributedSampler (and call set_epoch), or use run.shard(dataset, shuffle=True)",
    find,
)
