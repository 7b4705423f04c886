"""Early stopping: decides, the same on all ranks and across restarts, when a metric has stopped improving."""

import math
from numbers import Integral, Real
from typing import Any, Literal, get_args

import torch

from samestep.context import RunContext
from samestep.errors import CommunicationError, ConfigError
from samestep.loggers.loggers import check_metric_value

Mode = Literal["min", "max"]


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

        A value that is NaN or infinite is no improvement.
        """
        number = check_metric_value("early stopping", value)
        for rank, (other,) in enumerate(self._comm.exchange("stopping.update", [number])):
            if float(other) != number and not (math.isnan(number) and math.isnan(other)):
                raise CommunicationError(
                    f"stopping.update got {number:g} on rank {self._comm.world.rank} and {float(other):g} on rank "
                    f"{rank}, so one rank could stop without the others: pass a value over all ranks, such as "
                    "run.mean(losses), run.max(...) or metric.compute()"
                )
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
