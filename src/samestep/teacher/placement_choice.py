"""Choose a placement if you do not name one: the fastest that fits, printed with a table of all placements."""

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

from samestep.context import RunContext
from samestep.distributed.device import MemoryShare, memory_shares
from samestep.environment.world import World
from samestep.errors import SamestepError, TeacherError
from samestep.messages import format_bytes
from samestep.planner.cluster_discovery import cluster_of_ranks
from samestep.planner.teacher_costs import (
    TEACHER_COLUMNS,
    TeacherPlan,
    TeacherProfile,
    TeacherSetup,
    compare_placements,
    placement_cost,
    teacher_rows,
)
from samestep.teacher.frozen_model import FrozenModel, blocks
from samestep.teacher.options import TeacherOptions
from samestep.teacher.outputs import keep_top_k
from samestep.teacher.resident import free_device_memory, free_host_memory
from samestep.torch_private import without_memory

_ASSUMED_LENGTH: Final = 512  # tokens of a text, without an example
_INDEX_BYTES: Final = torch.int64.itemsize  # of each of the top-k logits
_SUM_BYTES: Final = torch.float32.itemsize  # of the log-sum-exp of each position
_TRAINING_FRACTION: Final = 0.5  # of a device's free memory; how much training needs is not known yet
_WIDTH: Final = 80


@dataclass(frozen=True)
class PlacementChoice:
    """The chosen placement, and what the choice is based on."""

    placement: str  # empty if none fits
    plan: TeacherPlan
    setup: TeacherSetup  # the training around the teacher, with the memory of the rank that has least
    profile: TeacherProfile
    work_source: str  # how the FLOPs are known

    def seconds(self, rows: int) -> float:
        """Estimate the time of one call in which each rank has `rows` samples."""
        call = replace(self.setup, global_batch=rows * self.setup.ranks, micro_batch=rows)
        return placement_cost(self.placement, call, self.profile).seconds


def choose_placement(context: RunContext, frozen: FrozenModel, options: TeacherOptions) -> PlacementChoice:
    """Choose the fastest placement that fits the rank with the least memory; rank 0 decides, and prints the table."""
    what, comm, device = "choosing a placement", context.comm, context.device
    share = min(memory_shares(comm, what, device, float(free_device_memory(device))))
    host = int(min(float(part[0]) for part in comm.exchange(what, [float(free_host_memory())])))

    def choose() -> PlacementChoice:
        setup = teacher_setup(context.world, context.config.global_batch, share.ranks)
        return _compare(setup, frozen, options, share, host)

    choice = context.once(choose)  # on rank 0 only, because nodes and examples may differ
    context.print(_format_table(choice))
    if not choice.placement:
        raise TeacherError(
            f"no placement fits a teacher of {format_bytes(choice.profile.bytes)} (see the table): pass a smaller "
            "dtype=, use larger or more GPUs, or pass a placement= to try it anyway"
        )
    return choice


