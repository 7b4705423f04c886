"""Small slices of an order, step after step, computed for many steps at once."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from samestep.errors import DataError

MASK64: Final = (1 << 64) - 1
GOLDEN: Final = 0x9E3779B97F4A7C15
FACTORS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS: Final = (30, 27, 31)


def mix64(word: int) -> int:
    """One 64-bit word scrambled so that every bit of it moves about half of the result's bits."""
    word &= MASK64
    word = (word ^ (word >> SHIFTS[0])) * FACTORS[0] & MASK64
    word = (word ^ (word >> SHIFTS[1])) * FACTORS[1] & MASK64
    return word ^ (word >> SHIFTS[2])


def key64(*words: int) -> int:
    """A key from any number of integers, each taken modulo 2**64; their order matters."""
    key = 0
    for word in words:
        key = mix64((key + GOLDEN) ^ mix64(word + GOLDEN))
    return key


def keyed_word(key: int, counter: int) -> int:
    """The 64-bit word number `counter` of the stream that `key` names."""
    return mix64(key + (counter + 1) * GOLDEN)


def keyed_words(key: int, counters: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """`keyed_word` of every counter at once."""
    words = counters.astype(np.uint64)
    words += np.uint64(1)
    words *= np.uint64(GOLDEN)
    words += np.uint64(key)
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(SHIFTS[2])
    return words


ROUNDS: Final = 10
LARGEST: Final = 1 << 62
"""Both halves and the sum of two of them must fit 32 bits."""

BLOCK: Final = 1 << 15
"""Positions computed together: few enough that all scratch arrays stay in the processor's second cache."""

_Words = npt.NDArray[np.uint32]
_Wide = npt.NDArray[np.uint64]
_Round = tuple[_Words, _Words, _Words]
_Scratch = tuple[_Words, _Wide]


@dataclass(frozen=True, slots=True, eq=False)
class Feistel:
    """The permutation of 0..n-1 that one key names, for n from 1 to `LARGEST`; make it with `feistel(n, key)`."""

    n: int
    bits: int
    """Width of the lower half."""
    high: int
    """Number of values of the upper half."""
    rounds: tuple[_Round, ...]
    _idle: list[_Scratch] = field(default_factory=list, repr=False)

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The elements at these positions, each of which must be in 0..n-1."""
        elements = np.empty(positions.size, dtype=np.int64)
        scratch = self._scratch()
        for first in range(0, positions.size, BLOCK):
            block = elements[first : first + BLOCK]
            self._network(positions[first : first + BLOCK], block, scratch)
            outside = np.flatnonzero(block >= self.n)
            while outside.size:
                walked = block[outside]
                self._network(walked, walked, scratch)
                block[outside] = walked
                outside = outside[walked >= self.n]
        self._idle.append(scratch)
        return elements

    def _scratch(self) -> _Scratch:
        """Arrays that no other thread has, from an earlier call where possible: fresh pages would double the cost."""
        try:
            return self._idle.pop()
        except IndexError:
            return np.empty((4, BLOCK), dtype=np.uint32), np.empty(BLOCK, dtype=np.uint64)

    def _network(self, positions: npt.NDArray[np.int64], elements: npt.NDArray[np.int64], scratch: _Scratch) -> None:
        """Fill `elements` with what one pass makes of `positions`; they may be one array."""
        # In place throughout: a fresh array for each operation would cost more than the operation.
        upper, lower, word, spare = scratch[0][:, : positions.size]
        wide = scratch[1][: positions.size]
        shift, high, half, high_wide = _word(32 - self.bits), _word(self.high), _wide(32), _wide(self.high)
        np.copyto(lower, positions, casting="unsafe")
        np.bitwise_and(lower, _word((1 << self.bits) - 1), out=lower)
        np.right_shift(positions, self.bits, out=elements)
        np.copyto(upper, elements, casting="unsafe")
        for number, keys in enumerate(self.rounds):
            if number % 2 == 0:
                _hash(upper, keys, word, spare)
                np.right_shift(word, shift, out=word)
                np.bitwise_xor(lower, word, out=lower)
            else:
                _hash(lower, keys, word, spare)
                np.copyto(wide, word)
                np.multiply(wide, high_wide, out=wide)
                np.right_shift(wide, half, out=wide)
                np.copyto(word, wide, casting="unsafe")
                np.add(upper, word, out=upper)
                # Below `high` the subtraction wraps to a huge number, so the smaller of the two is the remainder.
                np.subtract(upper, high, out=spare)
                np.minimum(upper, spare, out=upper)
        np.copyto(elements, upper)
        np.left_shift(elements, self.bits, out=elements)
        np.bitwise_or(elements, lower, out=elements)


def _hash(half: _Words, keys: _Round, word: _Words, spare: _Words) -> None:
    """Fill `word` with a keyed hash of `half`, good in its upper bits."""
    plus, times, times_again = keys
    np.add(half, plus, out=word)
    np.multiply(word, times, out=word)
    np.right_shift(word, _FIFTEEN, out=spare)
    np.bitwise_xor(word, spare, out=word)
    np.multiply(word, times_again, out=word)


def feistel(n: int, key: int) -> Feistel:
    """The permutation of 0..n-1 that the 64-bit `key` names."""
    assert 1 <= n <= LARGEST
    bits = max(1, n.bit_length() // 2)
    return Feistel(n, bits, -(-n >> bits), tuple(_round(key, number) for number in range(ROUNDS)))


def _round(key: int, number: int) -> _Round:
    """Three 32-bit keys; the factors are odd, since an even one would lose bits."""
    first, second = keyed_word(key, 2 * number), keyed_word(key, 2 * number + 1)
    return _word(first >> 32), _word(second >> 32 | 1), _word(second & 0xFFFFFFFF | 1)


def _word(number: int) -> _Words:
    """A constant as an array without dimensions, which numpy takes twice as fast as a scalar."""
    return np.array(number, dtype=np.uint32)


def _wide(number: int) -> _Wide:
    return np.array(number, dtype=np.uint64)


_FIFTEEN: Final = _word(15)


SMALL: Final = 1 << 20
"""Up to this many samples a shuffled epoch is held as one array of 4 MiB or less, and is as even as the hash itself."""

_KEPT_EPOCHS: Final = 2
"""While the last steps of an epoch are read, a prefetcher already reads the next epoch."""

_SHUFFLE, _DRAW = 1, 2  # keep the two uses of one seed apart

_Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SampleOrder:
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

    def __reduce__(self) -> tuple[type["SampleOrder"], tuple[object, ...]]:
        """Travel to another process without the arrays, which are cheaper computed than sent."""
        return SampleOrder, (self.n, self.seed, self.shuffle, self.weights)

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


_POSITIONS_AHEAD: Final = 1 << 15
_STEPS_AHEAD: Final = 1 << 10
"""Bounds the Python work of one refill where slices are tiny, so that no step waits a millisecond for it."""


class OrderReader:
    """What one rank reads of an order: the indices of its slice of every step.

    `span(step)` gives the positions (start, stop) that this rank reads in a step, and is pure; `Cut.span` is one. On W
    ranks these are one slice in W, so reading ahead in the order would compute W times what is needed: the reader asks
    for the spans ahead instead and computes only those. Any step of any epoch may be asked for at any time; steps that
    follow each other are cheap, a jump costs about a millisecond.

    >>> reader = OrderReader(Order(n=10, seed=0), span=lambda step: (4 * step, min(4 * step + 4, 10)), steps=3)
    >>> [reader.read(epoch=0, step=step).tolist() for step in range(3)]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    def __init__(self, order: SampleOrder, span: Callable[[int], tuple[int, int]], steps: int) -> None:
        self._order, self._span, self._steps = order, span, steps
        self._epoch, self._first = -1, 0
        self._edges: list[int] = [0]
        self._indices = np.empty(0, dtype=np.int64)

    def read(self, epoch: int, step: int) -> npt.NDArray[np.int64]:
        """The dataset indices of this rank's span of a step, as an array of the caller's own."""
        here = step - self._first
        if epoch != self._epoch or not 0 <= here < len(self._edges) - 1:
            self._fill(epoch, step)
            here = 0
        return self._indices[self._edges[here] : self._edges[here + 1]].copy()

    def _fill(self, epoch: int, step: int) -> None:
        starts, stops, edges = [], [], [0]
        for ahead in range(step, max(step + 1, min(step + _STEPS_AHEAD, self._steps))):
            start, stop = self._span(ahead)
            if edges[-1] and edges[-1] + stop - start > _POSITIONS_AHEAD:
                break
            starts.append(start)
            stops.append(stop)
            edges.append(edges[-1] + stop - start)
        lengths = np.subtract(stops, starts, dtype=np.int64)
        # Spans laid end to end: position number i is the start of its span plus how far i lies behind that span's edge.
        positions = np.repeat(np.subtract(starts, edges[:-1], dtype=np.int64), lengths)
        positions += np.arange(edges[-1], dtype=np.int64)
        self._indices = self._order.at(epoch, positions)
        self._epoch, self._first, self._edges = epoch, step, edges
