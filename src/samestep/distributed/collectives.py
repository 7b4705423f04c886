"""Collectives of all ranks as users call them: exact means and sums, a gather with a gradient, once, barrier."""

import math
import pickle
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import reduce
from io import BytesIO
from itertools import chain
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable

from samestep.distributed.communicator import Communicator
from samestep.distributed.once import Per, once
from samestep.environment.world import halved_note
from samestep.errors import CommunicationError, DataError, StepError
from samestep.messages import WarnOnce

T = TypeVar("T")
Number = bool | int | float
Array = np.ndarray | np.generic
Values = Number | torch.Tensor | Array | Iterable[Number | torch.Tensor | Array]
Op = Literal["sum", "mean", "max", "min"]
_OPS: dict[Op, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_GATHER = "run.gather"
_HALF = (torch.float16, torch.bfloat16)


class Collectives:
    """The collectives of a run. Every rank must call each of them, in the same order; a rank that differs is named."""

    def __init__(self, comm: Communicator, padding: "PaddingFilter") -> None:
        self._comm, self._padding, self._warnings = comm, padding, WarnOnce()

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        return self._comm.world.rank

    @property
    def size(self) -> int:
        """The world size: how many ranks there are."""
        return self._comm.world.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self._comm.world.is_main

    @property
    def is_node_main(self) -> bool:
        """Whether this is the first rank of its node."""
        return self._comm.world.is_node_main

    def mean(self, values: Values) -> float:
        """The mean of every element on every rank. Each element has the same weight, however many a rank has.

        >>> from samestep import Run
        >>> with Run(global_batch=8) as run:
        ...     run.mean([1, 2, 3, 6])
        3.0
        """
        tally = self._add_to_mean(_Tally(), values)
        parts = self._comm.exchange("run.mean", [tally.total(), float(tally.count)])
        count = sum(int(part[1]) for part in parts)
        if count == 0:
            raise CommunicationError(
                "run.mean got no values on any rank, so the mean is undefined: is the dataset empty?"
            )
        return math.fsum(float(part[0]) for part in parts) / count

    def means(self, batches: Iterable[Mapping[str, Values]]) -> dict[str, float]:
        """Several means from one pass over the data: each batch gives its values by name.

        >>> from samestep import Run
        >>> with Run(global_batch=8) as run:
        ...     run.means({"loss": [2.0 * x], "correct": [x > 1]} for x in (1, 2))
        {'loss': 3.0, 'correct': 0.5}
        """
        tallies: dict[str, _Tally] = {}
        for batch in batches:
            if not isinstance(batch, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # scripts are not type-checked
                raise CommunicationError(
                    f"run.means needs a dictionary of values per batch, got {type(batch).__name__}: pass "
                    "`({'loss': losses, 'accuracy': hits} for ...)`, or use run.mean for a single number"
                )
            for name, values in batch.items():
                self._add_to_mean(tallies.setdefault(name, _Tally()), values)
        mine = {name: (tally.total(), tally.count) for name, tally in tallies.items()}
        parts = self._comm.exchange_objects("run.means", mine)
        # a rank without batches has no names
        sums = {name: [part[name] for part in parts if name in part] for name in dict.fromkeys(chain(*parts))}
        counts = {name: sum(count for _, count in values) for name, values in sums.items()}
        if not sums or 0 in counts.values():
            names = "".join(f" for {name!r}" for name, count in counts.items() if not count)
            raise CommunicationError(
                f"run.means got no values{names} on any rank, so the mean is undefined: is the dataset empty?"
            )
        return {name: math.fsum(total for total, _ in values) / counts[name] for name, values in sums.items()}

    def sum(self, values: Values) -> int | float:
        """The sum of every element on every rank; integers stay exact."""
        parts = self._comm.exchange_objects("run.sum", self._add(_Tally(), values).total())
        return sum(parts) if all(isinstance(part, int) for part in parts) else math.fsum(parts)

    def max(self, values: Values) -> int | float:
        """The largest element on any rank."""
        best: int | float | None = None
        for value in _iterate(values):
            if (tensor := self._padding.drop(_to_tensor(value))).numel():
                largest = tensor.max().item()
                best = _larger(best, largest if tensor.is_floating_point() else int(largest))
        parts = [part for part in self._comm.exchange_objects("run.max", best) if part is not None]
        if not parts:
            raise CommunicationError(
                "run.max got no values on any rank, so the maximum is undefined: is the dataset empty?"
            )
        best = reduce(_larger, parts)
        return best if all(isinstance(part, int) for part in parts) else float(best)

    def all_reduce(self, tensor: torch.Tensor, op: Op, weight: float | None = None) -> torch.Tensor:
        """`tensor` reduced over the ranks, element by element, as a new tensor.

        The mean of integers is computed in float64. `weight` is this rank's count in a weighted mean.
        """
        if op not in _OPS:
            raise CommunicationError(f"run.all_reduce: op={op!r} is not valid; use one of {', '.join(map(repr, _OPS))}")
        if weight is not None and op != "mean":
            raise CommunicationError(f"run.all_reduce: weight= is valid with op='mean' only, got op={op!r}")
        if op == "mean":
            return _all_reduce_mean(self._comm, tensor, 1.0 if weight is None else weight)
        return _all_reduce(self._comm, tensor.detach().clone(), op)

    def gather(self, rows: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor:
        """The rows of all ranks in the order of the global batch or dataset, without padding; on every rank.

        Use it in a loss that compares the samples of a batch. With `step.mean`, the gradient is that of one rank:
        `logits = z1 @ run.gather(z2).T; step.mean(cross_entropy(logits, step.rows, reduction="none")).backward()`.
        In an evaluation pass a generator, `run.gather(net(x) for x, _ in test)`: ranks may have different numbers of
        batches.
        """
        if isinstance(rows, torch.Tensor) or not isinstance(rows, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]  # scripts are not type-checked
            self._padding.check_gather(_check_rows(rows))
            return _gather_rows(self._comm, self._padding.drop(rows), rows.device)
        parts: list[torch.Tensor] = []
        for part in rows:
            self._padding.check_gather(None)
            parts.append(self._padding.drop(_check_rows(part)))
        mine = torch.cat(parts) if parts else None
        return _gather_rows(self._comm, mine, torch.device("cpu") if mine is None else mine.device)

    def gather_objects(self, value: T) -> list[T]:
        """`value` of every rank, in rank order, on every rank; any object that pickles, such as a dict of counts.

        Tensors arrive on the CPU. For rows of tensors use `run.gather`, which takes less time and memory.
        """
        return gather_objects(self._comm, "run.gather_objects", value)

    def once(self, function: Callable[..., T], *args: object, per: Per = "run") -> T:
        """Run `function(*args)` on rank 0; every rank gets its return value, or raises its exception.

        With `per="node"` the first rank of each node runs it, for the ranks of that node.
        """
        return once(self._comm, function, *args, per=per)

    def agree(self, flag: bool) -> bool:
        """True on every rank if `flag` is true on any: all ranks stop, save or skip together."""
        return any(bool(part[0]) for part in self._comm.exchange("run.agree", [float(flag)]))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._comm.exchange("run.barrier", [])

    def _add_to_mean(self, tally: "_Tally", values: Values) -> "_Tally":
        for value in _iterate(values):
            # a number may be a time or a count of the batch; a tensor without dimensions is a mean over its rows
            if isinstance(value, torch.Tensor) and not value.dim() and self._padding.batch_rows > 1 and self.is_main:
                self._warnings.warn_once(
                    f"run.mean or run.means got a single value for a batch of {self._padding.batch_rows} rows: every "
                    "batch then has the same weight, so the result depends on the batch size and the number of ranks; "
                    "pass one value per sample, as in run.mean(cross_entropy(net(x), y, reduction='none') for x, y in "
                    "test)",
                    subject="the mean of a batch",
                )
            tally.add(self._padding.drop(_to_tensor(value)))
        return tally

    def _add(self, tally: "_Tally", values: Values) -> "_Tally":
        for value in _iterate(values):
            tally.add(self._padding.drop(_to_tensor(value)))
        return tally


class PaddingFilter:
    """Knows which rows of the current batch are padding, and drops them from `run.mean`, `run.sum` and `run.max`.

    In a step the micro-batches of all ranks have the same shape, so that some end with padding rows. In an evaluation
    a rank that has no sample left gets a padding row, since all ranks must call a sharded model equally often.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[int, int]] = []  # (rows, samples among them) of the current batch or the current step
        self._in_batch = False  # whether the user has a batch; False after the loop over the micro-batches of a step
        self._micro_batches = 0  # of the current step; 0 outside of a step
        self._dropped = False
        self.batch_rows = 0  # samples of the current batch of an evaluation; 0 outside of one

    @contextmanager
    def batch(self, samples: int) -> Generator[None]:
        """While the user has an evaluation batch of this many samples (0: of one padding row)."""
        outer, padding_rows = (self._rows, self._in_batch, self._micro_batches, self.batch_rows), int(not samples)
        self.batch_rows = samples
        self._rows, self._in_batch, self._micro_batches = [(padding_rows, 0)] if padding_rows else [], True, 0
        self._dropped = False
        try:
            yield
            if padding_rows and not self._dropped:
                raise DataError(
                    "this rank had no sample left and got a padding row, so that all ranks call the sharded model or "
                    "teacher the same number of times; the result was not passed to run.mean, run.sum or run.max, so "
                    "it would count: pass the values as they come, as in run.mean(net(x).argmax(-1) == y for x, y in "
                    "test)"
                )
        finally:
            self._rows, self._in_batch, self._micro_batches, self.batch_rows = outer

    def set_step_rows(self, rows: list[tuple[int, int]], in_batch: bool, micro_batches: int) -> None:
        """Set (rows, samples among them): of the current micro-batch, or after the loop of all of the step's."""
        self._rows, self._in_batch, self._micro_batches = rows, in_batch, micro_batches

    def check_gather(self, values: torch.Tensor | None) -> None:
        """Raise in a step if `values` are not one row per sample; None: several tensors, whose rows have no order."""
        if not self._in_batch or not self._micro_batches:
            return
        self.check_one_micro_batch()
        ((rows, _),) = self._rows
        if values is None or values.shape[0] != rows:
            found = "an iterable of tensors" if values is None else f"shape {tuple(values.shape)}"
            raise CommunicationError(
                f"run.gather needs one row for each of the {rows} rows of this micro-batch, got {found}: gather views "
                "of the samples one by one, and concatenate afterwards"
            )

    def check_one_micro_batch(self) -> None:
        """Raise in a step with several micro-batches: rows of the others would be missing."""
        if self._micro_batches > 1:
            raise StepError(
                f"this step has {self._micro_batches} micro-batches per rank{halved_note()}, and run.gather and "
                "step.rows see one: rows of the others would be missing, so the loss would depend on the micro-batch; "
                "pass a larger micro_batch, use more ranks, or reduce global_batch"
            )

    @property
    def rows(self) -> tuple[int, int]:
        """(rows, samples among them) of the current batch or step; (0, 0) if it has no padding that is known."""
        return sum(rows for rows, _ in self._rows), sum(real for _, real in self._rows)

    def drop_batch(self) -> bool:
        """Whether the current batch has no sample; then it counts as dropped."""
        rows, samples = self.rows
        self._dropped = self._dropped or (rows > 0 and not samples)
        return rows > 0 and not samples

    def drop(self, values: torch.Tensor) -> torch.Tensor:
        """`values` without those of padding rows."""
        padding = sum(rows - real for rows, real in self._rows)
        if not padding:
            return values
        rows, length = sum(rows for rows, _ in self._rows), values.shape[0] if values.dim() else None
        if length == rows:
            self._dropped = True
            parts = values.split([rows for rows, _ in self._rows])
            return torch.cat([part[:real] for part, (_, real) in zip(parts, self._rows, strict=True)])
        # the script may have selected the samples itself; after the loop, values need not belong to rows
        if length == rows - padding if self._in_batch else all(length != rows for rows, _ in self._rows):
            return values
        which = "this batch has" if self._in_batch else "the micro-batches of this step have"
        what = "a single value" if length is None else f"values of shape {tuple(values.shape)}"
        raise CommunicationError(
            f"{which} {rows} row(s), {padding} of them padding, and run.mean, run.sum or run.max got {what}, which "
            "cannot be separated by row: pass one value per sample (reduction='none') instead of one per batch, inside "
            "the loop over the batches"
        )


class _Tally:
    """Sum and count, kept on the device of the values until `total` is called: one transfer in all."""

    def __init__(self) -> None:
        self._sums: dict[tuple[torch.device, bool], torch.Tensor] = {}
        self.count = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Add the elements of a tensor."""
        self.count += tensor.numel()
        is_int = not tensor.is_floating_point()
        part = tensor.sum(dtype=torch.int64) if is_int else _double(tensor).sum()
        key = (part.device, is_int)
        self._sums[key] = self._sums[key] + part if key in self._sums else part

    def total(self) -> int | float:
        """The sum, an int if all elements were integers."""
        int_sum = sum(int(value) for (_, is_int), value in self._sums.items() if is_int)
        float_sums = [float(value) for (_, is_int), value in self._sums.items() if not is_int]
        return math.fsum([int_sum, *float_sums]) if float_sums else int_sum


def _all_reduce_mean(comm: Communicator, tensor: torch.Tensor, weight: float) -> torch.Tensor:
    wide = tensor.detach() if tensor.is_complex() else _widen(tensor.detach())
    payload = torch.cat([wide.reshape(-1) * weight, wide.new_tensor([weight])])  # values and weight in one collective
    summed = _all_reduce(comm, payload, "mean")
    if not summed[-1].is_nonzero():
        raise CommunicationError("run.all_reduce got weight=0 on every rank: at least one weight must be above 0")
    mean = (summed[:-1] / summed[-1]).reshape(tensor.shape)
    return mean.to(tensor.dtype) if tensor.is_floating_point() else mean


def _all_reduce(comm: Communicator, tensor: torch.Tensor, op: Op) -> torch.Tensor:
    if comm.alone:
        comm.refuse_inside_once("run.all_reduce")
        return tensor
    _check_same_tensors(comm, tensor, op)
    payload = tensor.cpu() if _needs_cpu(comm, tensor.device) else tensor
    with comm.collective("run.all_reduce"):
        dist.all_reduce(payload, op=_OPS[op], group=comm.group)
    return payload.to(tensor.device)


def _check_same_tensors(comm: Communicator, tensor: torch.Tensor, op: Op) -> None:
    """Raise if ranks pass tensors of different size or dtype: torch would hang or add unrelated elements."""
    mine = [float(list(_OPS).index(op)), float(zlib.crc32(str(tensor.dtype).encode())), float(tensor.numel())]
    for rank, theirs in enumerate(comm.exchange("run.all_reduce", mine)):
        if theirs.tolist() != mine:
            raise CommunicationError(
                f"run.all_reduce got op={op!r} and {tensor.numel()} elements of {tensor.dtype} on rank "
                f"{comm.world.rank}, but rank {rank} passed a different op, dtype or size ({int(theirs[2])} "
                "elements): pass tensors of the same shape and dtype on all ranks"
            )


def _iterate(values: Values) -> Iterable[object]:
    if isinstance(values, torch.Tensor | bool | int | float | np.ndarray | np.generic):
        return [values]
    if isinstance(values, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]  # scripts are not type-checked
        return values
    raise CommunicationError(
        f"cannot read numbers from {type(values).__name__}: pass a number, a tensor, or an iterable of them, "
        "such as `(net(x).argmax(-1) == y for x, y in test)`"
    )


def gather_objects(comm: Communicator, operation: str, value: T) -> list[T]:
    """Copies of what every rank passes, in rank order; if one of them does not pickle, every rank raises."""
    comm.refuse_inside_once(operation)
    data, problem, failure = b"", None, None
    try:
        data = pickle_object(value)
    except Exception as error:  # noqa: BLE001  # every rank raises it
        problem, failure = f"{type(value).__name__}: {error}"[:1500], error
    parts = comm.exchange_objects(operation, (data, problem))
    try:
        for rank, (_, text) in enumerate(parts):
            if text is not None:
                raise CommunicationError(
                    f"{operation} cannot pickle what rank {rank} passed, a {text}; pass numbers, text, tensors, or "
                    "lists and dictionaries of them, and no lambda, open file or class that is defined in a function"
                ) from (failure if rank == comm.world.rank else None)
    finally:
        del failure  # its traceback refers to this frame: together they would live until the garbage collector runs
    return [pickle.loads(part) for part, _ in parts]


def pickle_object(value: object) -> bytes:
    """The pickled value, with tensors as CPU tensors: of a view its own elements, not all that it is a view of."""
    buffer = BytesIO()
    _CpuPickler(buffer).dump(value)
    return buffer.getvalue()


class _CpuPickler(pickle.Pickler):
    def reducer_override(self, value: object, /) -> Any:
        """How a tensor is built from its bytes; everything else is pickled as usual."""
        if type(value) not in (torch.Tensor, nn.Parameter) or not isinstance(value, torch.Tensor):
            return NotImplemented
        if value.layout is not torch.strided or value.is_quantized:
            return NotImplemented if value.device.type == "cpu" else (_itself, (value.detach().cpu(),))
        dense = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
        data = dense.clone(memory_format=torch.contiguous_format)  # a single element may have any stride
        return _tensor_of_bytes, (data.view(torch.uint8).numpy(), value.dtype, tuple(value.shape))


def _tensor_of_bytes(data: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).reshape(shape)


def _itself(value: T) -> T:
    return value


def _to_tensor(value: object) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.is_complex():
            raise CommunicationError("cannot reduce a complex tensor: pass its real part or its absolute value")
        return value.detach()
    if isinstance(value, np.ndarray | np.generic):
        return torch.as_tensor(value)
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    raise CommunicationError(
        f"cannot read numbers from an iterable of {type(value).__name__}: its items must be numbers or tensors"
    )


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()  # MPS has no float64


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    """A dtype wide enough for weighted sums: half precision as fp32, integers as float64."""
    if not tensor.is_floating_point():
        return _double(tensor)
    return tensor.float() if tensor.element_size() < 4 else tensor


def _larger(one: int | float | None, other: int | float) -> int | float:
    """The larger of two; NaN wins, so that it does not disappear behind a number."""
    return other if one is None or other > one or other != other else one


def _gather_rows(comm: Communicator, rows: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """The rows of all ranks in rank order; ranks may have different numbers of rows, or none at all (None).

    In the backward pass each rank gets the sum of the gradients of all ranks for its own rows. So if every rank calls
    `backward()` on its part of a sum over all ranks, the gradients are those of the full sum.
    """
    if comm.alone:
        comm.refuse_inside_once(_GATHER)
        return _check_not_none(rows)
    shape = None if rows is None else tuple(rows.shape[1:])
    differentiable = rows is not None and rows.requires_grad and torch.is_grad_enabled()
    mine = None if rows is None else (rows.shape[0], shape, str(rows.dtype), differentiable)
    parts = comm.exchange_objects(_GATHER, mine)
    present = {rank: part for rank, part in enumerate(parts) if part is not None}
    if rows is None:
        known = next(iter(present.values()), None)
        rows = _check_not_none(None if known is None else _empty_rows(known[1] or (), known[2], device))
    for rank, (_, theirs, dtype, _) in present.items():
        if (theirs, dtype) != (tuple(rows.shape[1:]), str(rows.dtype)):
            raise CommunicationError(
                f"run.gather got rows of shape {tuple(rows.shape[1:])} and {rows.dtype} on rank {comm.world.rank}, and "
                f"of shape {theirs} and {dtype} on rank {rank}: pass tensors that differ in their first dimension only"
            )
    counts = [0 if part is None else part[0] for part in parts]
    if not any(part[3] for part in present.values()):
        return _all_gather(comm, rows.detach(), counts)
    # the backward pass is a collective: a rank whose rows need no gradient must take part in it
    return _Gather.apply(rows if rows.requires_grad else rows.detach().requires_grad_(), comm, counts)  # pyright: ignore[reportReturnType]  # apply is untyped


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: torch.Tensor, comm: Communicator, counts: list[int]) -> torch.Tensor:
        """All rows."""
        ctx.comm, ctx.counts = comm, counts  # pyright: ignore[reportAttributeAccessIssue]  # torch's way to keep values
        return _all_gather(comm, rows, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch passes one gradient per output
        """The sum of the ranks' gradients, for this rank's rows."""
        comm: Communicator = ctx.comm  # pyright: ignore[reportAttributeAccessIssue]
        counts: list[int] = ctx.counts  # pyright: ignore[reportAttributeAccessIssue]
        payload = gradient.float() if gradient.dtype in _HALF else gradient.clone()
        payload = (payload.cpu() if _needs_cpu(comm, gradient.device) else payload).contiguous()
        with comm.collective(f"the backward pass of {_GATHER}"):
            dist.all_reduce(payload, group=comm.group)
        own = payload.split(counts)[comm.world.rank]
        return own.to(device=gradient.device, dtype=gradient.dtype), None, None


def _all_gather(comm: Communicator, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    most, shape = max(counts), rows.shape[1:]
    if not most * math.prod(shape):
        return rows.new_empty((sum(counts), *shape))
    padded = rows.new_zeros((most, *shape))  # collectives need the same shape on every rank
    padded[: rows.shape[0]] = rows
    payload = padded.cpu() if _needs_cpu(comm, rows.device) else padded
    payload = payload.reshape(-1).view(torch.uint8)  # bytes: gloo does not know every dtype
    gathered = [torch.empty_like(payload) for _ in counts]
    with comm.collective(_GATHER):
        dist.all_gather(gathered, payload, group=comm.group)
    parts = [part.view(rows.dtype).reshape(most, *shape)[:count] for part, count in zip(gathered, counts, strict=True)]
    return torch.cat(parts).to(rows.device)


def _needs_cpu(comm: Communicator, device: torch.device) -> bool:
    """Whether the backend cannot send tensors of this device."""
    return device.type not in ("cpu", "cuda") or (device.type == "cuda" and comm.backend == "gloo")


def _empty_rows(shape: tuple[int, ...], dtype: str, device: torch.device) -> torch.Tensor:
    return torch.empty((0, *shape), dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)


def _check_rows(rows: object) -> torch.Tensor:
    """Raise if `rows` is not a tensor with a first dimension."""
    if isinstance(rows, torch.Tensor) and rows.dim():
        return rows
    found = "a tensor without dimensions" if isinstance(rows, torch.Tensor) else f"a {type(rows).__name__}"
    raise CommunicationError(
        f"run.gather needs a tensor with one row per sample, or an iterable of such tensors, got {found}: for single "
        "numbers use run.mean, run.sum or run.max"
    )


def _check_not_none(rows: torch.Tensor | None) -> torch.Tensor:
    if rows is None:
        raise CommunicationError("run.gather got no tensor on any rank: is the dataset empty?")
    return rows
