"""Inputs and outputs of a teacher taken apart into plain tensors, to be sent or kept, and put together again."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from samestep.errors import TeacherError
from samestep.nn.distill import TopK, top_k

Form = list[Any]
"""How a tree is built, as JSON can hold it: a word for each node, and what belongs to it."""

_PLAIN: Final = (str, bool, int, float, type(None))


class Outputs(dict[str, object]):
    """Outputs by name, as attributes too: what stands for a mapping class of the teacher's, such as a ModelOutput.

    >>> Outputs(logits=1).logits
    1
    """

    def __getattr__(self, name: str) -> object:
        if name not in self:
            raise AttributeError(f"the teacher's outputs have no {name!r}, only {sorted(self)}")
        return self[name]


def take_apart(tree: object, what: str) -> tuple[Form, list[torch.Tensor]]:
    """The form of `tree` and its tensors in order; `what` names it where something cannot be taken apart."""
    tensors: list[torch.Tensor] = []
    return _form(tree, what, tensors), tensors


def put_together(form: Form, tensors: Iterator[torch.Tensor]) -> object:
    """The tree of this form around `tensors`."""
    kind, held = form
    return _BUILDERS[kind](held, tensors)


def compressed(outputs: object, k: int | None, temperature: float) -> object:
    """`outputs` with the `k` largest logits in the place of all: of a tensor, or of what is named "logits"."""
    if k is None or isinstance(outputs, TopK):  # a server has done it already
        return outputs
    if isinstance(outputs, torch.Tensor):
        return top_k(outputs, k, temperature)
    if isinstance(outputs, Mapping) and isinstance(logits := outputs.get("logits"), TopK | torch.Tensor):
        few = compressed(logits, k, temperature)
        return {**outputs, "logits": few} if type(outputs) is dict else Outputs({**outputs, "logits": few})
    raise TeacherError(
        f"top_k={k} needs logits, and the teacher gives a {type(outputs).__name__}: let its module give a tensor of "
        "logits, or a mapping with 'logits', or leave top_k out"
    )


def _form(tree: object, what: str, tensors: list[torch.Tensor]) -> Form:
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return ["tensor", None]
    if isinstance(tree, TopK):
        tensors.extend(tree[:3])
        return ["top_k", tree.temperature]
    if isinstance(tree, _PLAIN):
        return ["value", tree]
    kind, parts = _parts(tree, what)
    held = [[key, _form(value, f"{what}[{key!r}]", tensors)] for key, value in parts]
    return [kind, held]


def _parts(tree: object, what: str) -> tuple[str, list[tuple[str | int, object]]]:
    """What a container is and holds, each part with its name or number."""
    if isinstance(tree, Mapping) and all(isinstance(key, str) for key in tree):
        return "dict" if type(tree) is dict else "outputs", list(tree.items())
    if isinstance(tree, tuple | list) and not hasattr(tree, "_fields"):
        return "list" if isinstance(tree, list) else "tuple", list(enumerate(tree))
    raise TeacherError(
        f"{what} is a {type(tree).__name__}, which can be neither sent nor kept: tensors, numbers and text can, and "
        "tuples, lists and mappings of them (a cache of keys and values is left out by use_cache=False)"
    )


def _named(held: list[list[Any]], tensors: Iterator[torch.Tensor]) -> dict[str, object]:
    return {key: put_together(form, tensors) for key, form in held}


_BUILDERS: Final[dict[str, Callable[[Any, Iterator[torch.Tensor]], object]]] = {
    "tensor": lambda held, tensors: next(tensors),
    "top_k": lambda held, tensors: TopK(next(tensors), next(tensors), next(tensors), float(held)),
    "dict": _named,
    "outputs": lambda held, tensors: Outputs(_named(held, tensors)),
    "list": lambda held, tensors: [put_together(form, tensors) for _, form in held],
    "tuple": lambda held, tensors: tuple(put_together(form, tensors) for _, form in held),
    "value": lambda held, tensors: held,
}


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it lies on the CPU in one piece."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def signature(tensor: torch.Tensor) -> tuple[str, list[int]]:
    """Dtype and shape, as JSON can hold them."""
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def from_bytes(data: torch.Tensor, dtype: str, shape: list[int]) -> torch.Tensor:
    """The tensor whose bytes `data` holds."""
    return data.view(getattr(torch, dtype)).reshape(shape)
