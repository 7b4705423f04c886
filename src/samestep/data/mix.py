"""Keyed 64-bit mixing, equal in Python integers and in numpy arrays.

The mixing is SplitMix64's: a bijection of 64-bit words, so distinct counters under one key never collide.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

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
