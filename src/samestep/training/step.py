"""One optimizer step: this rank's micro-batches of the global batch, and the mean loss over all of it."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from samestep.context import RunContext
from samestep.data import sample_rng
from samestep.data.permutation import key64
from samestep.data.sample_rng import SampleIds, set_micro_batch
from samestep.distributed.communicator import Communicator
from samestep.errors import StepError
from samestep.loggers.loggers import LogRow
from samestep.messages import format_list, warn
from samestep.parallel.wrapped_model import WrappedModel, gradients_finite, local_tensor
from samestep.torch_private import multiply_all
from samestep.training.mistakes import unpacking_problem

Losses = Sequence[tuple[torch.Tensor, list[int]]]
_PER_TOKEN = (
    "compute it from its logits: step.mean(cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], "
    "reduction='none'), mask=labels[:, 1:] != -100)"
)
_HALF = (torch.float16, torch.bfloat16)
_SHOWN_SAMPLES = 8
_NO_STEP_MEAN = (
    "a plain mean counts padding rows, and weights ranks and micro-batches of different size equally, so the result "
    "depends on the number of ranks; write step.mean(losses).backward() with one loss per sample (reduction='none')"
)


@dataclass(frozen=True)
class MicroBatch:
    """The rows that this rank passes through the model at once."""

    data: object  # the batch, on the device
    weights: torch.Tensor  # one weight per row: 1 for a sample, 0 for padding
    make_keys: Callable[[], torch.Tensor]  # computes `keys`; called only if a model draws keyed random numbers
    indices: list[int]  # the dataset index of each row
    real: int  # how many rows are samples; the rows after them are padding

    _row_draws: Counter[int] = field(default_factory=Counter[int], init=False)

    @property
    def full(self) -> bool:
        """Whether no row is padding, so that `step.mean` needs no weights."""
        return self.real == len(self.indices)

    @cached_property
    def keys(self) -> torch.Tensor:
        """One 64-bit key per row, from (seed, epoch, sample): the source of its random numbers."""
        return self.make_keys()

    def next_seed(self, row: int, draws: int) -> int:
        """A new seed for the sample of one row, after `draws` draws for all rows.

        Draws are counted per row, since how many rows come before it depends on the number of ranks.
        """
        self._row_draws[row % len(self.keys)] += 1
        draw = draws + self._row_draws[row % len(self.keys)]
        # key64 mixes all bits into the lower 32, the only ones that torch's CPU generator uses
        return key64(int(self.keys[row]), draw) % (1 << 63)


@dataclass(frozen=True)
class StepPosition:
    """Which step this is; the same on every rank and every world size."""

    number: int  # optimizer steps before this one since training began
    index: int  # steps before this one in its epoch
    epoch: int
    samples: int  # samples of the step, over all ranks
    micro_batches: int  # micro-batches that every rank runs
    shard: str | None = None  # the name of its shard; None for a stream, whose samples have no stable index


class Step:
    """One optimizer step. Iterate over it once; each item is a micro-batch, already on the device."""

    def __init__(
        self,
        context: RunContext,
        position: StepPosition,
        micro_batches: Iterator[MicroBatch],
        advance: Callable[[bool], None],
    ) -> None:
        self.position = position
        self.log_row = LogRow(1, position.number, position.epoch)  # of its metrics; set when the step begins
        self.done = self.abandoned = False
        """Whether all micro-batches were read, or the loop over them was left early."""
        self.losses: list[tuple[torch.Tensor, list[int]]] = []
        """The detached losses of each micro-batch and the dataset indices of its rows."""
        self.last_indices: list[int] = []
        """The dataset indices of the last micro-batch."""
        self._context, self._micro_batches, self._advance = context, micro_batches, advance
        self._current: MicroBatch | None = None
        self._rows: list[tuple[int, int]] = []  # of each micro-batch: its rows and how many of them are samples
        self._closed = False
        self._masked_count: torch.Tensor | None = None
        self._means = self._masked_means = self._draws = 0
        self._loss_sum: torch.Tensor | None = None
        self._loss_factor = 1.0

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
        """One weight for each row of the current micro-batch: 1 for a sample, 0 for padding."""
        return self._micro_batch().weights

    @property
    def loss(self) -> torch.Tensor | None:
        """The sum of this rank's `mean` values, detached; its average over the ranks is the mean loss."""
        if self._loss_sum is None or self._loss_factor == 1.0:
            return self._loss_sum
        return self._loss_sum * self._loss_factor

    @property
    def in_micro_batches(self) -> bool:
        """Whether the loop over the micro-batches is running."""
        return self._current is not None

    def __len__(self) -> int:
        return self.position.micro_batches

    def __iter__(self) -> Iterator[Any]:
        if self._current is not None or self.done:
            raise StepError(f"step {self.number} was iterated twice: its micro-batches can be read once")
        if self._closed:
            raise StepError(
                f"step {self.number} is over and its micro-batches were skipped: read them inside the loop over the "
                "epoch, before the next step starts (list(epoch) runs to the end)"
            )
        if not self._context.progress.steps_of_process and (problem := unpacking_problem(f"step {self.number}")):
            raise StepError(problem)
        self._start()
        try:
            for index, micro_batch in enumerate(self._micro_batches):
                self._current, self._draws, self.last_indices = micro_batch, 0, micro_batch.indices
                self._start_micro_batch(last=index == len(self) - 1)
                keys = partial(getattr, micro_batch, "keys")
                set_micro_batch(keys, partial(_sample_ids, micro_batch, self.position))
                with self._context.randomness.micro_batch("training", self.number, index, keys):
                    yield micro_batch.data
            for model in self._context.models:
                model.check_accumulated(self, self.number)
            self._finish_masked_mean()
            self.done = True
        finally:
            self._current = None
            set_micro_batch(None)
            self._context.padding.set_step_rows(self._rows, in_batch=False)
            if not self.done:
                self._abandon()
        self._finish()
        self._advance(True)  # from here on its samples count as trained, whatever the loop body still does

    def close(self) -> None:
        """Called when the loop body is over: skip micro-batches that were not read, since the next step has its own."""
        self._closed = True
        for _ in self._micro_batches:
            pass
        if not self.done:
            self._advance(False)

    def mean(self, losses: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """A scalar whose gradient, averaged over ranks and summed over micro-batches, is that of the global mean.

        `losses` has one value per row, or more with a `mask` that says which of them count. Padding rows never count.
        The loss at a masked position may be inf or nan, its gradient may not: mask the input of the loss as well.
        With a mask and several micro-batches the count is known only at the end of the step: the gradients are then
        scaled when the loop over the micro-batches ends, and `step.loss` holds the true value.
        """
        _check_losses(losses, mask, rows=self._micro_batch().weights.shape[0])
        self._means += 1
        if mask is None:
            value = self._plain_mean(losses)
        elif len(self) == 1:
            weighted, weights = self._weigh(losses, mask)
            count = self._total(weights.sum(dtype=torch.float64))
            value = weighted.sum() * (self._context.world.size / _check_count(count, self.number))
        else:
            value = self._deferred_mean(*self._weigh(losses, mask))
        self._context.acceleration.close_forward()
        detached = value.detach()
        self._loss_sum = detached if self._loss_sum is None else self._loss_sum + detached
        return self._for_backward(value)

    def sum(self, losses: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """A scalar whose gradient, averaged over ranks and summed over micro-batches, is that of the global sum."""
        _check_losses(losses, mask, rows=self._micro_batch().weights.shape[0])
        self._means += 1
        weighted, _ = self._weigh(losses, mask)
        value = weighted.sum() * self._context.world.size
        self._context.acceleration.close_forward()
        return self._for_backward(value)

    def finite(self) -> bool:
        """Whether the gradients of this step are finite, the same on every rank; rank 0 warns if they are not.

        Call it after the loop over the micro-batches: `if not step.finite(): optimizer.zero_grad(); continue`.
        """
        if not self.done:
            raise StepError("step.finite() was called inside the loop over the micro-batches: call it after the loop")
        comm, models, scale = self._context.comm, self._context.models, self._context.acceleration.loss_scale
        if scale is not None and scale.dropped:
            return False  # the loss scale has printed it
        finite = gradients_finite(comm, "step.finite", models)
        if not finite:
            report = _finite_report(comm, self.number, self.losses, models)
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
        generator.manual_seed(self._micro_batch().next_seed(row, self._draws))
        return generator

    def _start(self) -> None:
        """Scale gradients that an earlier step left by the loss scale that the new ones will carry."""
        context = self._context
        if context.acceleration.loss_scale is not None:
            context.acceleration.loss_scale.start_step(context.models)

    def _start_micro_batch(self, last: bool) -> None:
        """Reduce gradients over the ranks in the last micro-batch only."""
        models, micro_batch = self._context.models, self._micro_batch()
        self._rows.append((len(micro_batch.indices), micro_batch.real))
        self._context.padding.set_step_rows(self._rows[-1:], in_batch=True)
        for model in models:
            model.set_gradient_sync(last)
            if len(self) > 1:
                model.watch_accumulation(self, self.number)
        if not any(model.sharded for model in models):  # FSDP has its own mixed precision policy
            self._context.acceleration.open_forward()

    def _finish(self) -> None:
        """Complete the gradients and record the step, before the optimizer steps."""
        context = self._context
        context.acceleration.close_forward()
        for model in context.models:
            model.average_second_backward(self.number)
        rank = context.world.rank
        used = [model.check_used(self.number, self.last_indices, rank) for model in context.models]
        if any(used) and not self._means:
            context.warn_once(f"a backward pass ran without step.mean or step.sum: {_NO_STEP_MEAN}")
        context.acceleration.unscale(context.models, self.number)
        progress = context.progress
        progress.steps = self.number + 1
        progress.steps_of_process += 1
        progress.samples += self.samples
        context.metrics.add_samples(self.samples)
        if (loss := self.loss) is not None:
            # without the checks of PendingMetrics.add, which cost time in every step
            context.metrics.pending.values[self.log_row, "train/loss"] = loss

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
        return value if factor == 1.0 else value * factor

    def _micro_batch(self) -> MicroBatch:
        if self._current is None:
            raise StepError(
                f"step {self.number} has no current micro-batch: call this inside `for batch in step:`, on that step"
            )
        return self._current

    def _total(self, count: torch.Tensor) -> float:
        return sum(float(part[0]) for part in self._context.comm.exchange("step.mean", [float(count)]))

    def _plain_mean(self, losses: torch.Tensor) -> torch.Tensor:
        """The mean without a mask; if every row counts, as cheap as torch's own."""
        micro_batch, size = self._micro_batch(), self._context.world.size
        rows = losses.shape[0]
        if not micro_batch.full:
            weighted, _ = self._weigh(losses, None)
            return weighted.sum() * (size * rows / (self.samples * losses.numel()))
        self.losses.append((losses.detach(), micro_batch.indices))
        losses = losses.float() if losses.dtype in _HALF else losses
        if rows * size == self.samples:
            return losses.mean()
        return losses.sum() * (size * rows / (self.samples * losses.numel()))

    def _weigh(self, losses: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(weighted losses, weights) of the same shape, zero at padding and masked positions."""
        micro_batch = self._micro_batch()
        weights = micro_batch.weights.reshape(-1, *([1] * (losses.dim() - 1))).expand(losses.shape)
        if mask is not None:
            weights = weights * mask
        # the loss of padding may be inf or nan, and nan times zero is nan
        weighted = torch.where(weights != 0, losses * weights, torch.zeros_like(losses))
        self.losses.append((weighted.detach(), micro_batch.indices))
        return weighted, weights

    def _deferred_mean(self, weighted: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self._masked_count is None and self._has_gradients():
            raise StepError(
                f"step {self.number} starts with gradients of an earlier step, and its masked mean over several "
                "micro-batches scales all gradients at the end: call optimizer.zero_grad() before the step, or pass a "
                "larger micro_batch"
            )
        self._masked_means += 1
        count = weights.sum(dtype=torch.float64)
        self._masked_count = count if self._masked_count is None else self._masked_count + count
        return weighted.sum() * (self._context.world.size / self.samples)

    def _finish_masked_mean(self) -> None:
        if self._masked_count is None:
            return
        if self._means != self._masked_means or self._masked_means != len(self):
            raise StepError(
                f"step {self.number} has {len(self)} micro-batches and mixes a masked mean with other means: the count "
                "of a masked mean is known only at the end of the step, for one mean per micro-batch; add the losses "
                "before step.mean, or pass a larger micro_batch"
            )
        self._loss_factor = self.samples / _check_count(self._total(self._masked_count), self.number)
        for model in self._context.models:
            multiply_all(list(model.gradients()), self._loss_factor)

    def _has_gradients(self) -> bool:
        models = self._context.models
        return any(bool(local_tensor(gradient).any()) for model in models for gradient in model.gradients())


def _check_backward_in_time(step: Step, _: torch.Tensor) -> None:
    """Raise if backward() runs after the step is complete: masked means and loss scales would not apply."""
    if step.done:
        raise StepError(
            f"backward() of a loss of step {step.number} ran after the loop over its {len(step)} micro-batch(es), "
            "when the gradients are complete: call it inside the loop, for every micro-batch"
        )


def _check_losses(losses: torch.Tensor, mask: torch.Tensor | None, rows: int) -> None:
    if (problem := _losses_problem(losses, rows)) is not None:
        if hasattr(losses, "logits"):
            remedy = f"its loss is a mean over the tokens of this rank, so {_PER_TOKEN}"
        else:
            remedy = "use reduction='none' (and a mask for tokens that do not count)"
        if problem == "a scalar":
            remedy += f"; the loss that a transformers model computes from labels= is a scalar too, so {_PER_TOKEN}"
        raise StepError(
            f"step.mean and step.sum need one loss for each of the {rows} rows of this micro-batch, got {problem}: "
            f"{remedy}"
        )
    if mask is not None and mask.shape != losses.shape:
        raise StepError(f"the mask has shape {tuple(mask.shape)} and the losses {tuple(losses.shape)}: they must match")


def _losses_problem(losses: object, rows: int) -> str | None:
    if not isinstance(losses, torch.Tensor):
        return f"a {type(losses).__name__}"
    if losses.dim() == 0:
        return "a scalar"
    if losses.shape[0] != rows or not losses.numel():
        return f"shape {tuple(losses.shape)}"
    return None if losses.is_floating_point() else f"integers ({losses.dtype}), which have no gradient"


def _sample_ids(micro_batch: MicroBatch, position: StepPosition) -> SampleIds | None:
    if position.shard is None:
        return None
    return SampleIds(position.shard, position.epoch, micro_batch.indices, micro_batch.real)


def _check_count(count: float, number: int) -> float:
    if count == 0:
        raise StepError(
            f"the masks of step {number} are zero everywhere on all ranks, so the mean is undefined: check how the "
            "mask is computed, or leave such samples out of the dataset"
        )
    return count


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
