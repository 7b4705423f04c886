"""Follows every storage that a step makes and lets go, and notes how full memory is after each operation."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from samestep.measure.operations import Work

Workspace = Callable[[str, Sequence[object], Sequence[torch.Tensor]], int]


@dataclass
class Notes:
    """What was noted, moment by moment."""

    names: list[str] = field(default_factory=list)
    """The operation after which memory was looked at."""
    used: list[int] = field(default_factory=list)
    """Bytes in use then, gradients too, as the allocator rounds them."""
    exact: list[int] = field(default_factory=list)
    """The same, not rounded."""
    gradients: list[int] = field(default_factory=list)
    """Bytes of gradients among them."""


class Tracker(TorchDispatchMode):
    """A dispatch mode that counts bytes by storage, so that views cost nothing and tied weights count once."""

    def __init__(self, round_up: Callable[[int], int], workspace: Workspace, work: Work | None = None) -> None:
        super().__init__()
        self.notes = Notes()
        self.work = work
        self._round_up, self._workspace = round_up, workspace
        self._used = self._exact = self._gradients = 0
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}
        self._marked: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Bytes in use now."""
        return self._used

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that stood before the tracker began."""
        for tensor in tensors:
            self._meet(tensor)

    def mark_gradient(self, parameter: torch.Tensor) -> None:
        """Count a parameter's gradient, which stands from now on, as one."""
        gradient = parameter.grad
        if gradient is None or gradient.layout != torch.strided:
            return
        self._meet(gradient)
        key = id(gradient.untyped_storage())
        if key not in self._marked and key in self._alive:
            self._marked[key] = self._round_up(gradient.untyped_storage().nbytes())
            self._gradients += self._marked[key]

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operation as it is, then see which storages are new."""
        named = kwargs or {}
        result = func(*args, **named)
        if func.namespace == "prim":  # questions about a tensor
            return result
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        new = [self._meet(tensor) for tensor in outputs]
        inputs = tree_leaves((args, named))
        name = str(func.overloadpacket)
        if self.work is not None:
            self.work.add(func, args, named, result, inputs, outputs)
        aside = self._workspace(name, inputs, outputs)
        if any(new) or aside:
            self._note(name, aside)
        return result

    def _note(self, name: str, aside: int) -> None:
        self.notes.names.append(name)
        self.notes.used.append(self._used + aside)
        self.notes.exact.append(self._exact + aside)
        self.notes.gradients.append(self._gradients)

    def _meet(self, tensor: torch.Tensor) -> bool:
        """Count the storage of a tensor from now to its end; whether it is new."""
        if tensor.layout != torch.strided:
            return bool([part for part in _dense_parts(tensor) if self._meet(part)])
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive:
            return False
        exact = storage.nbytes()
        size = self._round_up(exact)
        self._alive[key] = (weakref.ref(storage, lambda _: self._forget(key)), size, exact)
        self._used += size
        self._exact += exact
        return True

    def _forget(self, key: int) -> None:
        _, size, exact = self._alive.pop(key)
        self._used -= size
        self._exact -= exact
        self._gradients -= self._marked.pop(key, 0)


def _dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What a sparse tensor is made of."""
    if tensor.layout != torch.sparse_coo:
        return []
    return [tensor._indices(), tensor._values()]  # pyright: ignore[reportPrivateUsage]  # torch has no other way to see those of one that is not coalesced
