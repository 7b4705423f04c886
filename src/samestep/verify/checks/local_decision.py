"""A learning rate that depends on the rank.

What it compares: the values that each rank passes to ReduceLROnPlateau, and the learning rates of all ranks in each
step.

Fault: `scheduler.step(val_loss)` with the validation loss of each rank's own shard. The learning rate falls on one
rank and not on the others, and the weights drift apart.

Repair: reduce the value over all ranks first, or broadcast that of rank 0.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.verify.check import Check, Worlds, first, same_on_all


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare schedulers and learning rates."""
    ranks = worlds.many.ranks
    if len(ranks) < 2:
        return
    for events in zip(*(trace.of("scheduler") for trace in ranks), strict=False):
        values = [event["metric"] for event in events]
        if all(value is not None for value in values) and not same_on_all(f"{value:.9g}" for value in values):
            text = ", ".join(f"rank {rank}: {value:.6g}" for rank, value in enumerate(values))
            yield CHECK.finding(
                first(events[0]["site"]),
                f"{events[0]['name']} gets another value on every rank ({text})",
                ranks=range(len(ranks)),
            )
            return
    for steps in zip(*(trace.steps for trace in ranks), strict=False):
        if not same_on_all(str(step.lr) for step in steps):
            text = ", ".join(f"rank {rank}: {step.lr[0]}" for rank, step in enumerate(steps))
            seen = f"the learning rate of step {steps[0].number} differs between the ranks ({text})"
            reduced = [
                call.site for call in ranks[0].collectives if call.name == "reduce" and call.step <= steps[0].number
            ]
            if reduced:
                yield CHECK.finding(
                    first(reduced[-1]),
                    f"{seen}: dist.reduce leaves the result on one rank only",
                    ranks=range(len(ranks)),
                    repair="use dist.all_reduce if every rank uses the result",
                )
                return
            yield CHECK.finding(
                first(ranks[0].optimizers[steps[0].optimizer]["site"]),
                seen,
                ranks=range(len(ranks)),
                repair="use the same learning rate on every rank: do not derive it from the rank or from values of one "
                "rank",
            )
            return


CHECK = Check(
    "SS404",
    "rank-dependent-learning-rate",
    "error",
    "the ranks take different steps, and their weights drift apart",
    "pass a value that is equal on all ranks: reduce it, or broadcast that of rank 0",
    find,
)
