"""The loop around steps: hands each step to the user's loop body, watches the optimizer, and ends the step."""

import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from samestep.context import RunContext
from samestep.errors import StepError
from samestep.loggers.loggers import EpochNumber, LogRow, check_log_step
from samestep.parallel.wrapped_model import check_optimizer
from samestep.training.step import Step

_KEPT_STEP_TIMES = 500


class StepLoop:
    """Runs the steps of all shards and streams of a run."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.current: Step | None = None  # the current or the last step
        self.step_starts: deque[float] = deque(maxlen=_KEPT_STEP_TIMES)  # when the last steps started, in seconds
        self.shards = 0  # how many shards there are
        self.before_step: list[Callable[[int], object]] = []  # called with the number of each step; see run.profile
        self.after_step: list[Callable[[int], object]] = []
        self.profiled_steps: set[int] = set()  # that some profiler records
        self._optimizers = context.replicas.optimizers
        self._warned_of_epoch = False
        self._evaluations = 0  # how many loops over batches for evaluation are running
        self._hooks = _watch_optimizers(self)

    @property
    def step_number(self) -> int:
        """The number of the current or last step; the last one may be that of the restored checkpoint."""
        return self.current.number if self.current is not None else max(0, self.context.progress.steps - 1)

    def log_row(self, step: int | None) -> LogRow:
        """The record for values that are logged now: of the current step and epoch, or of the user's own step number.

        `step=epoch.number` means the current step too: epochs are an axis of their own.
        """
        pending, progress = self.context.metrics.pending, self.context.progress
        number = self.step_number if step is None or isinstance(step, EpochNumber) else check_log_step(step)
        if number != self.step_number:
            self._warn_if_epoch(number)
            return LogRow(pending.position, number, None)
        if progress.in_step and self.current is not None:
            return self.current.log_row
        epoch = int(step) if isinstance(step, EpochNumber) else progress.epoch
        return LogRow(pending.position, number, epoch if number or self.current is not None else None)

    def run(self, step: Step) -> Iterator[Step]:
        """Yield `step` to the user's loop body, then run the step boundary: checks, metric sync and callbacks."""
        progress = self.context.progress
        self.context.comm.refuse_inside_once("a training step")
        self.current, progress.in_step = step, True
        if self.context.loggers is not None:
            self.context.loggers.begin_training()
        for hook in self.before_step[:]:
            hook(step.number)
        self.context.times.begin_step()
        pending = self.context.metrics.pending
        step.log_row = pending.begin_step(step.number, step.position.epoch)
        self.step_starts.append(time.perf_counter())
        try:
            yield step
        finally:
            progress.in_step = False
            step.record_loss(None)
            pending.end_step()
            self.context.padding.set_step_rows([], in_batch=False, micro_batches=0)
        step.close()
        self._end(step)

    @contextmanager
    def evaluation(self) -> Generator[None]:
        """While the user loops over a shard or stream for evaluation."""
        self.context.comm.refuse_inside_once("the loop over a shard or stream")
        self._evaluations += 1
        try:
            with self.context.evaluation():
                yield
        finally:
            self._evaluations -= 1

    def detach(self) -> None:
        """Stop watching optimizers."""
        for hook in self._hooks:
            hook.remove()

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """Called before any optimizer steps: inside a training step its parameters must be those of wrapped models."""
        context, step = self.context, self.current
        kind = type(optimizer).__name__
        if not context.progress.in_step or step is None:
            if self._evaluations and any(model.owns(p) for model in context.models for p in _parameters(optimizer)):
                raise StepError(
                    f"{kind}.step() was called in a loop over a shard or stream, which is for evaluation: it has no "
                    "epochs, no shuffling and no global batch; train with `for epoch in train.epochs(n): for step in "
                    "epoch: for inputs, labels in step:`"
                )
            return
        if step.abandoned:
            raise StepError(
                f"step {step.number} was left before its last micro-batch, and then {kind}.step() was called: its "
                "gradients are not those of the global batch and were dropped; to skip a step, `continue` with the "
                "next one"
            )
        if step.in_micro_batches and (len(step) > 1 or context.acceleration.loss_scale):
            raise StepError(
                f"{kind}.step() was called inside the loop over the micro-batches of step {step.number}, before its "
                "gradients are complete: call it after the loop; for one loop per optimizer, as in a GAN, pass "
                "run.shard(..., passes=2)"
            )
        if not any(optimizer is known for known in self._optimizers):
            check_optimizer(optimizer, context.models)
            for model in context.models:
                model.check_unchanged()
            self._optimizers.append(optimizer)
            context.acceleration.prepare_optimizer(optimizer)
        context.times.enter("optimizer")

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """Called after any optimizer has stepped: log its learning rates and its loss."""
        if self.current is None or not self.context.progress.in_step:
            return
        self.context.times.enter("other")
        which = next(index for index, known in enumerate(self._optimizers) if known is optimizer)
        row, metrics = self.current.log_row, self.context.metrics
        for name, rate in _learning_rates(which, optimizer):
            metrics.add_rank0_value((row, name), rate)
        self.current.record_loss(which)

    def _warn_if_epoch(self, number: int) -> None:
        """Warn once if a step number that is behind the current step is rather that of an epoch, from 0 or from 1."""
        epoch, current = self.context.progress.epoch, self.step_number
        if number in (epoch, epoch + 1) and number < current and not self._warned_of_epoch:
            self._warned_of_epoch = True
            self.context.warn_once(
                f"run.log(..., step={number}) after step {current} in epoch {epoch} records the values at step "
                f"{number}: if {number} is an epoch, leave step= out, since every record has its step and its epoch"
            )

    def _end(self, step: Step) -> None:
        context = self.context
        context.times.end_step()
        context.comm.start_steps()
        context.late_checks.end_step()
        if context.loggers is not None:
            context.loggers.console.advance(context.progress.steps)
        context.replicas.after_step(step.number, context.progress.steps_of_process)
        with context.times.phase("logging"):
            self._sync_metrics()
        for hook in self.after_step[:]:
            hook(step.number)
        for callback in context.callbacks:
            callback.on_step_end(context.progress.steps)

    def _sync_metrics(self) -> None:
        context = self.context
        if (records := context.metrics.count_step()) is not None:
            for model in context.models:
                model.check_unchanged()
            for ledger in context.ledgers:
                ledger.flush()
            context.metrics.write(records)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _learning_rates(which: int, optimizer: Optimizer) -> Iterator[tuple[str, float | torch.Tensor]]:
    """The learning rate of every parameter group, by metric name.

    One on a GPU stays a tensor: reading it now would wait for all of the step.
    """
    prefix = "train/learning_rate" if which == 0 else f"train/learning_rate/optimizer{which}"
    groups = optimizer.param_groups
    for index, group in enumerate(groups):
        rate, name = group["lr"], prefix if len(groups) == 1 else f"{prefix}/{index}"
        yield name, rate if isinstance(rate, torch.Tensor) and rate.is_cuda else float(rate)


def _watch_optimizers(loop: StepLoop) -> list[RemovableHandle]:
    """Hook every optimizer's step; the weak reference lets a run that was dropped without being closed be collected."""
    reference = weakref.ref(loop)

    def before(optimizer: Optimizer, *_: object) -> None:
        if (live := reference()) is not None:
            live.before_optimizer(optimizer)

    def after(optimizer: Optimizer, *_: object) -> None:
        if (live := reference()) is not None:
            live.after_optimizer(optimizer)

    return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
