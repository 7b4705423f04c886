"""What a rank changes: optimizers and their parameters, gradients before and after the exchange, learning rates."""

import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from samestep.verify.recorder.fingerprints import hash_tensor, is_row_sharded, is_sharded, is_zero, local_part, sketch
from samestep.verify.recorder.model_observer import ModelObserver
from samestep.verify.recorder.recorder import Recorder, StopScript, wrap
from samestep.verify.recorder.replay import Replay

_MAX_HASHED_BYTES: Final = 64 * 2**20  # of all parameters, in each step; of larger models a sample of the elements
_SAMPLED: Final = 4096


class ShardedGradients:
    """Lets `collect` see the gradients of a rank before FSDP2 reduces them, with the number of the sharded parameter.

    The parameters of a sharded module are parts of tensors. During its forward pass the module has the full ones, whose
    gradients are those of this rank's samples.
    """

    def __init__(self, number: Callable[[Tensor], int], collect: Callable[[int, Tensor, Tensor], None]) -> None:
        self._number, self._collect = number, collect
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hooked: dict[int, Tensor] = {}  # by id

    def watch(self, module: nn.Module) -> None:
        """Observe the forward passes of the modules inside of this one whose parameters an optimizer trains."""
        for each in module.modules():
            if each in self._watched:
                continue
            numbers = {
                name: self._number(parameter)
                for name, parameter in each.named_parameters(recurse=False)
                if hasattr(parameter, "_local_tensor") and parameter.requires_grad and self._number(parameter) >= 0
            }
            if numbers:
                self._watched.add(each)
                each.register_forward_pre_hook(partial(self._before_forward, numbers))

    def _before_forward(self, numbers: dict[str, int], module: nn.Module, args: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            is_whole = not hasattr(parameter, "_local_tensor") and parameter.requires_grad and parameter.is_leaf
            if name in numbers and is_whole and id(parameter) not in self._hooked:
                self._hooked[id(parameter)] = parameter
                parameter.register_hook(partial(self._collect, numbers[name], parameter))


class OptimizerObserver:
    """Follows the optimizers of this process and their parameters."""

    def __init__(self, recorder: Recorder, models: ModelObserver, replay: Replay) -> None:
        self._recorder, self._models, self._replay = recorder, models, replay
        self._optimizers: list[Optimizer] = []
        self._numbers: dict[int, int] = {}  # of parameters, by id; `_kept` keeps the ids valid
        self._kept: list[Tensor] = []
        self._local: dict[int, list[float]] = {}  # sketches of the gradients of this rank alone, since the last step
        self._norms: dict[int, float] = {}  # of these gradients, added up
        self._exchanged: dict[int, tuple[Tensor, Tensor]] = {}  # parameters, and copies of their gradients after the
        # last backward pass; a copy is faster than a sketch, which is needed only if the script changes the gradient
        self._before_clip: dict[int, list[float]] = {}
        self._named: set[int] = set()
        self._stepping: Optimizer | None = None  # whose step runs; it may call others, as ZeRO does for its part
        self._sharded = ShardedGradients(self._number, self._collect)

    def install(self) -> None:
        """Observe every optimizer and scheduler from now on."""
        self._models.before_training = self._sharded.watch
        self._models.after_backward = self._after_backward
        wrap(Optimizer, "__init__", self._create)
        wrap(Optimizer, "add_param_group", self._add_group)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrap(nn.utils, name, self._clip)
            setattr(nn.utils.clip_grad, name, getattr(nn.utils, name))
        wrap(LRScheduler, "__init__", self._create_scheduler)
        wrap(LRScheduler, "step", self._step_scheduler)
        wrap(ReduceLROnPlateau, "step", self._step_scheduler)

    def _create(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        recorder = self._recorder
        original(optimizer, *args, **kwargs)
        if recorder.is_quiet:
            return
        self._optimizers.append(optimizer)
        recorder.write(
            "optimizer", id=len(self._optimizers) - 1, name=type(optimizer).__name__, site=recorder.site(),
            parameters=[self._number(each) for group in optimizer.param_groups for each in group["params"]],
        )  # fmt: skip

    def _add_group(self, original: Any, optimizer: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(optimizer, group, *args, **kwargs)
        if not self._recorder.is_quiet:
            added = [each for each in optimizer.param_groups[-1]["params"] if isinstance(each, Tensor)]
            with self._recorder.quiet():
                for each in added:
                    self._watch(each)
                self._replay.add(added)
        return result

    def _watch(self, parameter: Tensor) -> None:
        if id(parameter) in self._numbers:
            return
        self._numbers[id(parameter)] = len(self._kept)
        self._kept.append(parameter)
        if parameter.requires_grad and parameter.is_leaf and not is_sharded(parameter):
            number = self._numbers[id(parameter)]
            parameter.register_hook(partial(self._collect, number, parameter))

    def _collect(self, number: int, leaf: Tensor, gradient: Tensor) -> None:
        """Add a gradient to those since the script has last removed or zeroed them."""
        if not self._recorder.is_own_process:
            return
        before = self._local.get(number)
        with self._recorder.quiet():
            if before is not None and is_zero(leaf.grad) and is_zero(self._kept[number].grad):
                before = None
                self._models.note_restart()
            found, norm = sketch(gradient), float(local_part(gradient).norm())
        self._norms[number] = norm if before is None else self._norms.get(number, 0.0) + norm
        self._local[number] = found if before is None else [a + b for a, b in zip(before, found, strict=True)]

    def _after_backward(self) -> None:
        """Keep the gradients that a wrapper has exchanged, before the script changes them."""
        covered = self._models.covered()
        self._exchanged = {
            self._number(each): (each, each.grad.detach().clone())
            for each in self._kept
            if each.grad is not None and (id(each) in covered or is_sharded(each))
        }

    def _changed(self, applied: dict[int, list[float]]) -> dict[str, list[float]]:
        """Sketches of exchanged gradients that are not those that the optimizer applies."""
        changed = {
            number: sketch(copy)
            for number, (parameter, copy) in self._exchanged.items()
            if parameter.grad is not None
            and not torch.equal(local_part(parameter.grad), local_part(copy))
            and number in applied
        }
        return {str(number): value for number, value in changed.items() if applied[number] != value}

    def _number(self, parameter: Tensor) -> int:
        return self._numbers.get(id(parameter), -1)

    def _clip(self, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not self._recorder.is_quiet and not self._before_clip:
            with self._recorder.quiet():
                self._before_clip = self._applied(parameters)
            self._recorder.write("clip", site=self._recorder.site())
        return original(parameters, *args, **kwargs)

    def _applied(self, parameters: list[Tensor]) -> dict[int, list[float]]:
        return {self._number(each): sketch(each.grad) for each in parameters if each.grad is not None}

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._recorder.is_quiet or optimizer not in self._optimizers or self._is_inner(optimizer):
            return None
        self._stepping = optimizer
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            self._write_step(optimizer, self._recorder.site())
            return None
        site, calls = self._recorder.site(), itertools.count()

        def observed() -> Any:  # Lightning computes the gradients inside of the step
            loss = closure()
            if next(calls) == 0:
                self._write_step(optimizer, site)
            return loss

        return args[:1], {**kwargs, "closure": observed}

    def _is_inner(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer steps for another one, with a part of its parameters."""
        if self._stepping is None or self._stepping is optimizer:
            return False
        outer = {id(each) for group in self._stepping.param_groups for each in group["params"]}
        return all(id(each) in outer for group in optimizer.param_groups for each in group["params"])

    def _write_step(self, optimizer: Optimizer, site: int) -> None:
        recorder = self._recorder
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        with recorder.quiet():
            applied = {**self._applied(parameters), **self._before_clip}
            values = {
                "optimizer": self._optimizers.index(optimizer),
                "lr": [_to_float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
                "applied": {str(number): value for number, value in applied.items()},
                "local": {str(number): value for number, value in self._local.items()},
                "norms": {str(number): value for number, value in self._norms.items() if number in applied},
                "exchanged": self._changed(applied),
                "weights": _hash_all(parameters),
                "sharded": [self._number(each) for each in parameters if is_sharded(each)],
                "clipped": bool(self._before_clip),
                "buffers": self._models.buffers(),
            }
            names = self._new_names(parameters)
        if names:
            recorder.write("names", **names)
        recorder.write("step", site=site, **values)

    def _new_names(self, parameters: list[Tensor]) -> dict[str, Any]:
        """Names of the parameters in the modules that were called, and those in no such module."""
        new = [each for each in parameters if self._number(each) not in self._named]
        if not new:
            return {}
        names = {
            id(parameter): (name, self._models.wrapper(module), self._models.number(module))
            for module in sorted(self._models.called, key=lambda each: self._models.wrapper(each) == "")[::-1]
            for name, parameter in module.named_parameters()
        }
        self._named |= {self._number(each) for each in new}
        return {
            "names": {str(self._number(each)): names[id(each)] for each in new if id(each) in names},
            "missing": [self._number(each) for each in new if id(each) not in names],
            "shapes": {str(self._number(each)): list(each.shape) for each in new},
            "covered": [self._number(each) for each in new if id(each) in self._models.covered()],
            "eps": {str(self._number(each)): torch.finfo(each.dtype).eps for each in new if each.is_floating_point()},
            "row_sharded": [self._number(each) for each in new if is_row_sharded(each)],
        }

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        recorder = self._recorder
        if recorder.is_quiet or optimizer not in self._optimizers or self._is_inner(optimizer):
            return
        self._stepping = None
        for group in optimizer.param_groups:
            for each in group["params"]:
                self._local.pop(self._number(each), None)
                self._norms.pop(self._number(each), None)
        self._before_clip = {}
        recorder.steps += 1
        recorder.write("step_end", optimizer=self._optimizers.index(optimizer))
        if recorder.steps >= recorder.last_step:
            raise StopScript

    def _create_scheduler(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        if not self._recorder.is_quiet:
            self._recorder.write("new_scheduler", name=type(scheduler).__name__, site=self._recorder.site())
        original(scheduler, *args, **kwargs)

    def _step_scheduler(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = self._recorder
        if recorder.is_quiet or not isinstance(scheduler, ReduceLROnPlateau):
            return original(scheduler, *args, **kwargs)
        metric = args[0] if args else kwargs.get("metrics")
        recorder.write("scheduler", name=type(scheduler).__name__, metric=_to_float(metric), site=recorder.site())
        with recorder.quiet():
            return original(scheduler, *args, **kwargs)


def _to_float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _hash_all(parameters: list[Tensor]) -> list[str]:
    parts = [local_part(each) for each in parameters]
    if sum(each.numel() * each.element_size() for each in parts) > _MAX_HASHED_BYTES:
        parts = [each.flatten()[:: max(1, each.numel() // _SAMPLED)] for each in parts]
    with torch.no_grad():
        return [hash_tensor(each) for each in parts]
