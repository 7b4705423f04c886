"""Lightning logs the value of one rank.

What it compares: the values of `trainer.callback_metrics` between the ranks after every validation and test. Metrics of
torchmetrics and values with `sync_dist=True` are synchronized and equal.

Fault: `self.log("val/loss", loss)` in `validation_step`. The logged value is that of rank 0's samples, and callbacks on
the ranks see different values.

Repair: `self.log("val/loss", loss, sync_dist=True)`, or log a torchmetrics object.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.verify.check import Check, Worlds, first
from samestep.verify.trace_events import Site

_TOLERANCE = 1e-6


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare logged values."""
    ranks = worlds.many.ranks
    if len(ranks) < 2:
        return
    synced = [{(event["name"], event["site"]) for event in trace.of("log") if event["sync"]} for trace in ranks]
    lonely = set[tuple[str, Site]]().union(*synced) - set[tuple[str, Site]].intersection(*synced)
    for name, site in sorted(lonely):
        logging = [rank for rank, each in enumerate(synced) if (name, site) in each]
        yield CHECK.finding(
            first(site), f"{name} is logged with sync_dist=True on some ranks only ({', '.join(map(str, logging))})",
            ranks=logging, consequence="the ranks that log it wait for the others in the reduction",
            repair="call self.log with sync_dist=True on every rank",
        )  # fmt: skip
    if lonely:
        return
    logged = [[event for event in trace.of("logged") if event["stage"] in ("validation", "test")] for trace in ranks]
    calls = {
        event["name"]: event
        for event in ranks[0].of("log")
        if event["stage"].startswith(("validat", "test")) and not event["sync"] and not event["metric"]
    }
    reported = set[object]()
    for events in zip(*logged, strict=False):
        for name, call in calls.items():
            values = [event["values"].get(name) for event in events]
            known = [value for value in values if value is not None]
            if len(known) < len(values) or max(known) - min(known) <= _TOLERANCE * max(map(abs, known)):
                continue
            if call["site"] in reported:
                continue
            reported.add(call["site"])
            text = ", ".join(f"rank {rank}: {value:.6g}" for rank, value in enumerate(known))
            yield CHECK.finding(
                first(call["site"]),
                f"{name} is logged without sync_dist and differs between the ranks ({text})",
                ranks=range(len(ranks)),
            )


CHECK = Check(
    "SS403",
    "unsynchronized-log",
    "error",
    "the logged metric covers the samples of one rank, and callbacks such as early stopping may decide differently",
    "pass sync_dist=True to self.log, or log a torchmetrics object",
    find,
)
