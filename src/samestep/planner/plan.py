"""The decision: the fastest layout that fits, with the reason against every other."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice

from samestep.data.partition import Partition
from samestep.errors import PlanError
from samestep.messages import format_bytes, format_seconds
from samestep.planner.cluster_spec import DEVICE_SPECS, HOST_MARGIN, ClusterSpec, DeviceSpec, parse_cluster_spec
from samestep.planner.layouts import (
    NOTHING_ASKED,
    Layout,
    PlanOptions,
    calls,
    command,
    frozen_bytes,
    frozen_flops,
    layouts,
)
from samestep.planner.memory_model import Memory, Placed, memory
from samestep.planner.model_profile import CUDA_MARGIN, ModelProfile
from samestep.planner.teacher_costs import TeacherProfile, TeacherSetup, placement_cost
from samestep.planner.time_model import StepTime, slowness, step_time


@dataclass(frozen=True)
class Task:
    """What a plan is made for."""

    machines: ClusterSpec
    """What there is."""
    model: ModelProfile
    """What is trained."""
    global_batch: int
    """Samples of a step, over all ranks."""
    precision: str
    """fp32, bf16 or fp16."""
    tf32: bool
    """Whether products in fp32 may use TF32."""
    margin: float
    """The part of a device's memory that stays free."""
    asked: PlanOptions = NOTHING_ASKED
    """What is asked for whatever the strategy."""

    @property
    def room(self) -> int:
        """Bytes of a device that may be used."""
        device = self.machines.device
        return device.memory_free - int(device.memory * self.margin)


@dataclass(frozen=True)
class Candidate:
    """One layout with its micro-batch, weighed."""

    layout: Layout
    """How the step is spread."""
    micro_batch: int
    """Samples that each rank puts through at once."""
    accumulation: int
    """Micro-batches of a step on each rank."""
    memory: Memory
    """What it takes; with a micro-batch of 1 where nothing fits."""
    time: StepTime
    """How long a step takes, estimated."""
    fits: bool
    """Whether it may be chosen."""
    reason: str
    """Why it was, or was not, in numbers."""


_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_NODE = 8  # devices that are sold in one node at most
_LARGER = 3  # kinds of larger devices that are named


def advise(
    task: Task, rest: Sequence[Candidate], fitting: Callable[[Task, ClusterSpec], str | None]
) -> tuple[str, ...]:
    """What to do about a task that fits in no layout; `fitting` names the layout that would fit on other machines."""
    return (*_more(task, fitting), *_larger(task, fitting), *_smaller(task, rest))


def _more(task: Task, fitting: Callable[[Task, ClusterSpec], str | None]) -> Iterator[str]:
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


def _larger(task: Task, fitting: Callable[[Task, ClusterSpec], str | None]) -> Iterator[str]:
    """Devices with more memory, the smallest first, and how many at least: no more than are here, if that will do."""
    memory = task.machines.device.memory
    larger = (s.device for s in DEVICE_SPECS.values() if s.device.kind == "cuda" and s.device.memory > memory)
    kinds = sorted(larger, key=lambda device: device.memory)
    few = [count for count in _COUNTS if count <= task.machines.devices]
    found = (found for device in kinds if (found := _enough(task, device, few, fitting)))
    named = list(islice(found, _LARGER))
    if not named:
        more = (_enough(task, device, [count], fitting) for count in _COUNTS for device in kinds)
        named = list(islice(filter(None, more), 1))
    yield from named


