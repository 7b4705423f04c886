"""Format plans as rows of text for tables, and the memory of a device as segments of a bar."""

from collections.abc import Sequence
from dataclasses import dataclass

from samestep.messages import format_bytes, format_seconds
from samestep.planner.plan import Plan
from samestep.planner.teacher_costs import TeacherPlan

PLAN_COLUMNS = ("strategy", "ranks", "micro-batch", "memory", "step time", "reason")
"""Column titles of `plan_rows`."""
TEACHER_COLUMNS = ("placement", "per GPU", "per node", "time", "reason")
"""Column titles of `teacher_rows`."""
WHAT_IF_COLUMNS = ("GPUs", "precision", "strategy", "micro-batch", "memory", "step time", "speed-up", "GPU-hours")
"""Column titles of `what_if_rows`."""


@dataclass(frozen=True)
class Segment:
    """One segment of a memory bar."""

    name: str  # component of the memory
    size: int  # bytes
    cells: int  # width in characters


def plan_rows(plan: Plan) -> list[tuple[str, ...]]:
    """One row per candidate, in the order of the plan."""
    return [
        (
            candidate.layout.name,
            str(candidate.layout.ranks),
            f"{candidate.micro_batch} x {candidate.accumulation}" if candidate.fits else "-",
            format_bytes(candidate.memory.total),
            format_seconds(candidate.time.total) if candidate.fits else "-",
            "chosen" if candidate is plan.chosen else candidate.reason,
        )
        for candidate in plan.candidates
    ]


def teacher_rows(plan: TeacherPlan) -> list[tuple[str, ...]]:
    """One row per placement, in the order of the plan."""
    return [
        (each.name, format_bytes(each.per_gpu), format_bytes(each.per_node), format_seconds(each.seconds), each.reason)
        for each in plan.placements
    ]


def what_if_rows(plans: Sequence[Plan], samples: int) -> list[tuple[str, ...]]:
    """One row per cluster, with the speed-up over the first that fits and the GPU-hours for `samples` samples."""
    return [_what_if_row(plan, speed_up, samples) for plan, speed_up in zip(plans, speed_ups(plans), strict=True)]


def _what_if_row(plan: Plan, speed_up: float | None, samples: int) -> tuple[str, ...]:
    chosen, hours, request = plan.chosen, gpu_hours(plan, samples), plan.request
    if chosen is None or hours is None or speed_up is None:
        return request.cluster.label, request.precision, "nothing fits", "-", "-", "-", "-", "-"
    return (
        request.cluster.label,
        request.precision,
        chosen.layout.name,
        f"{chosen.micro_batch} x {chosen.accumulation}",
        format_bytes(chosen.memory.total),
        format_seconds(chosen.time.total),
        f"{speed_up:.2f}",
        f"{hours:.3g}",
    )


def speed_ups(plans: Sequence[Plan]) -> list[float | None]:
    """Speed of each plan relative to the first that fits; None if nothing fits."""
    first = next((plan.chosen.time.total for plan in plans if plan.chosen), 0.0)
    return [first / plan.chosen.time.total if plan.chosen else None for plan in plans]


def gpu_hours(plan: Plan, samples: int) -> float | None:
    """Device hours for `samples` samples, including devices that are idle; None if nothing fits."""
    if plan.chosen is None:
        return None
    steps = -(-samples // plan.request.global_batch)
    return steps * plan.chosen.time.total * plan.request.cluster.devices / 3600


def memory_bar(plan: Plan, width: int) -> list[Segment]:
    """A device's memory as segments of `width` characters: the chosen candidate's, free, margin, other processes."""
    assert plan.chosen is not None
    device, usable, memory = plan.request.cluster.device, plan.request.usable_memory, plan.chosen.memory
    sizes = {
        **memory.components(),
        "free": usable - memory.total,
        "margin": device.memory_free - usable,
        "other processes": device.memory - device.memory_free,
    }
    sizes = {name: size for name, size in sizes.items() if size > 0}
    cells = _divide(list(sizes.values()), width)
    return [Segment(name, size, count) for (name, size), count in zip(sizes.items(), cells, strict=True)]


def _divide(sizes: Sequence[int], width: int) -> list[int]:
    """`width` cells in proportion to the sizes; the largest remainders get the cells that rounding leaves."""
    total = sum(sizes) or 1
    exact = [size * width / total for size in sizes]
    cells = [int(part) for part in exact]
    order = sorted(range(len(sizes)), key=lambda at: cells[at] - exact[at])
    for at in order[: width - sum(cells)]:
        cells[at] += 1
    return cells