def teacher_setup(world: World, global_batch: int, sharing: int) -> TeacherSetup:
    """Return the training that a teacher is placed for: the devices of this run, each shared by `sharing` ranks.

    Free memory excludes what this process has already allocated, its CUDA context included.
    """
    cluster = cluster_of_ranks(world, sharing)
    # A rank may see only its own GPU, so a node has at least as many as it has ranks.
    cluster = replace(cluster, devices_per_node=max(cluster.devices_per_node, world.local_size))
    return TeacherSetup(cluster, world.size, global_batch, -(-global_batch // world.size))


def _compare(
    setup: TeacherSetup, frozen: FrozenModel, options: TeacherOptions, share: MemoryShare, host: int
) -> PlacementChoice:
    profiled = profile_teacher(frozen, options)
    device = replace(setup.cluster.device, memory_free=share.free)
    cluster = replace(setup.cluster, device=device, host_memory=host)
    rows = min(profiled.example_rows or setup.samples, setup.samples)
    used = int(share.free * _TRAINING_FRACTION)
    setup = replace(setup, cluster=cluster, micro_batch=rows, used_per_gpu=used)
    plan = compare_placements(setup, profiled.profile)
    return PlacementChoice(plan.chosen.name if plan.chosen else "", plan, setup, profiled.profile, profiled.work_source)


def _format_table(choice: PlacementChoice) -> str:
    """Format all placements and the assumptions in lines of 80 columns."""
    setup, device = choice.setup, choice.setup.cluster.device
    rows = [TEACHER_COLUMNS, *teacher_rows(choice.plan)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(TEACHER_COLUMNS) - 1)]
    indent = " " * (sum(widths) + 2 * len(widths))
    lines = [
        f"teacher: {format_bytes(choice.profile.bytes)} for {setup.ranks} rank(s); seconds per step of "
        f"{setup.global_batch} samples, {setup.micro_batch} at once:"
    ]
    for name, *numbers, why in rows:
        cells = [name.ljust(widths[0]), *(text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True))]
        verdict = f"chosen: {why}" if name == choice.placement else why
        lines += textwrap.wrap("  ".join([*cells, verdict]), _WIDTH, subsequent_indent=indent)
    free = format_bytes(device.memory_free)
    for line in (
        f"work: {choice.work_source}",
        f"memory: {free} free on the rank with the least, half of it for training",
        f"rates: {device.source}",
    ):
        lines += textwrap.wrap(line, _WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


@dataclass(frozen=True)
class ProfiledTeacher:
    """The profile of a teacher, and how its FLOPs and outputs are known."""

    profile: TeacherProfile
    example_rows: int | None  # samples in the example batch; None without one
    work_source: str


def profile_teacher(frozen: FrozenModel, options: TeacherOptions) -> ProfiledTeacher:
    """Return the memory and work of a teacher; loads and computes nothing."""
    module = frozen.skeleton()
    layers = [frozen.total_bytes(options.dtype, name) for name in blocks(module)]
    sizes = Counter[torch.dtype]()
    for name in frozen.stored_names():
        sizes[frozen.dtype(name, options.dtype)] += frozen.bytes_of(name, options.dtype)
    dtype = sizes.most_common(1)[0][0] if sizes else torch.float32
    total = frozen.total_bytes(options.dtype)
    profile = TeacherProfile(
        bytes=total,
        largest_layer=max(layers, default=0),
        flops_per_sample=0.0,
        output_per_sample=0,
        dtype=str(dtype).removeprefix("torch."),
        resident=max(0, total - sum(layers)),
    )
    if frozen.example is None:
        profiled = _assume_work(profile, frozen, options, module, dtype)
    else:
        profiled = _count_work(profile, frozen, options, module)
    frozen.return_skeleton(module)
    return profiled


def batch_rows(inputs: object) -> int:
    """Return the number of samples in a call: the first dimension of its first tensor."""
    return next((len(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim()), 1)


def _assume_work(
    profile: TeacherProfile, frozen: FrozenModel, options: TeacherOptions, module: nn.Module, dtype: torch.dtype
) -> ProfiledTeacher:
    """Assume 2 FLOPs per parameter: at every position of a text, or once if the module has no embedding."""
    parameters = sum(frozen.bytes_of(name) // frozen.dtype(name).itemsize for name in frozen.stored_names())
    vocabularies = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    hint = "pass run.teacher(..., example=batch) to count them"
    if not vocabularies:
        source = f"2 FLOPs per parameter and sample, too few for convolutions: {hint}"
        return ProfiledTeacher(replace(profile, flops_per_sample=2.0 * parameters), None, source)
    source = f"2 FLOPs per parameter at each of {_ASSUMED_LENGTH} positions of a sample: {hint}"
    full = max(vocabularies) * dtype.itemsize
    kept = full if options.top_k is None else min(full, options.top_k * (dtype.itemsize + _INDEX_BYTES) + _SUM_BYTES)
    profile = replace(
        profile,
        flops_per_sample=2.0 * parameters * _ASSUMED_LENGTH,
        output_per_sample=_ASSUMED_LENGTH * kept,
        working_per_sample=_ASSUMED_LENGTH * (full - kept),
    )
    return ProfiledTeacher(profile, None, source)


def _count_work(
    profile: TeacherProfile, frozen: FrozenModel, options: TeacherOptions, module: nn.Module
) -> ProfiledTeacher:
    """Count the FLOPs of a forward pass with the example, using only shapes."""
    example = frozen.example
    if isinstance(example, Mapping):
        call = (), dict(example)
    else:
        call = tuple(example) if isinstance(example, list | tuple) else (example,), {}
    rows = batch_rows(example)
    try:
        # Attention as matrix products, which torch can count on any device.
        with without_memory(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            state = _empty_state(frozen, options.dtype, module)
            outputs = functional_call(module, state, *tree_map_only(torch.Tensor, _empty_like, call), tie_weights=False)
            kept = keep_top_k(outputs, options.top_k, options.temperature)
    except SamestepError:  # of top_k, whose message is enough
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TeacherError(
            f"the example batch does not pass through {type(module).__name__} ({reason}): pass one that the teacher "
            "can be called with, or none, and samestep assumes the FLOPs per sample"
        ) from error
    full_bytes, kept_bytes = (sum(leaf.nbytes for leaf in _tensors(tree)) // rows for tree in (outputs, kept))
    profile = replace(
        profile,
        flops_per_sample=counter.get_total_flops() / rows,
        output_per_sample=kept_bytes,
        working_per_sample=max(0, full_bytes - kept_bytes),
    )
    return ProfiledTeacher(profile, rows, f"counted with an example of {rows} sample(s)")


def _tensors(outputs: Any) -> list[torch.Tensor]:
    plain = dict(outputs) if isinstance(outputs, Mapping) else outputs
    return [leaf for leaf in tree_leaves(plain) if isinstance(leaf, torch.Tensor)]


def _empty_state(frozen: FrozenModel, dtype: torch.dtype | None, module: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer without values, in its final dtype; tied ones under each of their names.

    A layer that is used in several places appears once: functional_call cannot restore what it replaces twice.
    """
    saved = set(frozen.saved_names())
    state: dict[str, torch.Tensor] = {}
    for path, part in module.named_modules():
        for leaf, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            name = f"{path}.{leaf}" if path else leaf
            state[name] = torch.empty(tensor.shape, dtype=frozen.dtype(name, dtype) if name in saved else tensor.dtype)
    return state


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
