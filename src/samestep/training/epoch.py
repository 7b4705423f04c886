"""An epoch: one pass over the data in steps of the global batch."""

from collections.abc import Callable, Iterator

from samestep.errors import DataError
from samestep.messages import info
from samestep.training.step import Step


class Epoch:
    """One pass over the data in steps of the global batch; iterate over it once."""

    def __init__(self, number: int, steps: Callable[[int], Iterator[Step]], left: Callable[[], int] | None) -> None:
        self._steps, self._left, self._started = steps, left, False
        self.number = number
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
                f"epoch {self.number} was iterated twice, so its samples would count twice: ask for more epochs(...)"
            )
        self._started = True
        return self._steps(self.number)


def report_if_trained(epoch: int, count: int) -> None:
    """Log that no epoch is left, so that a finished run that is started again does not end without a message."""
    if epoch and epoch >= count:
        info(
            f"epochs({count}): {epoch} epochs are already trained, nothing is left to do; epochs({epoch + 1}) trains "
            "one more"
        )


def current_epoch(epoch: int, step: int) -> int:
    """The epoch at a position: before the first step of an epoch it is the previous one."""
    return epoch if step else max(0, epoch - 1)
