"""Evaluation on all ranks: evaluation mode, predictions in dataset order, metrics of torchmetrics, early stopping."""

import math
import pickle
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, count
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

import torch
from torch import nn

from samestep.context import RunContext
from samestep.distributed.collectives import Collectives, gather_objects, pickle_object
from samestep.distributed.communicator import gather_to_main
from samestep.distributed.rank_status import call_site
from samestep.errors import CheckpointError, CommunicationError, ConfigError, DataError, WrapError
from samestep.loggers.loggers import check_metric_value
from samestep.parallel.batchnorm import average_running_stats
from samestep.parallel.wrapped_model import WrappedModel
from samestep.torch_private import is_fsdp
from samestep.training.lifecycle import Lifecycle

if TYPE_CHECKING:  # an optional dependency
    from torchmetrics import Metric, MetricCollection

T = TypeVar("T")
Mode = Literal["min", "max"]
_PREDICT = "run.predict"
_ROUNDING = 1e-6  # some kernels of a GPU add fp32 numbers in another order each time, also in metric.compute()
_Rank = list[tuple[int, dict[str, Any]]]  # of each metric of a rank: how often it was updated, and its state


class Evaluation(Collectives):
    """What a run offers for evaluation."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        super().__init__(lifecycle.comm, lifecycle.padding)
        self._lifecycle = lifecycle

    def evaluate(self, model: nn.Module) -> AbstractContextManager[nn.Module]:
        """`model` in evaluation mode and without gradients, inside `with run.evaluate(model) as net:`.

        The forward pass of `net` needs no other rank, so ranks may have different numbers of batches. A sharded model
        does need all ranks: then all ranks run the same number of batches, and padding does not count.
        """
        needs_all_ranks = any(teacher.lockstep for teacher in self._lifecycle.teachers)
        return evaluate(self._lifecycle.context, model, needs_all_ranks)

    def predict(self, outputs: Iterator[T]) -> Iterator[T]:
        """What a generator over a shard computes, batch by batch in the order of the dataset, on rank 0.

        Inside of `run.evaluate`: `for scores in run.predict(net(x) for x, _ in test): write(scores)`. Every rank must
        run this loop. All ranks compute, and the body of the loop runs on rank 0 only. An item may be anything that
        pickles; its tensors arrive on the CPU. Rank 0 holds one batch per rank at a time. The batches have
        `micro_batch` rows of `run.shard`, by default 64 or, if that is less, `global_batch`: the same on any number of
        ranks.
        """
        context = self._lifecycle.context
        context.comm.refuse_inside_once(_PREDICT)
        if not isinstance(outputs, Iterator):  # pyright: ignore[reportUnnecessaryIsInstance]  # scripts are not type-checked
            raise DataError(
                f"run.predict got a {type(outputs).__name__} and needs a generator, which computes one batch at a "
                "time: pass run.predict(net(inputs) for inputs, _ in test)"
            )
        return _predict(context, outputs, call_site())

    def metric(self, metric: "Metric | MetricCollection") -> "RunMetric":
        """A metric of torchmetrics over the samples of all ranks, without padding; a part for `run.checkpoint`.

        `accuracy = run.metric(Accuracy("multiclass", num_classes=10))`, with `update`, `compute` and `reset`.
        """
        return RunMetric(self._lifecycle.context, metric)


# Models in evaluation mode


@contextmanager
def evaluate(context: RunContext, model: nn.Module, teacher_needs_all_ranks: bool) -> Generator[nn.Module]:
    """Yield the module to call; the mode of every submodule is restored afterwards, also after an exception."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  # scripts are not type-checked
        raise WrapError(
            f"run.evaluate needs a torch.nn.Module, got {type(model).__name__}: pass the model that run.wrap returned"
        )
    wrapped = context.find_wrapped(model)
    _check_same_model(context, type(model if wrapped is None else wrapped.inner).__name__, wrapped)
    net = model if wrapped is None else wrapped.core
    average_running_stats(context.comm, net)  # the average of a model has its own running statistics
    modes = [(module, module.training) for module in net.modules()]
    before = context.lockstep
    sharded = [module for module in net.modules() if is_fsdp(module)]  # the average of a sharded model is sharded, too
    context.lockstep = not context.comm.alone and (bool(sharded) or teacher_needs_all_ranks)
    try:
        net.eval()
        with torch.no_grad(), context.evaluation():
            yield net
    finally:
        context.lockstep = before
        for module in sharded:
            module.reshard()
        for module, training in modes:
            module.training = training


