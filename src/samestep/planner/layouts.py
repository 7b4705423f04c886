"""The layouts a plan weighs: every strategy that run.wrap has, with and without what saves memory."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from samestep.planner.cluster_spec import ClusterSpec
from samestep.planner.model_profile import ModelProfile

Strategy = Literal["single", "ddp", "zero2", "fsdp", "hybrid"]
Frozen = Literal["sharded", "offload", "balanced", "cpu"]

_SHARDED: tuple[Strategy, ...] = ("zero2", "fsdp", "hybrid")
_WORTH_PLACING = 0.1  # frozen parts below this part of all weights stay where the model is
# A frozen part does one forward pass; one that gradients pass through does a backward pass for its inputs as well.
_PASSES_WITH_GRADIENT = 1.4


@dataclass(frozen=True)
class PlanOptions:
    """What is asked for whatever the strategy."""

    script: str = "train.py"
    """What trains: a script, or the name of a recipe."""
    channels_last: bool = False
    """Images and weights of convolutions lie with their channels last: run.wrap(channels_last=True)."""
    blocks: bool = False
    """The classes of blocks are named: run.wrap(blocks=...); else it finds them."""


@dataclass(frozen=True)
class Layout:
    """One way to spread a training step over ranks, before its micro-batch is known."""

    strategy: Strategy
    """As `run.wrap` calls it."""
    ranks: int
    """How many ranks train."""
    shards: int
    """Over how many of them weights, gradients and optimizer state are cut; 1: each holds them whole."""
    offload: bool = False
    """What is sharded waits in host memory."""
    recompute: bool = False
    """Blocks compute their activations twice."""
    frozen: Frozen | None = None
    """Where `run.teacher` puts the frozen parts; None: in the model, on every rank."""
    blocked: str | None = None
    """Why the library cannot run it, or None."""

    @property
    def name(self) -> str:
        """How it is called in a table."""
        extras = (("offload", self.offload), ("recompute", self.recompute), (f"frozen {self.frozen}", self.frozen))
        return " + ".join((self.strategy, *(word for word, there in extras if there)))


NOTHING_ASKED = PlanOptions()
"""Nothing beyond a script called train.py."""


def layouts(machines: ClusterSpec, model: ModelProfile, asked: PlanOptions = NOTHING_ASKED) -> Iterator[Layout]:
    """Every layout of this model on these machines, also those that cannot run, with the reason."""
    for strategy, ranks, shards in _strategies(machines):
        cut = "channels_last=True needs whole weights" if asked.channels_last and strategy in _SHARDED else None
        for offload in (False, True) if strategy in _SHARDED else (False,):
            for recompute in (False, True) if model.working_recomputed is not None else (False,):
                for frozen, blocked in _placements(machines, model, strategy, ranks):
                    yield Layout(strategy, ranks, shards, offload, recompute, frozen, cut or blocked)


def _strategies(machines: ClusterSpec) -> Iterator[tuple[Strategy, int, int]]:
    yield "single", 1, 1
    if machines.devices > 1:
        yield "ddp", machines.devices, 1
        yield "zero2", machines.devices, machines.devices
        yield "fsdp", machines.devices, machines.devices
    if machines.nodes > 1 and machines.per_node > 1:
        yield "hybrid", machines.devices, machines.per_node


def _placements(
    machines: ClusterSpec, model: ModelProfile, strategy: Strategy, ranks: int
) -> Iterator[tuple[Frozen | None, str | None]]:
    yield None, None
    if frozen_bytes(model) < _WORTH_PLACING * model.weights:
        return
    useful: dict[Frozen, bool] = {
        "sharded": ranks > 1,
        "balanced": strategy == "single" and machines.per_node > 1,
        "offload": machines.device.kind == "cuda",
        "cpu": True,
    }
    blocked = (
        "gradients pass through the frozen parts, and run.teacher computes without" if gradient_passes(model) else None
    )
    for name, there in useful.items():
        if there:
            yield name, blocked


def frozen_bytes(model: ModelProfile) -> int:
    """Bytes of the frozen parts, which can be placed on their own."""
    return sum(part.frozen for part in model.frozen_parts)


def frozen_flops(model: ModelProfile) -> float:
    """Work of the forward passes of all frozen parts for one sample."""
    return sum(part.forward_flops for part in model.frozen_parts)


def gradient_passes(model: ModelProfile) -> bool:
    """Whether gradients flow through the frozen parts, as the work of a step tells.

    What trains costs three times its forward pass, a frozen part once, and twice where its inputs need gradients.
    """
    frozen = frozen_flops(model)
    if not frozen:
        return False
    trains = model.forward_flops - frozen
    return (model.step_flops - 3 * trains) / frozen > _PASSES_WITH_GRADIENT


def calls(
    layout: Layout, model: ModelProfile, micro_batch: int, accumulation: int, asked: PlanOptions = NOTHING_ASKED
) -> tuple[str, ...]:
    """What to write in the script for a layout, one call a line."""
    options = [] if layout.strategy == "single" else [f'"{layout.strategy}"']
    options += ["channels_last=True"] if asked.channels_last else []
    options += [f"blocks=({_classes(model)},)"] if asked.blocks and layout.strategy in _SHARDED else []
    options += ["offload=True"] if layout.offload else []
    options += [f"checkpoint=({_classes(model)},)"] if layout.recompute else []
    lines = [f"model = run.wrap({', '.join(['model', *options])})"]
    if layout.frozen is not None:
        names = ", ".join(part.name for part in model.frozen_parts)
        lines.append(f'teacher = run.teacher(build, weights=..., placement="{layout.frozen}")  # for {names}')
    cut = f", micro_batch={micro_batch}" if accumulation > 1 else ""
    return (*lines, f"train = run.shard(dataset, shuffle=True{cut})")


def command(layout: Layout, machines: ClusterSpec, script: str) -> str:
    """What to type to start it."""
    recipe, script = not script.endswith(".py"), shlex.quote(script)
    if machines.nodes > 1 and layout.ranks > 1:
        copied = f"samestep recipe copy {script} && " if recipe else ""
        return f"{copied}samestep submit {script}{'.py' if recipe else ''} --nodes {machines.nodes}"
    if layout.ranks == 1:
        return f"samestep recipe run --nproc-per-node 1 {script}" if recipe else f"python {script}"
    cpu = f" --nproc-per-node {layout.ranks}" if machines.device.kind == "cpu" else ""
    return f"samestep {'recipe ' if recipe else ''}run{cpu} {script}"


def _classes(model: ModelProfile) -> str:
    """One block of each kind, by the places where they repeat."""
    kinds = {re.sub(r"\d+", "0", part.name): part.name for part in reversed(model.blocks)}
    return ", ".join(f'type(model.get_submodule("{name}"))' for name in reversed(kinds.values()))
