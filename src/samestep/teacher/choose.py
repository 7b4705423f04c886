"""Which placement a teacher gets where the user names none: the fastest that fits, with the table of all."""

import textwrap
from dataclasses import dataclass, replace
from typing import Final

from samestep.errors import TeacherError
from samestep.plan.explain import TEACHER_TITLES, teacher_rows
from samestep.plan.teacher import Setting, TeacherFacts, TeacherPlan, placement_cost, weigh_placements
from samestep.ranks.sharing import Share, tightest_share
from samestep.teacher.frozen import Frozen
from samestep.teacher.ground import Ground, Wish
from samestep.teacher.needs import needs_of
from samestep.teacher.shared import host_room
from samestep.teacher.whole import device_room
from samestep.units import bytes_text

_LEFT: Final = 0.5  # of a device's free memory, for what trains: nobody knows yet how much that will be
_WIDTH: Final = 80


@dataclass(frozen=True)
class Choice:
    """A placement, chosen among all."""

    placement: str
    """Its name; empty where none fits."""
    plan: TeacherPlan
    """All of them, weighed."""
    setting: Setting
    """What they were weighed for, with the memory of the tightest rank."""
    facts: TeacherFacts
    """What of the teacher was reckoned with."""
    work: str
    """Where its work is known from."""

    def seconds(self, rows: int) -> float:
        """The estimate for one call in which each rank has `rows` samples."""
        call = replace(self.setting, global_batch=rows * self.setting.ranks, micro_batch=rows)
        return placement_cost(self.placement, call, self.facts)[2]


def choose_placement(ground: Ground, frozen: Frozen, wish: Wish) -> Choice:
    """The fastest placement that fits the tightest rank, decided by the first rank for all, and why."""
    act = "choosing a placement"
    share = tightest_share(ground.link, act, ground.device, float(device_room(ground.device)))
    host = int(min(float(part[0]) for part in ground.link.exchange(act, [float(host_room())])))

    def choose() -> Choice:
        """Weigh all placements; on the first rank only, as machines and examples may differ."""
        assert ground.setting is not None, "a placement is chosen for a setting"
        return _weigh(ground.setting(share.ranks), frozen, wish, share, host)

    choice = ground.once(choose)
    assert isinstance(choice, Choice)
    ground.say(_table(choice))
    if not choice.placement:
        raise TeacherError(
            f"no placement fits a teacher of {bytes_text(choice.facts.bytes)}, as the table says: give a smaller "
            "dtype=, larger or more GPUs, or name a placement= to try it all the same"
        )
    return choice


def _weigh(setting: Setting, frozen: Frozen, wish: Wish, share: Share, host: int) -> Choice:
    needs = needs_of(frozen, wish)
    device = replace(setting.machines.device, memory_free=share.free)
    machines = replace(setting.machines, device=device, host_memory=host)
    rows = min(needs.rows or setting.samples, setting.samples)
    setting = replace(setting, machines=machines, micro_batch=rows, taken_per_gpu=int(share.free * _LEFT))
    plan = weigh_placements(setting, needs.facts)
    return Choice(plan.chosen.name if plan.chosen else "", plan, setting, needs.facts, needs.told)


def _table(choice: Choice) -> str:
    """All placements in lines of 80 columns, and what was assumed."""
    setting, device = choice.setting, choice.setting.machines.device
    rows = [TEACHER_TITLES, *teacher_rows(choice.plan)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(TEACHER_TITLES) - 1)]
    indent = " " * (sum(widths) + 2 * len(widths))
    lines = [
        f"teacher: {bytes_text(choice.facts.bytes)} for {setting.ranks} rank(s); seconds of a step of "
        f"{setting.global_batch} samples, {setting.micro_batch} at once:"
    ]
    for name, *numbers, why in rows:
        cells = [name.ljust(widths[0]), *(text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True))]
        verdict = f"chosen: {why}" if name == choice.placement else why
        lines += textwrap.wrap("  ".join([*cells, verdict]), _WIDTH, subsequent_indent=indent)
    room = f"{bytes_text(device.memory_free)} free for the tightest rank, half of it left to what trains"
    for told in (f"work: {choice.work}", f"memory: {room}", f"rates: {device.source}"):
        lines += textwrap.wrap(told, _WIDTH, subsequent_indent="  ")
    return "\n".join(lines)
