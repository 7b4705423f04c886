"""What a rank computes: calls of modules, wrappers, backward passes and the scale of the loss in each of them."""

import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from samestep.verify.recorder.data_observer import DataObserver
from samestep.verify.recorder.fingerprints import (
    count_rows,
    hash_rows,
    hash_tensor,
    is_sharded,
    is_tracing,
    leaves,
    local_part,
    mapped_bytes,
    rng_state,
)
from samestep.verify.recorder.recorder import Recorder, wrap
from samestep.verify.recorder.replay import Replay

MODULE_CALL: Final = "__call__"  # of nn.Module
BATCHNORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # that each rank computes from its own batch
NORMS: Final = (  # layers with statistics of the batches of a rank
    *BATCHNORMS, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
_MAX_NODES: Final = 400
_MEAN_LOSSES: Final = (
    "MeanBackward", "NllLoss", "MseLoss", "BinaryCrossEntropy", "SmoothL1Loss", "HuberLoss", "KlDiv", "SoftMarginLoss",
    "MultiMarginLoss", "MultilabelMarginLoss", "CtcLoss",
)  # fmt: skip
_MEAN: Final = 1  # of torch's enumeration of reductions
_MIN_INSIDE_BYTES: Final = 2**20
_MAX_HASHED_BYTES: Final = 256 * 2**20


class ModelObserver:
    """Follows the outermost calls of modules; a module inside of another one is part of its call."""

    def __init__(self, recorder: Recorder, data: DataObserver, replay: Replay) -> None:
        self._recorder, self._data, self._replay = recorder, data, replay
        self._depth = 0
        self._backward_depth = 0
        self._modules: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._wrappers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._covered: dict[int, Tensor] = {}  # parameters that DDP has found when it was created, by id
        self._hashes: dict[int, tuple[int, str]] = {}
        self.called: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Modules with trainable parameters that were called with gradients."""
        self._trained: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # with those that lead to the loss
        self._inside: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # called without gradients while one is trained
        self._is_training = False  # whether the outermost call is one with gradients
        self._results: dict[tuple[str, ...], nn.Module] = {}  # modules without parameters by what they have computed
        self.before_training: Callable[[nn.Module], None] = lambda module: None
        """Is called with a sharded module before a call that trains it."""
        self.after_backward: Callable[[], None] = lambda: None
        """Is called after a backward pass in which a wrapper has exchanged gradients."""
        self._restarts = False

    def install(self) -> None:
        """Observe every module from now on."""
        call = getattr(nn.Module, MODULE_CALL)
        observer = self

        def observed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if observer._depth or observer._recorder.is_quiet or is_tracing():
                if observer._is_training and not torch.is_grad_enabled() and module not in observer._inside:
                    observer._note_inside(module)
                return call(module, *args, **kwargs)
            return observer._call(call, module, args, kwargs)

        nn.Module.__call__ = observed  # pyright: ignore[reportAttributeAccessIssue]
        wrap(Tensor, "backward", self._backward)
        wrap(torch.autograd, "backward", self._autograd_backward)
        wrap(DistributedDataParallel, "__init__", self._create_ddp)
        wrap(DistributedDataParallel, "join", self._join)
        wrap(DistributedDataParallel, "register_comm_hook", self._register_hook)
        wrap(Join, "__init__", self._join)
        wrap(Tensor, "requires_grad_", self._unfreeze)
        wrap(nn.Module, "add_module", self._add_module)

    def _create_ddp(self, original: Any, ddp: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        recorder = self._recorder
        if recorder.settings.device == "cpu":
            args, kwargs = (), {**kwargs, **dict(zip(("device_ids", "output_device"), args, strict=False))}
            kwargs.pop("device_ids", None)
            kwargs.pop("output_device", None)
        site = recorder.site()
        recorder.write("wrap", wrapper="ddp", state="start", site=site)
        original(ddp, module, *args, **kwargs)
        self._wrappers.add(ddp)
        self._covered |= {id(each): each for each in module.parameters() if each.requires_grad}
        recorder.write(
            "wrap", wrapper="ddp", state="end", site=site, module=self.number(ddp), inner=self.number(module),
            find_unused=bool(kwargs.get("find_unused_parameters", False)),
            broadcasts=bool(kwargs.get("broadcast_buffers", True)),
            parameters=[name for name, each in module.named_parameters() if each.requires_grad],
        )  # fmt: skip

    def _join(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._recorder.write("join", site=self._recorder.site())
        return original(*args, **kwargs)

    def _register_hook(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._recorder.write("comm_hook", site=self._recorder.site())
        return original(*args, **kwargs)

    def note_restart(self) -> None:
        """Note that the backward pass that runs begins a new sum of gradients: the script has dropped the last one."""
        self._restarts = True

    def _unfreeze(self, original: Any, tensor: Any, requires_grad: bool = True) -> Any:
        if self._wrappers and requires_grad and not tensor.requires_grad and not self._recorder.is_quiet:
            self._recorder.write("changed", what="unfrozen", site=self._recorder.site())
        return original(tensor, requires_grad)

    def _add_module(self, original: Any, module: nn.Module, name: str, added: Any) -> Any:
        if self._wrappers and not self._recorder.is_quiet:
            self._recorder.write("changed", what="added", site=self._recorder.site())
        return original(module, name, added)

    def buffers(self) -> dict[str, str]:
        """Hashes of the buffers of modules that training uses, without the statistics of normalization layers."""
        found = dict[str, str]()
        for outer in sorted(self._trained, key=self.number):
            for path, module in outer.named_modules():
                if isinstance(module, NORMS):
                    continue
                for name, buffer in module.named_buffers(recurse=False):
                    key = f"{path}.{name}".removeprefix("module.").removeprefix(".")
                    while key in found:  # of another module
                        key += "'"
                    found[key] = hash_tensor(buffer)
        return found

    def number(self, module: nn.Module) -> int:
        """The number of a module; a new one is written first."""
        known = self._modules.get(module)
        if known is None:
            known = self._modules[module] = len(self._modules)
            self._recorder.write("module", id=known, **self._describe(module))
        return known

    def _describe(self, module: nn.Module) -> dict[str, Any]:
        parameters = list(module.parameters())
        return {
            "class": type(module).__qualname__,
            "wrapper": self.wrapper(module),
            "trainable": sum(each.numel() for each in parameters if each.requires_grad),
            "frozen": sum(each.numel() for each in parameters if not each.requires_grad),
            "bytes": sum(each.numel() * each.element_size() for each in parameters),
            "local": sum(local_part(each).numel() * each.element_size() for each in parameters),
            "mapped": mapped_bytes(parameters),
            "batchnorm": _count_batchnorm(module),
            "buffers": sum(1 for _ in module.buffers()),
        }

    def covered(self) -> set[int]:
        """The ids of the parameters whose gradients DDP exchanges: those that it found when it was created."""
        return set(self._covered)

    def wrapper(self, module: nn.Module) -> str:
        """How a module is distributed: "ddp", "fsdp", "inside ddp" or ""."""
        if isinstance(module, DistributedDataParallel) or isinstance(
            getattr(module, "_forward_module", None),  # of Fabric
            DistributedDataParallel,
        ):
            return "ddp"
        if any(each.__name__.startswith("FSDP") for each in type(module).__mro__) or _is_fsdp1(module):
            return "fsdp"
        if any(getattr(each, "module", None) is module for each in self._wrappers):
            return "inside ddp"
        return ""

    def _call(self, call: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self._recorder
        trains = torch.is_grad_enabled() and module.training
        with recorder.quiet():
            if trains and self.wrapper(module) == "fsdp":
                self.before_training(module)
            self._replay.before_call(module, trains)
            inputs = [args, kwargs]
            rows, hashes = count_rows(inputs), hash_rows(inputs)
            is_frozen = not any(each.requires_grad for each in module.parameters())
            weights = self._hash(module) if is_frozen or not trains else ""
            rng = rng_state()
            buffers = "" if torch.is_grad_enabled() else "-".join(hash_tensor(each)[:6] for each in module.buffers())
        recorder.write(
            "call", buffers=buffers, module=self.number(module), wrapper=self.wrapper(module), site=recorder.site(2),
            training=_inner(module).training, grad=torch.is_grad_enabled(), rows=rows, hashes=hashes[:1],
            weights=weights, rng=rng, epoch=self._data.current,
        )  # fmt: skip
        if trains and any(True for each in module.parameters() if each.requires_grad):
            self.called.add(module)
            self._trained.add(module)
            self._trained.update(fed for key, fed in self._results.items() if key in map(tuple, hashes))
            self._results.clear()
        self._depth += 1
        self._is_training = trains
        try:
            result = call(module, *args, **kwargs)
            if trains and module not in self._trained and any(True for _ in module.buffers()):
                self._note_result(module, result)
            return result
        finally:
            self._depth -= 1
            self._is_training = False
            with recorder.quiet():
                after = rng_state()
            recorder.write("call_end", module=self._modules.get(module), rng=after)

    def _note_inside(self, module: nn.Module) -> None:
        """Note a frozen module that another one calls without gradients while it is trained, such as its teacher."""
        self._inside.add(module)
        parameters = list(module.parameters())
        size = sum(local_part(each).numel() * each.element_size() for each in parameters)
        if self._recorder.is_quiet or size < _MIN_INSIDE_BYTES or any(each.requires_grad for each in parameters):
            return
        with self._recorder.quiet():
            is_repeated = _is_checkpointed()
        if not is_repeated:
            self._recorder.write("frozen_inside", module=self.number(module), site=self._recorder.site(2))

    def _note_result(self, module: nn.Module, result: Any) -> None:
        """Note whether the loss depends on a module without parameters: not on one that computes a metric."""
        if any(isinstance(each, Tensor) and each.requires_grad for each in leaves(result)):
            self._trained.add(module)
            return
        with self._recorder.quiet():
            self._results |= {tuple(rows): module for rows in hash_rows(result)}

    def _hash(self, module: nn.Module) -> str:
        """A hash of the parameters of a module, computed again after each optimizer step."""
        number = id(module)
        known = self._hashes.get(number)
        if known is not None and known[0] == self._recorder.steps:
            return known[1]
        parameters = list(module.parameters())
        size = sum(each.numel() * each.element_size() for each in parameters)
        if size > _MAX_HASHED_BYTES or not parameters or any(not _is_plain(each) for each in parameters):
            return ""
        found = "-".join(hash_tensor(each)[:6] for each in parameters[:64])
        self._hashes[number] = self._recorder.steps, found
        return found

    def _backward(self, original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._run_backward(original, (tensor, *args), kwargs, tensor)

    def _autograd_backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        root = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
        return self._run_backward(original, (tensors, *args), kwargs, root)

    def _run_backward(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any], root: Any) -> Any:
        recorder = self._recorder
        if recorder.is_quiet or self._backward_depth:
            return original(*args, **kwargs)
        scales = list[float]()
        with recorder.quiet():
            value = float(root.detach()) if isinstance(root, Tensor) and root.numel() == 1 else None
            handles = _watch_scales(root, scales)
            rng = rng_state()
        syncs = [bool(getattr(each, "require_backward_grad_sync", True)) for each in self._wrappers]
        self._data.note_training()
        recorder.write("backward", site=recorder.site(2), loss=value, syncs=syncs, rng=rng, epoch=self._data.current)
        self._backward_depth += 1
        self._restarts = False
        try:
            result = original(*args, **kwargs)
            with recorder.quiet():
                if any(syncs) or not syncs:
                    self.after_backward()
            return result
        finally:
            self._backward_depth -= 1
            for handle in handles:
                handle.remove()
            recorder.write("backward_end", scales=scales, restarts=self._restarts)


def _inner(module: nn.Module) -> nn.Module:
    """The module inside of DDP, which may have been put into another mode than the wrapper."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def _is_checkpointed() -> bool:
    """Whether this is a forward pass that activation checkpointing runs without gradients, and later again."""
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        frame = frame.f_back
    return False


def _is_plain(parameter: Any) -> bool:
    """Whether a parameter is neither sharded nor replaced for one call, as by torch.func.functional_call."""
    return isinstance(parameter, nn.Parameter) and not is_sharded(parameter)


def _count_batchnorm(module: nn.Module) -> int:
    return sum(isinstance(each, BATCHNORMS) for each in module.modules())


def _is_fsdp1(module: nn.Module) -> bool:
    return type(module).__name__ == "FullyShardedDataParallel"


def _watch_scales(root: Any, scales: list[float]) -> list[Any]:
    """Collect the gradients that reach the means in the graph of a loss: how much a mean counts in it."""
    handles = list[Any]()
    if not isinstance(root, Tensor) or root.grad_fn is None or root.numel() != 1:
        return handles

    def collect(gradients: tuple[Tensor | None, ...]) -> None:
        if gradients and gradients[0] is not None and gradients[0].numel() == 1:
            scales.append(float(gradients[0].detach()))

    queue, seen = [root.grad_fn], {root.grad_fn}
    while queue and len(seen) < _MAX_NODES:
        node: Any = queue.pop(0)
        if node.name().startswith(_MEAN_LOSSES):
            if getattr(node, "_saved_reduction", _MEAN) == _MEAN:
                handles.append(node.register_prehook(collect))
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)
    return handles
