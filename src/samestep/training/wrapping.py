"""run.wrap."""

from collections.abc import Callable

from torch import nn

from samestep.data.loader import list_tensors
from samestep.errors import DataError, WrapError
from samestep.parallel.wrap import WrapOptions, check_options, wrap
from samestep.training.auto_plan import PlanSite, decide
from samestep.training.lifecycle import Lifecycle, seed_per_rank


def wrap_model(
    life: Lifecycle, once: Callable[..., object], model: nn.Module, wish: WrapOptions, example: object, optimizer: str
) -> nn.Module:
    """The model that trains on all ranks."""
    engine, link, device = life.engine, life.link, life.choice.device
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  # what scripts pass is not typed
        raise WrapError(
            f"run.wrap got a {type(model).__name__}, which is no torch.nn.Module: wrap what trains; a teacher "
            "is frozen, and is called as it is"
        )
    if any(known.owns(parameter) for known in engine.models for parameter in model.parameters()):
        raise WrapError(f"{type(model).__name__} has parameters that are wrapped already: a model is wrapped once")
    engine.speed.tell()
    check_options(wish, model)
    if example is not None:
        _check_example(example)
    numbers = engine.speed.numbers
    decision = decide(PlanSite(link, device, numbers, life.asked.global_batch, once), model, wish, example, optimizer)
    if decision is not None:
        engine.decisions.append(decision)
        life.say(decision.told)
        wish = decision.apply(wish, model)
    wrapped = wrap(link, model, device, wish, numbers, lambda: engine.in_step, life.say)
    engine.models.append(wrapped)
    seed_per_rank(life.asked.seed, link.world.rank)
    return wrapped.model


def _check_example(example: object) -> None:
    """Raise where there is no batch to trace a step with."""
    try:
        sizes = [len(tensor) for tensor in list_tensors(example) if tensor.dim()]
    except DataError:
        sizes = []
    if not sizes or not sizes[0]:
        raise WrapError(
            f"run.wrap got a {type(example).__name__} without samples as example=: give a batch as the model is called "
            "with it, a tensor or tuples, lists and dicts of them, with samples along their first dimension"
        )
