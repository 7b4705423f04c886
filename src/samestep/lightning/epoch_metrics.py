"""What `self.log` collected on each rank, brought together so that every sample weighs the same.

Lightning keeps for each name a sum over rows and a count of rows on each rank. Between ranks it averages both, the
counts as whole numbers: 3 and 2 make 2. Here sums and counts are added, and Lightning is given the finished value. The
accumulators are Lightning's own and private: nothing outside this module looks at them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer

from samestep.lightning.trainer_ranks import gathered

Kind = Literal["mean", "sum", "max", "min"]
_FLAGS: tuple[tuple[str, Kind], ...] = (
    ("is_mean_reduction", "mean"),
    ("is_sum_reduction", "sum"),
    ("is_max_reduction", "max"),
    ("is_min_reduction", "min"),
)


@dataclass(frozen=True)
class Contribution:
    """What one rank has of one name."""

    kind: Kind
    value: float
    count: int


def bring_together(trainer: Trainer) -> None:
    """Give Lightning the values of this epoch over all ranks, for all that was logged as a number; all must call it."""
    if trainer.world_size == 1:
        return
    metrics = dict(_collected(trainer))
    mine = {key: _contribution(metric) for key, metric in metrics.items()}
    parts = gathered(trainer, mine)
    for key, metric in metrics.items():
        value = combined([part[key] for part in parts if key in part])
        metric._computed = torch.tensor(value, dtype=metric.value.dtype, device=metric.value.device)


def combined(parts: list[Contribution]) -> float:
    """The value over all ranks.

    >>> combined([Contribution("mean", 18.0, 3), Contribution("mean", 12.0, 2)])
    6.0
    """
    values = [part.value for part in parts]
    if parts[0].kind == "mean":
        count = sum(part.count for part in parts)
        return sum(values) / count if count else float("nan")
    return {"sum": sum, "max": max, "min": min}[parts[0].kind](values)


def epoch_values(trainer: Trainer) -> dict[str, float]:
    """What the loop under way has logged for the epoch, numbers and torchmetrics, as Lightning tells it.

    A value of a single step is left out: it is that of one rank.
    """
    results: Any = trainer._results  # pyright: ignore[reportPrivateUsage]  # see the module's docstring
    values, told = dict[str, float](), trainer.callback_metrics
    for metric in (results or {}).values():
        if metric.meta.on_epoch and not metric.has_reset:
            name = metric.meta.forked_name(on_step=False)
            if metric.meta.add_dataloader_idx and metric.meta.dataloader_idx is not None:
                name += f"/dataloader_idx_{metric.meta.dataloader_idx}"
            if name in told:
                values[name] = float(told[name])
    return values


class Forgotten:
    """What was collected before a batch that is a copy, to be put back after it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._before = {key: _numbers(metric) for key, metric in _collected(trainer)}

    def put_back(self) -> None:
        """Forget what the copy added."""
        for key, metric in _collected(self._trainer):
            if key in self._before:
                metric.__dict__.update(self._before[key])
            else:
                metric.value = metric._defaults["value"].clone().to(metric.value.device)
                if metric.meta.is_mean_reduction:
                    metric.cumulated_batch_size = torch.zeros_like(metric.cumulated_batch_size)
            metric._computed = None


def _collected(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """The accumulators of the loop under way that hold a number of the epoch."""
    results: Any = trainer._results  # pyright: ignore[reportPrivateUsage]  # see the module's docstring
    for key, metric in (results or {}).items():
        if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset and not metric.meta.sync.rank_zero_only:
            yield key, metric


def _numbers(metric: Any) -> dict[str, torch.Tensor]:
    names = ("value", "cumulated_batch_size") if metric.meta.is_mean_reduction else ("value",)
    return {name: getattr(metric, name).clone() for name in names}


def _contribution(metric: Any) -> Contribution:
    kind: Kind = next(kind for flag, kind in _FLAGS if getattr(metric.meta, flag))
    count = int(metric.cumulated_batch_size) if kind == "mean" else 1
    return Contribution(kind, float(metric.value), count)
