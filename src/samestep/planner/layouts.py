"""The layouts that a plan compares: each strategy of run.wrap, with and without the options that save memory."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from samestep.messages import format_list
from samestep.planner.cluster_spec import ClusterSpec
from samestep.planner.model_profile import ModelProfile

Strategy = Literal["single", "ddp", "zero2", "fsdp", "hybrid"]
TeacherPlacement = Literal["sharded", "offload", "balanced", "cpu"]

_SHARDED: tuple[Strategy, ...] = ("zero2", "fsdp", "hybrid")
_SHOWN_FROZEN = 4
_MIN_FROZEN_FRACTION = 0.1  # frozen parts below this fraction of all weights stay in the model
# Frozen parts cost one forward pass, and about one more if gradients flow through them to their inputs.
_MAX_PASSES_WITHOUT_GRADIENT = 1.4


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
    unsupported = no_gradients if gradient_flows_through_frozen(model) else None
    if ranks > 1:
        yield "sharded", unsupported
    if strategy == "single" and cluster.devices_per_node > 1:
        yield "balanced", unsupported
    if cluster.device.kind == "cuda":
        yield "offload", unsupported
    yield "cpu", unsupported


def gradient_flows_through_frozen(model: ModelProfile) -> bool:
    """Whether gradients flow through the frozen parts, judging by the FLOPs of a step.

    Trainable parts cost three forward passes, frozen parts one, or two if their inputs need gradients.
    """
    frozen = model.frozen_part_flops
    if not frozen:
        return False
    trainable = model.forward_flops - frozen
    return (model.step_flops - 3 * trainable) / frozen > _MAX_PASSES_WITHOUT_GRADIENT


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
