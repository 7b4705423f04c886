"""Which placement a teacher gets where the user names none: the fastest that fits, with the table of all."""

import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from samestep.distributed.device import MemoryShare, smallest_memory_share
from samestep.errors import SamestepError, TeacherError
from samestep.messages import format_bytes
from samestep.planner.plan_report import TEACHER_COLUMNS, teacher_rows
from samestep.planner.teacher_costs import TeacherPlan, TeacherProfile, TeacherSetup, compare_placements, placement_cost
from samestep.teacher.frozen_model import FrozenModel, blocks, inside
from samestep.teacher.options import Ground, TeacherOptions
from samestep.teacher.outputs import compressed
from samestep.teacher.single_device import device_room, host_room
from samestep.torch_private import without_memory

_POSITIONS: Final = 512  # of a sample that is a text, where nobody shows one
_INDEX, _SUM = torch.int64.itemsize, torch.float32.itemsize  # beside each of the largest logits, and once a position


@dataclass(frozen=True)
class Needs:
    """The facts of a teacher, and how they are known."""

    facts: TeacherProfile
    """Bytes, work and outputs."""
    rows: int | None
    """Samples of the example that was counted with; None: there was none."""
    told: str
    """Where work and outputs come from, in words."""


@dataclass(frozen=True)
class _Sample:
    """One sample's forward pass."""

    flops: float
    output: int
    working: int  # beside what is given
    rows: int | None
    told: str


def needs_of(frozen: FrozenModel, wish: TeacherOptions) -> Needs:
    """What a teacher needs; nothing of it is loaded and nothing is computed."""
    module = frozen.skeleton()
    layers = {part: sum(_sizes(frozen, wish, part)) for part in blocks(module)}
    dtypes = Counter[torch.dtype]()
    for name in frozen.names():
        dtypes[frozen.dtype(name, wish.dtype)] += frozen.bytes_of(name, wish.dtype)
    dtype = dtypes.most_common(1)[0][0] if dtypes else torch.float32
    sample = _assume(frozen, wish, module, dtype) if frozen.example is None else _count(frozen, wish, module)
    frozen.take_back(module)
    size = frozen.bytes_in(wish.dtype)
    facts = TeacherProfile(
        bytes=size,
        largest_layer=max(layers.values(), default=0),
        flops_per_sample=sample.flops,
        output_per_sample=sample.output,
        working_per_sample=sample.working,
        dtype=str(dtype).removeprefix("torch."),
        resident=max(0, size - sum(layers.values())),
    )
    return Needs(facts, sample.rows, sample.told)


