"""What the ranks of a run do together: numbers over all, one for all, agreement, waiting."""

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Literal, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from samestep.distributed.communicator import Communicator
from samestep.distributed.once import Per, once
from samestep.errors import CommunicationError

Number = bool | int | float
Numbers = np.ndarray | np.generic
Values = Number | torch.Tensor | Numbers | Iterable[Number | torch.Tensor | Numbers]
Op = Literal["sum", "mean", "max", "min"]
_OPS: dict[Op, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def mean(link: Communicator, values: Values, keep: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """The mean of all elements on all ranks, from one sum in float64 and one exact count."""
    tally = _tally(values, keep)
    parts = link.exchange("run.mean", [tally.total(), float(tally.count)])
    counted = sum(int(part[1]) for part in parts)
    if counted == 0:
        raise CommunicationError(
            "run.mean got no values on any rank: the mean of nothing is not a number; is the data empty?"
        )
    return math.fsum(float(part[0]) for part in parts) / counted


def means(
    link: Communicator, batches: Iterable[Mapping[str, Values]], keep: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, float]:
    """Several means from one pass; a rank without a batch knows no names and has nothing to add."""
    mine: dict[str, _Tally] = {}
    for batch in batches:
        for name, values in _named(batch).items():
            _add(mine.setdefault(name, _Tally()), values, keep)
    parts = link.exchange_objects("run.means", {name: (tally.total(), tally.count) for name, tally in mine.items()})
    return _join(parts)


def _join(parts: list[dict[str, tuple[int | float, int]]]) -> dict[str, float]:
    """Means by name from the (sum, count) of each rank."""
    found = {name: [part[name] for part in parts if name in part] for name in dict.fromkeys(chain(*parts))}
    counts = {name: sum(count for _, count in sums) for name, sums in found.items()}
    if not found or 0 in counts.values():
        what = "".join(f" for {name!r}" for name, count in counts.items() if not count)
        raise CommunicationError(
            f"run.means got no values{what} on any rank: there is no mean of nothing; is the data empty?"
        )
    return {name: math.fsum(part for part, _ in sums) / counts[name] for name, sums in found.items()}


def total(link: Communicator, values: Values, keep: Callable[[torch.Tensor], torch.Tensor]) -> int | float:
    """The sum of all elements on all ranks; whole numbers stay whole and exact."""
    value = _tally(values, keep).total()
    whole = torch.tensor([float(isinstance(value, int))], dtype=torch.float64)
    parts = link.exchange("run.sum", torch.cat([_pack(value), whole]))
    if all(bool(part[2]) for part in parts):
        return sum(int(part[:1].view(torch.int64)) for part in parts)
    return math.fsum(float(part[1]) for part in parts)


def maximum(link: Communicator, values: Values, keep: Callable[[torch.Tensor], torch.Tensor]) -> int | float:
    """The largest element on any rank."""
    best: int | float | None = None
    for value in _iterate(values):
        if (tensor := keep(_tensor(value))).numel():
            best = _larger(best, _largest(tensor))
    whole = isinstance(best, int)
    packed = _pack(best if best is not None else -math.inf)
    flags = torch.tensor([float(best is not None), float(whole)], dtype=torch.float64)
    parts = [part for part in link.exchange("run.max", torch.cat([packed, flags])) if bool(part[2])]
    if not parts:
        raise CommunicationError(
            "run.max got no values on any rank: there is no largest of nothing; is the data empty?"
        )
    if all(bool(part[3]) for part in parts):
        return max(int(part[:1].view(torch.int64)) for part in parts)
    best = float(parts[0][1])
    for part in parts[1:]:
        best = _larger(best, float(part[1]))
    return best


def all_reduce(link: Communicator, tensor: torch.Tensor, op: Op, weight: float | None) -> torch.Tensor:
    """One tensor reduced element by element; the given one is left as it is."""
    if op not in _OPS:
        raise CommunicationError(f"run.all_reduce does not know op={op!r}: use one of {', '.join(map(repr, _OPS))}")
    if weight is not None and op != "mean":
        raise CommunicationError(f"run.all_reduce takes weight= with op='mean' only, not with op={op!r}")
    if op == "mean":
        return _all_mean(link, tensor, 1.0 if weight is None else weight)
    result = tensor.detach().clone()
    return _reduce_in_place(link, result, op)


def _all_mean(link: Communicator, tensor: torch.Tensor, weight: float) -> torch.Tensor:
    wide = tensor.detach() if tensor.is_complex() else _wide(tensor.detach())
    carried = torch.cat(
        [wide.reshape(-1) * weight, wide.new_tensor([weight])]
    )  # the weights ride along: one collective
    summed = _reduce_in_place(link, carried, "mean")
    if not summed[-1].is_nonzero():
        raise CommunicationError("run.all_reduce got weight=0 on every rank: a mean needs something that counts")
    mean = (summed[:-1] / summed[-1]).reshape(tensor.shape)
    return mean.to(tensor.dtype) if tensor.is_floating_point() else mean


def _reduce_in_place(link: Communicator, tensor: torch.Tensor, op: Op) -> torch.Tensor:
    if link.alone:
        link.refuse_inside_once("run.all_reduce")
        return tensor
    _compare_tensors(link, tensor, op)
    home = tensor.device
    carried = (
        tensor.cpu() if home.type not in ("cpu", "cuda") or (home.type == "cuda" and link.backend == "gloo") else tensor
    )
    with link.together("run.all_reduce"):
        dist.all_reduce(carried, op=_OPS[op])
    return carried.to(home)


def _compare_tensors(link: Communicator, tensor: torch.Tensor, op: Op) -> None:
    """Raise where ranks give tensors that cannot be added: torch would hang, or add what does not belong together."""
    mine = [float(list(_OPS).index(op)), float(zlib.crc32(str(tensor.dtype).encode())), float(tensor.numel())]
    for rank, theirs in enumerate(link.exchange("run.all_reduce", mine)):
        if theirs.tolist() != mine:
            raise CommunicationError(
                f"run.all_reduce got op={op!r} and {tensor.numel()} elements of {tensor.dtype} on rank "
                f"{link.world.rank}, and "
                f"rank {rank} gave something else ({int(theirs[2])} elements): all ranks must give tensors alike"
            )


class _Tally:
    """Sum and count of what is added, on the values' device until it is asked for: one transfer in all."""

    def __init__(self) -> None:
        self._sums: dict[tuple[torch.device, bool], torch.Tensor] = {}
        self.count = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Count the elements of one more tensor."""
        self.count += tensor.numel()
        whole = not tensor.is_floating_point()
        part = tensor.sum(dtype=torch.int64) if whole else _double(tensor).sum()
        key = (part.device, whole)
        self._sums[key] = self._sums[key] + part if key in self._sums else part

    def total(self) -> int | float:
        """The sum, an int where all were whole numbers."""
        whole_sum = sum(int(s) for (_, whole), s in self._sums.items() if whole)
        float_sums = [float(s) for (_, whole), s in self._sums.items() if not whole]
        return math.fsum([whole_sum, *float_sums]) if float_sums else whole_sum


def _tally(values: Values, keep: Callable[[torch.Tensor], torch.Tensor]) -> _Tally:
    tally = _Tally()
    _add(tally, values, keep)
    return tally


def _add(tally: _Tally, values: Values, keep: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for value in _iterate(values):
        tally.add(keep(_tensor(value)))


def _named(batch: object) -> Mapping[str, Values]:
    if isinstance(batch, Mapping):
        return cast("Mapping[str, Values]", batch)
    raise CommunicationError(
        f"run.means wants a dictionary of values for each batch and got {type(batch).__name__}: give "
        "`({'loss': losses, 'accuracy': hits} for ...)`, or use run.mean for a single number"
    )


def _iterate(values: Values) -> Iterable[object]:
    if isinstance(values, torch.Tensor | bool | int | float | np.ndarray | np.generic):
        return [values]
    if isinstance(values, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]  # users' values are what they are
        return values
    raise CommunicationError(
        f"cannot take numbers from {type(values).__name__}: give a number, a tensor, or an iterable of them, "
        "such as `(net(x).argmax(-1) == y for x, y in test)`"
    )


def _tensor(value: object) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.is_complex():
            raise CommunicationError(
                "cannot order or average a complex tensor: give its real part or its absolute value"
            )
        return value.detach()
    if isinstance(value, np.ndarray | np.generic):
        return torch.as_tensor(value)
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    raise CommunicationError(
        f"cannot take numbers from an iterable of {type(value).__name__}: its items must be numbers or tensors"
    )


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()  # Apple's GPU has no float64


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Room for weights and sums: half precision as fp32, whole numbers as float64."""
    if not tensor.is_floating_point():
        return _double(tensor)
    return tensor.float() if tensor.element_size() < 4 else tensor


def _largest(tensor: torch.Tensor) -> int | float:
    best = tensor.max().item()
    return float(best) if tensor.is_floating_point() else int(best)


def _larger(one: int | float | None, other: int | float) -> int | float:
    """The larger of two, where not-a-number wins: it must not vanish behind a number."""
    return other if one is None or other > one or other != other else one


def _pack(value: int | float) -> torch.Tensor:
    """A number as exact whole and as float64, side by side."""
    whole = torch.tensor([value if isinstance(value, int) else 0], dtype=torch.int64).view(torch.float64)
    return torch.cat([whole, torch.tensor([float(value)], dtype=torch.float64)])


T = TypeVar("T")


class Collectives:
    """The common acts of all ranks. Each must be called by every rank, in the same order; one who differs is named.

    `Run` is a Group that trains; modules below it need no more than this.
    """

    def __init__(self, link: Communicator) -> None:
        self._link = link
        self._onces = 0

    @property
    def rank(self) -> int:
        """This process's number among all, from 0."""
        return self._link.world.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._link.world.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self._link.world.is_main

    @property
    def is_node_main(self) -> bool:
        """Whether this is the first rank of its node."""
        return self._link.world.is_node_main

    def mean(self, values: Values) -> float:
        """The mean of every element on every rank: each sample weighs the same, however ranks are filled.

        >>> from samestep import Run
        >>> with Run(global_batch=8) as run:
        ...     run.mean([1, 2, 3, 6])
        3.0
        """
        return mean(self._link, values, self._keep_real)

    def means(self, batches: Iterable[Mapping[str, Values]]) -> dict[str, float]:
        """Several means from one pass over the data: each batch gives its values by name.

        >>> from samestep import Run
        >>> with Run(global_batch=8) as run:
        ...     run.means({"loss": [2.0 * x], "right": [x > 1]} for x in (1, 2))
        {'loss': 3.0, 'right': 0.5}
        """
        return means(self._link, batches, self._keep_real)

    def sum(self, values: Values) -> int | float:
        """The sum of every element on every rank; whole numbers stay exact."""
        return total(self._link, values, self._keep_real)

    def max(self, values: Values) -> int | float:
        """The largest element on any rank."""
        return maximum(self._link, values, self._keep_real)

    def all_reduce(self, tensor: torch.Tensor, op: Op, weight: float | None = None) -> torch.Tensor:
        """`tensor` reduced over the ranks, element by element, as a new tensor.

        A mean of whole numbers is computed in float64, never floored. `weight` is this rank's count in a weighted mean.
        """
        return all_reduce(self._link, tensor, op, weight)

    def once(self, function: Callable[..., T], *args: object, per: Per = "run") -> T:
        """Run `function(*args)` on the first rank; every rank gets what it returned, or raises what it raised.

        With `per="node"` the first rank of each node runs it, for the ranks of that node.
        """
        self._onces += 1
        return once(self._link, self._onces, per, function, *args)

    def agree(self, flag: bool) -> bool:
        """True on every rank if it is true on any: stopping, saving and skipping are decisions of all."""
        return any(bool(part[0]) for part in self._link.exchange("run.agree", [float(flag)]))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._link.exchange("run.barrier", [])

    def _keep_real(self, values: torch.Tensor) -> torch.Tensor:
        """What counts of `values`: all of it, unless a run in evaluation knows better."""
        return values
