"""A collective with tensors of different shapes.

What it compares: shape and dtype of what each rank passes to the same collective.

Fault: `dist.all_gather(buffers, predictions)` in the last batch of an evaluation, which has 5 samples on rank 0 and 2
on rank 1.

Repair: pad to the same length and cut afterwards, gather with `all_gather_object`, or reduce sums and counts instead.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.verify.check import Check, Worlds, first
from samestep.verify.control_flow import find_divergence


def find(worlds: Worlds) -> Iterator[Finding]:
    """Report the first collective whose tensors differ between the ranks."""
    divergence = find_divergence(worlds.many.ranks)
    if divergence is None or not divergence.is_shape_only:
        return
    points = {rank: point for rank, point in divergence.points.items() if point is not None}
    name = next(iter(points.values())).name
    roots = {rank: point.root for rank, point in points.items()}
    if len(set(roots.values())) > 1:
        text = ", ".join(f"rank {rank}: {root}" for rank, root in roots.items())
        yield CHECK.finding(
            first(next(iter(points.values())).site), f"{name} has another source or destination on every rank ({text})",
            ranks=sorted(points), repair="name the same rank as src or dst on every rank",
        )  # fmt: skip
        return
    shapes = ", ".join(f"rank {rank}: {_describe(point.source)}" for rank, point in points.items())
    yield CHECK.finding(
        first(next(iter(points.values())).site),
        f"{name} is called with tensors that differ between the ranks ({shapes})",
        ranks=sorted(points),
    )


def _describe(source: list[object] | None) -> str:
    return "unknown" if source is None else f"{str(source[1]).removeprefix('torch.')} {source[0]}"


CHECK = Check(
    "SS303",
    "different-shapes",
    "error",
    "gloo ends the run, NCCL hangs or returns wrong data",
    "pass tensors of the same shape and dtype on every rank: pad them, use all_gather_object, or reduce sums and "
    "counts",
    find,
)
