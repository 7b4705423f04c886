"""Randomness of a batch in a Trainer: whatever a module draws is keyed by sample, as in a Run.

A batch begins when its loader yields it, before the hooks that transfer and augment it, and ends with its
`on_..._batch_end`: forward, loss, backward pass and what activation checkpointing computes again are inside.
"""

from collections.abc import Callable

from lightning.pytorch import Trainer
from torch import Tensor

from samestep.data.sample_rng import set_micro_batch
from samestep.messages import WarnOnce
from samestep.parallel.model_randomness import Kind, ModelRandomness


class BatchRandomness:
    """Keys the draws of the current batch."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._randomness: ModelRandomness | None = None
        self._warnings = WarnOnce()
        self._keys: Callable[[], Tensor] | None = None
        self._draws = 0
        self._is_open = False

    def begin(self, trainer: Trainer, kind: Kind, step: int, number: int, keys: Callable[[], Tensor]) -> None:
        """Start a batch: the `number`-th of this rank in its step, or in the evaluation of an epoch."""
        self.end()
        if self._randomness is None:
            device, warn = trainer.strategy.root_device, self._warnings.warn_once if trainer.is_global_zero else _ignore
            self._randomness = ModelRandomness(self._seed, trainer.global_rank, device, warn)
            self._randomness.add_model(trainer.lightning_module, batch_dim=None)
        self._keys, self._draws = keys, 0
        set_micro_batch(keys)
        self._randomness.micro_batch(kind, step, number, keys).__enter__()
        self._is_open = True

    def end(self, error: BaseException | None = None) -> None:
        """End the batch, if one has begun."""
        if self._randomness is not None and self._is_open:
            self._is_open = False
            self._randomness.__exit__(error if error is None else type(error), error, None)
            set_micro_batch(None)
            self._keys = None

    def close(self, error: BaseException | None = None) -> None:
        """End the batch and forget the module."""
        self.end(error)
        self._randomness = None

    def next_draw(self) -> tuple[Tensor, int] | None:
        """Return the keys of the rows and a new salt for a draw of the user; None outside a batch."""
        if self._keys is None:
            return None
        self._draws += 1
        return self._keys(), self._draws  # ModelRandomness keys the draws of the module by other salts


def _ignore(text: str) -> None:
    """Rank 0 warns for all ranks."""
