"""Choose how to train a model on a cluster: the fastest layout that fits, with the reason against every other one."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice

from samestep.data.partition import Partition
from samestep.errors import PlanError
from samestep.messages import format_bytes, format_seconds
from samestep.planner.cluster_spec import HOST_MARGIN, KNOWN_DEVICES, ClusterSpec, DeviceSpec, parse_cluster_spec
from samestep.planner.layouts import (
    DEFAULT_OPTIONS,
    Layout,
    MemoryEstimate,
    Placement,
    PlanOptions,
    estimate_memory,
    launch_command,
    layouts,
    script_lines,
)
from samestep.planner.model_profile import CUDA_MARGIN, ModelProfile
from samestep.planner.teacher_costs import TeacherProfile, TeacherSetup, placement_cost
from samestep.planner.time_model import StepTime, estimate_step_time, matmul_slowdown

PRECISIONS = ("auto", "fp32", "bf16", "fp16")
"""Values of `Run(precision=...)`."""
_EQUALLY_FAST = 1.03  # step times that differ by less are too close for an estimate to tell apart
_MAX_EXTRA_MICRO_BATCHES = 32
_MIN_SPEEDUP = 1.01  # more micro-batches than necessary must make a step faster by more than this
_COUNTS = (1, 2, 4, 8, 16, 32, 64)  # numbers of devices that advice tries
_MAX_DEVICES_PER_NODE = 8
_MAX_LARGER_DEVICES = 3  # number of larger devices that advice names


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is made for."""

    cluster: ClusterSpec
    model: ModelProfile
    global_batch: int  # samples per step, over all ranks
    precision: str  # fp32, bf16 or fp16
    tf32: bool  # whether matrix products in fp32 may use TF32
    margin: float  # fraction of a device's memory that stays free
    options: PlanOptions = DEFAULT_OPTIONS

    @property
    def usable_memory(self) -> int:
        """Bytes of a device that the plan may use."""
        device = self.cluster.device
        return device.memory_free - int(device.memory * self.margin)

    @property
    def usable_host_memory(self) -> float:
        """Bytes of a node's host memory that the plan may use."""
        return self.cluster.host_memory * (1 - HOST_MARGIN)


