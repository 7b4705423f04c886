"""The training data of a Trainer: each optimizer step holds the same samples on any number of ranks.

One step is as many batches as the Trainer accumulates, so a step never crosses a window of accumulation; the last,
smaller step of an epoch may take fewer. What is handed out holds no padding: a rank's batch is as large as its part of
the step, and `Part.weight` says what its mean must weigh. The position is Lightning's own progress.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import numpy as np
import torch
from lightning.pytorch import Trainer

from samestep.data.keyed import sample_keys
from samestep.data.loader import Loader, Request
from samestep.data.order import Order
from samestep.data.order_reader import OrderReader
from samestep.data.sample_rng import Absent
from samestep.errors import DataError, StateError
from samestep.lightning.reading import Reading
from samestep.plan.batch import Cut

Settings = Callable[[int], object]


class Progress(Protocol):
    """How far Lightning is in an epoch, in batches."""

    ready: int
    started: int
    processed: int
    completed: int


@dataclass(frozen=True)
class Part:
    """One batch of this rank."""

    number: int
    """Optimizer steps before its own since training began, on any world size."""
    samples: int
    """How many samples its step has, over all ranks and batches."""
    real: int
    """How many of them are in this batch; 0: it is a copy, which weighs nothing."""
    last: bool
    """Whether the optimizer steps after it."""
    indices: list[int]
    """The dataset indices of its rows."""
    make_keys: Callable[[], torch.Tensor]
    """Makes one 64-bit key a row, from (seed, epoch, sample)."""

    def share(self) -> float:
        """Which part of its step this batch is."""
        return self.real / self.samples


class TrainLoader:
    """What a Trainer iterates over in training. It is no DataLoader, so Lightning puts no sampler of its own in it."""

    def __init__(self, trainer: Trainer, reading: Reading, order: Order, cut: Cut, settings: Settings | None) -> None:
        self._trainer, self._order, self._cut, self._settings = trainer, order, cut, settings
        self.count = cut.shape(0)[0]
        """Batches of a full step on every rank: what the Trainer must accumulate."""
        self.current: Part | None = None
        self._reader = OrderReader(order, cut.span, cut.steps)
        self._device = trainer.strategy.root_device
        self._loader: Loader | None = Loader(
            reading.dataset, order.seed, cut.rank, reading.collate, reading.workers, self._device
        )
        self.dataset = reading.dataset

    def __len__(self) -> int:
        return self._batches_until(self._cut.steps)

    def __iter__(self) -> Iterator[object]:
        """The rest of the epoch that Lightning is in, which it knows when it asks for the first batch, not before."""
        if self._trainer.accumulate_grad_batches != self.count:
            raise DataError(
                f"Trainer.accumulate_grad_batches is {self._trainer.accumulate_grad_batches} and a step of "
                f"SameStep is {self.count} batch(es): it follows from the global batch; leave out what changes it "
                "(GradientAccumulationScheduler), and pass SameStep(micro_batch=...) instead"
            )
        epoch, first = self._trainer.current_epoch, self._progress().ready // self.count
        asked: deque[Part] = deque()
        assert self._loader is not None
        for data in self._loader.read(self._requests(epoch, first, asked)):
            self.current = asked.popleft()
            yield data

    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch, which limit_train_batches may end early."""
        return int(min(self._cut.steps, -(-self._trainer.num_training_batches // self.count)))

    def state_dict(self) -> dict[str, int]:
        """Where training stands, in steps: valid on any world size and any accumulation."""
        done = self._progress().processed
        step = self._cut.steps if done >= len(self) else done // self.count
        return {"step": step, **self.identity}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Turn the batches that Lightning counted on another layout into those of this one.

        A window of accumulation that was under way is begun anew: its gradients were not saved.
        """
        self.check(state)
        progress, place = self._progress(), self._batches_until(state["step"])
        # Saved in on_train_batch_end, a batch is processed and not yet completed; Lightning looks at the difference.
        lag = progress.processed - progress.completed
        progress.ready = progress.started = progress.processed = place
        progress.completed = place - lag

    @property
    def identity(self) -> dict[str, int]:
        """What must be the same in a run that goes on from this one's checkpoints."""
        return {"n": self._cut.n, "global_batch": self._cut.global_batch, "seed": self._order.seed}

    def check(self, saved: Mapping[str, int]) -> None:
        """Refuse to go on from a run with other data, another global batch or another seed."""
        remedies = {
            "n": "give the same dataset, or begin anew without ckpt_path",
            "global_batch": f"pass SameStep(global_batch={saved.get('global_batch')})",
            "seed": f"pass SameStep(seed={saved.get('seed')})",
        }
        for name, here in self.identity.items():
            if saved.get(name) != here:
                raise StateError(
                    f"the checkpoint's position has {name}={saved.get(name)} and this training has {name}={here}: the "
                    f"samples already seen would not be the same; {remedies[name]}"
                )

    def close(self) -> None:
        """End the data workers."""
        self._loader = self.current = None

    def _progress(self) -> Progress:
        return cast("Progress", self._trainer.fit_loop.epoch_loop.batch_progress.current)

    def _batches_until(self, step: int) -> int:
        if step < self._cut.steps:
            return step * self.count
        return (self._cut.steps - 1) * self.count + self._cut.shape(self._cut.steps - 1)[0]

    def _requests(self, epoch: int, first: int, asked: deque[Part]) -> Iterator[Request]:
        """What to read, in order; what it weighs waits in `asked`."""
        setting = Absent.SETTING if self._settings is None else self._settings(epoch)
        for index in range(first, self._cut.steps):
            indices, start = self._reader.read(epoch, index), self._cut.span(index)[0]
            (begin, end), parts = self._cut.positions(index), self._cut.micro_batches(index)
            for at, part in enumerate(parts):
                chosen = indices[part.start - start : part.stop - start]
                if not part.real:  # all ranks need equally many backward passes
                    chosen = indices[part.pad - start : part.pad - start + 1]
                keys = partial(self._keys, epoch, chosen)
                number, last = epoch * self.steps + index, at == len(parts) - 1
                asked.append(Part(number, end - begin, part.real, last, chosen.tolist(), keys))
                yield Request(epoch, chosen, setting)

    def _keys(self, epoch: int, indices: np.ndarray) -> torch.Tensor:
        words = sample_keys(self._order.seed, epoch, indices).view(np.int64)
        return torch.from_numpy(words).to(self._device)
