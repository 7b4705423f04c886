"""The user's model: build it without memory for its weights, compute a loss, find its blocks and what they cost."""

import inspect
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from samestep.data.loader import list_tensors, map_tensors
from samestep.errors import DataError, MeasurementTooSlow, PlanError
from samestep.parallel.fsdp import find_blocks
from samestep.planner.model_profile import ModelPart, ModelProfile, PeakMemory
from samestep.planner.step_recorder import Args, OpCounter, tensor_leaves
from samestep.torch_private import cannot_be_traced, has_no_memory, with_memory

Loss = Callable[[nn.Module, object], torch.Tensor]
Build = Callable[[], object]
_EXAMPLE = "def build(): return Net(), (torch.zeros(8, 3, 224, 224), torch.zeros(8, dtype=torch.long))"
_NO_DEVICE = (
    "Build the model and its batch without a device: a plan does not need one, and Run moves them to its device."
)
_CUDA_ERRORS = ("cuda", "nvidia driver", "no kernel image")
_SMALL = 0.01  # the value of weights without values in a measurement
_MAX_INTEGERS = 2**26  # elements of an integer tensor that is computed with real values


@dataclass(frozen=True)
class TracedModel:
    """The user's model, an example batch, and how to compute a loss."""

    model: nn.Module  # the model
    example: object  # a batch with samples along the first dimension of its tensors
    samples: int  # number of samples in the example
    loss: Loss | None  # the user's loss function of model and batch; None: the loss comes from the model's outputs

    def batch(self, samples: int) -> object:
        """A batch of this size that repeats the samples of the example; tensors without samples stay as they are."""
        rows = torch.arange(samples) % self.samples

        def take(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[rows] if tensor.dim() and tensor.shape[0] == self.samples else tensor

        return map_tensors(self.example, take)

    def compute_loss(self, batch: object) -> torch.Tensor:
        """A scalar loss from a forward pass."""
        if self.loss is None:
            return _default_loss(*_call_model(self.model, batch))
        with explain_errors(
            "the loss function",
            "failed",
            "It is called with the model and a batch like the example: lambda model, batch: "
            "cross_entropy(model(batch[0]), batch[1])",
        ):
            losses = self.loss(self.model, batch)
        if not torch.is_tensor(losses) or not losses.requires_grad:
            raise PlanError(
                f"The loss function returned {_describe(losses)}, but must return a tensor with gradients, for example "
                "lambda model, batch: cross_entropy(model(batch[0]), batch[1])"
            )
        return losses.mean()


def build_model(build: Build, loss: Loss | None) -> TracedModel:
    """Call the user's build function and check what it returns."""
    name = f"{getattr(build, '__qualname__', type(build).__name__)}()"
    with explain_errors(name, "failed", "Call it on its own to see the traceback."):
        built = build()
    if not isinstance(built, tuple | list) or len(built) not in (2, 3):  # pyright: ignore[reportUnknownArgumentType]
        raise PlanError(f"{name} returned {_describe(built)}. Return a model and an example batch: {_EXAMPLE}")
    model, example, *rest = cast("Args", built)
    if not isinstance(model, nn.Module):
        raise PlanError(f"{name} returned {_describe(model)} as its model. Return an nn.Module first: {_EXAMPLE}")
    _check_model(name, model)
    if rest and not callable(rest[0]):
        raise PlanError(
            f"{name} returned {_describe(rest[0])} as its third value. Omit it, or return a function of model and "
            "batch that returns the loss."
        )
    return TracedModel(model, example, _count_samples(name, example), cast("Loss", rest[0]) if rest else loss)


def _check_model(build_name: str, model: nn.Module) -> None:
    if lazy := next((name for name, p in model.named_parameters() if is_lazy(p)), None):
        raise PlanError(
            f"Parameter {lazy!r} of {type(model).__name__} belongs to a lazy layer and has no shape yet. Call the "
            f"model once with the example batch in {build_name}, then return both."
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise PlanError(f"{type(model).__name__} has no trainable parameters. A plan is made for training.")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type not in ("cpu", "meta"):
            raise PlanError(f"{build_name} puts {name!r} on {tensor.device}. {_NO_DEVICE}")


def _count_samples(build_name: str, example: object) -> int:
    try:
        tensors = list_tensors(example)
    except DataError as error:
        raise PlanError(f"{build_name} returned an invalid example batch: {error}") from error
    sizes = [tensor.shape[0] for tensor in tensors if tensor.dim()]
    if not sizes or not sizes[0]:
        raise PlanError(
            f"{build_name} returned {_describe(example)} as its example batch. Return tensors with samples along their "
            f"first dimension, alone or in tuples, lists and dicts: {_EXAMPLE}"
        )
    return sizes[0]


def _call_model(model: nn.Module, batch: object) -> tuple[object, torch.Tensor | None]:
    """The outputs of the model, and the second item of a pair as labels if the model takes the first only."""
    with explain_errors(
        type(model).__name__,
        "cannot be called with the example batch",
        "Return the batch in the form that the model takes, or return a third value from the build function, lambda "
        "model, batch: loss, that calls the model.",
    ):
        if isinstance(batch, Mapping):
            return model(**cast("Mapping[str, object]", batch)), None
        if not isinstance(batch, tuple | list):
            return model(batch), None
        values, labels = cast("Args", batch), ()
        try:
            inspect.signature(model.forward).bind(*values)
        except TypeError:  # the model takes the first item only
            values, labels = values[:1], values[1:]
        return model(*values), labels[0] if len(labels) == 1 and isinstance(labels[0], torch.Tensor) else None


def _default_loss(output: object, labels: torch.Tensor | None) -> torch.Tensor:
    """The loss that the model returns, or the cross entropy with labels that match, or the sum of all outputs."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss.mean()
    if isinstance(output, torch.Tensor) and labels is not None and (loss := _cross_entropy(output, labels)) is not None:
        return loss
    differentiable = [t for t in _output_tensors(output) if t.is_floating_point() and t.requires_grad]
    if not differentiable:
        raise PlanError(
            f"The model returned {_describe(output)}, which has no gradients. Return a loss, or return a third value "
            "from the build function: lambda model, batch: loss"
        )
    return torch.stack([tensor.float().sum() for tensor in differentiable]).sum()


def _cross_entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
    """Cross entropy if the labels match the output without its class dimension, the second or the last."""
    if labels.is_floating_point() or output.dim() < 2:
        return None
    if labels.shape == output.shape[:1] + output.shape[2:]:
        return nn.functional.cross_entropy(output, labels)
    if labels.shape == output.shape[:-1]:
        return nn.functional.cross_entropy(output.flatten(0, -2), labels.flatten())
    return None


def _output_tensors(output: object) -> list[torch.Tensor]:
    """Tensors in tuples, lists and dicts, and in the attributes of an output object."""
    if isinstance(output, Mapping):
        output = list(cast("Mapping[str, object]", output).values())
    elif not isinstance(output, torch.Tensor | tuple | list) and hasattr(output, "__dict__"):
        output = list(vars(output).values())
    return tensor_leaves(output)


@contextmanager
def explain_errors(what: str, problem: str, advice: str) -> Generator[None]:
    """Turn an exception into a PlanError with the message "{what} {problem} (the exception). {advice}".

    Exceptions because a trace has no values pass through.
    """
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # also SystemExit, and classes of the user
        if cannot_be_traced(error) or isinstance(error, PlanError):
            raise
        text = describe_error(error)
        needs_cuda = any(word in text.lower() for word in _CUDA_ERRORS)
        problem, advice = ("needs CUDA", _NO_DEVICE) if needs_cuda else (problem, advice)
        raise PlanError(f"{what} {problem} ({text}). {advice}") from error


def describe_error(error: BaseException) -> str:
    """The type of an exception and the first line of its text.

    >>> describe_error(ValueError("no such file"))
    'ValueError: no such file'
    """
    kind, text = type(error).__name__, first_line(error)
    return f"{kind}: {text}" if text != kind else kind


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type if it has no text."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # noqa: BLE001  # of a class of the user
        lines = []
    return lines[0] if lines else type(error).__name__


def _describe(value: object) -> str:
    """What a value is, for an error message."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(cast('tuple[object, ...]', value))}"
    return "None" if value is None else f"a {type(value).__name__}"


class FloatsOnMeta(TorchDispatchMode):
    """Inside, new floating-point tensors are created on the meta device, and so are results computed from them."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: Args = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Run the operation on the meta device if it creates or takes a floating-point tensor."""
        kwargs = dict(kwargs or {})
        tensors = tensor_leaves((args, kwargs))
        if tensors and not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        takes_device = any(argument.name == "device" for argument in func._schema.arguments)  # pyright: ignore[reportPrivateUsage]
        on_meta = {**kwargs, "device": torch.device("meta")} if takes_device else kwargs
        if tensors:
            args, on_meta = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, on_meta))
            return func(*args, **on_meta)
        result = func(*args, **on_meta)
        return func(*args, **kwargs) if _are_integers(result) else result