@dataclass(frozen=True)
class Candidate:
    """One layout with its micro-batch size, memory and time."""

    layout: Layout  # how the step is distributed
    micro_batch: int  # samples per forward pass on each rank
    accumulation: int  # micro-batches per step on each rank
    memory: MemoryEstimate  # estimated memory; that of the smallest possible micro-batch if none fits
    time: StepTime  # estimated time of a step
    fits: bool  # whether it can be chosen
    reason: str  # why it was or was not chosen, with numbers

    def to_json(self) -> dict[str, object]:
        """The candidate as plain data."""
        return {
            "name": self.layout.name,
            **asdict(self.layout),
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "memory": {
                **self.memory.components(),
                "total": self.memory.total,
                "host": self.memory.host,
                "wrap": self.memory.wrap,
            },
            "seconds": {**self.time.components(), "total": self.time.total},
            "fits": self.fits,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Plan:
    """The chosen layout, and why."""

    request: PlanRequest  # what the plan was made for
    chosen: Candidate | None  # the fastest candidate that fits; None if none fits
    candidates: tuple[Candidate, ...]  # the chosen one, then those that fit by time, then the others by memory
    advice: tuple[str, ...] = ()  # if nothing fits: what would

    @property
    def code(self) -> tuple[str, ...]:
        """Lines of the training script that select the chosen layout; empty if nothing fits."""
        if self.chosen is None:
            return ()
        chosen, request = self.chosen, self.request
        return script_lines(chosen.layout, request.model, chosen.micro_batch, chosen.accumulation, request.options)

    @property
    def command(self) -> str | None:
        """Shell command that starts the training; None if nothing fits."""
        if self.chosen is None:
            return None
        return launch_command(self.chosen.layout, self.request.cluster, self.request.options.script)

    def to_json(self) -> dict[str, object]:
        """The plan as plain data."""
        request = self.request
        return {
            "cluster": asdict(request.cluster),
            "model": _model_json(request.model),
            "global_batch": request.global_batch,
            "precision": request.precision,
            "margin": request.margin,
            "options": asdict(request.options),
            "chosen": self.chosen.to_json() if self.chosen else None,
            "code": list(self.code),
            "command": self.command,
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "advice": list(self.advice),
        }


def _model_json(model: ModelProfile) -> dict[str, object]:
    """Bytes and work of a model, without the long list of its operators."""
    names = (
        *("name", "method", "weights", "trainable", "frozen", "buffers", "gradients", "optimizer", "optimizer_state"),
        *("forward_flops", "step_flops", "checkpointed_step_flops"),
    )
    activations = {"fixed": model.activations.fixed, "per_sample": model.activations.per_sample}
    return {**{name: getattr(model, name) for name in names}, "activations": activations}


def make_plan(
    cluster: ClusterSpec,
    model: ModelProfile,
    global_batch: int,
    precision: str = "auto",
    margin: float = CUDA_MARGIN,
    options: PlanOptions = DEFAULT_OPTIONS,
) -> Plan:
    """Compare all layouts and choose the fastest that fits and leaves `margin` of each device's memory free.

    Trace `model` in the precision that `resolve_precision` returns for this cluster.
    """
    check_plan_arguments(global_batch, margin)
    tf32 = precision != "fp32"
    request = PlanRequest(cluster, model, global_batch, resolve_precision(cluster, precision), tf32, margin, options)
    candidates = [_candidate(request, layout) for layout in layouts(cluster, model, options)]
    fitting = sorted((each for each in candidates if each.fits), key=lambda each: each.time.total)
    others = sorted((each for each in candidates if not each.fits), key=lambda each: each.memory.total)
    if not fitting:
        advice = (*_more_devices(request), *_larger_devices(request), _less_memory(others))
        return Plan(request, None, tuple(others), advice)
    best = _best(fitting)
    slower = [replace(each, reason=_why_not(each, best, fitting[0].time.total)) for each in fitting if each is not best]
    chosen = replace(best, reason=_why_chosen(request, best, slower))
    return Plan(request, chosen, (chosen, *slower, *others))


def check_plan_arguments(global_batch: int, margin: float) -> None:
    """Raise PlanError if the global batch or the margin is out of range."""
    if global_batch < 1:
        raise PlanError(f"--global-batch must be at least 1, got {global_batch}.")
    if not 0 <= margin < 1:
        raise PlanError(f"--margin must be at least 0 and less than 1, got {margin}.")


def resolve_precision(cluster: ClusterSpec, precision: str) -> str:
    """The precision that `Run(precision=precision)` uses on this cluster: fp32, bf16 or fp16."""
    if precision not in PRECISIONS:
        raise PlanError(f"Unknown precision {precision!r}. Use one of {', '.join(PRECISIONS)}.")
    device = cluster.device
    if precision == "bf16" and device.kind == "cuda" and "bfloat16" not in device.peak_flops:
        raise PlanError(f"precision bf16 is not supported by {device.name}. Use fp16, fp32 or auto.")
    if precision in ("bf16", "fp16") and device.kind == "mps":
        raise PlanError(f"precision {precision} is not supported on Apple GPUs. Use fp32 or auto.")
    if precision != "auto":
        return precision
    return "bf16" if device.kind == "cuda" and "bfloat16" in device.peak_flops else "fp32"


def _candidate(request: PlanRequest, layout: Layout) -> Candidate:
    """The layout with the largest micro-batch that fits, or with the smallest one if none fits."""
    samples = -(-request.global_batch // layout.ranks)
    largest = samples
    if not _fits(request, layout, samples):  # memory grows with the micro-batch; 0 if none fits
        largest = bisect_left(range(1, samples), True, key=lambda size: not _fits(request, layout, size))
    smallest = min((1, samples), key=lambda size: _memory(request, layout, size).total)
    partition = Partition(request.global_batch, request.global_batch, 0, layout.ranks, largest or smallest)
    number, rows = partition.shape(0)
    if largest:
        number, rows = _reduce_padding(request, layout, samples, number)
    memory = _memory(request, layout, rows)
    problem = layout.unsupported or ("" if largest else _does_not_fit(request, memory, rows))
    return Candidate(layout, rows, number, memory, _time(request, layout, rows, number), not problem, problem)


def _reduce_padding(request: PlanRequest, layout: Layout, samples: int, fewest: int) -> tuple[int, int]:
    """Number and size of micro-batches: as few as memory allows, or more if they have less padding and are faster.

    If 4 of 22 samples fit, 6 micro-batches of 4 have two rows of padding; 11 micro-batches of 2 have none.
    """
    most = min(2 * fewest, fewest + _MAX_EXTRA_MICRO_BATCHES, samples)
    shapes = [(number, -(-samples // number)) for number in range(fewest, most + 1)]
    # accumulation may need more memory than a single micro-batch, because gradients wait for the last one
    shapes = [(number, rows) for number, rows in shapes if _fits(request, layout, rows)]
    seconds = [_time(request, layout, rows, number).total for number, rows in shapes]
    limit = min(seconds) * _MIN_SPEEDUP
    return next(shape for shape, total in zip(shapes, seconds, strict=True) if total <= limit)


def _fits(request: PlanRequest, layout: Layout, micro_batch: int) -> bool:
    memory = _memory(request, layout, micro_batch)
    return memory.total <= request.usable_memory and memory.host <= request.usable_host_memory


def _memory(request: PlanRequest, layout: Layout, micro_batch: int) -> MemoryEstimate:
    return estimate_memory(
        layout,
        request.cluster,
        request.model,
        micro_batch,
        accumulates=micro_batch < -(-request.global_batch // layout.ranks),
        precision=request.precision,
        teacher=_teacher_cost(request, layout, micro_batch),
    )


def _time(request: PlanRequest, layout: Layout, micro_batch: int, accumulation: int) -> StepTime:
    teacher = _teacher_cost(request, layout, micro_batch)
    return estimate_step_time(
        layout,
        request.cluster,
        request.model,
        micro_batch,
        accumulation,
        precision=request.precision,
        tf32=request.tf32,
        teacher_seconds=teacher.seconds if teacher else 0.0,
    )


def _teacher_cost(request: PlanRequest, layout: Layout, micro_batch: int) -> Placement | None:
    """The cost of the frozen parts if the layout places them outside of the model."""
    if layout.teacher_placement is None:
        return None
    model = request.model
    setup = TeacherSetup(request.cluster, layout.ranks, request.global_batch, max(micro_batch, 1))
    blocks = [part.frozen for part in model.blocks if not part.trainable]
    layer = max(blocks, default=max(part.frozen for part in model.frozen_parts))
    dtype = max(model.frozen, key=lambda name: model.frozen[name], default="float32")
    # placed elsewhere they are not faster than in the model
    slowdown = matmul_slowdown(request.cluster, model, setup.micro_batch, request.precision, request.tf32)
    teacher = TeacherProfile(model.frozen_part_bytes, layer, model.frozen_part_flops * slowdown, 0, dtype=dtype)
    return placement_cost(layout.teacher_placement, setup, teacher)


def _does_not_fit(request: PlanRequest, memory: MemoryEstimate, micro_batch: int) -> str:
    if memory.total > request.usable_memory:
        largest = sorted(memory.components().items(), key=lambda item: -item[1])[:2]
        components = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
        needed, usable = format_bytes(memory.total), format_bytes(max(request.usable_memory, 0))
        return (
            f"does not fit: {needed} needed, {usable} usable per device with micro-batch {micro_batch} ({components})"
        )
    needed, usable = format_bytes(memory.host), format_bytes(request.usable_host_memory)
    return f"does not fit: {needed} of host memory needed, {usable} usable per node"


def _best(fitting: Sequence[Candidate]) -> Candidate:
    """Of the candidates as fast as the fastest, the one with the fewest options, then with the least memory."""
    fastest = min(each.time.total for each in fitting)
    return min((each for each in fitting if each.time.total <= fastest * _EQUALLY_FAST), key=_complexity)


def _complexity(candidate: Candidate) -> tuple[int, int]:
    layout = candidate.layout
    options = layout.cpu_offload + layout.activation_checkpointing + (layout.teacher_placement is not None)
    return options + (layout.shards > 1), candidate.memory.total


def _why_not(candidate: Candidate, best: Candidate, fastest: float) -> str:
    """The reason against a candidate that fits."""
    factor = candidate.time.total / best.time.total
    if candidate.time.total <= fastest * _EQUALLY_FAST:
        more = "memory" if _complexity(candidate)[0] == _complexity(best)[0] else "options"
        return f"as fast ({factor:.2f}x the chosen time), but needs more {more}"
    best_time = best.time.components()
    extra = {name: seconds - best_time[name] for name, seconds in candidate.time.components().items()}
    name = max(extra, key=lambda each: extra[each])
    return f"{factor:.2f}x the chosen time: {name} takes {format_seconds(extra[name])} more"


def _why_chosen(request: PlanRequest, best: Candidate, others: Sequence[Candidate]) -> str:
    used, free = format_bytes(best.memory.total), format_bytes(request.cluster.device.memory_free)
    rank = "about the fastest" if any(each.time.total < best.time.total for each in others) else "the fastest"
    choice = f"{rank} of {len(others) + 1} layouts that fit" if others else "the only layout that fits"
    seconds = format_seconds(best.time.total)
    return f"{choice}: {seconds} per step, {used} of {free} free memory per device, margin {request.margin:.0%}"


def _fitting_layout(request: PlanRequest, cluster: ClusterSpec) -> str | None:
    """Name of the layout that a plan for another cluster would choose; None if none fits there."""
    request = replace(request, cluster=cluster)
    candidates = (_candidate(request, layout) for layout in layouts(cluster, request.model, request.options))
    fitting = [each for each in candidates if each.fits]
    return _best(fitting).layout.name if fitting else None


def _more_devices(request: PlanRequest) -> Iterator[str]:
    """The smallest number of the same device that fits."""
    cluster = request.cluster
    if cluster.device.kind == "mps":  # a machine has one Apple GPU, and several machines cannot train together
        return
    for count in _COUNTS:
        if count > cluster.devices:
            per_node = max(cluster.devices_per_node, min(count, _MAX_DEVICES_PER_NODE))
            larger = cluster.resized(per_node, -(-count // per_node))
            if name := _fitting_layout(request, larger):
                yield f"{larger.label} would fit, with {name}"
                return
    yield f"no number of {cluster.device.name} up to {_COUNTS[-1]} would fit"


def _larger_devices(request: PlanRequest) -> list[str]:
    """Devices with more memory, smallest first: as many as there are or fewer, or else the first number that fits."""
    known = (cluster.device for cluster in KNOWN_DEVICES.values())
    larger = [device for device in known if device.kind == "cuda" and device.memory > request.cluster.device.memory]
    larger.sort(key=lambda device: device.memory)
    few = [count for count in _COUNTS if count <= request.cluster.devices]
    fitting = filter(None, (_fitting_number(request, device, few) for device in larger))
    more = filter(None, (_fitting_number(request, device, [count]) for count in _COUNTS for device in larger))
    return list(islice(fitting, _MAX_LARGER_DEVICES)) or list(islice(more, 1))


def _fitting_number(request: PlanRequest, device: DeviceSpec, counts: Sequence[int]) -> str | None:
    """Advice with the first of these numbers of a device that fits."""
    for count in counts:
        per_node = min(count, _MAX_DEVICES_PER_NODE)
        if name := _fitting_layout(request, parse_cluster_spec(f"{device.name}:{per_node}", -(-count // per_node))):
            return f"{count} x {device.name} ({format_bytes(device.memory)}) would fit, with {name}"
    return None


def _less_memory(candidates: Sequence[Candidate]) -> str:
    """How to reduce the largest component of the layout that needs the least memory."""
    supported = [candidate for candidate in candidates if candidate.layout.unsupported is None]
    least = min(supported, key=lambda candidate: candidate.memory.total)
    name, size = max(least.memory.components().items(), key=lambda item: item[1])
    remedy = {
        "activations": "use a shorter sequence or a smaller image; a smaller global batch does not help",
        "weights": "use a narrower dtype for frozen weights, or a smaller model",
        "gathered": "use smaller blocks: name their classes in run.wrap(blocks=...)",
    }.get(name, "use an optimizer with less state, or a smaller model")
    total = format_bytes(least.memory.total)
    return f"{least.layout.name} needs the least memory, {total}, most of it {name} ({format_bytes(size)}): {remedy}"
