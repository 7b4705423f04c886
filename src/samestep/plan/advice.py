"""What would fit where nothing does: more of these devices, larger ones, or a smaller sample."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from samestep.facts.devices import SHEETS
from samestep.facts.machine_words import machines_of
from samestep.facts.machines import Device, Machines
from samestep.plan.candidate import Candidate, Task
from samestep.units import bytes_text

_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_NODE = 8  # devices that are sold in one node at most
_LARGER = 3  # kinds of larger devices that are named


def advise(task: Task, rest: Sequence[Candidate], fitting: Callable[[Task, Machines], str | None]) -> tuple[str, ...]:
    """What to do about a task that fits in no layout; `fitting` names the layout that would fit on other machines."""
    return (*_more(task, fitting), *_larger(task, fitting), *_smaller(task, rest))


def _more(task: Task, fitting: Callable[[Task, Machines], str | None]) -> Iterator[str]:
    """The first number of the same devices that is enough."""
    machines = task.machines
    if machines.device.kind == "mps":  # there is one in a machine, and ranks on several have nothing to send through
        return
    for count in _COUNTS:
        if count > machines.devices:
            per_node = max(machines.per_node, min(count, _NODE))
            more = machines.of_size(per_node, -(-count // per_node))
            if name := fitting(task, more):
                yield f"{more.words} would do, with {name}"
                return
    yield f"no number of {machines.device.name} up to {_COUNTS[-1]} would do"


def _larger(task: Task, fitting: Callable[[Task, Machines], str | None]) -> Iterator[str]:
    """Devices with more memory, the smallest first, and how many at least: no more than are here, if that will do."""
    memory = task.machines.device.memory
    larger = (s.device for s in SHEETS.values() if s.device.kind == "cuda" and s.device.memory > memory)
    kinds = sorted(larger, key=lambda device: device.memory)
    few = [count for count in _COUNTS if count <= task.machines.devices]
    found = (found for device in kinds if (found := _enough(task, device, few, fitting)))
    named = list(islice(found, _LARGER))
    if not named:
        more = (_enough(task, device, [count], fitting) for count in _COUNTS for device in kinds)
        named = list(islice(filter(None, more), 1))
    yield from named


def _enough(
    task: Task, device: Device, counts: Sequence[int], fitting: Callable[[Task, Machines], str | None]
) -> str | None:
    """The first of these numbers of a device that is enough, in words."""
    for count in counts:
        per_node = min(count, _NODE)
        if name := fitting(task, machines_of(f"{device.name}:{per_node}", -(-count // per_node))):
            return f"{count} x {device.name} ({bytes_text(device.memory)}) would do, with {name}"
    return None


def _smaller(task: Task, rest: Sequence[Candidate]) -> Iterator[str]:
    """Where one sample alone is too large, nothing but a smaller sample helps on these devices."""
    runs = [candidate for candidate in rest if candidate.layout.blocked is None]
    least = min(runs, key=lambda candidate: candidate.memory.total)
    name, size = max(least.memory.parts().items(), key=lambda part: part[1])
    remedy = {
        "working": "a shorter sequence or a smaller image makes it less, a smaller global batch does not",
        "weights": "frozen weights in a narrower dtype, or a smaller model, make it less",
        "gathered": "smaller blocks make it less: run.wrap(blocks=...) names their classes",
    }.get(name, "an optimizer with less state, or a smaller model, makes it less")
    needs = f"{least.layout.name} needs least, {bytes_text(least.memory.total)}"
    yield f"{needs}, most of it {name} ({bytes_text(size)}): {remedy}"
