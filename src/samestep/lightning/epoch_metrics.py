"""Reduces the values of `self.log` over all ranks so that every sample has the same weight.

Lightning keeps for each name a sum over rows and a count of rows on each rank. Between ranks it averages both, and the
counts are integers: 3 and 2 become 2. samestep adds sums and counts and sets the final value. The accumulators are
private to Lightning: only this module uses them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer

from samestep.lightning.trainer_ranks import gather

_REDUCTIONS = {"is_sum_reduction": sum, "is_max_reduction": max, "is_min_reduction": min}


def reduce_epoch_metrics(trainer: Trainer) -> None:
    """Set the values of this epoch over all ranks, for everything logged as a number; all ranks must call it."""
    if trainer.world_size == 1:
        return
    metrics = dict(_accumulators(trainer))
    own = {
        key: (float(metric.value), int(metric.cumulated_batch_size) if metric.meta.is_mean_reduction else 1)
        for key, metric in metrics.items()
    }
    parts = gather(trainer, own)
    for key, metric in metrics.items():
        values, counts = zip(*(part[key] for part in parts if key in part), strict=True)
        if metric.meta.is_mean_reduction:
            value = sum(values) / sum(counts) if sum(counts) else float("nan")
        else:
            value = next(reduce for flag, reduce in _REDUCTIONS.items() if getattr(metric.meta, flag))(values)
        metric._computed = torch.tensor(value, dtype=metric.value.dtype, device=metric.value.device)


def epoch_values(trainer: Trainer) -> dict[str, float]:
    """Return what the current loop has logged for the epoch, numbers and torchmetrics, under Lightning's names.

    Values of a single step are left out: they are those of one rank.
    """
    values, logged = dict[str, float](), trainer.callback_metrics
    for _, metric in _results(trainer):
        if metric.meta.on_epoch and not metric.has_reset:
            name = metric.meta.forked_name(on_step=False)
            if metric.meta.add_dataloader_idx and metric.meta.dataloader_idx is not None:
                name += f"/dataloader_idx_{metric.meta.dataloader_idx}"
            if name in logged:
                values[name] = float(logged[name])
    return values


def copy_logged_values(trainer: Trainer) -> Callable[[], None]:
    """Copy what was logged before a padding batch; return a function that removes what the batch logs."""
    names = ("value", "cumulated_batch_size")
    before = {
        key: {name: getattr(metric, name).clone() for name in names[: 1 + metric.meta.is_mean_reduction]}
        for key, metric in _accumulators(trainer)
    }

    def _restore() -> None:
        for key, metric in _accumulators(trainer):
            if key in before:
                metric.__dict__.update(before[key])
            else:
                metric.value = metric._defaults["value"].clone().to(metric.value.device)
                if metric.meta.is_mean_reduction:
                    metric.cumulated_batch_size = torch.zeros_like(metric.cumulated_batch_size)
            metric._computed = None

    return _restore


def _results(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    results: Any = trainer._results  # pyright: ignore[reportPrivateUsage]  # see the module's docstring
    yield from (results or {}).items()


def _accumulators(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Yield the accumulators of the current loop that hold a number of the epoch."""
    for key, metric in _results(trainer):
        if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset and not metric.meta.sync.rank_zero_only:
            yield key, metric
