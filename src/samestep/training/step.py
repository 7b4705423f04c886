"""One optimizer step: this rank's micro-batches of the global batch, and the mean loss over all of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from samestep.context import RunContext
from samestep.data import sample_rng
from samestep.data.sample_rng import SampleIds, set_micro_batch
from samestep.distributed.communicator import Communicator
from samestep.errors import StepError
from samestep.loggers.loggers import LogRow
from samestep.messages import format_list, warn
from samestep.parallel.wrapped_model import WrappedModel, gradients_finite
from samestep.training.mistakes import unpacking_problem
from samestep.training.step_loss import Losses, MicroBatch, StepLoss, StepPosition

_SHOWN_SAMPLES = 8
_NO_STEP_MEAN = (
    "a plain mean counts padding rows, and weights ranks and micro-batches of different size equally, so the result "
    "depends on the number of ranks; write step.mean(losses).backward() with one loss per sample (reduction='none')"
)


class Step:
    """One optimizer step. Iterate over it; each item is a micro-batch, already on the device.

    With `run.shard(passes=2)` you can iterate twice, for example once per optimizer of a GAN.
    """

    def __init__(
        self,
        context: RunContext,
        position: StepPosition,
        micro_batches: Iterator[MicroBatch],
        advance: Callable[[bool], None],
        passes: int = 1,
    ) -> None:
        self.position = position
        self.log_row = LogRow(1, position.number, position.epoch)  # of its metrics; set when the step begins
        self.done = self.abandoned = False
        """Whether all micro-batches were read, or the loop over them was left early."""
        self.last_indices: list[int] = []
        """The dataset indices of the last micro-batch."""
        self._context, self._micro_batches, self._advance = context, micro_batches, advance
        self._current: MicroBatch | None = None
        self._row_counts: list[tuple[int, int]] = []  # of each micro-batch: its rows and how many of them are samples
        self._closed = False
        self._reduces = False  # whether the backward pass of the current micro-batch reduces gradients over the ranks
        self._draws = 0
        self._loss = StepLoss(context, position)
        self._passes, self._passes_done = passes, 0
        self._kept: list[MicroBatch] = []  # for the next pass

    @property
    def number(self) -> int:
        """Optimizer steps before this one since training began, on any world size."""
        return self.position.number

    @property
    def samples(self) -> int:
        """The number of samples of this step, over all ranks."""
        return self.position.samples

    @property
    def weights(self) -> torch.Tensor:
        """One weight for each row of the current micro-batch: a sample has weight 1, padding 0."""
        return self._micro_batch().weights

    @property
    def rows(self) -> torch.Tensor:
        """The position of each row of the current micro-batch in the global batch, and so in `run.gather(...)`.

        A padding row, which has weight 0, has the position of some sample.
        """
        micro_batch, first = self._micro_batch(), self.position.first_row
        self._context.padding.check_one_micro_batch()
        count = len(micro_batch.indices)
        return torch.arange(first, first + count, device=micro_batch.weights.device).clamp(max=self.samples - 1)

    @property
    def loss(self) -> torch.Tensor | None:
        """The sum of what `mean` and `sum` returned on this rank, detached: another number on every rank.

        The loss of the step is `run.mean(step.loss)`; decide by it, since all ranks must do the same.
        """
        return self._loss.value

    @property
    def in_micro_batches(self) -> bool:
        """Whether the loop over the micro-batches is running."""
        return self._current is not None

    def __len__(self) -> int:
        return self.position.micro_batches

    def __iter__(self) -> Iterator[Any]:
        if self._current is not None or self._passes_done == self._passes:
            often = "once" if self._passes == 1 else f"{self._passes} times, one loop after the other"
            raise StepError(
                f"step {self.number} was iterated too often: its micro-batches can be read {often}; to loop over them "
                f"once per optimizer, as in a GAN, pass run.shard(..., passes={self._passes + 1})"
            )
        if self._closed:
            raise StepError(
                f"step {self.number} is over and its micro-batches were skipped: read them inside the loop over the "
                "epoch, before the next step starts (list(epoch) runs to the end)"
            )
        if not self._context.progress.steps_of_process and (problem := unpacking_problem(f"step {self.number}")):
            raise StepError(problem)
        draws = self._start()
        try:
            for index, micro_batch in enumerate(self._kept if self._passes_done else self._micro_batches):
                self._current, self._draws, self.last_indices = micro_batch, draws, micro_batch.indices
                self._start_micro_batch(last=index == len(self) - 1)
                keys = partial(getattr, micro_batch, "keys")
                set_micro_batch(keys, partial(_sample_ids, micro_batch, self.position))
                with self._context.randomness.micro_batch("training", self.number, index, keys, self._passes_done):
                    yield micro_batch.data
            for model in self._context.models:
                model.end_micro_batches()
            self._loss.finish()
            self.done = True
        finally:
            self._current = None
            set_micro_batch(None)
            self._context.padding.set_step_rows(self._row_counts, in_batch=False, micro_batches=len(self))
            if not self.done:
                self._abandon()
        self._finish()
        if not self._passes_done:
            self._advance(True)  # from here on its samples count as trained, whatever the loop body still does
        self._passes_done += 1

    def close(self) -> None:
        """Called when the loop body is over: skip micro-batches that were not read, since the next step has its own."""
        self._closed = True
        for _ in self._micro_batches:
            pass
        for model in self._context.models:
            model.close_step(self, self.number)
        if not self.done and not self._passes_done:
            self._advance(False)
        self._kept.clear()

    def mean(
        self, losses: torch.Tensor, mask: torch.Tensor | None = None, *, lengths: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A scalar whose gradient, averaged over ranks and summed over micro-batches, is that of the global mean.

        `losses` has one value per row, or more with a `mask` that says which of them count. Padding rows never count.
        If the sequences of the rows are packed one after the other, pass their `lengths`: the mean is that over all
        tokens of all ranks. The loss at a masked position may be inf or nan, its gradient may not: mask the input of
        the loss as well. With a mask or lengths and several micro-batches the count is known only at the end of the
        step: the gradients are then scaled when the loop over the micro-batches ends, and `step.loss` holds the true
        value.
        """
        return self._for_backward(self._loss.mean(self._micro_batch(), losses, mask, lengths))

    def sum(
        self, losses: torch.Tensor, mask: torch.Tensor | None = None, *, lengths: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A scalar whose gradient, averaged over ranks and summed over micro-batches, is that of the global sum."""
        return self._for_backward(self._loss.sum(self._micro_batch(), losses, mask, lengths))

    def log(
        self,
        values: Mapping[str, torch.Tensor],
        mask: torch.Tensor | None = None,
        *,
        lengths: torch.Tensor | None = None,
    ) -> None:
        """Log the exact mean of values per row over the global batch, by name, without an additional collective.

        Call it inside the loop over the micro-batches: `step.log({"loss/kl": kl, "accuracy": scores.argmax(-1) == y})`.
        Padding rows do not count; `mask` and `lengths` are those of `step.mean`.
        """
        self._loss.log(self._micro_batch(), values, mask, lengths)

    def record_loss(self, optimizer: int | None) -> None:
        """Log the loss since the last call as that of the optimizer that has stepped, by its number; None: of none."""
        if (loss := self._loss.take_unrecorded()) is not None:
            values, name = self._context.metrics.pending.values, "train/loss"
            if optimizer is None and (self.log_row, name) in values:
                return
            # without the checks of PendingMetrics.add, which cost time in every step
            values[self.log_row, f"{name}/optimizer{optimizer}" if optimizer else name] = loss

    def finite(self) -> bool:
        """Whether the gradients of this step are finite, the same on every rank; rank 0 warns if they are not.

        Call it after the loop over the micro-batches: `if not step.finite(): optimizer.zero_grad(); continue`.
        """
        if not self.done:
            raise StepError("step.finite() was called inside the loop over the micro-batches: call it after the loop")
        comm, models, scale = self._context.comm, self._context.models, self._context.acceleration.loss_scale
        comm.refuse_inside_once("step.finite")
        if scale is not None and scale.dropped:
            return False  # the loss scale has printed it
        finite = gradients_finite(comm, "step.finite", models)
        if not finite:
            report = _finite_report(comm, self.number, self._loss.losses, models)
            if comm.world.is_main:
                warn(report)
        return finite

    def random(self, *shape: int) -> torch.Tensor:
        """Uniform numbers in [0, 1) of shape (rows, *shape), keyed by (seed, epoch, sample); new at every call."""
        self._draws += 1
        return sample_rng.uniform(self._micro_batch().keys, shape, self._draws).to(self._context.convert_to)

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal numbers of shape (rows, *shape), keyed like `random`."""
        self._draws += 1
        return sample_rng.normal(self._micro_batch().keys, shape, self._draws).to(self._context.convert_to)

    def rng(self, row: int) -> torch.Generator:
        """A CPU generator for the sample of one row, for draws that `random` and `normal` do not offer."""
        generator = sample_rng.SampleGenerator()
        generator.manual_seed(self._micro_batch().row_seed(row, self._draws))
        return generator

    def _start(self) -> int:
        """Start a pass; returns how many random draws the samples had in earlier passes.

        Gradients that an earlier step left are scaled by the loss scale that the new ones will carry.
        """
        context = self._context
        if self._passes_done:
            self.record_loss(None)
            self.done, self._row_counts = False, []
            self._loss = StepLoss(context, self.position, self._passes_done)
        if context.acceleration.loss_scale is not None:
            context.acceleration.loss_scale.start_step(context.models)
        return self._draws

    def _start_micro_batch(self, last: bool) -> None:
        """Reduce gradients over the ranks in the last micro-batch only."""
        models, micro_batch = self._context.models, self._micro_batch()
        self._row_counts.append((len(micro_batch.indices), micro_batch.real))
        self._reduces = last and not self._context.comm.alone
        self._context.times.begin_micro_batch()
        if len(self._kept) < len(self) and self._passes > 1:
            self._kept.append(micro_batch)
        self._context.padding.set_step_rows(self._row_counts[-1:], in_batch=True, micro_batches=len(self))
        for model in models:
            model.start_micro_batch(self, self.number, self._passes_done, last)
        self._context.acceleration.open_forward()

    def _finish(self) -> None:
        """Complete the gradients and record the step, before the optimizer steps."""
        context = self._context
        context.acceleration.close_forward()
        for model in context.models:
            model.average_second_backward(context.comm, self, self.number)
        rank = context.world.rank
        used = [model.check_used(self.number, self.last_indices, rank) for model in context.models]
        if any(used) and not self._loss.means:
            context.warn_once(f"a backward pass ran without step.mean or step.sum: {_NO_STEP_MEAN}")
        context.acceleration.unscale(context.models, self.number)
        self._loss.log_values(self.log_row)
        if self._passes_done:
            return
        progress = context.progress
        progress.steps = self.number + 1
        progress.steps_of_process += 1
        progress.samples += self.samples
        context.metrics.add_samples(self.samples)

    def _abandon(self) -> None:
        """Drop the gradients of a step that was left early: they are those of some micro-batches and ranks only."""
        self.abandoned = True
        self._context.acceleration.close_forward()
        for model in self._context.models:
            model.drop_gradients()

    def _for_backward(self, value: torch.Tensor) -> torch.Tensor:
        factor = self._context.acceleration.loss_factor
        if value.requires_grad and (len(self) > 1 or factor != 1.0):
            value.register_hook(partial(_check_backward_in_time, self))
        if value.requires_grad:
            self._context.times.watch_backward(value, self._reduces)
        return value if factor == 1.0 else value * factor

    def _micro_batch(self) -> MicroBatch:
        if self._current is None:
            raise StepError(
                f"step {self.number} has no current micro-batch: call this inside `for batch in step:`, on that step"
            )
        return self._current


def _check_backward_in_time(step: Step, _: torch.Tensor) -> None:
    """Raise if backward() runs after the step is complete: masked means and loss scales would not apply."""
    if step.done:
        raise StepError(
            f"backward() of a loss of step {step.number} ran after the loop over its {len(step)} micro-batch(es), "
            "when the gradients are complete: call it inside the loop, for every micro-batch"
        )


def _sample_ids(micro_batch: MicroBatch, position: StepPosition) -> SampleIds | None:
    if position.shard is None:
        return None
    return SampleIds(position.shard, position.epoch, micro_batch.indices, micro_batch.real)


def _finite_report(comm: Communicator, step: int, losses: Losses, models: Sequence[WrappedModel]) -> str:
    """One report from what each rank has seen; a collective."""
    mine = (_bad_samples(losses), next((name for model in models if (name := model.first_not_finite())), None))
    gathered = comm.exchange_objects("reporting a step that is not finite", mine)
    by_rank = [
        f"rank {rank}: samples {format_list(samples, _SHOWN_SAMPLES)}"
        for rank, (samples, _) in enumerate(gathered)
        if samples
    ]
    bad_names = {name for _, name in gathered}
    names = (name for model in models for name, _ in model.inner.named_parameters())
    parameter = next((name for name in names if name in bad_names), None)
    where = (
        f"the loss is not finite on {'; '.join(by_rank)}"
        if by_rank
        else "every loss is finite, so the backward pass produced it"
    )
    first = f"; the first parameter with such a gradient is {parameter!r}" if parameter else ""
    return f"step {step} is not finite: {where}{first}"


def _bad_samples(losses: Losses) -> list[int]:
    bad: set[int] = set()
    for values, indices in losses:
        finite = values.reshape(len(indices), -1).isfinite().all(dim=1)
        if not bool(finite.all()):
            bad.update(indices[row] for row in torch.nonzero(~finite).reshape(-1).tolist())
    return sorted(bad)