def _check_same_model(context: RunContext, name: str, wrapped: WrappedModel | None) -> None:
    """Raise if not every rank is here, or if ranks evaluate different models; a collective."""
    own = name, None if wrapped is None else context.models.index(wrapped)
    for rank, (other, number) in enumerate(context.comm.exchange_objects("run.evaluate", own)):
        if (other, number) != own:
            mine, theirs = (f"{kind} (model {i})" for kind, i in (own, (other, number)))
            raise CommunicationError(
                f"rank {context.world.rank} evaluates {mine} and rank {rank} evaluates {theirs}: pass the same model "
                "to run.evaluate on every rank"
            )


# Predictions


def _predict(context: RunContext, outputs: Iterator[T], site: str) -> Iterator[T]:
    """Yield on rank 0 what all ranks compute, one batch per rank at a time; on the other ranks, yield nothing.

    `site` names the call in every exchange: rank 0 may leave the loop in another line than that of the call.
    """
    comm = context.comm
    try:
        for number in count(comm.world.rank, comm.world.size):
            # rank 0 may have left the loop: no other rank may start a forward pass that waits for it
            if context.lockstep and _exchange_lengths(context, 0, site) is None:
                return
            data = _next_output(context, outputs, number)
            lengths = _exchange_lengths(context, len(data), site)
            if lengths is None or not any(lengths):
                return
            for part in filter(None, gather_to_main(comm, _PREDICT, data, lengths)):
                with comm.running_once(_PREDICT):
                    yield pickle.loads(part)
    except GeneratorExit:
        if not comm.alone:
            comm.exchange(_PREDICT, [0.0, 1.0], site)
        raise
    finally:
        if isinstance(outputs, Generator):
            outputs.close()


def _exchange_lengths(context: RunContext, length: int, site: str) -> list[int] | None:
    """How many bytes each rank has for rank 0, or None if rank 0 has left the loop; a collective."""
    by_rank = [part.tolist() for part in context.comm.exchange(_PREDICT, [float(length), 0.0], site)]
    return None if any(left for _, left in by_rank) else [int(length) for length, _ in by_rank]


def _next_output(context: RunContext, outputs: Iterator[object], number: int) -> bytes:
    """The pickled output for the batch of this number; nothing if there is none or it is padding."""
    context.predicts, context.prediction = True, None
    try:
        output = next(outputs)
    except StopIteration:
        return b""
    finally:
        context.predicts = False
    if context.prediction is None or context.prediction[0] != number:
        raise DataError(
            f"run.predict got an item that does not belong to batch {number}: pass a generator that loops over one "
            "shard and gives one item per batch, as in run.predict(net(inputs) for inputs, _ in test)"
        )
    if not context.prediction[1]:
        context.padding.drop_batch()
        return b""
    try:
        return pickle_object(output)
    except Exception as error:
        raise CommunicationError(
            f"run.predict cannot pickle the item for batch {number}, a {type(output).__name__}: {error}; pass tensors, "
            "numbers, text, or tuples, lists and dictionaries of them"
        ) from error


# Metrics


