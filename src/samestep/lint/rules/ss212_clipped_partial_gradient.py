"""Gradients are clipped before they are complete.

The norm of a gradient has a meaning after all ranks and all micro-batches have contributed to it. Clipping before a
hand-written `all_reduce` scales the gradient of each rank differently. Clipping after every micro-batch scales what was
accumulated so far again and again. Both give another step than clipping the complete gradient once. The same holds for
a norm that each rank computes from its own shards of a model of FSDP.

Bad:

```python
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # SS212
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
```

Good:

```python
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
```

Source: petuum/adaptdl#26, huggingface/accelerate#641, huggingface/diffusers#721.
"""

from collections.abc import Iterator
from typing import Final

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.library.tensor_library import IS_SHARD
from samestep.lint.module_trees import exchanges, modules_of
from samestep.lint.rule import Analysis, Rule
from samestep.lint.training_steps import accumulates, accumulations, mentions
from samestep.lint.values import ModelValue, Taint, TensorValue, Value, options_of

_SCALING: Final = ("mul_", "div_")
_SCALE_ALL: Final = ("_foreach_mul_", "_foreach_div_", "clip_grads_with_norm_")


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for clipping before an exchange of gradients, and for clipping after every micro-batch."""
    for clip in analysis.of("clip"):
        yield from _before_exchange(analysis, clip)
        yield from _in_accelerate(analysis, clip)
        yield from _after_micro_batch(analysis, clip)
        yield from _of_own_shard(analysis, clip)
    yield from _scaled_shards(analysis)


def _before_exchange(analysis: Analysis, clip: Event) -> Iterator[Finding]:
    for event in exchanges(analysis, "gradient"):
        is_same = clip.loops == event.loops[: len(clip.loops)]
        steps = [step.order for step in analysis.of("optimizer_step") if clip.order < step.order < event.order]
        if event.order > clip.order and is_same and not steps and not _clips_again(analysis, event):
            yield RULE.finding(
                clip.location,
                "each rank clips its own gradient before the gradients are exchanged",
                evidence=[f"the exchange follows ({event.location})"],
                related=[event.location],
                repair="clip after the gradients are exchanged",
            )
            return


def _clips_again(analysis: Analysis, exchange: Event) -> bool:
    return any(clip.order > exchange.order for clip in analysis.of("clip"))


def _in_accelerate(analysis: Analysis, clip: Event) -> Iterator[Finding]:
    is_guarded = any(mentions(analysis, guard, "sync_gradients") for guard in clip.guards)
    if "accumulate" in clip.contexts and accumulates(analysis) and not is_guarded:
        yield RULE.finding(
            clip.location,
            "this clips after every micro-batch, not once per step",
            evidence=["`accumulate` runs this for micro-batches that the optimizer does not apply yet"],
            repair="`if accelerator.sync_gradients: accelerator.clip_grad_norm_(model.parameters(), max_norm)`",
        )


def _after_micro_batch(analysis: Analysis, clip: Event) -> Iterator[Finding]:
    for group in accumulations(analysis):
        is_inside = group.loop in clip.loops and group.backward.order < clip.order < group.step.order
        has_guard = any(guard in clip.guards for guard in group.guards)
        if is_inside and (group.is_inner or not has_guard):
            yield RULE.finding(
                clip.location,
                "this clips after every micro-batch, not once per step",
                evidence=[f"the step comes after several micro-batches ({group.step.location})"],
                related=[group.step.location],
                repair="clip right before `optimizer.step()`, under the same condition",
            )
            return


def _of_own_shard(analysis: Analysis, clip: Event) -> Iterator[Finding]:
    """`clip_grad_norm_` of torch on a model of FSDP, whose parameters are the shards of this rank."""
    if clip.call is None or clip.call.name != "torch.nn.utils.clip_grad_norm_":
        return
    for model in modules_of(clip.parameters):
        if not isinstance(model, ModelValue) or model.wrapper != "fsdp" or "sharding_strategy" in model.options:
            continue
        if _is_class(analysis, model):
            yield RULE.finding(
                clip.location,
                "each rank clips by the norm of one shard of the gradient",
                evidence=[f"FSDP shards the model ({model.location})"],
                repair="`model.clip_grad_norm_(max_norm)`, which computes the norm over all ranks",
            )


def _scaled_shards(analysis: Analysis) -> Iterator[Finding]:
    """Gradients that are scaled by a norm of this rank's shards, which nothing reduces."""
    for event in analysis.of("in_place", "assign_attribute", "call"):
        if event.kind == "call":
            is_scaling = event.name.rpartition(".")[2] in _SCALE_ALL and len(event.arguments) > 1
            targets, factor = (event.arguments[0], event.arguments[-1]) if is_scaling else (None, None)
        elif event.kind == "in_place":
            targets, factor = event.owner, event.value if event.name in _SCALING else None
        else:
            targets, factor = (event.owner, _factor(event.value)) if event.name == "grad" else (None, None)
        taint = _shard_taint(factor)
        if taint is not None and (event.kind != "in_place" or _is_gradient(targets)):
            yield RULE.finding(
                event.location,
                "the shards of the gradient are scaled by a norm of this rank's shards",
                evidence=[f"{taint.text} ({taint.location})", "nothing adds the norms of the ranks"],
                repair="`dist.all_reduce` the sum of the squares, or call `torch.nn.utils.clip_grad_norm_`",
            )
            return


def _factor(value: Value | None) -> Value | None:
    """By what a gradient is multiplied: `p.grad = p.grad * scale`."""
    for each in options_of(value):
        if isinstance(each, TensorValue) and each.operation in ("*", "/") and len(each.parts) > 1:
            return each.parts[1]
    return None


def _is_gradient(value: Value | None) -> bool:
    return any(isinstance(each, TensorValue) and each.content == "gradient" for each in options_of(value))


def _shard_taint(value: Value | None) -> Taint | None:
    taints = value.taints if value is not None else ()
    return next((each for each in taints if each.text.endswith(IS_SHARD)), None)


def _is_class(analysis: Analysis, model: ModelValue) -> bool:
    """Whether FullyShardedDataParallel wraps the model; with fully_shard the norm is computed over all ranks."""
    return any(wrap.model is model for wrap in analysis.wrapped)


RULE = Rule(
    "SS212",
    "clipped-partial-gradient",
    "error",
    "the step is not that of the clipped gradient, and depends on the number of ranks or micro-batches",
    "clip once, when the gradient of the step is complete",
    find,
)
