"""What run.wrap does: plan where that was left open, wrap, and let the run know its model."""

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import torch
from torch import nn

from samestep.distributed.communicator import Communicator
from samestep.distributed.device import MemoryShare, smallest_memory_share
from samestep.environment.hardware import read_hardware
from samestep.environment.world import World
from samestep.messages import format_bytes, format_seconds
from samestep.parallel.precision import ComputePrecision
from samestep.parallel.wrap import WrapOptions
from samestep.planner.cluster_discovery import cluster_of_ranks
from samestep.planner.cluster_spec import ClusterSpec
from samestep.planner.model_parts import checkpointable_classes, profile_weights
from samestep.planner.model_profile import CUDA_CONTEXT, CUDA_MARGIN, ModelProfile
from samestep.planner.plan import Candidate, Plan, make_plan
from samestep.planner.step_timing import time_model
from samestep.planner.trace import trace_model

_HALF = 0.5  # of a device's memory stays free for activations where nobody has counted them
_WHOLE: tuple[str, ...] = ("single", "ddp")
_ABOUT = 1.1  # an estimate that is better by less does not outweigh a simpler run
_SIMPLEST: tuple[str, ...] = (*_WHOLE, "fsdp", "hybrid", "zero2")


@dataclass(frozen=True)
class PlanSite:
    """What a plan must know of the run it is made for."""

    link: Communicator
    """All ranks."""
    device: torch.device
    """Where this rank computes."""
    numbers: ComputePrecision
    """What it computes in."""
    global_batch: int
    """Samples in a step, over all ranks."""
    once: Callable[..., object]
    """Runs a function on the first rank and gives its result to all: `Run.once`."""


@dataclass(frozen=True)
class RunPlan:
    """What the ranks of a run will do, and what it was expected to take."""

    chosen: Candidate
    """The layout and its micro-batch."""
    told: str
    """One line with the reason."""
    facts: dict[str, object]
    """The plan as plain data, for summary and checkpoint."""
    counted: bool
    """Whether activations and work were traced, so that memory and time can be compared at the end."""

    @property
    def rows(self) -> int | None:
        """The micro-batch; None where all rows of a rank go through at once."""
        return self.chosen.micro_batch if self.counted and self.chosen.accumulation > 1 else None

    def apply(self, wish: WrapOptions, model: nn.Module) -> WrapOptions:
        """The wish with what was decided in the place of what was left open."""
        layout = self.chosen.layout
        again = (
            checkpointable_classes(model, wish.blocks)
            if layout.activation_checkpointing and not wish.checkpoint
            else wish.checkpoint
        )
        strategy = layout.strategy if wish.strategy is None and layout.ranks > 1 else wish.strategy
        why = "as planned" if wish.strategy is None else wish.why
        return replace(wish, strategy=strategy, offload=layout.cpu_offload or wish.offload, checkpoint=again, why=why)


def decide(
    site: PlanSite, model: nn.Module, wish: WrapOptions, example: object | None, optimizer: str
) -> RunPlan | None:
    """The plan of this run; None where there is nothing to decide or nothing is known to decide by."""
    settled = site.link.alone or wish.strategy is not None or site.device.type != "cuda"
    if example is None and settled:
        return None
    share = smallest_memory_share(site.link, "planning", site.device, _free(site.device))
    return cast(RunPlan, site.once(_decide, site, model, wish, example, optimizer, share))


def planned_rows(decisions: Sequence[RunPlan]) -> int | None:
    """The micro-batch of the tightest plan; None where none cuts a rank's rows."""
    return min((rows for made in decisions if (rows := made.rows) is not None), default=None)


def compare(decision: RunPlan, device: torch.device, moments: list[float]) -> dict[str, object]:
    """Planned beside actual: peak memory where the device tells it, and the median time between two steps."""
    intervals = [after - before for before, after in pairwise(moments)]
    found: dict[str, object] = {"planned_seconds": decision.chosen.time.total}
    if intervals:
        found["actual_seconds"] = statistics.median(intervals)
    if device.type == "cuda":
        memory = decision.chosen.memory
        found |= {"planned_bytes": memory.total - memory.overhead}
        found |= {"actual_bytes": torch.cuda.max_memory_allocated(device)}
    return found


def tell(compared: dict[str, object]) -> str:
    """What was planned and what came, in one line.

    >>> tell({"planned_seconds": 0.2, "actual_seconds": 0.25})
    'plan: 200 ms a step were estimated and 250 ms came (+25%)'
    """
    parts: list[str] = []
    if "actual_bytes" in compared:
        planned, actual = int(str(compared["planned_bytes"])), int(str(compared["actual_bytes"]))
        parts.append(
            f"{format_bytes(planned)} were estimated and {format_bytes(actual)} came ({actual / planned - 1:+.0%})"
        )
    if "actual_seconds" in compared:
        ahead, came = float(str(compared["planned_seconds"])), float(str(compared["actual_seconds"]))
        times = f"{format_seconds(ahead)} a step were estimated and {format_seconds(came)} came"
        parts.append(f"{times} ({came / ahead - 1:+.0%})")
    return f"plan: {'; '.join(parts)}" if parts else ""


