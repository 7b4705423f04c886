"""Samples that no rank reads.

What it compares: the samples of all ranks together with those that one rank reads, in complete epochs. The end of a
training epoch may be dropped, up to one global batch, in a single epoch or with `drop_last=True`. An evaluation may
only drop what one rank drops as well.

Fault: `DistributedSampler(dataset, num_replicas=8, rank=rank)` on 2 ranks, `rank=local_rank` on two nodes, slices of
`len(dataset) // world_size` samples whose remainder no rank evaluates, or a sampler of a smaller dataset than that of
the loader.

Repair: let the sampler take rank and number of replicas from the process group, and divide the remainder too.
"""

from collections.abc import Iterator
from dataclasses import replace

from samestep.findings import Finding, Location
from samestep.messages import format_list
from samestep.verify.check import Check, Worlds, first, same_on_all
from samestep.verify.checks.duplicated_data import loader_location, sample_lists
from samestep.verify.rank_trace import RankTrace, WorldTrace
from samestep.verify.source import argument, call_named, origin, sharding_statement
from samestep.verify.trace_events import Epoch, LoaderInfo, Role

_ROLES: tuple[Role, ...] = ("train", "eval")


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare the samples of all ranks with those of one, then those of ranks on different nodes."""
    for world in (worlds.many, worlds.nodes):
        if world is None or len(world.ranks) < 2:
            continue
        found = _wrong_sampler(world)
        for role in _ROLES:
            if found is None and worlds.one is not None and worlds.one.ranks:
                found = _compare(worlds, world, worlds.one[0], role)
        if found is not None:
            yield found
            return


def _wrong_sampler(world: WorldTrace) -> Finding | None:
    """A sampler that divides the data between more ranks than there are, or only a part of the data."""
    for epoch in (*world[0].epochs_of("train"), *world[0].epochs_of("eval")):
        sampler, length = epoch.loader.distributed or {}, epoch.loader.length
        replicas, size = sampler.get("replicas", 0), sampler.get("length")
        if replicas > world.size and epoch.role == "train":
            return CHECK.finding(
                first(epoch.loader.sampler_site),
                f"the sampler divides the data between {replicas} ranks, but there are {world.size}: "
                f"{replicas - world.size} of {replicas} parts are read by no rank",
            )
        if size and length and size < length and epoch.loader.sampler == "DistributedSampler":
            return CHECK.finding(
                first(epoch.loader.sampler_site),
                f"the sampler is that of {size} samples, but the loader reads a dataset of {length}: {length - size} "
                "samples are read by no rank",
                repair="create the sampler with the dataset that the loader reads",
            )
    return None


def _compare(worlds: Worlds, world: WorldTrace, one: RankTrace, role: Role) -> Finding | None:
    reference = _complete(one, role)
    epochs = [_complete(trace, role) for trace in world.ranks]
    if not reference or not all(epochs) or reference[0].loader.replacement:
        return None
    lists = sample_lists([each[0] for each in epochs])
    by_content = lists[0] != epochs[0][0].samples
    expected = set(reference[0].contents if by_content else reference[0].samples)
    union = set[str]().union(*((epoch.contents if by_content else epoch.samples) for each in epochs for epoch in each))
    missing = expected - union
    count = min(len(each) for each in epochs)
    drops = any(_drops_tail(each[0].loader) for each in epochs)
    batch = (reference[0].loader.batch_size or 1) if role == "train" and (count < 2 or drops) else 0
    if role == "train" and _has_own_batches(epochs):
        batch = sum(len(each[0].batches[0].samples) for each in epochs) - 1  # less than a batch of all ranks
    loader = epochs[0][0].loader
    if role == "eval" and loader.drop_last and not by_content and union != expected:
        return _dropped(worlds, loader, len(union), len(expected))
    if len(missing) <= batch or not union <= expected:
        return None
    shown = format_list(sorted(sorted(missing), key=len), 4)
    where = " if every rank is on a separate node" if world.name == "nodes" else ""
    what = "training" if role == "train" else "evaluation"
    sampler = first(loader.sampler_site)
    is_named = loader.distributed and sampler is not None and "Sampler" in sampler.source
    location = sampler if is_named else None
    return CHECK.finding(
        location
        or _skipped(loader)
        or sharding_statement(worlds.files, worlds.executed())
        or loader_location(worlds, loader),
        f"{len(missing)} of {len(expected)} samples are read by no rank in {count} epoch{'s' * (count > 1)} of "
        f"{what}{where}: {shown}",
        evidence=[_describe_sampler(each[0]) for each in epochs if each[0].loader.distributed],
    )


def _skipped(loader: LoaderInfo) -> Location | None:
    """The number of batches that a resumed epoch skips: where it comes from."""
    location = first(loader.site)
    call = call_named(location, ["skip_first_batches"]) if location is not None else None
    return origin(location, argument(call, "num_batches", 1)) if location is not None and call is not None else None


def _dropped(worlds: Worlds, loader: LoaderInfo, evaluated: int, by_one: int) -> Finding:
    location = loader_location(worlds, loader)
    option = argument(call, "drop_last") if location and (call := call_named(location, ["DataLoader"])) else None
    return CHECK.finding(
        replace(location, line=option.lineno) if location and option is not None else location,
        f"{evaluated} of {loader.length} samples are evaluated on {worlds.many.size} ranks and {by_one} on one, and "
        "not the same ones: each rank drops its last batch (drop_last=True)",
        ranks=range(worlds.many.size),
        repair="leave drop_last=False for evaluations, and reduce sums and counts",
    )


def _drops_tail(loader: LoaderInfo) -> bool:
    return loader.drop_last or bool((loader.distributed or {}).get("drop_last"))


def _has_own_batches(epochs: list[list[Epoch]]) -> bool:
    """Whether a batch sampler of the script makes batches of one size only, and so leaves out smaller ones."""
    batches = [batch for each in epochs for epoch in each for batch in epoch.batches]
    is_own = all(each[0].loader.batch_sampler not in ("", "BatchSampler") for each in epochs)
    return is_own and same_on_all(len(batch.samples) for batch in batches)


def _complete(trace: RankTrace, role: Role) -> list[Epoch]:
    found = [epoch for epoch in trace.epochs_of(role) if epoch.is_complete and epoch.batches]
    return [
        epoch
        for epoch in found
        if epoch.batches[0].indices is not None and epoch.loader.dataset == found[0].loader.dataset
    ]


def _describe_sampler(epoch: Epoch) -> str:
    values = epoch.loader.distributed or {}
    return f"DistributedSampler(num_replicas={values['replicas']}, rank={values['rank']})"


CHECK = Check(
    "SS104",
    "missing-samples",
    "error",
    "the model never sees these samples, or the metric leaves them out",
    "let DistributedSampler read rank and number of replicas from the process group, and give the remainder to a rank "
    "too",
    find,
)