class RunMetric:
    """A metric of torchmetrics over the samples of all ranks; created by `run.metric`.

    As a part of `run.checkpoint` it is exact after a restart on any number of ranks, also in the middle of an epoch.
    """

    def __init__(self, context: RunContext, metric: "Metric | MetricCollection") -> None:
        self._context = context
        _check_metric(metric)
        self.metric = metric.to(context.device)
        """The metric, with the samples of this rank."""
        for each in _metrics(self.metric):
            each.distributed_available_fn = _never  # it does not communicate by itself
        self._earlier: list[_Rank] = []  # the ranks of the starts before this one
        self._gathered: list[_Rank] | None = None  # the state of all ranks, for `state_dict`; None after an update
        context.state_gatherers[id(self)] = self

    def update(self, *arguments: Any, **keywords: Any) -> None:
        """Add the samples of this rank's batch or micro-batch; rows of padding do not count."""
        self._context.comm.refuse_inside_once("metric.update")
        self._gathered = None
        if not self._context.padding.drop_batch():
            kept = {name: self._without_padding(value) for name, value in keywords.items()}
            self.metric.update(*map(self._without_padding, arguments), **kept)

    def compute(self) -> Any:
        """The value over the samples of all ranks since the last `reset`, the same on every rank; a collective."""
        by_rank = [*self._earlier, *gather_objects(self._context.comm, "metric.compute", self._state())]
        merged = self.metric.clone()
        for at, each in enumerate(_metrics(merged)):
            _set_state(each, [rank[at] for rank in by_rank])
        return merged.compute()

    def reset(self) -> None:
        """Forget all samples."""
        self.metric.reset()
        self._earlier, self._gathered = [], None

    def state_dict(self) -> dict[str, object]:
        """The states of all ranks, which `gather_state` has gathered; on a single rank it needs no call of that."""
        if self._gathered is None and not self._context.comm.alone:
            raise CheckpointError(
                "the state of a metric of run.metric is that of all ranks, and it was not gathered: pass the metric to "
                "run.checkpoint by itself, as in run.checkpoint(folder, model=model, metric=metric), and not inside "
                "another object"
            )
        return {"ranks": self._with_earlier([self._state()]) if self._gathered is None else self._gathered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the samples of earlier starts."""
        self.reset()
        self._earlier = state["ranks"]

    def gather_state(self, operation: str) -> None:
        """Gather what `state_dict` returns until the next update; a collective, which `run.checkpoint` calls."""
        self._gathered = self._with_earlier(gather_objects(self._context.comm, operation, self._state()))

    def _with_earlier(self, ranks: list[_Rank]) -> list[_Rank]:
        return [*self._earlier, *(rank for rank in ranks if any(updates for updates, _ in rank))]

    def _state(self) -> _Rank:
        return [(each.update_count, dict(each.metric_state)) for each in _metrics(self.metric)]

    def _without_padding(self, value: object) -> object:
        if isinstance(value, torch.Tensor):
            return self._context.padding.drop(value) if value.dim() else value
        rows, samples = self._context.padding.rows
        return value[:samples] if isinstance(value, list | tuple) and rows and len(value) == rows else value  # pyright: ignore[reportUnknownVariableType]


def _never() -> bool:
    return False


def _check_metric(metric: object) -> None:
    try:
        from torchmetrics import Metric, MetricCollection
    except ImportError as error:
        raise DataError(
            "run.metric needs torchmetrics and cannot import it: in the clone of samestep, run `pip install "
            "'.[metrics]'`, or use run.mean and run.sum"
        ) from error
    if not isinstance(metric, Metric | MetricCollection):
        raise DataError(
            f"run.metric got a {type(metric).__name__}: pass a metric of torchmetrics, such as "
            'run.metric(Accuracy("multiclass", num_classes=10)), or use run.mean for a mean over all samples'
        )


def _metrics(metric: "Metric | MetricCollection") -> "list[Metric]":
    """The metric and those inside of it, in the same order on all ranks."""
    from torchmetrics import Metric, MetricCollection

    if isinstance(metric, MetricCollection):
        metric.items()  # metrics that share a state get a copy of it
    return [each for each in metric.modules() if isinstance(each, Metric)]


def _set_state(metric: "Metric", states: list[tuple[int, dict[str, Any]]]) -> None:
    """Give a metric the state of all samples, reduced as torchmetrics reduces the states of its processes."""
    from torchmetrics.utilities.data import dim_zero_cat

    updated = [state for updates, state in states if updates]
    for name, reduce in metric._reductions.items() if updated else ():  # pyright: ignore[reportPrivateUsage]
        values = [_to_device(state[name], metric.device) for state in updated]
        merged: Any = list(chain(*values)) if isinstance(values[0], list) else torch.stack(values)
        is_complete = reduce is None or (isinstance(merged, list) and reduce is dim_zero_cat)
        setattr(metric, name, merged if is_complete else cast("Any", reduce)(merged))
    metric._update_count = sum(updates for updates, _ in states)  # pyright: ignore[reportPrivateUsage]
    metric._computed = None  # pyright: ignore[reportPrivateUsage]


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_to_device(each, device) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return value.to(device) if isinstance(value, torch.Tensor) else value


class EarlyStopping:
    """Whether a metric has stopped improving; created by `run.early_stopping`.

    Its state is the best value and the number of updates since then, so a restarted run stops at the same epoch.
    """

    def __init__(self, context: RunContext, patience: int, mode: Mode, min_delta: float) -> None:
        if not isinstance(patience, Integral) or patience < 1:  # pyright: ignore[reportUnnecessaryIsInstance]  # scripts are not type-checked
            raise ConfigError(
                f"patience={patience!r} of run.early_stopping must be an integer of at least 1: the number of "
                "evaluations in a row without an improvement, e.g. patience=3"
            )
        if mode not in get_args(Mode):
            raise ConfigError(
                f'mode={mode!r} of run.early_stopping is not valid: use "min" for a loss, "max" for a score'
            )
        if not isinstance(min_delta, Real) or not 0 <= min_delta < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"min_delta={min_delta!r} of run.early_stopping must be a number of at least 0: by how much a value "
                "must be better than the best to count as an improvement"
            )
        self._comm, self._patience, self._mode, self._min_delta = context.comm, int(patience), mode, float(min_delta)
        self.best: float | None = None
        """The best value so far; None before the first."""
        self.updates_since_best = 0
        """How many updates in a row brought no improvement."""

    @property
    def stopped(self) -> bool:
        """Whether training should stop: `patience` updates in a row brought no improvement."""
        return self.updates_since_best >= self._patience

    def update(self, value: float | torch.Tensor) -> bool:
        """Add the value of an evaluation, the same on all ranks; returns `stopped`. A collective.

        A value that is NaN or infinite does not count as an improvement. If the values differ by rounding, that of rank
        0 counts.
        """
        number = check_metric_value("early stopping", value)
        values = [float(each) for (each,) in self._comm.exchange("stopping.update", [number])]
        for rank, other in enumerate(values):
            if not math.isclose(other, number, rel_tol=_ROUNDING) and not (math.isnan(number) and math.isnan(other)):
                raise CommunicationError(
                    f"stopping.update got {number:g} on rank {self._comm.world.rank} and {other:g} on rank {rank}, so "
                    "one rank could stop without the others: pass a value over all ranks, such as run.mean(losses), "
                    "run.max(...) or metric.compute()"
                )
        number = values[0]
        if math.isfinite(number) and self._is_better(number):
            self.best, self.updates_since_best = number, 0
        else:
            self.updates_since_best += 1
        return self.stopped

    def state_dict(self) -> dict[str, Any]:
        """The best value and the number of updates since then."""
        return {"best": self.best, "updates_since_best": self.updates_since_best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, with the patience of this start."""
        self.best, self.updates_since_best = state["best"], state["updates_since_best"]

    def _is_better(self, value: float) -> bool:
        if self.best is None:
            return True
        gain = self.best - value if self._mode == "min" else value - self.best
        return gain > self._min_delta
