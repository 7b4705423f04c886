"""One seed: the same initial weights on every rank, then different noise on each."""

import random

import numpy as np
import torch

_STRIDE = 0xD1B54A32D192ED03  # odd too, and far from the other
_SPREAD = 0x9E3779B97F4A7C15  # odd, from the golden ratio: neighbouring ranks land far apart


def seed_alike(seed: int) -> None:
    """Make every rank draw the same numbers, so that models are built alike."""
    _seed_all(seed)


def seed_apart(seed: int, rank: int) -> None:
    """Make each rank draw its own numbers, so that noise such as dropout differs between ranks."""
    _seed_all((seed + (rank + 1) * _SPREAD) % (1 << 63))


def seed_anew(seed: int, rank: int, step: int) -> None:
    """Make each rank draw its own numbers from `step` on, others than it drew from the start."""
    seed_apart((seed + step * _STRIDE) % (1 << 63), rank)


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)  # every CUDA device as well
