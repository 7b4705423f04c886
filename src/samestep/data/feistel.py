"""A keyed permutation of 0..n-1 with random access and memory that does not grow with n.

An index below `high * 2**bits` is a pair (upper < high, lower < 2**bits). Rounds in turn change one half by a keyed
hash of the other (lower by xor, upper by addition modulo `high`): a Feistel network, so a bijection whatever the hash.
The box holds fewer than 2**bits, about sqrt(n), indices too many; an output among these is put through the network
again until it is below n (cycle walking), which keeps it a bijection of 0..n-1. A box of 2**(even number) indices
would be up to four times too large and spend most of its time walking.

Nothing here is cryptography. With 12 rounds no statistical test in tests/unit finds fault from about 16 elements on;
below, orders are reached unevenly (`Order` shuffles up to a million elements another way).
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from samestep.data.mix import keyed_word

ROUNDS: Final = 12
LARGEST: Final = 1 << 62
"""Both halves and the sum of two of them must fit 32 bits."""

BLOCK: Final = 1 << 15
"""Positions computed together: few enough that all scratch arrays stay in the processor's second cache."""

_Words = npt.NDArray[np.uint32]
_Round = tuple[np.uint32, np.uint32, np.uint32]


@dataclass(frozen=True, slots=True)
class Feistel:
    """The permutation of 0..n-1 that one key names, for n from 1 to `LARGEST`; make it with `feistel(n, key)`."""

    n: int
    bits: int
    """Width of the lower half."""
    high: int
    """Number of values of the upper half."""
    rounds: tuple[_Round, ...]

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The elements at these positions, each of which must be in 0..n-1."""
        elements = np.empty(positions.size, dtype=np.int64)
        for first in range(0, positions.size, BLOCK):
            block = slice(first, first + BLOCK)
            elements[block] = self._walk(positions[block])
        return elements

    def _walk(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        elements = self._network(positions)
        outside = np.flatnonzero(elements >= self.n)
        while outside.size:
            elements[outside] = self._network(elements[outside])
            outside = outside[elements[outside] >= self.n]
        return elements

    def _network(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        upper = (positions >> self.bits).astype(np.uint32)
        lower = (positions & ((1 << self.bits) - 1)).astype(np.uint32)
        word, spare = np.empty_like(upper), np.empty_like(upper)
        wide = np.empty(upper.shape, dtype=np.uint64)
        shift, high, high_wide, half = (
            np.uint32(32 - self.bits),
            np.uint32(self.high),
            np.uint64(self.high),
            np.uint64(32),
        )
        # In place throughout: a fresh array for each operation would cost more than the operation.
        for number, keys in enumerate(self.rounds):
            if number % 2 == 0:
                _hash(upper, keys, word, spare)
                np.right_shift(word, shift, out=word)
                np.bitwise_xor(lower, word, out=lower)
            else:
                _hash(lower, keys, word, spare)
                np.multiply(word, high_wide, out=wide)
                np.right_shift(wide, half, out=wide)
                np.add(upper, wide, out=upper, casting="unsafe")
                # Below `high` the subtraction wraps to a huge number, so the smaller of the two is the remainder.
                np.subtract(upper, high, out=spare)
                np.minimum(upper, spare, out=upper)
        elements = upper.astype(np.int64)
        np.left_shift(elements, self.bits, out=elements)
        np.bitwise_or(elements, lower, out=elements, casting="unsafe")
        return elements


def _hash(half: _Words, keys: _Round, word: _Words, spare: _Words) -> None:
    """Fill `word` with a keyed hash of `half`, good in its upper bits."""
    plus, times, times_again = keys
    np.add(half, plus, out=word)
    np.multiply(word, times, out=word)
    np.right_shift(word, np.uint32(15), out=spare)
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
    return np.uint32(first >> 32), np.uint32(second >> 32 | 1), np.uint32(second & 0xFFFFFFFF | 1)
