"""How long a micro-batch takes on the device at hand: its operations run one by one, without the model's memory."""

from dataclasses import replace

import torch

from samestep.errors import PlanError
from samestep.facts.machines import Machines
from samestep.facts.model import ModelFacts, Op, Timed
from samestep.measure.calls import Call, Cost, Shape
from samestep.measure.host_time import host_seconds
from samestep.measure.operations import Work
from samestep.measure.replay import replay
from samestep.measure.subject import Build, Loss
from samestep.measure.trace import FEWEST, trace_calls
from samestep.plan.speed import op_seconds
from samestep.torch_private import cannot_be_traced
from samestep.wrap.precision import Numbers, check_wish, choose_numbers, see_arithmetic, set_fp32_products


def time_here(
    facts: ModelFacts, build: Build, machines: Machines, micro_batch: int, precision: str, *, channels_last: bool
) -> ModelFacts:
    """The same before a run, on the first GPU of this machine, which is one of `machines`."""
    device = torch.device("cuda", 0)
    numbers = choose_numbers([see_arithmetic(device, check_wish(precision), compile=False)])
    return time_model(facts, build, machines, device, micro_batch, numbers, channels_last=channels_last)


def time_model(
    facts: ModelFacts,
    build: Build,
    machines: Machines,
    device: torch.device,
    micro_batch: int,
    numbers: Numbers,
    *,
    loss: Loss | None = None,
    channels_last: bool = False,
) -> ModelFacts:
    """`facts` with the seconds that `device`, one of `machines`, takes over micro-batches up to `micro_batch`.

    As they were where the model cannot be traced, or where nobody has kernels to run.
    """
    sizes = sorted({max(FEWEST, micro_batch // 2), max(2 * FEWEST, micro_batch)})
    kind = "cuda" if device.type == "cuda" else "cpu"
    try:
        works = trace_calls(build, sizes, precision=numbers.name, loss=loss, target=kind, channels_last=channels_last)
    except Exception as error:
        if cannot_be_traced(error) or isinstance(error, PlanError):  # as in a step of another size than was planned by
            return facts
        raise
    restore = set_fp32_products(numbers)
    try:
        seconds = [time_work(work, machines, device, numbers.tf32) for work in works]
    finally:
        restore()
    points = tuple(zip(sizes, seconds, strict=True))
    host = host_seconds(build, device, numbers.dtype, loss, channels_last) if _runs_whole(facts, device) else None
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what follows counts on it
        torch.cuda.reset_peak_memory_stats(device)  # or the probe would count as training's
    how = f"{facts.how}; its operations timed on this device"
    return replace(facts, timed=Timed(machines.device.name, points, host), how=how)


def _runs_whole(facts: ModelFacts, device: torch.device) -> bool:
    """Whether some samples may be computed for real."""
    return device.type == "cuda" and 2 * facts.persistent + facts.working.at(2) < torch.cuda.mem_get_info(device)[0]


def time_work(work: Work, machines: Machines, device: torch.device, tf32: bool) -> float:
    """Seconds that `device` takes over the calls of `work`; those that cannot be run alone are reckoned."""
    calls = work.calls or {}
    seconds = replay(calls, device)
    total = 0.0
    for call, cost in calls.items():
        known = seconds.get(call)
        total += op_seconds(machines, as_op(call, cost), tf32) if known is None else known * cost.count
    return total


def as_op(call: Call, cost: Cost) -> Op:
    """Equal calls as one kind of operation."""
    return Op(str(call.func.overloadpacket), cost.count, cost.flops, cost.moved, _dtype(call.args))


def _dtype(values: tuple[object, ...]) -> str:
    """What a call computes in: the dtype of its last tensor of real numbers."""
    flat = [each for value in values for each in (value if isinstance(value, tuple) else (value,))]
    shapes = [each for each in flat if isinstance(each, Shape) and each.dtype.is_floating_point]
    return str(shapes[-1].dtype).removeprefix("torch.") if shapes else ""
