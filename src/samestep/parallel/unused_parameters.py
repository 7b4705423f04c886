"""Parameters that a step did not use: noticed at once on every world size, named, explained."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from samestep.torch_private import gathered_parameters


class Passes:
    """Whether a DDP model had two backward passes after one forward pass: it sends the gradients of the first alone."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._again = False
        # What received gradients since the last forward pass. Held no longer than a step: the hooks that fill it live
        # as long as the parameters themselves.
        self._seen: list[torch.Tensor] = []
        model.register_forward_pre_hook(self._begin_forward)
        for parameter in model.parameters():
            if parameter.requires_grad:
                # called for every parameter at every step: this one runs no line of Python
                parameter.register_post_accumulate_grad_hook(self._seen.append)

    def begin(self) -> None:
        """Forget the micro-batches before, whose gradients are not sent."""
        self._seen.clear()
        self._again = False

    def end(self) -> bool:
        """Whether it was so in the micro-batch that is over."""
        self._look()
        return self._again

    def _begin_forward(self, *_: object) -> None:
        if torch.is_grad_enabled():  # else DDP takes no note of it either
            self._look()

    def _look(self) -> None:
        self._again = self._again or len(self._seen) > len(set(map(id, self._seen)))
        self._seen.clear()


_SHOWN = 6
_TIMED = 10  # forward passes whose median tells what a search costs


class Use:
    """Which trainable parameters received a gradient in the last micro-batch of a step."""

    def __init__(self, model: nn.Module) -> None:
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        # By name, and held no longer than a step: the hooks that fill it live as long as the parameters themselves.
        self._seen: dict[str, torch.Tensor] = {}
        if isinstance(model, FSDPModule):  # what it computes with exists only after the first forward pass
            self._waiting = model.register_forward_hook(self._watch_gathered)
        else:
            self._watch(dict(model.named_parameters()))

    def begin(self) -> None:
        """Forget the micro-batches before."""
        self._seen.clear()

    @property
    def any(self) -> bool:
        """Whether there was a backward pass at all; none is the user's choice."""
        return bool(self._seen)

    def missing(self) -> list[str]:
        """The parameters that the backward pass left out."""
        seen = set(self._seen)
        self._seen.clear()
        return [name for name in self._names if name not in seen]

    def _watch_gathered(self, model: nn.Module, *_: object) -> None:
        self._waiting.remove()
        self._watch(gathered_parameters(model))

    def _watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                # called for every parameter at every step: this one runs no line of Python
                parameter.register_post_accumulate_grad_hook(partial(self._seen.__setitem__, name))


class SearchCost:
    """Times the first training passes of a DDP model that searches for unused parameters, tells the cost, and is gone.

    The search follows the forward pass inside DDP's own, on the CPU: its time is that of the outer pass less the inner.
    """

    def __init__(self, outer: DistributedDataParallel, inner: nn.Module, say: Callable[[str], None]) -> None:
        self._outer, self._inner, self._say = outer, inner, say
        self._moments: list[float] = []
        self._costs: list[tuple[float, float]] = []
        self._hooks = [
            outer.register_forward_pre_hook(self._begin),
            inner.register_forward_pre_hook(self._note),
            inner.register_forward_hook(self._note),
            outer.register_forward_hook(self._end),
        ]

    def __deepcopy__(self, memo: dict[int, object]) -> "SearchCost":
        """Itself: a copy of the model, such as its moving average, is not timed, and must not copy the ranks' group."""
        del memo
        return self

    def _begin(self, *_: object) -> None:
        self._moments = [time.perf_counter()]

    def _note(self, called: nn.Module, *_: object) -> None:
        if called is self._inner:
            self._moments.append(time.perf_counter())

    def _end(self, *_: object) -> None:
        self._moments.append(time.perf_counter())
        searched = self._outer.require_backward_grad_sync and torch.is_grad_enabled()
        if len(self._moments) != 4 or not searched:  # the inner model was called past DDP, or gradients stay here
            return
        begin, inner_begin, inner_end, end = self._moments
        self._costs.append(((end - begin) - (inner_end - inner_begin), end - begin))
        if len(self._costs) == _TIMED:
            cost, whole = (statistics.median(times) for times in zip(*self._costs, strict=True))
            for hook in self._hooks:
                hook.remove()
            self._say(
                f"unused='allow': searching for unused parameters takes {1000 * cost:.2f} ms a step "
                f"({cost / whole:.0%} of the forward pass); whether one is skipped depends on the number of ranks"
            )


def explain(model: nn.Module, missing: Sequence[str], number: int, samples: Sequence[int], rank: int) -> str:
    """What was not used, where, for which samples, and what can be done."""
    shown = ", ".join(missing[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")
    home = _common_module(model, missing)
    which = ", ".join(map(str, samples[:_SHOWN])) + (", ..." if len(samples) > _SHOWN else "")
    return (
        f"step {number} did not use {len(missing)} parameter(s) of {home} on rank {rank}: {shown}. The samples that "
        f"took the other branch are {which}. Other ranks would wait for these gradients, and whether an optimizer "
        "skips them would depend on the number of ranks. Either connect them at every step (for dropped conditioning: "
        "samestep.nn.ConditioningDropout), or freeze what never trains (parameter.requires_grad_(False)), or accept "
        "the search and its cost: run.wrap(model, unused='allow')"
    )


def _common_module(model: nn.Module, names: Sequence[str]) -> str:
    """The smallest module that holds all of `names`."""
    paths = [name.split(".")[:-1] for name in names]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    module = model.get_submodule(".".join(common))
    return f"{type(module).__name__} at {'.'.join(common)!r}" if common else type(module).__name__
