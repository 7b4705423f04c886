"""The base of shards and streams: epochs, position, keys of samples, data workers, ledger, batches on the device."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from numbers import Integral
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import TensorDataset

from samestep.context import RunContext
from samestep.data.content_probe import Probe
from samestep.data.ledger import ShardDescription, ShardLedger, next_generation
from samestep.data.loader import is_custom_batch, is_dense, map_tensors, move_to_device
from samestep.data.sample_rng import micro_batch_keys, normal, sample_keys, uniform
from samestep.environment.hardware import read_hardware
from samestep.environment.world import oom_retries
from samestep.errors import DataError
from samestep.loggers.loggers import EpochNumber
from samestep.messages import info
from samestep.training.mistakes import unpacking_problem
from samestep.training.step import Step
from samestep.training.step_loop import StepLoop

_MAX_WORKERS: Final = 8  # if samestep chooses
_MOST_WORKERS: Final = 1024
_END: Final = object()  # after the last batch


class Epoch:
    """One pass over the data in steps of the global batch; iterate over it once."""

    def __init__(self, number: int, steps: Callable[[int], Iterator[Step]], left: Callable[[], int] | None) -> None:
        self._steps, self._left, self._started = steps, left, False
        self.number = EpochNumber(number)
        """The number of this epoch, from 0."""

    def __len__(self) -> int:
        if self._left is None:
            raise DataError(
                "the number of steps of a stream is unknown: iterate over it, or pass a dataset with a length to "
                "run.shard"
            )
        return self._left()

    def __iter__(self) -> Iterator[Step]:
        if self._started:
            raise DataError(
                f"epoch {self.number} was iterated twice, so its samples would count twice: call epochs() with a "
                "larger number"
            )
        if problem := unpacking_problem(f"epoch {self.number}"):
            raise DataError(problem)
        self._started = True
        return self._steps(self.number)


class TrainingData(ABC):
    """The base of Shard and Stream: the position in the epochs, and the keys of samples."""

    def __init__(self, loop: StepLoop, passes: int) -> None:
        if not isinstance(passes, Integral) or passes < 1:  # pyright: ignore[reportUnnecessaryIsInstance]  # scripts are not type-checked
            raise DataError(
                f"passes={passes!r} is not a number of loops: pass how often you loop over the micro-batches of a "
                "step, 1 or more"
            )
        self._loop, self._context, self._passes = loop, loop.context, passes
        self._epoch = self._step = self._draws = 0
        self._evaluating = False
        self._epochs_of_process = 0  # completed epochs since this process built or restored it
        self._ledger: ShardLedger | None = None
        self._weights: dict[tuple[int, int], torch.Tensor] = {}  # see _row_weights
        self._compared = False  # whether the ranks have compared what they read

    def __iter__(self) -> Iterator[Any]:
        """One pass over all samples, in batches of this rank, for evaluation."""
        with self._loop.evaluation():
            yield from self._evaluation_batches()

    @abstractmethod
    def _evaluation_batches(self) -> Iterator[Any]:
        """The batches of one pass for evaluation."""

    def _epochs(
        self, count: int, steps: Callable[[int], Iterator[Step]], steps_left: Callable[[], int] | None
    ) -> Iterator[Epoch]:
        if self._epochs_of_process and self._epoch >= count:
            raise DataError(
                f"epochs({count}) has nothing left to train, since {self._epoch} epoch(s) are trained: the number "
                "counts all epochs of the run, also after a restart, not those of one call; write one loop, `for epoch "
                f"in train.epochs(10):`, or epochs({self._epoch + 1}) here for one more"
            )
        if self._epoch and self._epoch >= count:  # a finished run that is started again must not end without a message
            info(
                f"epochs({count}): {self._epoch} epochs are already trained, nothing is left to do; "
                f"epochs({self._epoch + 1}) trains one more"
            )
        while self._epoch < count:
            number = self._context.progress.epoch = self._epoch
            yield Epoch(number, steps, steps_left)
            if self._epoch == number:  # the loop over its steps was left early
                self._begin_epoch(number + 1)
            self._epochs_of_process += 1
        # now, since afterwards rank 0 may convert the model to export it
        self._context.replicas.check("after the last epoch", self._context.progress.steps_of_process)

    def _begin_epoch(self, number: int) -> None:
        self._epoch, self._step = number, 0

    def _set_position(self, epoch: int, step: int) -> None:
        self._epoch, self._step, self._epochs_of_process = epoch, step, 0
        # before the first step of an epoch an evaluation belongs to the previous one
        self._context.progress.epoch = epoch if step else max(0, epoch - 1)

    @property
    def _must_compare(self) -> bool:
        """Whether the first read must return probes of the data: for the other ranks, or for the ledger."""
        return not self._compared and not (self._ledger is None and self._context.comm.alone)

    def _gather_probes(self, probes: Sequence[Probe]) -> list[Sequence[Probe]]:
        """Record what this rank reads, and return what every rank reads; a collective, once per shard or stream."""
        self._compared = True
        if self._ledger is not None:
            self._ledger.record_data(probes)
        return self._context.comm.exchange_objects("the comparison of the data between ranks", probes)

    def random(self, *shape: int) -> torch.Tensor:
        """Uniform numbers in [0, 1) of shape (rows, *shape) for the batch of an evaluation; new at every call.

        They are the counterpart of `step.random`, keyed by (seed, epoch, sample): the same on any number of ranks.
        """
        return uniform(*self._next_draw("random", shape)).to(self._context.convert_to)

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal numbers of shape (rows, *shape), keyed like `random`."""
        return normal(*self._next_draw("normal", shape)).to(self._context.convert_to)

    def _next_draw(self, name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, tuple[int, ...], int]:
        keys = micro_batch_keys()
        if not self._evaluating or keys is None:
            raise DataError(
                f"{name}() was called outside of `for batch in shard`: use it there, in an evaluation; in training use "
                f"step.{name}()"
            )
        self._draws += 1
        return keys, shape, self._draws

    def _evaluate_batch(self, data: object, number: int, keys: Callable[[], torch.Tensor]) -> Iterator[object]:
        """Yield a batch of an evaluation, with what is drawn in the loop body keyed by sample."""
        self._draws, self._evaluating = 0, True
        try:
            with self._context.randomness.micro_batch("evaluation", self._context.progress.epoch, number, keys):
                yield data
        finally:
            self._evaluating = False

    def _keys(self, epoch: int, indices: np.ndarray) -> torch.Tensor:
        keys = torch.from_numpy(sample_keys(self._context.config.seed, epoch, indices).view(np.int64))
        return move_without_waiting(keys, self._context.device)

    def _row_weights(self, rows: int, real: int) -> torch.Tensor:
        """One weight per row, on the device: 1 for the first `real` rows, 0 for padding."""
        if (rows, real) not in self._weights:
            weights = (torch.arange(rows) < real).float()
            self._weights[rows, real] = move_without_waiting(weights, self._context.device)
        return self._weights[rows, real]


