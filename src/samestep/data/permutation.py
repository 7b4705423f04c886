"""The order of samples in an epoch: a keyed permutation with random access, so its state is just (epoch, step).

`SampleOrder` gives the dataset index at every position of an epoch. `OrderReader` reads one rank's part of it step by
step. A permutation of up to `TABLE_LIMIT` samples is an array that is sorted by a keyed hash; a larger one is a Feistel
network, which computes any element without storing the others.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from samestep.data.partition import check_sizes
from samestep.errors import DataError

TABLE_LIMIT: Final = 1 << 20
"""Up to this many samples a shuffled epoch is stored as one array, of 4 MiB or less."""

MAX_SAMPLES: Final = 1 << 62
"""Both halves of a Feistel network, and the sum of two halves, must fit into 32 bits."""

_CACHED_EPOCHS: Final = 2  # while the last steps of an epoch are used, the loader already prefetches the next epoch

_Indices = npt.NDArray[np.int64]
_Weights = npt.NDArray[np.float64]
_Permutation = Callable[[_Indices], _Indices]  # from positions to the elements at them


@dataclass(frozen=True, eq=False)
class SampleOrder:
    """The dataset index at every position of every epoch, with random access.

    `shuffle=False` keeps the order of the dataset. `shuffle=True` permutes it differently in every epoch. With
    `weights`, every position draws a sample with replacement: an epoch still has n positions, and a sample may be at
    several of them or at none. A shuffle uses 4 bytes per sample up to `TABLE_LIMIT` samples and constant memory above;
    weights use 16 bytes per sample.

    >>> order = SampleOrder(n=10, seed=0, shuffle=True)
    >>> sorted(order.indices(epoch=3, start=0, stop=10).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    n: int
    seed: int  # any integer; seeds that differ by a multiple of 2**64 give the same order
    shuffle: bool = False
    weights: _Weights | None = None  # one number >= 0 per sample; they need not add up to 1
    _cumulative: _Weights | None = field(init=False, repr=False, default=None)
    _permutations: dict[int, "_Permutation"] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        check_sizes(self.n)
        if self.n > MAX_SAMPLES:
            raise DataError(
                f"the dataset reports {self.n} samples, and samestep supports at most {MAX_SAMPLES}: check its __len__"
            )
        if self.weights is not None:
            weights, cumulative = _check_weights(self.weights, self.n)
            object.__setattr__(self, "weights", weights)
            object.__setattr__(self, "_cumulative", cumulative)

    def __reduce__(self) -> tuple[type["SampleOrder"], tuple[object, ...]]:
        """Pickle without the cached arrays, which are cheaper to compute than to send."""
        return SampleOrder, (self.n, self.seed, self.shuffle, self.weights)

    def indices(self, epoch: int, start: int, stop: int) -> _Indices:
        """Return the dataset indices at positions start to stop - 1 of an epoch; no other position is computed.

        A call takes about 0.1 ms even for few positions. To read small slices step by step, use `OrderReader`.
        """
        if not 0 <= start <= stop <= self.n:
            raise DataError(f"positions {start} to {stop} are not in an epoch, which has positions 0 to {self.n}")
        return self.at(epoch, np.arange(start, stop, dtype=np.int64))

    def at(self, epoch: int, positions: _Indices) -> _Indices:
        """Return the dataset indices at any positions of an epoch; the caller ensures that they are in 0..n-1."""
        if epoch < 0:
            raise DataError(f"epoch {epoch} does not exist: epochs are counted from 0")
        if self._cumulative is not None:
            return _draw_weighted(self._cumulative, key64(Purpose.WEIGHTED_DRAW, self.seed, epoch), positions)
        if not self.shuffle:
            return positions.astype(np.int64)
        permutation = self._permutations.get(epoch)
        if permutation is None:
            key = key64(Purpose.SHUFFLE, self.seed, epoch)
            small = self.n <= TABLE_LIMIT
            permutation = _table_permutation(self.n, key) if small else FeistelPermutation(self.n, key).at
            for oldest in list(self._permutations)[: 1 - _CACHED_EPOCHS]:
                self._permutations.pop(oldest, None)
            self._permutations[epoch] = permutation
        return permutation(positions)


class OrderReader:
    """Reads the dataset indices of one rank, step by step.

    `read_range(step)` gives the positions (start, stop) that this rank reads in a step, like `Partition.read_range`.
    With W ranks these are one slice out of W, so the reader computes the slices of many steps ahead and skips what lies
    between them. You may read any step of any epoch at any time. Consecutive steps are cheap, a jump takes about 1 ms.

    >>> order = SampleOrder(n=10, seed=0)
    >>> reader = OrderReader(order, read_range=lambda step: (4 * step, min(4 * step + 4, 10)), steps=3)
    >>> [reader.read(epoch=0, step=step).tolist() for step in range(3)]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    MAX_POSITIONS_AHEAD: Final = 1 << 15
    MAX_STEPS_AHEAD: Final = 1 << 10  # limits the Python loop of a refill to below 1 ms if slices are small

    def __init__(self, order: SampleOrder, read_range: Callable[[int], tuple[int, int]], steps: int) -> None:
        self._order, self._read_range, self._steps = order, read_range, steps
        self._epoch, self._first_step = -1, 0
        self._offsets: list[int] = [0]
        self._indices = np.empty(0, dtype=np.int64)

    def read(self, epoch: int, step: int) -> _Indices:
        """Return the dataset indices of this rank in a step, as an array that the caller may change."""
        ahead = step - self._first_step
        if epoch != self._epoch or not 0 <= ahead < len(self._offsets) - 1:
            self._fill(epoch, step)
            ahead = 0
        return self._indices[self._offsets[ahead] : self._offsets[ahead + 1]].copy()

    def _fill(self, epoch: int, step: int) -> None:
        """Compute the indices of this and the following steps, concatenated."""
        starts, stops, offsets = [], [], [0]
        for ahead in range(step, max(step + 1, min(step + self.MAX_STEPS_AHEAD, self._steps))):
            start, stop = self._read_range(ahead)
            if offsets[-1] and offsets[-1] + stop - start > self.MAX_POSITIONS_AHEAD:
                break
            starts.append(start)
            stops.append(stop)
            offsets.append(offsets[-1] + stop - start)
        lengths = np.subtract(stops, starts, dtype=np.int64)
        # Element i of the concatenation is at position: start of its slice + (i - offset of its slice).
        positions = np.repeat(np.subtract(starts, offsets[:-1], dtype=np.int64), lengths)
        positions += np.arange(offsets[-1], dtype=np.int64)
        self._indices = self._order.at(epoch, positions)
        self._epoch, self._first_step, self._offsets = epoch, step, offsets


# Sampling with weights


def _check_weights(weights: _Weights, n: int) -> tuple[_Weights, _Weights]:
    """Return a copy of the weights, which later changes to the caller's array do not reach, and its cumulative sum."""
    try:
        array = np.array(weights, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"sampling_weights are not numbers ({error}): pass one number for each of the {n} samples"
        ) from error
    if array.shape != (n,):
        raise DataError(
            f"sampling_weights have shape {array.shape} and the dataset has {n} samples: pass one weight per sample"
        )
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if wrong.size:
        raise DataError(
            f"{wrong.size} of {n} sampling_weights are negative, nan or infinite, first sampling_weights[{wrong[0]}] = "
            f"{array[wrong[0]]}: every weight must be a number >= 0"
        )
    with np.errstate(over="ignore"):
        cumulative = np.cumsum(array)
    if cumulative[-1] == 0:
        raise DataError(
            f"all {n} sampling_weights are 0, so no sample can be drawn: give at least one sample a weight above 0"
        )
    if math.isinf(cumulative[-1]):
        raise DataError(f"the sum of the {n} sampling_weights overflows float64: divide them by {array.max()}")
    array.flags.writeable = False
    return array, cumulative


def _draw_weighted(cumulative: _Weights, key: int, positions: _Indices) -> _Indices:
    """Draw a keyed uniform number for each position, and return the sample whose part of the total weight it hits."""
    uniform = (keyed_words(key, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    uniform *= cumulative[-1]
    # Rounding may raise a product to the total itself, beyond the last sample: clip to the last one with weight > 0.
    last = np.searchsorted(cumulative, cumulative[-1], side="left")
    return np.minimum(np.searchsorted(cumulative, uniform, side="right"), last).astype(np.int64)


# The two permutations


def _table_permutation(n: int, key: int) -> _Permutation:
    """Return a permutation of 0..n-1 that is stored as an array: the indices sorted by a keyed hash."""
    # Hash and index share one 64-bit word: ties are broken by index, so every version of numpy sorts the same way.
    bits = (n - 1).bit_length()
    index = np.arange(n, dtype=np.uint64)
    words = keyed_words(key, index)
    words >>= np.uint64(bits)
    words <<= np.uint64(bits)
    words |= index
    # numpy sorts 16-bit keys by radix; after that pass `words` is nearly sorted, which halves the time of the sort.
    words = words[np.argsort((words >> np.uint64(48)).astype(np.uint16), kind="stable")]
    words.sort(kind="stable")
    words &= np.uint64((1 << bits) - 1)
    elements = words.astype(np.uint32)
    return lambda positions: elements[positions].astype(np.int64)


_Words = npt.NDArray[np.uint32]
_RoundKeys = tuple[_Words, _Words, _Words]
_Scratch = tuple[_Words, npt.NDArray[np.uint64]]


class FeistelPermutation:
    """A permutation of 0..n-1 that needs no memory: a keyed Feistel network with cycle walking, n <= `MAX_SAMPLES`.

    A position is split into an upper half (`high` values) and a lower half (`bits` bits). Ten rounds change one half by
    a keyed hash of the other. The network permutes 0..high * 2**bits - 1; a result beyond n goes through it again.
    """

    ROUNDS: Final = 10
    BLOCK: Final = 1 << 15  # positions computed together: all scratch arrays stay in the L2 cache

    def __init__(self, n: int, key: int) -> None:
        assert 1 <= n <= MAX_SAMPLES
        self._n = n
        self._bits = max(1, n.bit_length() // 2)
        self._high = -(-n >> self._bits)
        self._rounds = [_round_keys(key, number) for number in range(self.ROUNDS)]
        self._idle: list[_Scratch] = []

    def at(self, positions: _Indices) -> _Indices:
        """Return the elements at these positions, each of which must be in 0..n-1."""
        elements = np.empty(positions.size, dtype=np.int64)
        try:
            # Arrays that no other thread uses; reused ones if possible, since new pages would double the cost.
            scratch = self._idle.pop()
        except IndexError:
            scratch = np.empty((4, self.BLOCK), dtype=np.uint32), np.empty(self.BLOCK, dtype=np.uint64)
        for first in range(0, positions.size, self.BLOCK):
            block = elements[first : first + self.BLOCK]
            self._run_network(positions[first : first + self.BLOCK], block, scratch)
            outside = np.flatnonzero(block >= self._n)
            while outside.size:
                walked = block[outside]
                self._run_network(walked, walked, scratch)
                block[outside] = walked
                outside = outside[walked >= self._n]
        self._idle.append(scratch)
        return elements

    def _run_network(self, positions: _Indices, elements: _Indices, scratch: _Scratch) -> None:
        """Fill `elements` with the result of one pass over `positions`; both may be the same array."""
        # In place throughout: allocating an array for each operation would cost more than the operation.
        upper, lower, word, temporary = scratch[0][:, : positions.size]
        wide = scratch[1][: positions.size]
        shift, high = _word(32 - self._bits), _word(self._high)
        half, high_wide = np.array(32, dtype=np.uint64), np.array(self._high, dtype=np.uint64)
        np.copyto(lower, positions, casting="unsafe")
        np.bitwise_and(lower, _word((1 << self._bits) - 1), out=lower)
        np.right_shift(positions, self._bits, out=elements)
        np.copyto(upper, elements, casting="unsafe")
        for number, keys in enumerate(self._rounds):
            if number % 2 == 0:
                _hash(upper, keys, word, temporary)
                np.right_shift(word, shift, out=word)
                np.bitwise_xor(lower, word, out=lower)
            else:
                _hash(lower, keys, word, temporary)
                np.copyto(wide, word)
                np.multiply(wide, high_wide, out=wide)
                np.right_shift(wide, half, out=wide)
                np.copyto(word, wide, casting="unsafe")
                np.add(upper, word, out=upper)
                # Below `high` the subtraction wraps to a huge number, so the smaller of the two is the remainder.
                np.subtract(upper, high, out=temporary)
                np.minimum(upper, temporary, out=upper)
        np.copyto(elements, upper)
        np.left_shift(elements, self._bits, out=elements)
        np.bitwise_or(elements, lower, out=elements)


def _round_keys(key: int, number: int) -> _RoundKeys:
    """Return an offset and two factors of 32 bits; the factors are odd, since an even one would lose bits."""
    first, second = keyed_word(key, 2 * number), keyed_word(key, 2 * number + 1)
    return _word(first >> 32), _word(second >> 32 | 1), _word(second & 0xFFFFFFFF | 1)


def _hash(half: _Words, keys: _RoundKeys, word: _Words, temporary: _Words) -> None:
    """Fill `word` with a keyed hash of `half` whose upper bits are well mixed."""
    offset, factor, second_factor = keys
    np.add(half, offset, out=word)
    np.multiply(word, factor, out=word)
    np.right_shift(word, _FIFTEEN, out=temporary)
    np.bitwise_xor(word, temporary, out=word)
    np.multiply(word, second_factor, out=word)


def _word(number: int) -> _Words:
    """Return a constant as a 0-d array: numpy operations take it twice as fast as a scalar."""
    return np.array(number, dtype=np.uint32)


_FIFTEEN: Final = _word(15)


# Keyed 64-bit words (SplitMix64), from which all randomness of samestep derives

MASK64: Final = (1 << 64) - 1
GOLDEN: Final = 0x9E3779B97F4A7C15
FACTORS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS: Final = (30, 27, 31)


class Purpose(IntEnum):
    """What a key is for: the first word of every key, so that no two uses share random numbers."""

    SHUFFLE = 1
    WEIGHTED_DRAW = 2
    SAMPLE = 3  # everything that belongs to one sample of one epoch
    ELEMENT = 4  # the elements of one draw for a sample
    NUMPY_STREAM = 5
    TORCH_STREAM = 6
    READ_SAMPLE = 7  # the global generators while a sample is read
    COLLATE = 8
    OPEN_STREAM = 9
    DIMENSION = 10  # the indices of an element in a draw
    STEP = 11  # draws that belong to a step instead of a sample
    FUSED_KERNEL = 12  # draws that cannot be keyed
    PROBE_INDICES = 13
    PROBE_SIGNS = 14


def mix64(word: int) -> int:
    """Mix a 64-bit word so that a change of one bit changes about half of the bits of the result."""
    word &= MASK64
    word = (word ^ (word >> SHIFTS[0])) * FACTORS[0] & MASK64
    word = (word ^ (word >> SHIFTS[1])) * FACTORS[1] & MASK64
    return word ^ (word >> SHIFTS[2])


def key64(*words: int) -> int:
    """Make a 64-bit key from any number of integers, each taken modulo 2**64; their order matters."""
    key = 0
    for word in words:
        key = mix64((key + GOLDEN) ^ mix64(word + GOLDEN))
    return key


def keyed_word(key: int, counter: int) -> int:
    """Return word number `counter` of the random stream of `key`."""
    return mix64(key + (counter + 1) * GOLDEN)


def keyed_words(key: int, counters: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """Return `keyed_word` for each counter."""
    words = counters.astype(np.uint64)
    words += np.uint64(1)
    words *= np.uint64(GOLDEN)
    words += np.uint64(key)
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(SHIFTS[2])
    return words
