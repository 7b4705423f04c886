"""One pass over the data in steps of the global batch."""

from collections.abc import Callable, Iterator

from samestep.errors import DataError
from samestep.log import note
from samestep.run.step import Step


class Epoch:
    """One pass over the data in steps of the global batch; iterate over it once."""

    def __init__(self, number: int, steps: Callable[[int], Iterator[Step]], left: Callable[[], int] | None) -> None:
        self._steps, self._left, self._begun = steps, left, False
        self.number = number
        """Which pass this is, from 0."""

    def __len__(self) -> int:
        if self._left is None:
            raise DataError(
                "a stream does not know how many steps it has: iterate over it, or give run.shard a dataset with a "
                "length"
            )
        return self._left()

    def __iter__(self) -> Iterator[Step]:
        if self._begun:
            raise DataError(
                f"epoch {self.number} was iterated twice: its samples would count twice; ask for more epochs(...)"
            )
        self._begun = True
        return self._steps(self.number)


def note_if_trained(epoch: int, count: int) -> None:
    """Say so where nothing is left to train: a finished run that is started again would end without a word."""
    if epoch and epoch >= count:
        note(
            f"epochs({count}): {epoch} are trained already, nothing is left to do; epochs({epoch + 1}) trains one more"
        )


def under_way(epoch: int, step: int) -> int:
    """The epoch under way at a position: before the first step of one it is still the one before."""
    return epoch if step else max(0, epoch - 1)
