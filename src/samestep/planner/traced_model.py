"""The model that is looked at: built by the user's function, called with an example batch, its loss made."""

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from samestep.data.loader import list_tensors, map_tensors
from samestep.errors import DataError, PlanError
from samestep.torch_private import cannot_be_traced, has_no_memory, with_memory

_ASKS_FOR_CUDA = ("cuda", "nvidia driver", "no kernel image")


@contextmanager
def telling(what: str, explain: Callable[[str], str]) -> Generator[None]:
    """Turn what `what` raises inside into a PlanError by `explain`; asking for values is left to the trace."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if cannot_be_traced(error) or isinstance(error, PlanError):
            raise
        said = said_by(error)
        raise PlanError(_without_device(what, said) if _asks_for_cuda(said) else explain(said)) from error


def said_by(error: BaseException) -> str:
    """The kind of an error and the first line of its text.

    >>> said_by(ValueError("no such file"))
    'ValueError: no such file'
    """
    kind = type(error).__name__
    return f"{kind}: {first_line(error)}" if str(error).strip() else kind


def first_line(error: BaseException) -> str:
    """The first line of its text, or its kind where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _asks_for_cuda(said: str) -> bool:
    return any(word in said.lower() for word in _ASKS_FOR_CUDA)


def _without_device(what: str, said: str) -> str:
    return (
        f"{what} asks for CUDA ({said}): build the model and its batch without a device; a plan needs none, and Run "
        "moves them to its own"
    )


_ASKED_FOR_VALUES = object()
_LARGEST = 2**26  # elements of a tensor of whole numbers that is computed for real


class FloatsOnMeta(TorchDispatchMode):
    """Inside, new floating tensors are on the meta device, and so is what is computed with them."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operation on the meta device where it makes or takes a tensor of that kind."""
        named = dict(kwargs or {})
        tensors = _tensors((args, named))
        if tensors and not any(tensor.is_meta for tensor in tensors):
            return func(*args, **named)
        away = {**named, "device": torch.device("meta")} if _takes_device(func) else named
        if tensors:
            args, away = tree_map_only(torch.Tensor, _to_meta, (args, away))
            return func(*args, **away)
        made = func(*args, **away)
        return func(*args, **named) if _whole(made) else made


class WholeNumbers(TorchDispatchMode):
    """Inside `without_memory()`, computes what depends on whole numbers alone for real."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operation by shapes; again for real where nothing floating is in it."""
        named = kwargs or {}
        tensors = _tensors((args, named))
        if func.namespace == "prim" or not all(map(_has_value, tensors)):
            return func(*args, **named)
        if tensors and func._schema.is_mutable:  # pyright: ignore[reportPrivateUsage]  # torch has no other name for it
            return _for_real(func, args, named)
        made = _by_shapes(func, args, named)
        return _for_real(func, args, named) if made is _ASKED_FOR_VALUES or _whole(made) else made


def to_shapes(model: nn.Module, batch: object) -> object:
    """Take the memory of what is floating from a model, in place, and from the batch; tied weights stay tied.

    Only inside `without_memory()`, where new tensors are shapes alone.
    """
    known: dict[int, torch.Tensor] = {}

    def shape(tensor: torch.Tensor) -> torch.Tensor:
        """The shape of a tensor; of the same one, the same."""
        if id(tensor) not in known:
            known[id(tensor)] = _shape(tensor)
        return known[id(tensor)]

    for module in model.modules():
        own: Any = (module._parameters, module._buffers, vars(module))  # pyright: ignore[reportPrivateUsage]  # setattr would refuse
        for held in own:
            for name, value in list(held.items()):
                if isinstance(value, torch.Tensor):
                    held[name] = shape(value)
    return map_tensors(batch, shape)


