"""What the ranks of a run do together: numbers over all, one for all, agreement, waiting."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch

from samestep.ranks import reduce
from samestep.ranks.link import Link
from samestep.ranks.once import Per, once
from samestep.ranks.reduce import Op, Values

T = TypeVar("T")


class Group:
    """The common acts of all ranks. Each must be called by every rank, in the same order; one who differs is named.

    `Run` is a Group that trains; modules below it need no more than this.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._onces = 0

    @property
    def rank(self) -> int:
        """This process's number among all, from 0."""
        return self._link.world.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._link.world.size

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self._link.world.first

    @property
    def node_first(self) -> bool:
        """Whether this is the first rank of its node."""
        return self._link.world.node_first

    def mean(self, values: Values) -> float:
        """The mean of every element on every rank: each sample weighs the same, however ranks are filled.

        >>> from samestep import Run
        >>> with Run(global_batch=8) as run:
        ...     run.mean([1, 2, 3, 6])
        3.0
        """
        return reduce.mean(self._link, values, self._keep_real)

    def means(self, batches: Iterable[Mapping[str, Values]]) -> dict[str, float]:
        """Several means from one pass over the data: each batch gives its values by name.

        >>> from samestep import Run
        >>> with Run(global_batch=8) as run:
        ...     run.means({"loss": [2.0 * x], "right": [x > 1]} for x in (1, 2))
        {'loss': 3.0, 'right': 0.5}
        """
        return reduce.means(self._link, batches, self._keep_real)

    def sum(self, values: Values) -> int | float:
        """The sum of every element on every rank; whole numbers stay exact."""
        return reduce.total(self._link, values, self._keep_real)

    def max(self, values: Values) -> int | float:
        """The largest element on any rank."""
        return reduce.maximum(self._link, values, self._keep_real)

    def all_reduce(self, tensor: torch.Tensor, op: Op, weight: float | None = None) -> torch.Tensor:
        """`tensor` reduced over the ranks, element by element, as a new tensor.

        A mean of whole numbers is computed in float64, never floored. `weight` is this rank's count in a weighted mean.
        """
        return reduce.all_reduce(self._link, tensor, op, weight)

    def once(self, function: Callable[..., T], *args: object, per: Per = "run") -> T:
        """Run `function(*args)` on the first rank; every rank gets what it returned, or raises what it raised.

        With `per="node"` the first rank of each node runs it, for the ranks of that node.
        """
        self._onces += 1
        return once(self._link, self._onces, per, function, *args)

    def agree(self, flag: bool) -> bool:
        """True on every rank if it is true on any: stopping, saving and skipping are decisions of all."""
        return any(bool(part[0]) for part in self._link.exchange("run.agree", [float(flag)]))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._link.exchange("run.barrier", [])

    def _keep_real(self, values: torch.Tensor) -> torch.Tensor:
        """What counts of `values`: all of it, unless a run in evaluation knows better."""
        return values
