"""The micro-batches of a step and their losses, whose gradients are those of the mean or sum over the global batch.

DDP and FSDP average gradients over the ranks, and backward passes of several micro-batches add up. So the mean over the
global batch of S samples is, on each of R ranks, the sum of its losses times R / S.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from samestep.context import RunContext
from samestep.data.permutation import key64
from samestep.distributed.communicator import sum_tensor
from samestep.errors import StepError
from samestep.loggers.loggers import LogRow, check_metric_name
from samestep.parallel.fsdp import local_tensor
from samestep.torch_private import multiply_all
from samestep.training.mistakes import check_gathered_labels, coupling_warning

Losses = Sequence[tuple[torch.Tensor, list[int]]]
_HALF = (torch.float16, torch.bfloat16)
_PER_TOKEN = (
    "compute it from its logits: step.mean(cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], "
    "reduction='none'), mask=labels[:, 1:] != -100)"
)


@dataclass(frozen=True)
class MicroBatch:
    """The rows that this rank passes through the model at once."""

    data: object  # the batch, on the device
    weights: torch.Tensor  # one weight per row: a sample has weight 1, padding 0
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

    def row_seed(self, row: int, draws: int) -> int:
        """A new seed for the sample of one row, after `draws` draws for all rows.

        Draws are counted per row, since how many rows come before it depends on the number of ranks.
        """
        self._row_draws[row % len(self.keys)] += 1
        draw = draws + self._row_draws[row % len(self.keys)]
        # key64 mixes all bits into the lower 32, the only ones that torch's CPU generator uses
        return key64(int(self.keys[row]), draw) % (1 << 63)


@dataclass(frozen=True)
class StepPosition:
    """Which step this is, and this rank's part of it."""

    number: int  # optimizer steps before this one since training began
    index: int  # steps before this one in its epoch
    epoch: int
    samples: int  # samples of the step, over all ranks
    micro_batches: int  # micro-batches that every rank runs
    first_row: int  # samples of the step on lower ranks: the position of this rank's first row in the global batch
    shard: str | None = None  # the name of its shard; None for a stream, whose samples have no stable index


