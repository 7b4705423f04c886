"""The replica check: whether all ranks hold the same bits in weights, buffers and optimizer state."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from samestep.distributed.communicator import Communicator
from samestep.errors import ReplicasDiffer
from samestep.parallel.batchnorm import unsynced_batchnorms
from samestep.parallel.wrapped_model import WrappedModel

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaCheck:
    """The replica checks of a run: every so many steps, before each checkpoint, and when training ends."""

    def __init__(self, comm: Communicator, models: Sequence[WrappedModel], every: int) -> None:
        self.optimizers: list[Optimizer] = []  # those that have stepped, in the order of their first step
        self._comm, self._models, self._every = comm, models, every
        self._checked = 0  # steps of this process at the last check

    def after_step(self, number: int, steps: int) -> None:
        """Check after every `replica_check_every`-th step."""
        if self._every and (number + 1) % self._every == 0:
            self.check(f"after step {number}", steps)

    def check(self, when: str, steps: int) -> None:
        """Check, unless checks are turned off or there was no step since the last one; a collective.

        `steps` are the steps of this process, the same number on all ranks.
        """
        if not self._every or steps == self._checked or self._comm.alone:
            return
        check_replicas(self._comm, replicated_tensors(self._models, self.optimizers), when)
        self._checked = steps


def check_replicas(comm: Communicator, tensors: Mapping[str, torch.Tensor], when: str) -> None:
    """Compare one number per rank; only if they differ, find and name the first tensor that differs."""
    if comm.alone:
        return
    hashes = fingerprints(tensors)
    total = float(sum(value * (2 * index + 1) for index, value in enumerate(hashes.values())) % (1 << 52))
    if len({float(part[0]) for part in comm.exchange("comparing replicas", [total])}) == 1:
        return
    name, by_rank = _first_difference(comm.exchange_objects("comparing replicas in full", hashes))
    groups: dict[int | None, list[int]] = {}
    for rank, value in enumerate(by_rank):
        groups.setdefault(value, []).append(rank)
    ranks = " differ from ranks ".join(str(ranks) for ranks in groups.values())
    raise ReplicasDiffer(
        f"{when}, ranks hold different bits in {name!r}: ranks {ranks}. Something changed it on some ranks only: an "
        "optimizer step under a rank condition, a decision by one rank's step.loss (decide by run.mean(step.loss)), a "
        "buffer computed from this rank's rows (average it with run.all_reduce), an update outside the optimizer, or a "
        "hardware fault. samestep stops the run, since its ranks no longer train the same model"
    )


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """For each tensor the sum of its bits read as integers: one pass over memory, no copy, exact.

    Sharded tensors differ between ranks and are left out.
    """
    full = {name: t for name, t in tensors.items() if not isinstance(t, DTensor) and t.numel()}
    sums = {name: _as_integers(tensor).sum(dtype=torch.int64) for name, tensor in full.items()}
    by_device: dict[torch.device, list[str]] = {}
    for name, value in sums.items():
        by_device.setdefault(value.device, []).append(name)
    values: dict[str, int] = {}
    for names in by_device.values():  # one transfer per device
        values.update(zip(names, torch.stack([sums[name] for name in names]).tolist(), strict=True))
    return {name: values[name] for name in full}


def replicated_tensors(models: Sequence[WrappedModel], optimizers: Sequence[Optimizer]) -> dict[str, torch.Tensor]:
    """Weights, buffers and optimizer state that must be equal on all ranks, by name."""
    found: dict[str, torch.Tensor] = {}
    for index, model in enumerate(models):
        prefix = "" if index == 0 else f"model {index}: "
        per_rank = {id(b) for norm in unsynced_batchnorms(model.inner) for b in norm.buffers()}
        named = (*model.inner.named_parameters(), *model.inner.named_buffers())
        found.update({f"{prefix}{name}": t for name, t in named if id(t) not in per_rank})
        for which, optimizer in enumerate(optimizers):
            suffix = "" if which == 0 else f", optimizer {which}"
            found.update({f"{prefix}{name}{suffix}": value for name, value in _optimizer_state(model, optimizer)})
    return found


def _optimizer_state(model: WrappedModel, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.inner.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if torch.is_tensor(value):
                yield f"{name} ({key} of {type(optimizer).__name__})", value


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous()
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    return real.view(torch.uint8 if real.dtype == torch.bool else _INTEGERS[real.element_size()])


def _first_difference(by_rank: list[dict[str, int]]) -> tuple[str, list[int | None]]:
    for name in dict.fromkeys(name for hashes in by_rank for name in hashes):
        values = [hashes.get(name) for hashes in by_rank]
        if len(set(values)) > 1:
            return name, values
    return "the order of tensors", [len(hashes) for hashes in by_rank]
