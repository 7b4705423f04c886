"""The plan of a run: traces the model and plans strategy, memory and micro-batch for the hardware of this run."""

import copy
import statistics
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn

from samestep.context import RunContext
from samestep.distributed.device import MemoryShare, memory_shares
from samestep.environment.hardware import read_hardware
from samestep.environment.world import World
from samestep.errors import MeasurementTooSlow
from samestep.messages import format_bytes, format_seconds
from samestep.parallel.precision import ComputePrecision
from samestep.parallel.wrap import WrapOptions
from samestep.planner.cluster_discovery import cluster_of_ranks
from samestep.planner.cluster_spec import ClusterSpec
from samestep.planner.model_profile import CUDA_CONTEXT, CUDA_MARGIN, ModelProfile
from samestep.planner.plan import Candidate, Plan, make_plan
from samestep.planner.step_timing import time_model
from samestep.planner.trace import TRACED, trace_model
from samestep.planner.traced_model import checkpointable_classes, profile_weights

_ACTIVATION_MARGIN = 0.5  # of a device's memory stays free for activations if they were not traced
_UNSHARDED: tuple[str, ...] = ("single", "ddp")
_SIMPLEST_FIRST: tuple[str, ...] = (*_UNSHARDED, "fsdp", "hybrid", "zero2")
_SIMILAR = 1.1  # a layout that is faster by less than this factor does not outweigh a simpler one


@dataclass(frozen=True)
class RunPlan:
    """What the ranks of a run will do, and the memory and time it is estimated to take."""

    chosen: Candidate  # the layout and its micro-batch
    message: str  # one line with the reason
    details: dict[str, object]  # the plan as plain data, for the summary and for checkpoints
    traced: bool  # whether a step was traced, so that memory and time can be compared at the end

    @property
    def micro_batch(self) -> int | None:
        """The micro-batch size; None if all rows of a rank fit at once."""
        return self.chosen.micro_batch if self.traced and self.chosen.accumulation > 1 else None

    def apply(self, options: WrapOptions, model: nn.Module) -> WrapOptions:
        """The options with the plan's decisions for those that were not set."""
        layout = self.chosen.layout
        blocks = options.activation_checkpointing
        if layout.activation_checkpointing and not blocks:
            blocks = checkpointable_classes(model, options.blocks)
        strategy = layout.strategy if options.strategy is None and layout.ranks > 1 else options.strategy
        return replace(
            options,
            strategy=strategy,
            cpu_offload=layout.cpu_offload or options.cpu_offload,
            activation_checkpointing=blocks,
            reason="as planned" if options.strategy is None else options.reason,
        )

    def comparison(self, device: torch.device, step_starts: list[float]) -> dict[str, object]:
        """Planned and actual values: the median step time, and the peak memory of a GPU."""
        intervals = [after - before for before, after in pairwise(step_starts)]
        compared: dict[str, object] = {"planned_seconds": self.chosen.time.total}
        if intervals:
            compared["actual_seconds"] = statistics.median(intervals)
        if device.type == "cuda":
            compared["planned_bytes"] = self.chosen.memory.total - self.chosen.memory.overhead
            compared["actual_bytes"] = torch.cuda.max_memory_allocated(device)
        return compared

    def summary(self, device: torch.device, step_starts: list[float]) -> dict[str, object]:
        """The plan and the comparison, for summary.json."""
        return self.details | {"compared": self.comparison(device, step_starts) if self.traced else {}}


def plan_run(
    context: RunContext, model: nn.Module, options: WrapOptions, example: object | None, optimizer: str
) -> RunPlan | None:
    """The plan of this run; None if nothing is left to decide, or nothing is known to decide by. A collective."""
    if example is None and _is_decided(context, options):
        return None
    share = min(memory_shares(context.comm, "planning", context.device, _free_memory(context.device)))
    return context.once(_plan_on_rank0, context, model, options, example, optimizer, share)


def _is_decided(context: RunContext, options: WrapOptions) -> bool:
    """Whether the strategy is decided without a plan."""
    return context.comm.alone or options.strategy is not None or context.device.type != "cuda"


def format_comparison(compared: dict[str, object]) -> str:
    """Planned and actual values in one line.

    >>> format_comparison({"planned_seconds": 0.2, "actual_seconds": 0.25})
    'plan: 200 ms per step estimated, 250 ms measured (+25%)'
    """
    parts: list[str] = []
    if "actual_bytes" in compared:
        planned, actual = int(str(compared["planned_bytes"])), int(str(compared["actual_bytes"]))
        parts.append(f"{format_bytes(planned)} estimated, {format_bytes(actual)} used ({actual / planned - 1:+.0%})")
    if "actual_seconds" in compared:
        planned, actual = float(str(compared["planned_seconds"])), float(str(compared["actual_seconds"]))
        times = f"{format_seconds(planned)} per step estimated, {format_seconds(actual)} measured"
        parts.append(f"{times} ({actual / planned - 1:+.0%})")
    return f"plan: {'; '.join(parts)}" if parts else ""


def _plan_on_rank0(
    context: RunContext,
    model: nn.Module,
    options: WrapOptions,
    example: object | None,
    optimizer: str,
    share: MemoryShare,
) -> RunPlan | None:
    world, precision, batch = context.world, _plan_precision(context).name, context.config.global_batch
    cluster, made, unknown = _cluster(world, share), None, "run.wrap(model, example=batch) would count those too"
    if example is not None:
        try:
            made = _traced_plan(context, cluster, model, options, example, optimizer)
        except MeasurementTooSlow as error:
            if _is_decided(context, options):
                context.print(f"plan: none. {error}")
                return None
            unknown = str(error)
    traced = made is not None
    made = made or make_plan(cluster, profile_weights(model), batch, precision, _ACTIVATION_MARGIN)
    in_model = (each for each in made.candidates if each.layout.teacher_placement is None)
    ours = [each for each in in_model if each.layout.ranks == world.size]
    allowed = [each for each in ours if _is_allowed(each, world.size, options)] or ours
    fitting = [each for each in allowed if each.fits]
    chosen = _simplest_of_fastest(fitting, traced) or min(allowed, key=lambda each: each.memory.total)
    unknown = "" if traced else unknown
    message = _choice_message(made, chosen, len(fitting), unknown) if fitting else _nothing_fits_message(made, chosen)
    return RunPlan(chosen, message, _details(made, chosen), traced)


