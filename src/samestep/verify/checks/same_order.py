"""Every epoch has the same order.

What it compares: the order of the samples in consecutive epochs of training, on each rank. Data that is read in its own
order, without shuffling, is not reported, and neither is an epoch that the script leaves early and begins again.

Fault: a `DistributedSampler(dataset, shuffle=True)` whose `set_epoch` is never called. It shuffles with the same seed
in each epoch. Or `set_epoch(epoch)` at the end of an epoch, so that the second one repeats the first one.

Repair: `sampler.set_epoch(epoch)` at the beginning of each epoch.
"""

from collections.abc import Iterator
from itertools import pairwise

from samestep.findings import Finding, Location
from samestep.verify.check import Check, Worlds, first, same_on_all
from samestep.verify.rank_trace import RankTrace
from samestep.verify.source import epoch_loop, find_calls
from samestep.verify.trace_events import Epoch, LoaderInfo


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare the order of consecutive epochs."""
    for trace in worlds.many:
        by_dataset = dict[str, list[Epoch]]()
        for epoch in trace.epochs_of("train"):
            by_dataset.setdefault(epoch.loader.dataset, []).append(epoch)
        for epochs in by_dataset.values():
            orders = [epoch.samples for epoch in epochs]
            if len(orders) < 2 or len(orders[0]) < 4 or _is_sorted(orders[0]) or _is_unshuffled(epochs[0].loader):
                continue
            if not epochs[0].ended and trace.of("set_epoch"):  # left early, and then resumed from its beginning
                continue
            same = [_is_same(one, other) for one, other in pairwise(orders)]
            # epochs that all have the same order, or a sampler whose number was set too late: epoch 1 repeats epoch 0
            if all(same) or (epochs[0].loader.distributed is not None and same[0] and _are_set(trace)):
                found = _describe(worlds, trace, epochs, all(same))
                if found is not None:
                    yield found
                    return


def _is_same(order: list[str], other: list[str]) -> bool:
    return bool(other) and other[: len(order)] == order[: len(other)]


def _are_set(trace: RankTrace) -> bool:
    """Whether every call of set_epoch passes a new number, so that no epoch is repeated on purpose."""
    numbers = [(call["site"], call["epoch"]) for call in trace.of("set_epoch")]
    return len(numbers) > 1 and len(set(numbers)) == len(numbers)


def _describe(worlds: Worlds, trace: RankTrace, epochs: list[Epoch], all_same: bool) -> Finding | None:
    loader, last = epochs[0].loader, len(epochs) - 1 if all_same else 1
    text = f"epochs 0 to {last} have the same order of samples on every rank"
    calls = [
        Location(file, call.lineno)
        for file in worlds.files
        for call in find_calls(file, ["set_epoch"])
        if (file, call.lineno) in worlds.executed()
    ]
    if loader.distributed is not None:
        sampler, called = loader.sampler_site, trace.of("set_epoch")
        location = first(called[0]["site"]) if called else None
        return CHECK.finding(
            location or epoch_loop(epochs[1].site) or first(epochs[1].site),
            f"{text}: DistributedSampler.set_epoch() {_was_called(called, all_same)}",
            related=[sampler[0]] if sampler else [],
        )
    drawn = trace.of("order")
    if calls and 0 < len(drawn) < len(epochs):
        kept = next((each for each in drawn[-1]["site"] if each.function.endswith("__init__")), None)
        return CHECK.finding(
            kept or first(drawn[-1]["site"]), f"{text}: the sampler draws it once, before set_epoch at {calls[0]}",
            related=calls[:1], repair="draw the order in __iter__ of the batch sampler, in every epoch",
        )  # fmt: skip
    if calls:
        return CHECK.finding(
            first(loader.site), f"{text}, although the script calls set_epoch at {calls[0]}", related=calls[:1],
            repair="let set_epoch reach what draws the order: persistent data workers keep a copy of the dataset",
        )  # fmt: skip
    return None


def _was_called(calls: list[dict[str, object]], all_same: bool) -> str:
    if not calls:
        return "was never called"
    if not all_same:
        return "is called after the epoch instead of before it"
    is_same = same_on_all(call["epoch"] for call in calls)
    return f"was called {len(calls)} times, with the same number" if is_same else "was called for another sampler"


def _is_unshuffled(loader: LoaderInfo) -> bool:
    """Whether the loader keeps the order of its dataset on purpose: with `shuffle=False`."""
    if loader.distributed is not None:
        return not loader.distributed["shuffle"]
    return loader.sampler == "SequentialSampler" and loader.batch_sampler == "BatchSampler" and not loader.is_iterable


def _is_sorted(samples: list[str]) -> bool:
    numbers = [int(sample) for sample in samples if sample.isdecimal()]
    return len(numbers) == len(samples) and numbers == sorted(numbers)


CHECK = Check(
    "SS102",
    "same-order-every-epoch",
    "error",
    "every epoch replays the same batches in the same order, so the data is not shuffled after the first one",
    "call sampler.set_epoch(epoch) at the beginning of every epoch",
    find,
)
