"""Weights of one world in another: one rank repeats the steps of many with the weights that they had.

The ranks of the world "many" save the weights at the start of a step and of an evaluation; the rank of the world "one"
copies them. So a difference in one step does not spread to the next, and both worlds can be compared step by step.
"""

import os
import pickle
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from samestep.verify.recorder.fingerprints import local_part, raw_bytes, to_strided
from samestep.verify.recorder.recorder import Recorder

_MAX_BYTES: Final = 2**30  # of all saved weights
_EVERY_STEP_BYTES: Final = 2**21  # models up to this size are saved at every step
_CHOSEN_STEPS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class Replay:
    """Saves or copies the weights of the optimizers' parameters and of evaluated modules."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._folder = Path(recorder.settings.states)
        self.parameters: list[Tensor] = []
        """Of all optimizers, in the order of their creation."""
        self._step = -1  # whose weights were saved or copied last
        self._evaluation: tuple[int, int] = -1, -1  # step and number of the evaluation
        self._evaluated: set[int] = set()
        self._bytes = 0

    def add(self, parameters: list[Tensor]) -> None:
        """Follow these parameters of an optimizer too."""
        known = {id(each) for each in self.parameters}
        self.parameters += [each for each in parameters if id(each) not in known]

    def before_call(self, module: nn.Module, trains: bool) -> None:
        """Save or copy what a call of a module will use."""
        step = self._recorder.steps
        if self._recorder.settings.world == "nodes":
            return
        if trains:
            self._evaluated.clear()
            if step != self._step and self.parameters:
                self._step = step
                self._exchange(f"step-{step}", self.parameters, step)
        elif not torch.is_grad_enabled() or not module.training:
            self._before_evaluation(module, step)

    def _before_evaluation(self, module: nn.Module, step: int) -> None:
        if step == 0 or id(module) in self._evaluated:
            return
        if not self._evaluated:
            number = self._evaluation[1] + 1 if self._evaluation[0] == step else 0
            self._evaluation = step, number
        self._evaluated.add(id(module))
        tensors = [*module.parameters(), *module.buffers()]
        if tensors:
            self._exchange(f"evaluation-{step}-{self._evaluation[1]}-{len(self._evaluated)}", tensors, step)

    def _exchange(self, name: str, tensors: list[Tensor], step: int) -> None:
        size = sum(local_part(each).numel() * each.element_size() for each in tensors)
        if size > _EVERY_STEP_BYTES and step not in _CHOSEN_STEPS:
            return
        if self._recorder.settings.is_reference:
            self._copy(name, tensors)
        elif self._bytes + size <= _MAX_BYTES and (self._recorder.rank == 0 or _is_sharded(tensors)):
            self._bytes += size
            self._save(name, tensors)

    def _save(self, name: str, tensors: list[Tensor]) -> None:
        """Save under a name that appears only when the file is complete."""
        parts = [to_strided(local_part(each)) for each in tensors]
        header = [(part.dtype, part.shape, _shard_dimension(each)) for part, each in zip(parts, tensors, strict=True)]
        path = f"{self._folder}/{name}.{self._recorder.rank}"
        with open(f"{path}.tmp", "wb", buffering=0) as file:  # noqa: PTH123
            file.write(pickle.dumps(header))
            for part in parts:  # a zip file of torch.save takes three times as long
                file.write(raw_bytes(part))
        os.replace(f"{path}.tmp", path)  # noqa: PTH105

    def _copy(self, name: str, tensors: list[Tensor]) -> None:
        paths = sorted(self._folder.glob(f"{name}.*"), key=lambda path: int(path.suffix[1:]))
        if not paths:
            return
        ranks = [_load(path) for path in paths]
        merged = [_merge(parts) for parts in zip(*ranks, strict=True)]
        is_equal = [list(each.shape) for each in merged] == [list(each.shape) for each in tensors]
        self._recorder.write("replay", name=name, copied=is_equal)
        if not is_equal:
            return
        with torch.no_grad():
            for tensor, value in zip(tensors, merged, strict=True):
                part = local_part(tensor).data  # a graph that uses the tensor stays valid: its version does not change
                part.copy_(value.to(part.dtype) if part.shape == value.shape else value.reshape(part.shape))


def _load(path: Path) -> list[tuple[Tensor, int | None]]:
    """The tensors of a file of `_save`, each with the dimension in which it is sharded."""
    with path.open("rb") as file:
        header: list[tuple[torch.dtype, torch.Size, int | None]] = pickle.load(file)
        found = list[tuple[Tensor, int | None]]()
        for dtype, shape, dimension in header:
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
            file.readinto(tensor.flatten().view(torch.uint8).numpy().data)
            found.append((tensor, dimension))
    return found


def _is_sharded(tensors: list[Tensor]) -> bool:
    return any(_shard_dimension(each) is not None for each in tensors)


def _shard_dimension(tensor: Tensor) -> int | None:
    for placement in getattr(tensor, "placements", ()):
        if placement.is_shard():
            return placement.dim
    return None


def _merge(parts: tuple[tuple[Tensor, int | None], ...]) -> Tensor:
    """One tensor of the parts of all ranks."""
    dimension: Any = parts[0][1]
    return parts[0][0] if dimension is None else torch.cat([part for part, _ in parts], dimension)
