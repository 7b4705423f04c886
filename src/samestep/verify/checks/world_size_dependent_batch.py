"""The global batch grows with the number of ranks.

What it compares: the samples of an optimizer step on one rank and on several, with the same arguments. This is a common
design, so it is reported with `--strict` only.

Fault: `DataLoader(dataset, batch_size=args.batch_size, sampler=DistributedSampler(dataset))` with a fixed learning
rate. Two ranks take half as many steps with twice the batch, so the result depends on the number of ranks.

Repair: `batch_size=args.batch_size // world_size`, or `Run(global_batch=256)`.
"""

from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.verify.check import Check, Worlds
from samestep.verify.checks.duplicated_data import loader_location
from samestep.verify.source import argument, attribute_assignments, call_named, origin


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare the batch sizes that the script asks for."""
    size = worlds.many.size
    if worlds.one is None or size < 2:
        return
    scaled = {event["dataset"]: event["size"] for trace in worlds.one for event in trace.of("scaled")}
    for epoch in worlds.many[0].epochs_of("train"):
        batch, requested = epoch.loader.batch_size, scaled.get(epoch.loader.dataset)
        if batch is not None and requested == batch and (epoch.loader.distributed or epoch.loader.is_iterable):
            location = loader_location(worlds, epoch.loader)
            yield CHECK.finding(
                _batch_size(worlds, location) or location,
                f"the global batch is {batch} on one rank and {batch * size} on {size}, with the same arguments",
            )
            return


def _batch_size(worlds: Worlds, location: Location | None) -> Location | None:
    """The line that the batch size of the loader comes from."""
    call = call_named(location, ["DataLoader"]) if location else None
    value = argument(call, "batch_size", 1) if call else None
    if location is None or value is None:
        return None
    name = getattr(value, "attr", None)
    if name is None:
        return origin(location, value)
    assigned = [
        each for each in attribute_assignments(worlds.files, name) if (each[0], each[1].lineno) in worlds.executed()
    ]
    return Location(assigned[-1][0], assigned[-1][1].lineno) if assigned else location


CHECK = Check(
    "SS111",
    "world-size-dependent-batch",
    "note",
    "the number of steps and the size of a step depend on the number of ranks, so results cannot be compared",
    "divide the batch size by the number of ranks, or use Run(global_batch=...)",
    find,
    is_strict=True,
)