class StepLoss:
    """What `step.mean`, `step.sum` and `step.log` have seen in one loop over the micro-batches of a step."""

    def __init__(self, context: RunContext, position: StepPosition, number: int = 0) -> None:
        self.losses: list[tuple[torch.Tensor, list[int]]] = []
        """The detached losses of each micro-batch and the dataset indices of its rows."""
        self.means = 0  # calls of mean and sum
        self._context, self._position, self._number = context, position, number  # of the loop over the micro-batches
        self._checked: MicroBatch | None = None
        self._calls = 0  # of `mean` without a mask in the micro-batch `_checked`
        self._masked_means = 0
        self._masked_count: torch.Tensor | None = None
        self._total: torch.Tensor | None = None  # of what mean and sum returned
        self._unrecorded: torch.Tensor | None = None  # the same since an optimizer has stepped
        self._factor: torch.Tensor | None = None  # of gradients and losses, once the count of a masked mean is known
        self._logged: dict[str, tuple[torch.Tensor, torch.Tensor | float]] = {}

    @property
    def value(self) -> torch.Tensor | None:
        """The sum of what `mean` and `sum` returned, detached."""
        return self._total if self._total is None or self._factor is None else _scale(self._total, self._factor)

    def take_unrecorded(self) -> torch.Tensor | None:
        """The part of `value` since the last call."""
        value, self._unrecorded = self._unrecorded, None
        return value if value is None or self._factor is None else _scale(value, self._factor)

    def mean(
        self, micro_batch: MicroBatch, losses: torch.Tensor, mask: torch.Tensor | None, lengths: torch.Tensor | None
    ) -> torch.Tensor:
        """See `Step.mean`."""
        self._check(micro_batch, losses, mask, lengths)
        if mask is None and lengths is None:
            if losses.dim() > 1:
                self._warn_if_padded(micro_batch, losses.shape)
            value = self._plain_mean(micro_batch, losses)
        elif self._position.micro_batches == 1:
            weighted, weights = self._weigh(micro_batch, losses, mask, lengths)
            value = _scale(_total(weighted), self._over_count(self._context.world.size, _wide_sum(weights)))
        else:
            value = self._deferred_mean(*self._weigh(micro_batch, losses, mask, lengths))
        return self._add(value)

    def sum(
        self, micro_batch: MicroBatch, losses: torch.Tensor, mask: torch.Tensor | None, lengths: torch.Tensor | None
    ) -> torch.Tensor:
        """See `Step.sum`."""
        self._check(micro_batch, losses, mask, lengths)
        weighted, _ = self._weigh(micro_batch, losses, mask, lengths)
        return self._add(_total(weighted) * self._context.world.size)

    def log(
        self,
        micro_batch: MicroBatch,
        values: Mapping[str, torch.Tensor],
        mask: torch.Tensor | None,
        lengths: torch.Tensor | None,
    ) -> None:
        """See `Step.log`."""
        for name, each in values.items():
            _check_term(check_metric_name(name), each, mask, lengths, len(micro_batch.indices))
            wide = each.detach().to(torch.float32 if each.device.type == "mps" else torch.float64)  # MPS has no float64
            if mask is None and lengths is None and micro_batch.full:
                total, count = wide.sum(), float(wide.numel())
            else:
                weighted, weights = _weighted(micro_batch, wide, mask, lengths)
                total, count = weighted.sum(), weights.sum(dtype=wide.dtype)
            before = self._logged.get(name)
            self._logged[name] = (total, count) if before is None else (before[0] + total, before[1] + count)

    def log_values(self, row: LogRow) -> None:
        """Hand the sums and counts of `log` to the metric sync."""
        for name, (total, count) in self._logged.items():
            self._context.metrics.pending.add_mean(row, name, total, count)

    def finish(self) -> None:
        """Scale the gradients of a mean whose count is known only now, after the last micro-batch."""
        if self._masked_count is None:
            return
        count = self._position.micro_batches
        if self.means != self._masked_means or self._masked_means != count:
            raise StepError(
                f"step {self._position.number} has {count} micro-batches and mixes a masked mean with other means: the "
                "count of a masked mean is known only at the end of the step, for one mean per micro-batch; add the "
                "losses before step.mean, or pass a larger micro_batch"
            )
        self._factor = self._over_count(self._position.samples, self._masked_count)
        for model in self._context.models:
            multiply_all([local_tensor(gradient) for gradient in model.gradients()], self._factor)

    def _check(
        self, micro_batch: MicroBatch, losses: torch.Tensor, mask: torch.Tensor | None, lengths: torch.Tensor | None
    ) -> None:
        context, rows = self._context, len(micro_batch.indices)
        _check_losses(losses, mask, lengths, rows)
        if not context.progress.steps_of_process:  # the search would take time in every step
            check_gathered_labels(losses, rows, self._position.first_row)
            if warning := coupling_warning(losses, rows, context.world.size, self._position.micro_batches):
                context.warn_once(warning)

    def _warn_if_padded(self, micro_batch: MicroBatch, shape: torch.Size) -> None:
        """Warn once if losses have another number of columns than before in this epoch: they may contain padding."""
        context, position = self._context, self._position
        self._calls = self._calls + 1 if micro_batch is self._checked else 0
        self._checked = micro_batch
        key = position.shard, self._number, self._calls
        epoch, before = context.loss_shapes.get(key, (position.epoch, shape))
        context.loss_shapes[key] = position.epoch, shape
        # what changes with the epoch, as images that grow, is the same in all micro-batches; streams have no name
        several_streams = position.shard is None and len(context.training_data) > 1
        if before[1:] != shape[1:] and epoch == position.epoch and not several_streams:
            context.warn_once(
                f"step.mean got losses of shape {tuple(shape)} after losses of shape {tuple(before)}, without a mask: "
                "if rows are padded to the longest of their micro-batch, how much padding counts depends on the "
                "micro-batches and the number of ranks; pass mask=, which says which values count, as in "
                "`step.mean(losses, mask=labels != -100)`, or lengths= for packed sequences",
                subject="losses of another shape",
            )

    def _add(self, value: torch.Tensor) -> torch.Tensor:
        self.means += 1
        self._context.acceleration.close_forward()
        detached, same = value.detach(), self._unrecorded is self._total
        self._total = detached if self._total is None else self._total + detached
        if same:  # one addition on the device instead of two
            self._unrecorded = self._total
        else:
            self._unrecorded = detached if self._unrecorded is None else self._unrecorded + detached
        return value

    def _over_count(self, numerator: int, mine: torch.Tensor) -> torch.Tensor:
        """`numerator` divided by the count of a masked mean over all ranks, as a tensor on the device.

        Over NCCL nothing waits for it: the GPU adds the counts between the forward and the backward pass.
        """
        count = sum_tensor(self._context.comm, "step.mean", mine)
        self._context.late_checks.add(
            count == 0,
            StepError(
                f"the masks of step {self._position.number} are zero everywhere on all ranks, so the mean is "
                "undefined: check how the mask is computed, or leave such samples out of the dataset"
            ),
        )
        # until the check is read, a step without a count must not turn the weights into NaN
        return torch.where(count == 0, 0.0, numerator / count)

    def _plain_mean(self, micro_batch: MicroBatch, losses: torch.Tensor) -> torch.Tensor:
        """The mean without a mask; if every row counts, as cheap as torch's own."""
        size, rows, samples = self._context.world.size, losses.shape[0], self._position.samples
        if not micro_batch.full:
            weighted, _ = self._weigh(micro_batch, losses, None, None)
            return _total(weighted) * (size * rows / (samples * losses.numel()))
        self.losses.append((losses.detach(), micro_batch.indices))
        if rows * size == samples:
            return losses.mean(dtype=_dtype_of_sums(losses))
        return _total(losses) * (size * rows / (samples * losses.numel()))

    def _weigh(
        self, micro_batch: MicroBatch, losses: torch.Tensor, mask: torch.Tensor | None, lengths: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weighted, weights = _weighted(micro_batch, losses, mask, lengths)
        by_row = weighted.detach()
        if lengths is not None:
            rows = torch.arange(len(micro_batch.indices), device=losses.device)
            tokens = rows.repeat_interleave(lengths.to(losses.device), output_size=losses.shape[0])
            by_row = by_row.reshape(losses.shape[0], -1).sum(dim=1)
            by_row = by_row.new_zeros(len(rows)).index_add(0, tokens, by_row)
        self.losses.append((by_row, micro_batch.indices))
        return weighted, weights

    def _deferred_mean(self, weighted: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self._masked_count is None:
            self._check_no_gradients()
        self._masked_means += 1
        count = _wide_sum(weights)
        self._masked_count = count if self._masked_count is None else self._masked_count + count
        return _total(weighted) * (self._context.world.size / self._position.samples)

    def _check_no_gradients(self) -> None:
        models = self._context.models
        gradients = [local_tensor(gradient) for model in models for gradient in model.gradients()]
        if gradients:  # optimizer.zero_grad(set_to_none=False) leaves zeros
            self._context.late_checks.add(
                torch.stack([gradient.any() for gradient in gradients]).any(),
                StepError(
                    f"step {self._position.number} starts with gradients of an earlier step, and its masked mean over "
                    "several micro-batches scales all gradients at the end: call optimizer.zero_grad() before the "
                    "step, or pass a larger micro_batch"
                ),
            )


def _weighted(
    micro_batch: MicroBatch, losses: torch.Tensor, mask: torch.Tensor | None, lengths: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weighted losses, weights) of the same shape, zero at padding and masked positions."""
    weights = micro_batch.weights
    if lengths is not None:
        weights = weights.repeat_interleave(lengths.to(weights.device), output_size=losses.shape[0])
    weights = weights.reshape(-1, *([1] * (losses.dim() - 1))).expand(losses.shape)
    if mask is not None:
        weights = weights * mask
    # the loss of padding may be inf or nan, and nan times zero is nan
    return torch.where(weights != 0, losses * weights, torch.zeros_like(losses)), weights


def _total(losses: torch.Tensor) -> torch.Tensor:
    return losses.sum(dtype=_dtype_of_sums(losses))


def _dtype_of_sums(losses: torch.Tensor) -> torch.dtype:
    """A sum of losses in fp16 may overflow, and one in bf16 has three digits."""
    return torch.float32 if losses.dtype in _HALF else losses.dtype


def _wide_sum(weights: torch.Tensor) -> torch.Tensor:
    """A count as exact as the device allows; MPS has no float64."""
    return weights.sum(dtype=torch.float32 if weights.device.type == "mps" else torch.float64)


def _scale(value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return value * factor.to(value.dtype)


def _check_losses(losses: torch.Tensor, mask: torch.Tensor | None, lengths: torch.Tensor | None, rows: int) -> None:
    if lengths is not None:
        _check_lengths(losses, lengths, rows)
    elif (problem := _losses_problem(losses, rows)) is not None:
        if hasattr(losses, "logits"):
            remedy = f"its loss is a mean over the tokens of this rank, so {_PER_TOKEN}"
        else:
            remedy = "use reduction='none' (and a mask for tokens that do not count, or lengths= for packed sequences)"
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


def _check_lengths(losses: torch.Tensor, lengths: torch.Tensor, rows: int) -> None:
    total = int(lengths.sum())
    if tuple(lengths.shape) != (rows,) or not losses.dim() or total != losses.shape[0]:
        raise StepError(
            f"lengths has shape {tuple(lengths.shape)} and a sum of {total}, and this micro-batch has {rows} rows and "
            f"losses of shape {tuple(losses.shape)}: pass one length per row, with one loss per token in the order of "
            "the rows"
        )


def _check_term(
    name: str, values: torch.Tensor, mask: torch.Tensor | None, lengths: torch.Tensor | None, rows: int
) -> None:
    if lengths is not None:
        _check_lengths(values, lengths, rows)
    elif (problem := _losses_problem(values, rows)) is not None and not problem.startswith("integers"):
        raise StepError(
            f"step.log needs one value of {name!r} for each of the {rows} rows of this micro-batch, got {problem}: "
            "pass values per row, or log a number that each rank has for itself with run.log"
        )
    if mask is not None and mask.shape != values.shape:
        raise StepError(
            f"the mask has shape {tuple(mask.shape)} and the values of {name!r} {tuple(values.shape)}: they must match"
        )