def _traced_plan(
    context: RunContext, cluster: ClusterSpec, model: nn.Module, options: WrapOptions, example: object, optimizer: str
) -> Plan:
    """By a traced step; on a GPU its operations are timed at about the micro-batch size that will be used."""
    precision, batch = _plan_precision(context), context.config.global_batch
    on_gpu = context.device.type == "cuda"
    profile: ModelProfile = trace_model(
        lambda: (_without_weights(model), example),
        optimizer=optimizer,
        precision=precision.name,
        blocks=options.blocks,
        target="cuda" if on_gpu else "cpu",
        channels_last=options.channels_last,
    )
    made = make_plan(cluster, profile, batch, precision.name, CUDA_MARGIN)
    if not on_gpu or made.chosen is None:
        return made
    profile = time_model(
        profile,
        lambda: (_without_weights(model), example),
        cluster,
        context.device,
        made.chosen.micro_batch,
        precision,
        channels_last=options.channels_last,
    )
    return make_plan(cluster, profile, batch, precision.name, CUDA_MARGIN)


def _plan_precision(context: RunContext) -> ComputePrecision:
    """The precision to plan for: an fp64 run is planned as fp32 with weights and activations of twice the size."""
    precision = context.acceleration.precision
    return replace(precision, name="fp32") if precision.name == "fp64" else precision


def _cluster(world: World, share: MemoryShare) -> ClusterSpec:
    """The devices of this run: as many per node as it has ranks there, with the smallest memory share of any rank.

    If nodes have different numbers of ranks, each rank counts as a node, so that nothing is faster than the network.
    """
    cluster = cluster_of_ranks(world, share.ranks)
    cluster = replace(cluster, device=replace(cluster.device, memory_free=share.free))
    if world.size == world.nodes * world.local_size:
        return replace(cluster, devices_per_node=world.local_size)
    return replace(cluster.resized(1, world.size), host_memory=cluster.host_memory // world.local_size)


def _free_memory(device: torch.device) -> float:
    """Free bytes on this rank's device; the CUDA context of this process counts as free, since a plan includes it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + CUDA_CONTEXT + torch.cuda.memory_reserved(device)
    return read_hardware().memory_available


def _without_weights(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters are on the meta device."""
    meta = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, meta)


def _is_allowed(candidate: Candidate, size: int, options: WrapOptions) -> bool:
    """Whether a candidate respects the options that were set."""
    layout = candidate.layout
    memory_format = layout.strategy in _UNSHARDED or not options.channels_last
    strategy = options.strategy in (None, layout.strategy) or size == 1
    offload = layout.cpu_offload == options.cpu_offload or (options.strategy is None and layout.cpu_offload)
    recompute = layout.activation_checkpointing or not options.activation_checkpointing
    return memory_format and strategy and recompute and (offload or size == 1)


def _simplest_of_fastest(fitting: list[Candidate], traced: bool) -> Candidate | None:
    """The simplest candidate that is about as fast as the fastest; without a trace no time is known."""
    if not fitting:
        return None
    limit = _SIMILAR * min(each.time.total for each in fitting)
    return min((each for each in fitting if not traced or each.time.total <= limit), key=_complexity)


def _complexity(candidate: Candidate) -> tuple[int, bool, bool]:
    """Unsharded before sharded, device memory before host memory, kept activations before recomputed ones."""
    layout = candidate.layout
    return _SIMPLEST_FIRST.index(layout.strategy), layout.cpu_offload, layout.activation_checkpointing


def _choice_message(made: Plan, chosen: Candidate, fitting: int, unknown: str) -> str:
    """The choice with its numbers; `unknown` says why activations were not counted, if so."""
    used, free = format_bytes(chosen.memory.total), format_bytes(made.request.cluster.device.memory_free)
    if unknown:
        return (
            f"plan: {chosen.layout.name} (weights, gradients and Adam's two moments need {used} of {free} free per "
            f"device, and half of it is left to activations; {unknown})"
        )
    split = f"{chosen.layout.ranks} x {chosen.micro_batch} x {chosen.accumulation}"
    method = made.request.model.method
    caveat = "" if method == TRACED else f"; {method}"
    return (
        f"plan: {chosen.layout.name}, global batch {made.request.global_batch} as {split} ({used} of {free} free per "
        f"device, {format_seconds(chosen.time.total)} per step estimated; the simplest of the fastest among {fitting} "
        f"that fit{caveat})"
    )


def _nothing_fits_message(made: Plan, chosen: Candidate) -> str:
    advice = f"; {made.advice[0]}" if made.advice else ""
    return f"plan: nothing fits by this estimate, {chosen.layout.name} comes closest ({chosen.reason}){advice}"


def _details(made: Plan, chosen: Candidate) -> dict[str, object]:
    """The choice with its numbers, and why each other layout was not chosen."""
    data = replace(made, chosen=chosen, candidates=()).to_json()
    others = {each.layout.name: each.reason for each in made.candidates if each.layout != chosen.layout}
    return {"chosen": data["chosen"], "others": others, "margin": made.request.margin, "model": data["model"]}
