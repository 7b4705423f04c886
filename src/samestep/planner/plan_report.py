"""A plan as rows of plain text, for a table, a bar and a few lines."""

from collections.abc import Sequence
from dataclasses import dataclass

from samestep.messages import format_bytes, format_seconds
from samestep.planner.plan import Candidate, Plan
from samestep.planner.teacher_costs import TeacherPlan

TITLES = ("strategy", "ranks", "micro-batch", "memory", "seconds", "verdict")
"""Titles of `rows`."""
TEACHER_TITLES = ("placement", "on a GPU", "on a node", "seconds", "verdict")
"""Titles of `teacher_rows`."""
WHAT_IF_TITLES = ("GPUs", "precision", "strategy", "micro-batch", "memory", "seconds", "speed-up", "GPU-hours")
"""Titles of `what_if_rows`."""


@dataclass(frozen=True)
class Segment:
    """One part of a bar of memory."""

    name: str
    """Which part."""
    size: int
    """Bytes."""
    cells: int
    """How many characters of the bar it takes."""


def rows(plan: Plan) -> list[tuple[str, ...]]:
    """One row a candidate, in the plan's order."""
    return [_row(candidate, plan) for candidate in plan.candidates]


def bar(plan: Plan, width: int) -> list[Segment]:
    """A device's memory as parts of `width` characters: the chosen candidate's, what is free, left, or others hold."""
    assert plan.chosen is not None
    device, used = plan.task.machines.device, plan.chosen.memory
    rest = {
        "free": plan.task.room - used.total,
        "margin": device.memory_free - plan.task.room,
        "others": device.memory - device.memory_free,
    }
    parts = [(name, size) for name, size in {**used.parts(), **rest}.items() if size > 0]
    cells = _shares([size for _, size in parts], width)
    return [Segment(name, size, count) for (name, size), count in zip(parts, cells, strict=True)]


def teacher_rows(plan: TeacherPlan) -> list[tuple[str, ...]]:
    """One row a placement, in the plan's order."""
    return [
        (each.name, format_bytes(each.per_gpu), format_bytes(each.per_node), format_seconds(each.seconds), each.why)
        for each in plan.placements
    ]


def what_if_rows(plans: Sequence[Plan], samples: int) -> list[tuple[str, ...]]:
    """One row for each of several machines; speed-ups are against the first that fits, hours for `samples` samples."""
    return [_what_if(plan, speed_up, samples) for plan, speed_up in zip(plans, speed_ups(plans), strict=True)]


def speed_ups(plans: Sequence[Plan]) -> list[float | None]:
    """How many times as fast each is as the first that fits; None where nothing fits."""
    first = next((plan.chosen.time.total for plan in plans if plan.chosen), 0.0)
    return [first / plan.chosen.time.total if plan.chosen else None for plan in plans]


def gpu_hours(plan: Plan, samples: int) -> float | None:
    """Device hours for `samples` samples; all devices are paid for, also those that idle."""
    if plan.chosen is None:
        return None
    steps = -(-samples // plan.task.global_batch)
    return steps * plan.chosen.time.total * plan.task.machines.devices / 3600


def _row(candidate: Candidate, plan: Plan) -> tuple[str, ...]:
    micro = f"{candidate.micro_batch} x {candidate.accumulation}" if candidate.fits else "-"
    return (
        candidate.layout.name,
        str(candidate.layout.ranks),
        micro,
        format_bytes(candidate.memory.total),
        format_seconds(candidate.time.total) if candidate.fits else "-",
        "chosen" if candidate is plan.chosen else candidate.reason,
    )


def _what_if(plan: Plan, speed_up: float | None, samples: int) -> tuple[str, ...]:
    chosen, hours, task = plan.chosen, gpu_hours(plan, samples), plan.task
    if chosen is None or hours is None or speed_up is None:
        return task.machines.words, task.precision, "nothing fits", "-", "-", "-", "-", "-"
    return (
        task.machines.words,
        task.precision,
        chosen.layout.name,
        f"{chosen.micro_batch} x {chosen.accumulation}",
        format_bytes(chosen.memory.total),
        format_seconds(chosen.time.total),
        f"{speed_up:.2f}",
        f"{hours:.3g}",
    )


def _shares(sizes: Sequence[int], width: int) -> list[int]:
    """Whole cells for each size, together `width`: those with the largest remainders get what rounding leaves."""
    total = sum(sizes) or 1
    exact = [size * width / total for size in sizes]
    cells = [int(share) for share in exact]
    order = sorted(range(len(sizes)), key=lambda at: cells[at] - exact[at])
    for at in order[: width - sum(cells)]:
        cells[at] += 1
    return cells
