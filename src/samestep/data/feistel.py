"""A keyed permutation of 0..n-1 with random access and memory that does not grow with n.

An index below `high * 2**bits` is a pair (upper < high, lower < 2**bits). Rounds in turn change one half by a keyed
hash of the other (lower by xor, upper by addition modulo `high`): a Feistel network, so a bijection whatever the hash.
The box holds fewer than 2**bits, about sqrt(n), indices too many; an output among these is put through the network
again until it is below n (cycle walking), which keeps it a bijection of 0..n-1. A box of 2**(even number) indices
would be up to four times too large and spend most of its time walking.

Nothing here is cryptography. From about 20 elements on, 10 rounds pass every statistical test in tests/unit, where 4
fail even for a million; below 20, orders are reached unevenly (`Order` shuffles up to a million elements another way).
As in every Feistel network one parity is more frequent, which shows only to those who look at all n elements at once.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from samestep.data.mix import keyed_word

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