def _shape(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or (_is_whole(tensor) and not tensor.is_meta):
        return tensor
    bare = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    if not isinstance(tensor, nn.Parameter):
        return bare
    parameter = nn.Parameter(bare, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter


def _by_shapes(func: Callable[..., object], args: tuple[object, ...], named: Mapping[str, object]) -> object:
    try:
        return func(*args, **named)
    except Exception as error:
        if not cannot_be_traced(error):
            raise
        return _ASKED_FOR_VALUES


def _has_value(tensor: torch.Tensor) -> bool:
    return _is_whole(tensor) and not has_no_memory(tensor)


def _for_real(func: Callable[..., object], args: tuple[object, ...], named: Mapping[str, object]) -> object:
    with with_memory():
        return func(*args, **named)


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _whole(made: object) -> bool:
    tensors = _tensors(made)
    return bool(tensors) and all(_is_whole(tensor) and tensor.numel() <= _LARGEST for tensor in tensors)


def _takes_device(func: OpOverload) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)  # pyright: ignore[reportPrivateUsage]


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


Loss = Callable[[nn.Module, object], torch.Tensor]
Build = Callable[[], object]
_EXAMPLE = "def build(): return Net(), (torch.zeros(8, 3, 224, 224), torch.zeros(8, dtype=torch.long))"


@dataclass(frozen=True)
class Subject:
    """A model, an example batch, and how a loss comes out of them."""

    model: nn.Module
    """As the user built it."""
    example: object
    """A batch with samples along the first dimension of its tensors."""
    samples: int
    """How many samples the example has."""
    loss: Loss | None
    """The user's own way from model and batch to a loss; None: made from what the model gives."""

    def batch(self, samples: int) -> object:
        """A batch of so many samples, those of the example over and over; what is not by sample stays as it is."""
        rows = torch.arange(samples) % self.samples

        def take(tensor: torch.Tensor) -> torch.Tensor:
            """Rows of one tensor."""
            return tensor[rows] if tensor.dim() and tensor.shape[0] == self.samples else tensor

        return map_tensors(self.example, take)

    def compute_loss(self, batch: object) -> torch.Tensor:
        """One number to go backward from, out of a forward pass."""
        if self.loss is not None:
            with telling("the loss function", _why_loss_failed):
                losses = self.loss(self.model, batch)
            if not torch.is_tensor(losses) or not losses.requires_grad:
                raise PlanError(
                    f"loss gave {_told(losses)}: it must give a tensor that gradients come from, for example "
                    "lambda model, batch: cross_entropy(model(batch[0]), batch[1])"
                )
            return losses.mean()
        return _stand_in(_call(self.model, batch), _left_over(self.model, batch))


def build_subject(build: Build, loss: Loss | None) -> Subject:
    """Call the user's function and check what it returns."""
    with telling(_name(build), lambda said: _why_build_failed(build, said)):
        built = build()
    if not isinstance(built, tuple | list) or len(built) not in (2, 3):  # pyright: ignore[reportUnknownArgumentType]
        raise PlanError(f"{_name(build)} returned {_told(built)}: return a model and an example batch, {_EXAMPLE}")
    model, example, *own = cast("tuple[object, ...]", built)
    if not isinstance(model, nn.Module):
        raise PlanError(f"{_name(build)} returned {_told(model)} as its model: return an nn.Module first, {_EXAMPLE}")
    _check_model(build, model)
    return Subject(model, example, _count_samples(build, example), _own_loss(build, own) or loss)


def _check_model(build: Build, model: nn.Module) -> None:
    if lazy := next((name for name, p in model.named_parameters() if is_lazy(p)), None):
        raise PlanError(
            f"{lazy!r} of {type(model).__name__} has no shape yet, as in every lazy layer: call the model once with "
            f"the example batch in {_name(build)}, then return both"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise PlanError(f"{type(model).__name__} has no parameter that trains: a plan is made for training")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type not in ("cpu", "meta"):
            raise PlanError(
                f"{_name(build)} puts {name!r} on {tensor.device}: build the model and its batch without a device; a "
                "plan needs none, and Run moves them to its own"
            )


def _own_loss(build: Build, own: list[object]) -> Loss | None:
    if own and not callable(own[0]):
        raise PlanError(
            f"{_name(build)} returned {_told(own[0])} as its third value: leave it out, or return a function of model "
            "and batch that gives the loss"
        )
    return cast("Loss", own[0]) if own else None


def _count_samples(build: Build, example: object) -> int:
    try:
        tensors = list_tensors(example)
    except DataError as error:
        raise PlanError(f"{_name(build)} returned a batch that cannot be used: {error}") from error
    sizes = [tensor.shape[0] for tensor in tensors if tensor.dim()]
    if not sizes or not sizes[0]:
        raise PlanError(
            f"{_name(build)} returned {_told(example)} as its example batch: return tensors with samples along their "
            f"first dimension, alone or in tuples, lists and dicts, {_EXAMPLE}"
        )
    return sizes[0]


def _why_build_failed(build: Build, said: str) -> str:
    return f"{_name(build)} failed, so there is no model to look at ({said}): call it by itself to see where"


def _why_loss_failed(said: str) -> str:
    return (
        f"the loss function failed ({said}): it is called with the model and a batch like the example, lambda model, "
        "batch: cross_entropy(model(batch[0]), batch[1])"
    )


def _call(model: nn.Module, batch: object) -> object:
    """Call the model as its signature allows: with all of the batch, or with its first item."""
    with telling(type(model).__name__, lambda said: _why_call_failed(model, said)):
        if isinstance(batch, Mapping):
            return model(**cast("Mapping[str, object]", batch))
        if isinstance(batch, tuple | list):
            values = cast("tuple[object, ...]", batch)
            return model(*values) if _takes(model, values) else model(values[0])
        return model(batch)


def _why_call_failed(model: nn.Module, said: str) -> str:
    return (
        f"{type(model).__name__} cannot be called with the example batch ({said}): give the batch as the model takes "
        "it; a build function may return a third value, lambda model, batch: loss, that calls it"
    )


def _takes(model: nn.Module, values: tuple[object, ...]) -> bool:
    try:
        inspect.signature(model.forward).bind(*values)
    except TypeError:
        return False
    return True


def _left_over(model: nn.Module, batch: object) -> torch.Tensor | None:
    """The second item of a pair of which the model takes the first only: its labels."""
    if isinstance(batch, tuple | list):
        values = cast("tuple[object, ...]", batch)
        if len(values) == 2 and isinstance(values[1], torch.Tensor) and not _takes(model, values):
            return values[1]
    return None


def _stand_in(output: object, labels: torch.Tensor | None) -> torch.Tensor:
    """The loss that the model gives, or the cross entropy with labels that fit, or the sum of all floating outputs."""
    given = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(given, torch.Tensor):
        return given.mean()
    if isinstance(output, torch.Tensor) and labels is not None and (loss := _scored(output, labels)) is not None:
        return loss
    floating = [t for t in _tensors_in(output) if t.is_floating_point() and t.requires_grad]
    if not floating:
        raise PlanError(
            f"the model gave {_told(output)}, and nothing in it leads back to its parameters: return a loss, or a "
            "third value from the build function, lambda model, batch: loss"
        )
    return torch.stack([tensor.float().sum() for tensor in floating]).sum()


def _scored(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
    """Cross entropy, where labels have the output's shape less its classes: the second dimension, or the last."""
    if labels.is_floating_point() or output.dim() < 2:
        return None
    if labels.shape == output.shape[:1] + output.shape[2:]:
        return nn.functional.cross_entropy(output, labels)
    if labels.shape == output.shape[:-1]:
        return nn.functional.cross_entropy(output.flatten(0, -2), labels.flatten())
    return None


def _tensors_in(output: object) -> list[torch.Tensor]:
    """Those in tuples, lists and dicts, and in the fields of an object that holds the outputs."""
    if isinstance(output, Mapping):
        output = list(cast("Mapping[str, object]", output).values())
    elif not isinstance(output, torch.Tensor | tuple | list) and hasattr(output, "__dict__"):
        output = list(vars(output).values())
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _name(build: Build) -> str:
    return f"{getattr(build, '__qualname__', type(build).__name__)}()"


def _told(value: object) -> str:
    """What something is, for a message."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(cast('tuple[object, ...]', value))}"
    return "None" if value is None else f"a {type(value).__name__}"
