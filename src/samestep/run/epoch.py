"""One pass over the data in steps of the global batch."""

from collections.abc import Callable, Iterator

from samestep.errors import DataError
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
