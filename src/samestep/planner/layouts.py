"""The layouts that a plan compares (each strategy of run.wrap, with and without its options), and their memory."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

from samestep.messages import format_list
from samestep.planner.cluster_spec import ClusterSpec
from samestep.planner.model_profile import CUDA_CONTEXT, ModelProfile

Strategy = Literal["single", "ddp", "zero2", "fsdp", "hybrid"]
TeacherPlacement = Literal["sharded", "offload", "balanced", "cpu"]

_SHARDED: tuple[Strategy, ...] = ("zero2", "fsdp", "hybrid")
_SHOWN_FROZEN = 4
_MIN_FROZEN_FRACTION = 0.1  # frozen parts below this fraction of all weights stay in the model
_MIB = 2**20
_CONTEXT = {"cuda": CUDA_CONTEXT, "mps": 300 * _MIB, "cpu": 300 * _MIB}  # without CUDA: a Python process with torch
_NCCL_BUFFERS = 400 * _MIB
_COMPONENTS = ("weights", "gradients", "optimizer", "activations", "buckets", "gathered", "overhead")


@dataclass(frozen=True)
class PlanOptions:
    """Options of the training script that hold for every layout."""

    script: str = "train.py"  # training script, or name of a recipe
    channels_last: bool = False  # whether the script passes run.wrap(channels_last=True)
    blocks: bool = False  # whether the script passes run.wrap(blocks=...); otherwise blocks are detected


DEFAULT_OPTIONS = PlanOptions()


@dataclass(frozen=True)
class Layout:
    """One way to distribute a training step over ranks; the micro-batch size is chosen later."""

    strategy: Strategy  # strategy of `run.wrap`
    ranks: int  # number of ranks that train
    shards: int  # ranks that weights, gradients and optimizer state are sharded over; 1: a full copy on each rank
    cpu_offload: bool = False  # whether shards are kept in host memory
    activation_checkpointing: bool = False  # whether blocks recompute their activations in the backward pass
    teacher_placement: TeacherPlacement | None = None  # of the frozen parts by `run.teacher`; None: in the model
    unsupported: str | None = None  # why samestep cannot run this layout; None if it can

    @property
    def name(self) -> str:
        """Name in tables, such as `fsdp + offload + activation ckpt`."""
        options = (
            ("offload", self.cpu_offload),
            ("activation ckpt", self.activation_checkpointing),
            (f"frozen {self.teacher_placement}", self.teacher_placement),
        )
        return " + ".join((self.strategy, *(option for option, used in options if used)))


@dataclass(frozen=True)
class Placement:
    """One placement of a teacher with its cost."""

    name: str  # name in `run.teacher(placement=...)`
    per_gpu: int  # bytes on the device with the most of it
    per_node: int  # bytes of host memory per node
    seconds: float  # estimated time that it adds to a step, without overlap with the student
    fits: bool = True  # whether it can be chosen
    reason: str = ""  # why it was or was not chosen


def layouts(cluster: ClusterSpec, model: ModelProfile, options: PlanOptions = DEFAULT_OPTIONS) -> Iterator[Layout]:
    """Every layout of this model on this cluster, including the unsupported ones with the reason."""
    for strategy, ranks, shards in _strategies(cluster):
        sharded = strategy in _SHARDED
        full_weights = "channels_last=True needs unsharded weights" if options.channels_last and sharded else None
        offloads = (False, True) if sharded else (False,)
        checkpointings = (False,) if model.checkpointed_activations is None else (False, True)
        placements = _teacher_placements(cluster, model, strategy, ranks)
        for offload, checkpointing, (placement, unsupported) in product(offloads, checkpointings, placements):
            yield Layout(strategy, ranks, shards, offload, checkpointing, placement, full_weights or unsupported)


def _strategies(cluster: ClusterSpec) -> Iterator[tuple[Strategy, int, int]]:
    """Strategy, ranks and shards."""
    yield "single", 1, 1
    if cluster.devices > 1:
        yield "ddp", cluster.devices, 1
        yield "zero2", cluster.devices, cluster.devices
        yield "fsdp", cluster.devices, cluster.devices
    if cluster.nodes > 1 and cluster.devices_per_node > 1:
        yield "hybrid", cluster.devices, cluster.devices_per_node


def _teacher_placements(
    cluster: ClusterSpec, model: ModelProfile, strategy: Strategy, ranks: int
) -> Iterator[tuple[TeacherPlacement | None, str | None]]:
    """Placements of the frozen parts, each with the reason if it is unsupported."""
    yield None, None
    if model.frozen_part_bytes < _MIN_FROZEN_FRACTION * model.weights:
        return
    no_gradients = "gradients flow through the frozen parts, and run.teacher computes no gradients"
    unsupported = no_gradients if any(part.needs_gradient for part in model.frozen_parts) else None
    if ranks > 1:
        yield "sharded", unsupported
    if strategy == "single" and cluster.devices_per_node > 1:
        yield "balanced", unsupported
    if cluster.device.kind == "cuda":
        yield "offload", unsupported
    yield "cpu", unsupported


def script_lines(
    layout: Layout, model: ModelProfile, micro_batch: int, accumulation: int, options: PlanOptions = DEFAULT_OPTIONS
) -> tuple[str, ...]:
    """The lines of the training script that select this layout."""
    arguments = ["model"] if layout.strategy == "single" else ["model", f'"{layout.strategy}"']
    if options.channels_last:
        arguments.append("channels_last=True")
    if options.blocks and layout.strategy in _SHARDED:
        arguments.append(f"blocks=({_block_classes(model)},)")
    if layout.cpu_offload:
        arguments.append("cpu_offload=True")
    if layout.activation_checkpointing:
        arguments.append(f"activation_checkpointing=({_block_classes(model)},)")
    lines = [f"model = run.wrap({', '.join(arguments)})"]
    if layout.teacher_placement is not None:
        names = format_list([part.name for part in model.frozen_parts], _SHOWN_FROZEN)
        lines.append(
            f'teacher = run.teacher(build, weights=..., placement="{layout.teacher_placement}")  # for {names}'
        )
    size = f", micro_batch={micro_batch}" if accumulation > 1 else ""
    return (*lines, f"train = run.shard(dataset, shuffle=True{size})")


def _block_classes(model: ModelProfile) -> str:
    """An expression for the class of each kind of block: blocks whose names differ in numbers only are one kind."""
    kinds = {re.sub(r"\d+", "0", part.name): part.name for part in reversed(model.blocks)}
    return ", ".join(f'type(model.get_submodule("{name}"))' for name in reversed(kinds.values()))


def launch_command(layout: Layout, cluster: ClusterSpec, script: str) -> str:
    """The shell command that starts the training script or recipe with this layout."""
    recipe, script = not script.endswith(".py"), shlex.quote(script)
    if cluster.nodes > 1 and layout.ranks > 1:
        copy = f"samestep recipe copy {script} && " if recipe else ""
        return f"{copy}samestep submit {script}{'.py' if recipe else ''} --nodes {cluster.nodes}"
    if layout.ranks == 1:
        return f"samestep recipe run --nproc-per-node 1 {script}" if recipe else f"python {script}"
    ranks = f" --nproc-per-node {layout.ranks}" if cluster.device.kind == "cpu" else ""
    return f"samestep {'recipe ' if recipe else ''}run{ranks} {script}"


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device at the peak of a step, and bytes of host memory per node."""

    weights: int  # weights and buffers
    gradients: int  # gradients at the end of a backward pass
    optimizer: int  # optimizer state
    activations: int  # activations, temporaries and the batch
    buckets: int  # gradients that exist at the peak of the activations: DDP's buckets, or from earlier micro-batches
    gathered: int  # weights gathered from other ranks for the current blocks, and their gradients before reduce-scatter
    overhead: int  # context of the device and buffers of NCCL
    host: int  # bytes of host memory per node, for all of its ranks
    wrap: int  # bytes on one device at the peak of run.wrap, without overhead; not a part of the total

    @property
    def total(self) -> int:
        """Bytes on one device."""
        return sum(self.components().values())

    def components(self) -> Mapping[str, int]:
        """Bytes on one device by component."""
        return {name: getattr(self, name) for name in _COMPONENTS}


