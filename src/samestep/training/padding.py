"""Padding rows in an evaluation."""

from collections.abc import Generator
from contextlib import contextmanager

import torch

from samestep.errors import CommunicationError, DataError


class Padding:
    """Whether the batch that an evaluation has just handed out is nothing but padding, and whether it was left out.

    All ranks must call a sharded model equally often. A rank that has no sample left is given a copy of one.
    """

    def __init__(self) -> None:
        self._rows = 0
        self._left_out = False

    @contextmanager
    def handed_out(self, rows: int) -> Generator[None]:
        """While a batch with this many rows of padding (none: 0) is in the user's hands."""
        self._rows, self._left_out = rows, False
        try:
            yield
            if rows and not self._left_out:
                raise DataError(
                    "this rank had no sample left and was given a copy of one, so that all ranks call the sharded "
                    "model or teacher equally often; what was made of it did not go through run.mean, run.sum or "
                    "run.max, and would count: give them values as they come, run.mean(net(x).argmax(-1) == y for x, y "
                    "in test)"
                )
        finally:
            self._rows = 0

    def leave_out(self, values: torch.Tensor) -> torch.Tensor:
        """`values` without what was made of padding."""
        if not self._rows:
            return values
        if values.dim() == 0 or values.shape[0] != self._rows:
            what = "a single value" if values.dim() == 0 else f"values of shape {tuple(values.shape)}"
            raise CommunicationError(
                f"this batch has {self._rows} row(s), all padding, and {what} cannot be told apart by row: give "
                "run.mean, run.sum and run.max one value a sample (reduction='none'), not one of a whole batch"
            )
        self._left_out = True
        return values[:0]
