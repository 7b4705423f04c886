"""Randomness on a device that belongs to samples, not to batches: a pure function of (key, salt, element).

A sample's numbers are the same whatever other samples share its batch, on any rank and world size. The integers beneath
them, and so `uniform`, are equal bit for bit on every device; `normal` takes logarithms and cosines, whose last bit may
differ from one kind of device to another.
"""

import math
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.data.mix import FACTORS, GOLDEN, SHIFTS, key64, keyed_word, keyed_words
from samestep.errors import DataError

_SAMPLE, _ELEMENT = 3, 4  # keep these uses of a seed apart from the order's

_LOW_24: Final = (1 << 24) - 1
_LOW_40: Final = (1 << 40) - 1


def sample_key(seed: int, epoch: int, index: int) -> int:
    """The 64-bit key of one sample in one epoch, from 0 to 2**64-1; distinct for distinct indices of an epoch."""
    return keyed_word(epoch_key(seed, epoch), index)


def sample_keys(seed: int, epoch: int, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """`sample_key` of many indices."""
    return keyed_words(epoch_key(seed, epoch), indices)


def sample_key_tensor(seed: int, epoch: int, indices: Tensor) -> Tensor:
    """`sample_key` of many int64 indices on their device, as the int64 numbers with the same 64 bits."""
    if indices.dtype != torch.int64:
        raise DataError(f"indices are {indices.dtype} and must be torch.int64: use indices.long()")
    return _mix_(((indices + 1) * _signed(GOLDEN)).add_(_signed(epoch_key(seed, epoch))))


def epoch_key(seed: int, epoch: int) -> int:
    """The key from which an epoch's sample keys come."""
    return key64(_SAMPLE, seed, epoch)


def uniform(keys: Tensor, shape: tuple[int, ...], salt: int) -> Tensor:
    """Float32 numbers in [0, 1) for each key, of shape (rows, *shape), in steps of 2**-24.

    `salt` tells uses apart: two calls with one salt give the same numbers. The first elements of a longer shape are
    those of a shorter one.

    >>> keys = torch.tensor([7, 8, 9])
    >>> bool((uniform(keys, (5,), salt=1)[1:2] == uniform(keys[1:2], (5,), salt=1)).all())
    True
    """
    words = _words(keys, math.prod(shape), salt)
    return ((words >> 40) & _LOW_24).to(torch.float32).mul_(2.0**-24).view(len(keys), *shape)


def normal(keys: Tensor, shape: tuple[int, ...], salt: int) -> Tensor:
    """Standard normal float32 numbers for each key, of shape (rows, *shape), none beyond 7.45.

    Equal to `uniform`'s in everything else; the two share their bits, so do not use one salt for both.
    """
    count = math.prod(shape)
    words = _words(keys, (count + 1) // 2, salt)
    # Box and Muller: a word makes two numbers. Its upper 40 bits give a radius with a long tail, its lower 24 an angle.
    radius = (((words >> 24) & _LOW_40) + 1).to(torch.float32).mul_(2.0**-40).log_().mul_(-2.0).sqrt_()
    angle = (words & _LOW_24).to(torch.float32).mul_(2.0 * math.pi * 2.0**-24)
    pairs = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1)
    return pairs.flatten(start_dim=1)[:, :count].reshape(len(keys), *shape)


def _words(keys: Tensor, count: int, salt: int) -> Tensor:
    """Keyed 64-bit words of shape (rows, count): SplitMix64 from a start that key and salt name."""
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise DataError(
            f"keys are {keys.dtype} of shape {tuple(keys.shape)} and must be torch.int64 of shape (rows,): "
            "take them from micro_batch_keys() or sample_key_tensor(...)"
        )
    starts = _mix_(keys + _signed(key64(_ELEMENT, salt)))
    counters = torch.arange(1, count + 1, dtype=torch.int64, device=keys.device).mul_(_signed(GOLDEN))
    return _mix_(starts[:, None] + counters)


def _mix_(words: Tensor) -> Tensor:
    """`mix64` in place. Multiplication wraps as in unsigned words; the mask makes torch's signed shift a plain one."""
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        words ^= (words >> shift) & ((1 << (64 - shift)) - 1)
        words *= _signed(factor)
    words ^= (words >> SHIFTS[2]) & ((1 << (64 - SHIFTS[2])) - 1)
    return words


def _signed(word: int) -> int:
    """The int64 number with the bits of an unsigned 64-bit word."""
    return word - (1 << 64) if word >> 63 else word