def estimate_memory(
    layout: Layout,
    cluster: ClusterSpec,
    model: ModelProfile,
    micro_batch: int,
    *,
    accumulates: bool,
    precision: str,
    teacher: Placement | None = None,
) -> MemoryEstimate:
    """Memory of `layout` with `micro_batch` samples per forward pass.

    `accumulates`: a step has several micro-batches. `teacher`: cost of the frozen parts if they are placed outside of
    the model.
    """
    trainable = sum(model.trainable.values())
    not_trained = model.weights - trainable
    if teacher is not None:
        not_trained += teacher.per_gpu - model.frozen_part_bytes
    activations, buckets = _activations(layout, model, micro_batch, accumulates, precision)
    uses_nccl = layout.ranks > 1 and cluster.device.kind == "cuda"
    offloaded = trainable + model.gradients + model.optimizer_state if layout.cpu_offload else 0
    return MemoryEstimate(
        weights=not_trained + (0 if layout.cpu_offload else _shard(trainable, layout.shards)),
        gradients=_gradients(layout, model.gradients, accumulates),
        optimizer=0 if layout.cpu_offload else _shard(model.optimizer_state, layout.shards),
        activations=activations,
        buckets=buckets,
        gathered=_gathered(layout, model, precision) if layout.shards > 1 else 0,
        overhead=_CONTEXT[cluster.device.kind] + (_NCCL_BUFFERS if uses_nccl else 0),
        host=cluster.devices_per_node * _shard(offloaded, layout.shards) + (teacher.per_node if teacher else 0),
        wrap=not_trained + _wrapped(layout, model),
    )


