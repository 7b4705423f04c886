"""Parameters that a step did not use, and backward passes that DDP did not reduce: detected, named and explained."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os.path import commonprefix

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from samestep.messages import format_list
from samestep.torch_private import gathered_parameters

_SHOWN = 6
_TIMED_PASSES = 10  # forward passes whose median is reported as the cost of the search


class UsedParameters:
    """Which trainable parameters received a gradient in the last micro-batch of a step."""

    def __init__(self, model: nn.Module) -> None:
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        # cleared after every step, since the hooks that fill it live as long as the parameters
        self._seen: dict[str, torch.Tensor] = {}
        if isinstance(model, FSDPModule):  # the parameters it computes with exist after the first forward pass
            self._first_forward = model.register_forward_hook(self._watch_gathered)
        else:
            self._watch(dict(model.named_parameters()))

    def start(self) -> None:
        """Forget earlier micro-batches."""
        self._seen.clear()

    @property
    def any(self) -> bool:
        """Whether there was a backward pass."""
        return bool(self._seen)

    def missing(self) -> list[str]:
        """The parameters without a gradient."""
        seen = set(self._seen)
        self._seen.clear()
        return [name for name in self._names if name not in seen]

    def _watch_gathered(self, model: nn.Module, *_: object) -> None:
        self._first_forward.remove()
        self._watch(gathered_parameters(model))

    def _watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                # runs for every parameter at every step, so it must not run Python code
                parameter.register_post_accumulate_grad_hook(partial(self._seen.__setitem__, name))


class BackwardPasses:
    """Whether a DDP model had two backward passes after one forward pass: DDP reduces only the first."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._repeated = False
        # parameters with a gradient since the last forward pass; cleared after every step, since the hooks live longer
        self._seen: list[torch.Tensor] = []
        model.register_forward_pre_hook(self._start_forward)
        for parameter in model.parameters():
            if parameter.requires_grad:
                # runs for every parameter at every step, so it must not run Python code
                parameter.register_post_accumulate_grad_hook(self._seen.append)

    def start(self) -> None:
        """Forget earlier micro-batches, whose gradients are not reduced."""
        self._seen.clear()
        self._repeated = False

    def repeated(self) -> bool:
        """Whether there were two in the last micro-batch."""
        self._check()
        return self._repeated

    def _start_forward(self, *_: object) -> None:
        if torch.is_grad_enabled():  # otherwise DDP does not count it either
            self._check()

    def _check(self) -> None:
        self._repeated = self._repeated or len(self._seen) > len(set(map(id, self._seen)))
        self._seen.clear()


class SearchCost:
    """Times DDP's search for unused parameters in the first training passes, and reports the cost once.

    The search follows the inner forward pass, on the CPU: its time is that of the outer pass minus the inner.
    """

    def __init__(self, outer: DistributedDataParallel, inner: nn.Module, report: Callable[[str], None]) -> None:
        self._outer, self._inner, self._report = outer, inner, report
        self._times: list[float] = []
        self._costs: list[tuple[float, float]] = []
        self._hooks = [
            outer.register_forward_pre_hook(self._start),
            inner.register_forward_pre_hook(self._record),
            inner.register_forward_hook(self._record),
            outer.register_forward_hook(self._end),
        ]

    def __deepcopy__(self, memo: dict[int, object]) -> "SearchCost":
        """Itself: a copy of the model, such as its moving average, is not timed and must not copy the process group."""
        del memo
        return self

    def _start(self, *_: object) -> None:
        self._times = [time.perf_counter()]

    def _record(self, called: nn.Module, *_: object) -> None:
        if called is self._inner:
            self._times.append(time.perf_counter())

    def _end(self, *_: object) -> None:
        self._times.append(time.perf_counter())
        searched = self._outer.require_backward_grad_sync and torch.is_grad_enabled()
        if len(self._times) != 4 or not searched:  # the inner model was called directly, or gradients are not reduced
            return
        start, inner_start, inner_end, end = self._times
        self._costs.append(((end - start) - (inner_end - inner_start), end - start))
        if len(self._costs) == _TIMED_PASSES:
            cost, forward = (statistics.median(times) for times in zip(*self._costs, strict=True))
            for hook in self._hooks:
                hook.remove()
            self._report(
                f"unused_parameters='allow': the search for unused parameters takes {1000 * cost:.2f} ms per step "
                f"({cost / forward:.0%} of the forward pass); whether a parameter is skipped depends on the number of "
                "ranks"
            )


def unused_message(model: nn.Module, missing: Sequence[str], step: int, samples: Sequence[int], rank: int) -> str:
    """Which parameters were not used, for which samples, and what to do."""
    shown = format_list(missing, _SHOWN)
    which = ", ".join(map(str, samples[:_SHOWN])) + (", ..." if len(samples) > _SHOWN else "")
    return (
        f"step {step} did not use {len(missing)} parameter(s) of {_common_module(model, missing)} on rank {rank}: "
        f"{shown}. The samples that took the other branch are {which}. Other ranks would wait for these gradients, and "
        "whether an optimizer skips them would depend on the number of ranks. Use them at every step (for dropped "
        "conditioning: samestep.nn.ConditioningDropout), freeze what never trains (parameter.requires_grad_(False)), "
        "or accept the search and its cost: run.wrap(model, unused_parameters='allow')"
    )


def _common_module(model: nn.Module, names: Sequence[str]) -> str:
    """The smallest module that contains all of `names`."""
    common = commonprefix([name.split(".")[:-1] for name in names])  # noqa: RUF071  # of lists, by component
    module = model.get_submodule(".".join(common))
    return f"{type(module).__name__} at {'.'.join(common)!r}" if common else type(module).__name__