def evaluation_epoch(epoch: int) -> int:
    """The epoch by which the noise of an evaluation is keyed: not that of training, which has seen the same samples."""
    return -1 - epoch


def choose_micro_batch(context: RunContext, micro_batch: int | None) -> int | None:
    """The most rows per micro-batch: as passed or planned, halved once for each out-of-memory restart; None: all."""
    if micro_batch is not None and (not isinstance(micro_batch, Integral) or micro_batch < 1):
        raise DataError(
            f"micro_batch={micro_batch!r} is not a number of rows: pass 1 or more, or omit it to pass each rank's part "
            "of a step through the model at once"
        )
    rank_batch = -(-context.config.global_batch // context.world.size)
    rows, retries = micro_batch or context.planned_micro_batch, oom_retries()
    if retries:
        before, rows = rows or rank_batch, max(1, -(-(rows or rank_batch) // 2**retries))
        context.print_once(
            f"micro-batch: {rows} row(s) instead of {before}, which ran out of memory; the global batch of "
            f"{context.config.global_batch} and the training result stay the same"
        )
    context.largest_micro_batch = max(context.largest_micro_batch, min(rows or rank_batch, rank_batch))
    return rows


def choose_num_workers(context: RunContext, dataset: object, num_workers: int | None) -> int:
    """The number that was passed, or one chosen by the cores and printed."""
    if num_workers is not None:
        return check_num_workers(num_workers)
    cores, ranks = read_hardware().cores.usable, context.world.local_size
    chosen = max(0, min(_MAX_WORKERS, cores // ranks - 1))
    reason = f"{cores} cores for {ranks} rank(s) on this node, at most {_MAX_WORKERS} workers per rank"
    if isinstance(dataset, TensorDataset | Sequence):
        chosen = 0
        reason = "the data is in memory, and reading it in the training process is faster than in a worker"
    context.print_once(f"data workers: {chosen} per rank ({reason}); pass num_workers= to change it")
    return chosen


def check_num_workers(num_workers: int) -> int:
    """Return `num_workers` if it is a valid number of data workers."""
    if not isinstance(num_workers, Integral) or not 0 <= num_workers <= _MOST_WORKERS:
        raise DataError(
            f"num_workers={num_workers!r} is not a number of data workers: pass 0 to {_MOST_WORKERS}; each is a process"
        )
    return num_workers


def open_ledger(
    context: RunContext, name: str, description: ShardDescription, weights_hash: str | None = None
) -> ShardLedger | None:
    """A ledger for another shard or stream, if the run keeps ledgers."""
    if not context.config.ledger:
        return None
    if any(ledger.name == name for ledger in context.ledgers):
        raise DataError(f"two shards are named {name!r}, and each needs its own ledger: pass different names")
    generation = context.once(next_generation, context.folder, name)
    world = context.world
    ledger = ShardLedger(context.folder, name, description, world.rank, world.size, generation, weights_hash)
    context.ledgers.append(ledger)
    return ledger


# Batches on the device

StartCopy = Callable[[object], Callable[[], object]]
"""Starts the copy of a batch; what it returns makes the device wait for the copy, and returns the batch there."""


def batches_on_device(
    batches: Iterator[object], device: torch.device, dtype: torch.dtype | None = None
) -> Iterator[object]:
    """Yield the batches on the device; on CUDA the next one is copied while this one is computed."""
    if device.type == "cuda":
        return prefetch(batches, CudaCopier(device, dtype))
    return (move_to_device(batch, device, dtype) for batch in batches)


def prefetch(batches: Iterator[object], start_copy: StartCopy) -> Iterator[object]:
    """Start the copy of the next batch before yielding this one, and never of more than one.

    If the next batch cannot be read, the error is raised when that batch is requested: this one is still trained.
    """
    finish, failure = _start_next(batches, start_copy)
    try:
        while finish is not None:
            batch, finish = finish(), None
            finish, failure = _start_next(batches, start_copy)
            yield batch
            batch = None
    finally:
        if finish is not None and not sys.is_finalizing():
            finish()  # the loop was left: nothing may use the memory of the batch before its copy is complete
    try:
        if failure is not None:
            raise failure
    finally:
        del failure  # its traceback refers to this frame: together they would live until the garbage collector runs


def _start_next(
    batches: Iterator[object], start_copy: StartCopy
) -> tuple[Callable[[], object] | None, Exception | None]:
    try:
        batch = next(batches, _END)
        return (None, None) if batch is _END else (start_copy(batch), None)
    except Exception as error:  # noqa: BLE001  # raised by `prefetch`
        return None, error


class CudaCopier:
    """Copies batches from pinned memory on a separate CUDA stream; a `StartCopy`.

    The memory belongs to the stream that computes. So the copy waits for what this stream has queued, at most the
    previous step, and no more than two batches take memory, however far Python is ahead of the GPU.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
        self._device, self._dtype, self._stream = device, dtype, torch.cuda.Stream(device)

    def __call__(self, batch: object) -> Callable[[], object]:
        """Start the copy of a batch. Batch classes and special tensors are copied by the stream that computes."""
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def allocate(tensor: torch.Tensor) -> torch.Tensor:
            dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
            if not _is_plain(tensor):
                return tensor.to(self._device, dtype, non_blocking=True)
            source = tensor.to(dtype)
            source = source if source.is_pinned() else source.pin_memory()  # otherwise Python waits for the copy
            copies.append((torch.empty_like(source, device=self._device), source))
            return copies[-1][0]

        moved = batch.to(self._device) if is_custom_batch(batch) else map_tensors(batch, allocate)  # pyright: ignore[reportAttributeAccessIssue]
        computing, copied = torch.cuda.current_stream(self._device), torch.cuda.Event()
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        copied.record(self._stream)
        return partial(self._finish, moved, [target for target, _ in copies], computing, copied)

    def _finish(
        self, moved: object, targets: list[torch.Tensor], computing: torch.cuda.Stream, copied: torch.cuda.Event
    ) -> object:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        if current != computing:
            for target in targets:
                target.record_stream(current)  # the memory must not be reused before this stream is done with it
        return moved


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a copy of the values in new memory is all that moving a tensor takes."""
    is_host = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and is_dense(tensor)
    return is_host and not tensor.requires_grad and tensor.numel() > 0


def move_without_waiting(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move a small tensor from host memory to the device; from memory that is not pinned, Python waits for the GPU."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
