"""What a model needs as far as its weights tell: where no example batch says more."""

from torch import nn

from samestep.facts.model import Line, ModelFacts
from samestep.measure.operations import Work
from samestep.measure.parts import ForwardWork, blocks_of, describe, nbytes

_MOMENTS = 2  # of Adam, the optimizer that most models are trained with


def facts_of_weights(model: nn.Module) -> ModelFacts:
    """Weights, gradients and two moments of Adam; activations and work are not known and count as nothing."""
    by_dtype: dict[bool, dict[str, int]] = {True: {}, False: {}}
    for parameter in model.parameters():
        held, name = by_dtype[parameter.requires_grad], str(parameter.dtype).removeprefix("torch.")
        held[name] = held.get(name, 0) + parameter.numel() * parameter.element_size()
    trains = sum(by_dtype[True].values())
    nothing, blocks = Line(0, 0), blocks_of(model, ())
    return ModelFacts(
        name=type(model).__name__,
        trainable=by_dtype[True],
        frozen=by_dtype[False],
        buffers=nbytes(model.buffers()),
        gradients=trains,
        optimizer="Adam",
        optimizer_state=_MOMENTS * trains,
        working=nothing,
        working_recomputed=None,
        forward_flops=0.0,
        step_flops=0.0,
        step_flops_recomputed=0.0,
        ops=(),
        traced_batch=1,
        blocks=describe(blocks, ForwardWork(Work(), ()), samples=1),
        frozen_parts=(),
        how="by its weights alone: activations are not counted",
    )