def _wrapped(layout: Layout, model: ModelProfile) -> int:
    """The shards of all blocks so far and the next block in full, in the order in which run.wrap shards them.

    Offloaded shards leave the device one after the other: at most those of one block are there.
    """
    trainable = sum(model.trainable.values())
    if layout.shards == 1:
        return trainable
    blocks = [part.trainable for part in model.blocks]
    peak = shards = 0
    for size in (*blocks, trainable - sum(blocks)):
        shards = _shard(size, layout.shards) + (0 if layout.cpu_offload else shards)
        peak = max(peak, shards + size)
    return peak


def _shard(size: int, shards: int) -> int:
    return -(-size // shards)


def _gradients(layout: Layout, size: int, accumulates: bool) -> int:
    """With accumulation, unsharded gradients stay until the last micro-batch, since ranks reduce only then."""
    if layout.shards == 1:
        return size
    shard = 0 if layout.cpu_offload else _shard(size, layout.shards)
    return shard + size if accumulates else shard


def _activations(
    layout: Layout, model: ModelProfile, samples: int, accumulates: bool, precision: str
) -> tuple[int, int]:
    """Activation memory, and the memory that gradients add if they exist throughout the step.

    Sharded weights are gathered in the precision of the computation, so autocast does not make its own copies.
    """
    peak = (layout.activation_checkpointing and model.checkpointed_activations) or model.activations
    # offloaded gradients leave the device as soon as they are computed
    activations = peak.at_with_all_gradients(samples) if layout.cpu_offload else peak.at(samples, layout.shards)
    persistent_gradients = layout.strategy == "ddp" or accumulates
    buckets = max(0, peak.at_with_all_gradients(samples) - activations) if persistent_gradients else 0
    if layout.shards > 1 and precision in ("bf16", "fp16"):
        activations = max(activations - model.compute_bytes(precision), min(activations, peak.per_sample * samples))
    return activations, buckets


def _gathered(layout: Layout, model: ModelProfile, precision: str) -> int:
    """The current and the next block, and all parameters outside of blocks; with zero2 all parameters."""
    trainable = sum(model.trainable.values())
    full = model.compute_bytes(precision)
    ratio = full / trainable if trainable else 1.0
    largest = max((part.trainable for part in model.blocks), default=0)
    outside = trainable - sum(part.trainable for part in model.blocks)
    weights = full if layout.strategy == "zero2" else int(ratio * (min(2 * largest, trainable) + outside))
    gradients = 2 * max(largest, outside)  # unsharded gradients, and the copy that reduce-scatter sends
    return min(weights, full) + min(gradients, 2 * model.gradients)