class RealIntegers(TorchDispatchMode):
    """Inside `without_memory()`, operations on integers alone are computed with real values.

    So are single numbers computed from integers, and a single random number in [0, 1), which is always the largest one:
    code such as `if torch.rand([]) < layerdrop` skips no layer, so that the trace counts all of them. A mask computed
    from floating-point numbers has no values: as an index, it selects everything.
    """

    def __init__(self) -> None:
        super().__init__()
        self.selected_all = False
        """Whether a mask without values selected everything, so that the trace is an upper bound."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: Args = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Run the operation on shapes, and again with values if they are known."""
        kwargs = kwargs or {}
        if func.overloadpacket in _INDEXING:
            args = (args[0], self._positions(*cast("Any", args)), *args[2:])
        elif func.overloadpacket is torch.ops.aten._pack_padded_sequence:
            return _pack(*cast("Any", args))
        elif func.overloadpacket in _SELECTING and (found := self._select(*cast("Any", args))) is not None:
            return found
        tensors = tensor_leaves((args, kwargs))
        if func.namespace == "prim" or not all(map(_has_value, tensors)):
            return func(*args, **kwargs)
        in_place = bool(tensors) and func._schema.is_mutable  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
        if not in_place:
            try:
                result: object = func(*args, **kwargs)
                if func.overloadpacket is torch.ops.aten.rand and isinstance(result, torch.Tensor):
                    return _largest_random_number(result)
                if not (_are_integers(result) or (tensors and _are_single_numbers(result))):
                    return result
            except Exception as error:
                if not cannot_be_traced(error):
                    raise
        with with_memory():
            return func(*args, **kwargs)

    def _positions(self, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], *rest: object) -> object:
        """The indices of a call with positions in place of masks."""
        values = rest[0] if rest else tensor
        if isinstance(values, torch.Tensor) and tensor.dtype != values.dtype:  # torch checks it with values only
            raise RuntimeError(
                f"Index put requires the source and destination dtypes match, got {tensor.dtype} for the destination "
                f"and {values.dtype} for the source."
            )
        found: list[torch.Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype == torch.bool and index.numel() <= _MAX_INTEGERS:
                found.extend(self._nonzero(index, index.shape).unbind(1))
            else:
                found.append(index)
        return found

    def _select(self, tensor: torch.Tensor, mask: torch.Tensor | None = None) -> object:
        """The result of nonzero() or masked_select(); None if torch computes it."""
        if mask is None:
            listed = has_no_memory(tensor) and tensor.numel() <= _MAX_INTEGERS
            return self._nonzero(tensor, tensor.shape) if listed else None
        shape = torch.broadcast_shapes(tensor.shape, mask.shape)
        if shape.numel() > _MAX_INTEGERS:
            return None
        return tensor.expand(shape)[self._nonzero(mask, shape).unbind(1)]

    def _nonzero(self, mask: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The positions of a mask that is expanded to a shape, one per row: all of them if it has no values."""
        with with_memory():
            if has_no_memory(mask):
                self.selected_all = True
                mask = torch.ones(1, dtype=torch.bool)
            return mask.expand(shape).nonzero()


_INDEXING = frozenset(
    getattr(torch.ops.aten, name) for name in ("index", "index_put", "index_put_", "_index_put_impl_")
)
_SELECTING = frozenset((torch.ops.aten.nonzero, torch.ops.aten.masked_select))


def _pack(padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A packed sequence and the number of rows at each of its time steps; the lengths are always on the CPU."""
    with with_memory():
        steps = torch.arange(int(lengths.max()))
        rows, total = (lengths > steps[:, None]).sum(1), int(lengths.sum())
    return padded.new_empty(total, *padded.shape[2:]), rows


def _largest_random_number(draw: torch.Tensor) -> torch.Tensor:
    """The largest number that torch.rand returns, if the draw is a single number."""
    if draw.numel() != 1:
        return draw
    with with_memory():
        return torch.full(draw.shape, 1 - 2.0**-24, dtype=draw.dtype)


def _has_value(tensor: torch.Tensor) -> bool:
    """Whether a trace knows the values: integers, and single numbers, unless they were computed from other numbers."""
    return not has_no_memory(tensor) and (_is_integer(tensor) or tensor.numel() == 1) and not tensor.requires_grad


def _are_single_numbers(result: object) -> bool:
    tensors = tensor_leaves(result)
    return bool(tensors) and all(tensor.numel() == 1 for tensor in tensors)


class MeasuredOnCpu(TorchDispatchMode):
    """Runs real micro-batches on the CPU, up to a time limit, and computes products of half precision in fp32.

    Most CPUs are very slow in fp16.
    """

    def __init__(self, seconds: float, too_slow: MeasurementTooSlow) -> None:
        super().__init__()
        self._end, self._too_slow = time.monotonic() + seconds, too_slow

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: Args = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Run the operation, in fp32 and then rounded if it is a product and its inputs are in half precision."""
        if time.monotonic() > self._end:
            raise self._too_slow
        half = next((t.dtype for t in tensor_leaves((args, kwargs)) if t.dtype in _HALF), None)
        if half is None or func.overloadpacket not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        wide: tuple[Args, dict[str, object]] = tree_map_only(
            torch.Tensor, lambda t: t.float() if t.dtype in _HALF else t, (args, dict(kwargs or {}))
        )
        return tree_map_only(torch.Tensor, lambda t: t.to(half), func(*wide[0], **wide[1]))


_HALF = (torch.bfloat16, torch.float16)
_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_grouped_mm")
)


def strip_memory(model: nn.Module, batch: object) -> object:
    """Replace floating-point tensors of the model, in place, and of the batch by tensors without memory.

    Tied weights stay tied. Call it inside `without_memory()` only, where new tensors have no memory.
    """
    known: dict[int, torch.Tensor] = {}

    def strip(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = _without_memory(tensor)
        return known[id(tensor)]

    _replace_tensors(model, strip)
    return map_tensors(batch, strip)


def give_memory(model: nn.Module) -> None:
    """Replace tensors of the model that are on the meta device, in place, by tensors on the CPU with small values.

    Tied weights stay tied.
    """
    known: dict[int, torch.Tensor] = {}

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in known:
            value = 0 if _is_integer(tensor) else _SMALL
            known[id(tensor)] = _as_parameter(tensor, torch.full_like(tensor, value, device="cpu"))
        return known[id(tensor)]

    _replace_tensors(model, fill)


def _replace_tensors(model: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for module in model.modules():
        containers: Any = (module._parameters, module._buffers, vars(module))  # pyright: ignore[reportPrivateUsage]  # setattr checks types
        for container in containers:
            for name, value in list(container.items()):
                if isinstance(value, torch.Tensor):
                    container[name] = function(value)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or (_is_integer(tensor) and not tensor.is_meta):
        return tensor
    return _as_parameter(tensor, torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"))


def _as_parameter(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, as a parameter if `tensor` is one."""
    if not isinstance(tensor, nn.Parameter):
        return value
    parameter = nn.Parameter(value, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter


def _is_integer(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _are_integers(result: object) -> bool:
    tensors = tensor_leaves(result)
    return bool(tensors) and all(_is_integer(tensor) and tensor.numel() <= _MAX_INTEGERS for tensor in tensors)


def resolve_classes(model: nn.Module, classes: Sequence[type[nn.Module] | str]) -> tuple[type[nn.Module], ...]:
    """Classes of submodules; names are looked up in the model."""
    known = {type(module).__name__: type(module) for module in model.modules() if module is not model}
    for name in classes:
        if isinstance(name, str) and name not in known:
            raise PlanError(
                f"{type(model).__name__} has no submodule of class {name}. Name a class that repeats in the model; it "
                f"has {', '.join(sorted(known)) or 'none'}."
            )
    return tuple(known[kind] if isinstance(kind, str) else kind for kind in classes)


def named_blocks(model: nn.Module, classes: Sequence[type[nn.Module]]) -> dict[str, nn.Module]:
    """The blocks that FSDP gathers separately, by name, in the order of the model."""
    found = {id(block) for block in find_blocks(model, classes)}
    return {name: module for name, module in model.named_modules() if id(module) in found}


def checkpointable_classes(model: nn.Module, classes: Sequence[type[nn.Module]]) -> tuple[type[nn.Module], ...]:
    """Classes for activation checkpointing: those given, or the classes of repeated blocks with trainable parameters.

    A single layer is left out: it has no inner activations that could be recomputed.
    """
    if classes:
        return tuple(classes)
    blocks = [inner for block in named_blocks(model, ()).values() for inner in _unpack_sequential(block)]
    blocks = [block for block in blocks if any(True for _ in block.children())]
    trainable = Counter(type(block) for block in blocks if any(p.requires_grad for p in block.parameters()))
    return tuple(kind for kind, count in trainable.items() if count > 1)


def _unpack_sequential(block: nn.Module) -> Iterator[nn.Module]:
    """The block, or the modules of an nn.Sequential, whose class does not say what repeats."""
    if type(block) is not nn.Sequential:
        yield block
        return
    for child in block:
        yield from _unpack_sequential(child)


@dataclass
class PartCalls:
    """The forward passes of a submodule, or of what is inside of it if the model calls that directly."""

    flops: float = 0.0
    needs_gradient: bool = False  # whether any output does
    depth: int = 0  # how many of its modules are being called now
    entered_at: float = 0.0  # FLOPs of the counter when the outermost of them was called

    def enter(self, counter: OpCounter, *_: object) -> None:
        """One of its modules is called."""
        if not self.depth:
            self.entered_at = counter.flops
        self.depth += 1

    def leave(self, counter: OpCounter, _module: nn.Module, _inputs: object, output: object) -> None:
        """One of its modules returns."""
        self.depth -= 1
        if not self.depth:
            self.flops += counter.flops - self.entered_at
        self.needs_gradient |= any(tensor.requires_grad for tensor in tensor_leaves(output))


@contextmanager
def watch_parts(counter: OpCounter, parts: Iterable[nn.Module]) -> Generator[Mapping[nn.Module, PartCalls]]:
    """Watch the forward passes of submodules inside."""
    calls = {part: PartCalls() for part in parts}
    hooks: list[RemovableHandle] = []
    for part, watched in calls.items():
        for module in part.modules():
            hooks.append(module.register_forward_pre_hook(partial(watched.enter, counter)))
            hooks.append(module.register_forward_hook(partial(watched.leave, counter)))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def describe_parts(
    modules: Mapping[str, nn.Module], calls: Mapping[nn.Module, PartCalls], samples: int
) -> tuple[ModelPart, ...]:
    """Bytes of each module, its FLOPs per sample, and whether gradients flow through it."""
    parts: list[ModelPart] = []
    for name, module in modules.items():
        called = calls.get(module, PartCalls())
        trainable = storage_bytes(p for p in module.parameters() if p.requires_grad)
        frozen = storage_bytes(p for p in module.parameters() if not p.requires_grad)
        frozen += storage_bytes(module.buffers())
        parts.append(ModelPart(name, trainable, frozen, called.flops / samples, called.needs_gradient))
    return tuple(parts)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of tensors, each counted once: views and tied weights add nothing."""
    storages = {id(storage): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def profile_weights(model: nn.Module) -> ModelProfile:
    """Profile without an example batch: weights, gradients and Adam's state; activations and work count as 0."""
    by_dtype: dict[bool, dict[str, int]] = {True: {}, False: {}}
    for parameter in model.parameters():
        sizes, name = by_dtype[parameter.requires_grad], str(parameter.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + parameter.numel() * parameter.element_size()
    trainable = sum(by_dtype[True].values())
    return ModelProfile(
        name=type(model).__name__,
        trainable=by_dtype[True],
        frozen=by_dtype[False],
        buffers=storage_bytes(model.buffers()),
        gradients=trainable,
        optimizer="Adam",
        optimizer_state=2 * trainable,  # Adam's two moments
        activations=PeakMemory.linear(0, 0),
        checkpointed_activations=None,
        forward_flops=0.0,
        step_flops=0.0,
        checkpointed_step_flops=0.0,
        ops=(),
        traced_samples=1,
        blocks=describe_parts(named_blocks(model, ()), {}, samples=1),
        frozen_parts=(),
        method="from the weights only: activations are not counted",
    )