def _decide(
    site: PlanSite, model: nn.Module, wish: WrapOptions, example: object | None, optimizer: str, share: MemoryShare
) -> RunPlan:
    """On the first rank, for all."""
    world, numbers = site.link.world, site.numbers
    machines = _machines(world, share)
    if example is None:
        made = make_plan(machines, profile_weights(model), site.global_batch, numbers.name, _HALF)
    else:
        made = _counted(site, machines, model, wish, example, optimizer)
    ours = [
        each for each in made.candidates if each.layout.ranks == world.size and each.layout.teacher_placement is None
    ]
    allowed = [each for each in ours if _may(each, world.size, wish)] or ours
    fitting = [each for each in allowed if each.fits]
    chosen = _best(fitting, counted=example is not None) or min(allowed, key=lambda each: each.memory.total)
    told = _tell_choice(made, chosen, len(fitting), example is not None) if fitting else _nothing_fits(made, chosen)
    return RunPlan(chosen, told, _plain(made, chosen), example is not None)


def _counted(
    site: PlanSite, machines: ClusterSpec, model: nn.Module, wish: WrapOptions, example: object, optimizer: str
) -> Plan:
    """By a traced step; on a GPU with its operations timed at about the micro-batch that will be taken."""
    facts = _trace(site, model, wish, example, optimizer)
    made = make_plan(machines, facts, site.global_batch, site.numbers.name, CUDA_MARGIN)
    if site.device.type != "cuda" or made.chosen is None:
        return made
    facts = time_model(
        facts,
        lambda: (_shell(model), example),
        machines,
        site.device,
        made.chosen.micro_batch,
        site.numbers,
        channels_last=wish.channels_last,
    )
    return make_plan(machines, facts, site.global_batch, site.numbers.name, CUDA_MARGIN)


def _machines(world: World, share: MemoryShare) -> ClusterSpec:
    """This run's own devices: as many a node as it has ranks there, with what the tightest rank has of its own.

    Where nodes have unlike numbers of ranks, each rank counts as a node of its own: nothing is faster than the network.
    """
    found = cluster_of_ranks(world, share.ranks)
    found = replace(found, device=replace(found.device, memory_free=share.free))
    if world.size == world.nodes * world.local_size:
        return replace(found, devices_per_node=world.local_size)
    return replace(found.resized(1, world.size), host_memory=found.host_memory // world.local_size)


def _free(device: torch.device) -> float:
    """Bytes that are free where this rank computes; a GPU's lack this process's context, which a plan counts."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + CUDA_CONTEXT + torch.cuda.memory_reserved(device)
    return read_hardware().memory_available


def _trace(site: PlanSite, model: nn.Module, wish: WrapOptions, example: object, optimizer: str) -> ModelProfile:
    return trace_model(
        lambda: (_shell(model), example),
        optimizer=optimizer,
        precision=site.numbers.name,
        blocks=wish.blocks,
        target="cuda" if site.device.type == "cuda" else "cpu",
        channels_last=wish.channels_last,
    )


def _shell(model: nn.Module) -> nn.Module:
    """The model without its weights: a copy whose parameters have shapes alone."""
    bare = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, bare)


def _may(candidate: Candidate, size: int, wish: WrapOptions) -> bool:
    """Whether a candidate leaves the user what he asked for."""
    layout = candidate.layout
    whole = layout.strategy in _WHOLE or not wish.channels_last
    asked = wish.strategy in (None, layout.strategy) or size == 1
    offloads = (
        layout.cpu_offload == wish.offload if wish.strategy is not None else layout.cpu_offload or not wish.offload
    )
    again = layout.activation_checkpointing or not wish.checkpoint
    return whole and asked and again and (offloads or size == 1)


def _best(fitting: list[Candidate], counted: bool) -> Candidate | None:
    """The simplest of those that are about as fast as the fastest; where no work was counted, no time is known."""
    if not fitting:
        return None
    limit = _ABOUT * min(each.time.total for each in fitting)
    return min((each for each in fitting if not counted or each.time.total <= limit), key=_simplicity)


def _simplicity(candidate: Candidate) -> tuple[int, bool, bool]:
    """Whole models before sharded ones, device memory before host memory, activations kept before computed twice."""
    layout = candidate.layout
    return _SIMPLEST.index(layout.strategy), layout.cpu_offload, layout.activation_checkpointing


def _tell_choice(made: Plan, chosen: Candidate, fitting: int, counted: bool) -> str:
    used, has = format_bytes(chosen.memory.total), format_bytes(made.request.cluster.device.memory_free)
    if not counted:
        return (
            f"plan: {chosen.layout.name} (weights, gradients and two moments of Adam take {used} of {has} free on a "
            "device, half of which is left to activations; run.wrap(model, example=batch) would count those too)"
        )
    cut = f"{chosen.layout.ranks} x {chosen.micro_batch} x {chosen.accumulation}"
    return (
        f"plan: {chosen.layout.name}, global batch {made.request.global_batch} as {cut} ({used} of {has} free on a "
        f"device, {format_seconds(chosen.time.total)} a step by estimate; of {fitting} that fit the simplest that is "
        "about the fastest)"
    )


def _nothing_fits(made: Plan, chosen: Candidate) -> str:
    advice = f"; {made.advice[0]}" if made.advice else ""
    return f"plan: nothing fits by this estimate, {chosen.layout.name} comes nearest ({chosen.reason}){advice}"


def _plain(made: Plan, chosen: Candidate) -> dict[str, object]:
    """What is worth keeping: the choice with its numbers, and why each other was not taken."""
    told = replace(made, chosen=chosen, candidates=()).to_json()
    others = {each.layout.name: each.reason for each in made.candidates if each.layout != chosen.layout}
    return {"chosen": told["chosen"], "others": others, "margin": made.request.margin, "model": told["model"]}
