"""The order of an epoch: which dataset index stands at which position, known without computing the others.

The order is a function of (n, seed, epoch) and, with weights, of these; of nothing else: not of ranks, workers, numpy's
global state or numpy's version. What it gives for a seed stays the same in every later version of samestep; golden
values in tests/unit/test_order.py guard that.
"""

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from samestep.data.feistel import LARGEST, Feistel, feistel
from samestep.data.mix import key64, keyed_words
from samestep.errors import DataError

SMALL: Final = 1 << 20
"""Up to this many samples a shuffled epoch is held as one array of 4 MiB or less, and is as even as the hash itself."""

_KEPT_EPOCHS: Final = 2
"""While the last steps of an epoch are read, a prefetcher already reads the next epoch."""

_SHUFFLE, _DRAW = 1, 2  # keep the two uses of one seed apart

_Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Order:
    """The dataset index at every position of every epoch, by random access.

    As they stand (`shuffle=False`), in a keyed permutation of each epoch's own, or, with `weights`, drawn with
    replacement in proportion to them: then an epoch has n positions too, and a sample may stand at several or none.
    A shuffle takes 4 bytes a sample up to `SMALL` samples and beyond nothing that grows with n; weights take 16 each.

    >>> order = Order(n=10, seed=0, shuffle=True)
    >>> sorted(order.indices(epoch=3, start=0, stop=10).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    n: int
    seed: int
    """Any integer; two that differ by a multiple of 2**64 give the same order."""
    shuffle: bool = False
    weights: npt.NDArray[np.float64] | None = None
    """One number >= 0 for each sample; they need not add up to 1."""
    _bounds: npt.NDArray[np.float64] | None = field(init=False, repr=False, default=None)
    _permutations: dict[int, "Feistel | _Table"] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.n < 1:
            raise DataError(
                f"the dataset is empty: it has {self.n} samples and needs at least 1; check what it reads from"
            )
        if self.n > LARGEST:
            raise DataError(
                f"the dataset says it has {self.n} samples and an order holds at most {LARGEST}; check its __len__"
            )
        if self.weights is not None:
            weights = _copied(self.weights, self.n)
            object.__setattr__(self, "weights", weights)
            object.__setattr__(self, "_bounds", _cumulated(weights))

    def __reduce__(self) -> tuple[type["Order"], tuple[object, ...]]:
        """Travel to another process without the arrays, which are cheaper computed than sent."""
        return Order, (self.n, self.seed, self.shuffle, self.weights)

    def indices(self, epoch: int, start: int, stop: int) -> _Indices:
        """The dataset indices at positions start..stop of an epoch; no other position is computed.

        A call costs some 0.1 ms however few it asks for: to read small slices step after step, use `OrderReader`.
        """
        if not 0 <= start <= stop <= self.n:
            raise DataError(f"positions {start} to {stop} are not in an epoch, which has positions 0 to {self.n}")
        if not self.shuffle and self._bounds is None:
            _check_epoch(epoch)
            return np.arange(start, stop, dtype=np.int64)
        return self.at(epoch, np.arange(start, stop, dtype=np.int64))

    def at(self, epoch: int, positions: _Indices) -> _Indices:
        """The dataset indices at any positions of an epoch; a position outside 0..n-1 is the caller's mistake."""
        _check_epoch(epoch)
        if self._bounds is not None:
            return _drawn(self._bounds, key64(_DRAW, self.seed, epoch), positions)
        if not self.shuffle:
            return positions.astype(np.int64)
        return self._permutation(epoch).at(positions)

    def _permutation(self, epoch: int) -> "Feistel | _Table":
        kept = self._permutations.get(epoch)
        if kept is None:
            key = key64(_SHUFFLE, self.seed, epoch)
            kept = _Table(_shuffled(self.n, key)) if self.n <= SMALL else feistel(self.n, key)
            for old in list(self._permutations)[: 1 - _KEPT_EPOCHS]:
                self._permutations.pop(old, None)
            self._permutations[epoch] = kept
        return kept


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """A permutation held in full."""

    elements: npt.NDArray[np.uint32]

    def at(self, positions: _Indices) -> _Indices:
        """The elements at these positions."""
        return self.elements[positions].astype(np.int64)


def _check_epoch(epoch: int) -> None:
    if epoch < 0:
        raise DataError(f"epoch {epoch} does not exist: epochs are counted from 0")


def _shuffled(n: int, key: int) -> npt.NDArray[np.uint32]:
    """0..n-1 sorted by a keyed hash, ties by index; sorting (hash, index) in one word has one result on any numpy."""
    bits = (n - 1).bit_length()
    index = np.arange(n, dtype=np.uint64)
    words = keyed_words(key, index)
    words >>= np.uint64(bits)
    words <<= np.uint64(bits)
    words |= index
    # numpy sorts 16 bits by radix; after that pass the words are nearly in order, which halves the time of the sort.
    words = words[np.argsort((words >> np.uint64(48)).astype(np.uint16), kind="stable")]
    words.sort(kind="stable")
    words &= np.uint64((1 << bits) - 1)
    return words.astype(np.uint32)


def _drawn(bounds: npt.NDArray[np.float64], key: int, positions: _Indices) -> _Indices:
    """For each position a keyed uniform number, and the sample in whose share of all weight it falls."""
    uniform = (keyed_words(key, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    uniform *= bounds[-1]
    # Rounding may lift a product to the total itself, beyond the last share: the last sample with weight gets it.
    last = np.searchsorted(bounds, bounds[-1], side="left")
    return np.minimum(np.searchsorted(bounds, uniform, side="right"), last).astype(np.int64)


def _copied(weights: npt.NDArray[np.float64], n: int) -> npt.NDArray[np.float64]:
    """Weights of our own, so that a change to the caller's array afterwards does not change the order."""
    try:
        array = np.array(weights, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"weights must be one number for each of the {n} samples, and are not numbers: {error}"
        ) from error
    if array.shape != (n,):
        raise DataError(
            f"weights have shape {array.shape} and the dataset has {n} samples: give one weight for each sample"
        )
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if wrong.size:
        first = int(wrong[0])
        raise DataError(
            f"{wrong.size} of {n} weights are negative, nan or infinite, first weights[{first}] = {array[first]}: "
            "every weight must be a number >= 0"
        )
    array.flags.writeable = False
    return array


def _cumulated(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Where the share of each sample ends."""
    n = weights.size
    with np.errstate(over="ignore"):
        bounds = np.cumsum(weights)
    if bounds[-1] == 0:
        raise DataError(f"all {n} weights are 0, so no sample can be drawn: give at least one sample a weight above 0")
    if math.isinf(bounds[-1]):
        raise DataError(f"the sum of the {n} weights is too large for a float64: divide them by {weights.max()}")
    return bounds