def _enough(
    task: Task, device: DeviceSpec, counts: Sequence[int], fitting: Callable[[Task, ClusterSpec], str | None]
) -> str | None:
    """The first of these numbers of a device that is enough, in words."""
    for count in counts:
        per_node = min(count, _NODE)
        if name := fitting(task, parse_cluster_spec(f"{device.name}:{per_node}", -(-count // per_node))):
            return f"{count} x {device.name} ({format_bytes(device.memory)}) would do, with {name}"
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
    needs = f"{least.layout.name} needs least, {format_bytes(least.memory.total)}"
    yield f"{needs}, most of it {name} ({format_bytes(size)}): {remedy}"


AS_FAST = 1.03
"""Two layouts whose estimates differ by less than this are taken as equally fast."""
_MOST_MORE = 32  # micro-batches beyond the fewest that are tried
_WORTH_CUTTING = 1.01  # a step must become shorter by more than this to be cut into more micro-batches
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
"""What `Run(precision=...)` takes."""


@dataclass(frozen=True)
class Plan:
    """What was decided, and why."""

    task: Task
    """What for."""
    chosen: Candidate | None
    """The fastest that fits; None where nothing does."""
    candidates: tuple[Candidate, ...]
    """All that were weighed: the chosen one first, then what fits by seconds, then what does not by bytes."""
    advice: tuple[str, ...] = ()
    """Where nothing fits: what would."""

    @property
    def script(self) -> tuple[str, ...]:
        """What to write in the script, one call a line; nothing where nothing fits."""
        if self.chosen is None:
            return ()
        task, chosen = self.task, self.chosen
        return calls(chosen.layout, task.model, chosen.micro_batch, chosen.accumulation, task.asked)

    @property
    def start(self) -> str | None:
        """What to type to start it."""
        return command(self.chosen.layout, self.task.machines, self.task.asked.script) if self.chosen else None

    def to_json(self) -> dict[str, object]:
        """The same as plain data."""
        machines, model = self.task.machines, self.task.model
        return {
            "machines": asdict(machines),
            "model": _told(model),
            "global_batch": self.task.global_batch,
            "precision": self.task.precision,
            "margin": self.task.margin,
            "asked": asdict(self.task.asked),
            "chosen": _plain(self.chosen) if self.chosen else None,
            "script": list(self.script),
            "start": self.start,
            "candidates": [_plain(candidate) for candidate in self.candidates],
            "advice": list(self.advice),
        }


def plan(
    machines: ClusterSpec,
    model: ModelProfile,
    global_batch: int,
    precision: str = "auto",
    margin: float = CUDA_MARGIN,
    asked: PlanOptions = NOTHING_ASKED,
) -> Plan:
    """Weigh every layout and choose the fastest that fits, `margin` of each device's memory left free.

    `model` must have been traced in the precision that is planned for: see `precision_on`.
    """
    task = replace(_task(machines, model, global_batch, precision, margin), asked=asked)
    weighed = [_weigh(task, layout) for layout in layouts(machines, model, task.asked)]
    fitting = sorted((each for each in weighed if each.fits), key=lambda each: each.time.total)
    rest = sorted((each for each in weighed if not each.fits), key=lambda each: each.memory.total)
    if not fitting:
        return Plan(task, None, tuple(rest), advise(task, rest, _fitting_on))
    best = _best(fitting)
    told = [replace(each, reason=_lost(each, best, fitting[0].time.total)) for each in fitting if each is not best]
    chosen = replace(best, reason=_won(task, best, told))
    return Plan(task, chosen, (chosen, *told, *rest))


def _fitting_on(task: Task, machines: ClusterSpec) -> str | None:
    """The layout that would be chosen on other machines, by its name; None where none fits there either."""
    other = replace(task, machines=machines)
    weighed = (_weigh(other, layout) for layout in layouts(machines, task.model, task.asked))
    fitting = [each for each in weighed if each.fits]
    return _best(fitting).layout.name if fitting else None


def precision_on(machines: ClusterSpec, wish: str) -> str:
    """What `Run(precision=wish)` computes in on these machines: fp32, bf16 or fp16."""
    if wish not in PRECISIONS:
        raise PlanError(f"precision {wish} is not known: use one of {', '.join(PRECISIONS)}")
    device = machines.device
    if wish == "bf16" and device.kind == "cuda" and "bfloat16" not in device.rates:
        raise PlanError(f"precision bf16 needs a GPU that has it, and {device.name} has not: use fp16, fp32 or auto")
    if wish in ("bf16", "fp16") and device.kind == "mps":
        raise PlanError(f"precision {wish} is for CUDA and the CPU: on Apple's GPU use fp32 or auto")
    if wish != "auto":
        return wish
    return "bf16" if device.kind == "cuda" and "bfloat16" in device.rates else "fp32"


def check_numbers(global_batch: int, margin: float) -> None:
    """Raise where there is nothing to plan for."""
    if global_batch < 1:
        raise PlanError(f"a global batch of {global_batch} holds nothing: give --global-batch 1 or more")
    if not 0 <= margin < 1:
        raise PlanError(f"margin {margin} is no part of a memory: give 0 up to, not including, 1")


def _task(machines: ClusterSpec, model: ModelProfile, global_batch: int, precision: str, margin: float) -> Task:
    check_numbers(global_batch, margin)
    return Task(machines, model, global_batch, precision_on(machines, precision), precision != "fp32", margin)


def _weigh(task: Task, layout: Layout) -> Candidate:
    """The layout with the largest micro-batch that fits, or with what comes nearest where none does."""
    slice_ = -(-task.global_batch // layout.ranks)
    fitting = slice_ if _fits(task, layout, slice_) else _largest(task, layout, slice_ - 1)
    least = min((1, slice_), key=lambda samples: _memory(task, layout, samples).total)
    number, rows = Partition(task.global_batch, task.global_batch, 0, layout.ranks, fitting or least).shape(0)
    if fitting:
        number, rows = _without_padding(task, layout, slice_, number)
    used = _memory(task, layout, rows)
    why = layout.blocked or ("" if fitting else _too_large(task, used, rows))
    return Candidate(layout, rows, number, used, _time(task, layout, rows, number), not why, why)


def _without_padding(task: Task, layout: Layout, slice_: int, fewest: int) -> tuple[int, int]:
    """As few micro-batches as memory allows, or some more where those fill up with fewer rows that only pad.

    22 samples of which 4 fit make 6 micro-batches of 4, two rows of them padding; 11 of 2 pad nothing.
    """
    most = min(2 * fewest, fewest + _MOST_MORE, slice_)
    shapes = [(number, -(-slice_ // number)) for number in range(fewest, most + 1)]
    # a step that is cut may need more memory than one that is not: gradients wait for the last micro-batch
    shapes = [(number, rows) for number, rows in shapes if _fits(task, layout, rows)]
    best = min(_time(task, layout, rows, number).total for number, rows in shapes)
    return next(
        (number, rows) for number, rows in shapes if _time(task, layout, rows, number).total <= best * _WORTH_CUTTING
    )


def _time(task: Task, layout: Layout, rows: int, number: int) -> StepTime:
    teacher = _teacher_cost(task, layout, rows)[2]
    return step_time(layout, task.machines, task.model, (rows, number), task.precision, task.tf32, teacher)


def _largest(task: Task, layout: Layout, most: int) -> int:
    """The largest micro-batch up to `most` that fits, by halving, since memory grows with it; 0 where none does."""
    least, beyond = 0, most + 1
    while beyond - least > 1:
        middle = (least + beyond) // 2
        least, beyond = (middle, beyond) if _fits(task, layout, middle) else (least, middle)
    return least


def _fits(task: Task, layout: Layout, micro_batch: int) -> bool:
    used = _memory(task, layout, micro_batch)
    return used.total <= task.room and used.host <= task.machines.host_memory * (1 - HOST_MARGIN)


def _memory(task: Task, layout: Layout, micro_batch: int) -> Memory:
    accumulates = micro_batch < -(-task.global_batch // layout.ranks)
    per_gpu, per_node, _ = _teacher_cost(task, layout, micro_batch)
    placed = Placed(per_gpu, per_node) if layout.frozen else None
    return memory(layout, task.machines, task.model, micro_batch, accumulates, task.precision, placed)


def _teacher_cost(task: Task, layout: Layout, micro_batch: int) -> tuple[int, int, float]:
    if layout.frozen is None:
        return 0, 0, 0.0
    setting = TeacherSetup(task.machines, layout.ranks, task.global_batch, max(micro_batch, 1))
    model = task.model
    size = frozen_bytes(model)
    blocks = [part.frozen for part in model.blocks if not part.trainable]
    layer = max(blocks, default=max(part.frozen for part in model.frozen_parts))
    dtype = max(model.frozen, key=lambda name: model.frozen[name], default="float32")
    # moved elsewhere it computes no faster than in the model
    work = frozen_flops(model) * slowness(task.machines, model, setting.micro_batch, task.precision, task.tf32)
    return placement_cost(layout.frozen, setting, TeacherProfile(size, layer, work, 0, dtype=dtype))


def _too_large(task: Task, used: Memory, micro_batch: int) -> str:
    parts = sorted(used.parts().items(), key=lambda part: -part[1])
    most = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts[:2])
    if used.total > task.room:
        needs, has = format_bytes(used.total), format_bytes(max(task.room, 0))
        return f"a micro-batch of {micro_batch} needs {needs} on a device and {has} may be used ({most})"
    needs, has = format_bytes(used.host), format_bytes(task.machines.host_memory * (1 - HOST_MARGIN))
    return f"needs {needs} of a node's host memory and {has} may be used"


def _best(fitting: Sequence[Candidate]) -> Candidate:
    """The fastest; among those as fast as it, the one that asks for least, then the one that leaves most memory."""
    fastest = min(each.time.total for each in fitting)
    return min((each for each in fitting if each.time.total <= fastest * AS_FAST), key=_asks)


def _asks(candidate: Candidate) -> tuple[int, int]:
    layout = candidate.layout
    return layout.offload + layout.recompute + (layout.frozen is not None) + (layout.shards > 1), candidate.memory.total


def _lost(candidate: Candidate, best: Candidate, fastest: float) -> str:
    slow = f"{candidate.time.total / best.time.total:.2f} times the seconds of the chosen"
    if candidate.time.total <= fastest * AS_FAST:
        more = "memory" if _asks(candidate)[0] == _asks(best)[0] else "settings"
        return f"{slow}: as fast, with more {more}"
    part, extra = _slowest(candidate, best)
    return f"{slow}: {part} takes {format_seconds(extra)} more"


def _slowest(candidate: Candidate, best: Candidate) -> tuple[str, float]:
    """The part of a step in which it loses most."""
    theirs = best.time.parts()
    part, seconds = max(candidate.time.parts().items(), key=lambda each: each[1] - theirs[each[0]])
    return part, seconds - theirs[part]


def _won(task: Task, best: Candidate, others: Sequence[Candidate]) -> str:
    used, has = format_bytes(best.memory.total), format_bytes(task.machines.device.memory_free)
    among = "about the fastest" if any(each.time.total < best.time.total for each in others) else "the fastest"
    rest = f"{among} of {len(others) + 1} that fit" if others else "the only one that fits"
    memory = f"{used} of {has} free on a device, {task.margin:.0%} left as a margin"
    return f"{rest}: {format_seconds(best.time.total)} a step, {memory}"


def _told(model: ModelProfile) -> dict[str, object]:
    """A model's bytes and work; of its operations there are too many."""
    return {
        "name": model.name,
        "how": model.how,
        "weights": model.weights,
        "trainable": dict(model.trainable),
        "frozen": dict(model.frozen),
        "buffers": model.buffers,
        "gradients": model.gradients,
        "optimizer": model.optimizer,
        "optimizer_state": model.optimizer_state,
        "working": {"fixed": model.working.fixed, "per_sample": model.working.per_sample},
        "forward_flops": model.forward_flops,
        "step_flops": model.step_flops,
        "step_flops_recomputed": model.step_flops_recomputed,
    }


def _plain(candidate: Candidate) -> dict[str, object]:
    return {
        "name": candidate.layout.name,
        **asdict(candidate.layout),
        "micro_batch": candidate.micro_batch,
        "accumulation": candidate.accumulation,
        "memory": {**candidate.memory.parts(), "total": candidate.memory.total, "host": candidate.memory.host},
        "seconds": {**candidate.time.parts(), "total": candidate.time.total},
        "fits": candidate.fits,
        "reason": candidate.reason,
    }
