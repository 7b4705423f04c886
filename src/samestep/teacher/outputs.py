"""Inputs and outputs of a teacher taken apart into plain tensors, to be sent or kept, and put together again."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

import torch

from samestep.errors import TeacherError
from samestep.nn.distill import TopK, top_k
from samestep.teacher.carry import with_fields, with_items
from samestep.teacher.output_class import (
    is_structure,
    make_mapping,
    make_named_tuple,
    make_record,
    make_structure,
    name_of,
    split_mapping,
)

Form = list[Any]
"""How a tree is built, as JSON can hold it: a word for each node, and what belongs to it."""

_PLAIN: Final = (str, bool, int, float, type(None))


def take_apart(tree: object, what: str) -> tuple[Form, list[torch.Tensor]]:
    """The form of `tree` and its tensors in order; `what` names it where something cannot be taken apart."""
    tensors: list[torch.Tensor] = []
    return _form(tree, what, tensors), tensors


def put_together(form: Form, tensors: Iterator[torch.Tensor]) -> object:
    """The tree of this form around `tensors`, of the classes it was taken apart from."""
    kind, held = form
    return _BUILDERS[kind](held, tensors)


def compressed(outputs: Any, k: int | None, temperature: float) -> object:
    """`outputs` with the `k` largest logits in the place of all: of a tensor, or of what is named "logits"."""
    if k is None or isinstance(outputs, TopK):  # a server has done it already
        return outputs
    if isinstance(outputs, torch.Tensor):
        return top_k(outputs, k, temperature)
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if not isinstance(logits, TopK | torch.Tensor):
        raise TeacherError(
            f"top_k={k} needs logits, and the teacher gives a {type(outputs).__name__}: let its module give a tensor "
            "of logits, or a mapping or object with 'logits', or leave top_k out"
        )
    return outputs if isinstance(logits, TopK) else _with_logits(outputs, top_k(logits, k, temperature))


def _with_logits(outputs: Any, few: TopK) -> object:
    """The same outputs, of the same class, with these logits."""
    if isinstance(outputs, Mapping):
        return with_items(outputs, {**outputs, "logits": few})
    if isinstance(outputs, tuple):
        return outputs._replace(logits=few)  # pyright: ignore[reportAttributeAccessIssue]  # a named one: it has logits
    return with_fields(outputs, {"logits": few})


def _form(tree: object, what: str, tensors: list[torch.Tensor]) -> Form:
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return ["tensor", None]
    if isinstance(tree, TopK):
        tensors.extend(tree[:3])
        return ["top_k", tree.temperature]
    if isinstance(tree, _PLAIN):
        return ["value", tree]
    if isinstance(tree, Mapping) and type(tree) is not dict:
        return _mapping_form(tree, what, tensors)
    kind, name, parts = _parts(tree, what)
    held = [[key, _form(value, f"{what}[{key!r}]", tensors)] for key, value in parts]
    return [kind, held if name is None else [name, held]]


def _mapping_form(tree: Mapping[Any, object], what: str, tensors: list[torch.Tensor]) -> Form:
    twice, rest = split_mapping(tree)
    parts = [_form(part, what, tensors)[1] for part in (dict(tree), rest)]
    return ["mapping", [name_of(type(tree)), parts[0], twice, parts[1]]]


def _parts(tree: Any, what: str) -> tuple[str, str | None, list[tuple[str | int, object]]]:
    """What a container is, the name of its class where that matters, and what it holds by name or number."""
    kind, name = type(tree), name_of(type(tree))
    if isinstance(tree, dict) and all(isinstance(key, str | int) for key in tree):
        return "dict", None, list(tree.items())
    if isinstance(tree, list):
        return "list", None, list(enumerate(tree))
    if isinstance(tree, tuple):
        return _tuple_parts(kind, name, tree)
    if is_dataclass(kind):
        return "record", name, [(field.name, getattr(tree, field.name)) for field in fields(kind)]
    raise TeacherError(
        f"{what} is a {kind.__name__}, which can be neither sent nor kept: tensors, numbers and text can, and tuples, "
        "lists, mappings and dataclasses of them (a cache of keys and values is left out by use_cache=False)"
    )


def _tuple_parts(kind: type, name: str, tree: Any) -> tuple[str, str | None, list[tuple[str | int, object]]]:
    if hasattr(kind, "_fields"):
        return "named", name, list(zip(tree._fields, tree, strict=True))
    return ("structure", name, list(enumerate(tree))) if is_structure(kind) else ("tuple", None, list(enumerate(tree)))


def _named(held: list[list[Any]], tensors: Iterator[torch.Tensor]) -> dict[str, object]:
    return {key: put_together(form, tensors) for key, form in held}


def _listed(held: list[list[Any]], tensors: Iterator[torch.Tensor]) -> list[object]:
    return [put_together(form, tensors) for _, form in held]


def _mapping(held: list[Any], tensors: Iterator[torch.Tensor]) -> object:
    name, items, twice, rest = held
    return make_mapping(name, _named(items, tensors), twice, _named(rest, tensors))


_BUILDERS: Final[dict[str, Callable[[Any, Iterator[torch.Tensor]], object]]] = {
    "tensor": lambda held, tensors: next(tensors),
    "top_k": lambda held, tensors: TopK(next(tensors), next(tensors), next(tensors), float(held)),
    "dict": _named,
    "mapping": _mapping,
    "named": lambda held, tensors: make_named_tuple(held[0], _named(held[1], tensors)),
    "structure": lambda held, tensors: make_structure(held[0], _listed(held[1], tensors)),
    "record": lambda held, tensors: make_record(held[0], _named(held[1], tensors)),
    "list": _listed,
    "tuple": lambda held, tensors: tuple(_listed(held, tensors)),
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