def rows_of(inputs: object) -> int:
    """How many samples a call has: the first dimension of its first tensor."""
    return next((len(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim()), 1)


def _sizes(frozen: FrozenModel, wish: TeacherOptions, part: str) -> list[int]:
    return [frozen.bytes_of(name, wish.dtype) for name in frozen.names() if inside(name, part)]


def _assume(frozen: FrozenModel, wish: TeacherOptions, module: nn.Module, dtype: torch.dtype) -> _Sample:
    """Two operations a parameter: at every position of a text, and once where there is no embedding to read one."""
    parameters = sum(frozen.bytes_of(name) // frozen.dtype(name).itemsize for name in frozen.names())
    words = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    show = "give run.teacher(..., example=batch) to count it"
    if words:
        told = f"2 operations a parameter at each of {_POSITIONS} positions of a sample: {show}"
        whole = max(words) * dtype.itemsize
        given = whole if wish.top_k is None else min(whole, wish.top_k * (dtype.itemsize + _INDEX) + _SUM)
        sizes = _POSITIONS * given, _POSITIONS * (whole - given)
        return _Sample(2.0 * parameters * _POSITIONS, *sizes, None, told)
    told = f"2 operations a parameter and sample, too few for convolutions: {show}"
    return _Sample(2.0 * parameters, 0, 0, None, told)


def _count(frozen: FrozenModel, wish: TeacherOptions, module: nn.Module) -> _Sample:
    """Count the products of a forward pass with the example, by shapes alone."""
    example = frozen.example
    args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (_listed(example), {})
    rows = rows_of(example)
    try:
        # Attention as plain products, which torch can count on any device.
        with without_memory(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            state = _without_values(frozen, wish, module)
            given = tree_map_only(torch.Tensor, _shape, (args, kwargs))
            outputs = functional_call(module, state, *given, tie_weights=False)
            few = compressed(outputs, wish.top_k, wish.temperature)
    except SamestepError:  # of top_k, which says what it wants
        raise
    except Exception as error:
        raise TeacherError(
            f"the example batch does not pass through {type(module).__name__} by its shapes alone "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__}): give one that the teacher can be "
            "called with, or none, and the work of a sample is assumed"
        ) from error
    whole, given = (sum(leaf.nbytes for leaf in _leaves(tree)) // rows for tree in (outputs, few))
    told = f"counted with an example of {rows} sample(s)"
    return _Sample(counter.get_total_flops() / rows, given, max(0, whole - given), rows, told)


def _listed(example: object) -> tuple[object, ...]:
    return tuple(example) if isinstance(example, list | tuple) else (example,)


def _leaves(outputs: Any) -> list[torch.Tensor]:
    plain = dict(outputs) if isinstance(outputs, Mapping) else outputs
    return [leaf for leaf in tree_leaves(plain) if isinstance(leaf, torch.Tensor)]


def _without_values(frozen: FrozenModel, wish: TeacherOptions, module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer as a shape, in the dtype that it will have; tied ones under each of their names.

    A layer that stands in several places comes once: what torch had replaced in it twice it could not put back.
    """
    saved = set(frozen.saved())
    found: dict[str, torch.Tensor] = {}
    for path, part in module.named_modules():
        own = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        for name, tensor in ((f"{path}.{leaf}" if path else leaf, tensor) for leaf, tensor in own):
            dtype = frozen.dtype(name, wish.dtype) if name in saved else tensor.dtype
            found[name] = torch.empty(tensor.shape, dtype=dtype)
    return found


def _shape(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)


_LEFT: Final = 0.5  # of a device's free memory, for what trains: nobody knows yet how much that will be
_WIDTH: Final = 80


@dataclass(frozen=True)
class Choice:
    """A placement, chosen among all."""

    placement: str
    """Its name; empty where none fits."""
    plan: TeacherPlan
    """All of them, weighed."""
    setting: TeacherSetup
    """What they were weighed for, with the memory of the tightest rank."""
    facts: TeacherProfile
    """What of the teacher was reckoned with."""
    work: str
    """Where its work is known from."""

    def seconds(self, rows: int) -> float:
        """The estimate for one call in which each rank has `rows` samples."""
        call = replace(self.setting, global_batch=rows * self.setting.ranks, micro_batch=rows)
        return placement_cost(self.placement, call, self.facts).seconds


def choose_placement(ground: Ground, frozen: FrozenModel, wish: TeacherOptions) -> Choice:
    """The fastest placement that fits the tightest rank, decided by the first rank for all, and why."""
    act = "choosing a placement"
    share = smallest_memory_share(ground.link, act, ground.device, float(device_room(ground.device)))
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
            f"no placement fits a teacher of {format_bytes(choice.facts.bytes)}, as the table says: give a smaller "
            "dtype=, larger or more GPUs, or name a placement= to try it all the same"
        )
    return choice


def _weigh(setting: TeacherSetup, frozen: FrozenModel, wish: TeacherOptions, share: MemoryShare, host: int) -> Choice:
    needs = needs_of(frozen, wish)
    device = replace(setting.cluster.device, memory_free=share.free)
    machines = replace(setting.cluster, device=device, host_memory=host)
    rows = min(needs.rows or setting.samples, setting.samples)
    setting = replace(setting, cluster=machines, micro_batch=rows, used_per_gpu=int(share.free * _LEFT))
    plan = compare_placements(setting, needs.facts)
    return Choice(plan.chosen.name if plan.chosen else "", plan, setting, needs.facts, needs.told)


def _table(choice: Choice) -> str:
    """All placements in lines of 80 columns, and what was assumed."""
    setting, device = choice.setting, choice.setting.cluster.device
    rows = [TEACHER_COLUMNS, *teacher_rows(choice.plan)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(TEACHER_COLUMNS) - 1)]
    indent = " " * (sum(widths) + 2 * len(widths))
    lines = [
        f"teacher: {format_bytes(choice.facts.bytes)} for {setting.ranks} rank(s); seconds of a step of "
        f"{setting.global_batch} samples, {setting.micro_batch} at once:"
    ]
    for name, *numbers, why in rows:
        cells = [name.ljust(widths[0]), *(text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True))]
        verdict = f"chosen: {why}" if name == choice.placement else why
        lines += textwrap.wrap("  ".join([*cells, verdict]), _WIDTH, subsequent_indent=indent)
    room = f"{format_bytes(device.memory_free)} free for the tightest rank, half of it left to what trains"
    for told in (f"work: {choice.work}", f"memory: {room}", f"rates: {device.source}"):
        lines += textwrap.wrap(told, _WIDTH, subsequent_indent="  ")
    return "\n".join(lines)
