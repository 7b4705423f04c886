"""Randomness of the sample being read: the same on any ranks and workers, its own for every sample and epoch.

`sample_rng()` and `current_setting()` work inside a dataset's `__getitem__`, in the thread that called it; a block of
`sample_luck` opens them there, and in a test of a dataset. `micro_batch_keys()` is the same thought for modules of a
model: the keys of the samples in front of them.
"""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from enum import Enum
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.data.permutation import FACTORS, GOLDEN, SHIFTS, key64, keyed_word, keyed_words
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


_NUMPY_STREAM: Final = 5
_TORCH_STREAM: Final = 6
_MASK32: Final = (1 << 32) - 1


class Absent(Enum):
    """What stands for "no setting was given": None is a setting, and an enum stays itself through pickle."""

    SETTING = "no setting"


class SampleLuck:
    """The randomness of one sample while its `with` block lasts; generators are made when first asked for."""

    __slots__ = ("_numpy_rng", "_token", "_torch_rng", "epoch", "index", "seed", "setting")

    def __init__(self, seed: int, epoch: int, index: int | None, setting: object) -> None:
        self.seed, self.epoch, self.index, self.setting = seed, epoch, index, setting
        self._torch_rng: torch.Generator | None = None
        self._numpy_rng: np.random.Generator | None = None
        self._token: Token[SampleLuck | None] | None = None

    def __enter__(self) -> Self:
        self._token = _LUCK.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._token is not None
        _LUCK.reset(self._token)

    def turn_to(self, index: int) -> None:
        """Be the luck of another sample from now on; a batch needs one block then, not one for each of its samples."""
        self.index = index
        self._torch_rng = self._numpy_rng = None

    def torch_rng(self) -> torch.Generator:
        """The sample's torch generator, on the CPU."""
        if self._torch_rng is None:
            seed = generator_seed(self.seed, self.epoch, self._one_sample("sample_rng()"))
            self._torch_rng = torch.Generator().manual_seed(seed)
        return self._torch_rng

    def numpy_rng(self) -> np.random.Generator:
        """The sample's numpy generator, independent of the torch one."""
        if self._numpy_rng is None:
            key = sample_key(self.seed, self.epoch, self._one_sample("sample_numpy_rng()"))
            self._numpy_rng = np.random.Generator(np.random.Philox(key=np.array([key, _NUMPY_STREAM], dtype=np.uint64)))
        return self._numpy_rng

    def _one_sample(self, asked: str) -> int:
        if self.index is None:
            raise DataError(
                f"{asked} was called in a dataset's __getitems__, which reads many samples, and belongs to one: "
                "call it in __getitem__, and leave __getitems__ out of the dataset"
            )
        return self.index


_LUCK: ContextVar[SampleLuck | None] = ContextVar("samestep_sample_luck", default=None)


def sample_luck(seed: int, epoch: int, index: int, setting: object = Absent.SETTING) -> SampleLuck:
    """The block in which one sample is read; `setting` is what `current_setting()` gives inside.

    Blocks may nest, and then the inner one counts.

    >>> with sample_luck(seed=0, epoch=0, index=3, setting=224):
    ...     current_setting()
    224
    """
    return SampleLuck(seed, epoch, index, setting)


def batch_luck(setting: object) -> SampleLuck:
    """The block in which a dataset's `__getitems__` reads many samples: with a setting, without one's randomness."""
    return SampleLuck(0, 0, None, setting)


def sample_rng() -> torch.Generator:
    """The torch generator of the sample being read; further calls for one sample continue it.

    >>> with sample_luck(seed=0, epoch=0, index=3):
    ...     crop = torch.randint(0, 8, (2,), generator=sample_rng())
    """
    return _current("sample_rng()").torch_rng()


def sample_numpy_rng() -> np.random.Generator:
    """The numpy generator of the sample being read; further calls for one sample continue it."""
    return _current("sample_numpy_rng()").numpy_rng()


def epoch_setting() -> object:
    """What the shard's `settings` function gave for the epoch of the sample being read."""
    setting = _current("epoch_setting()").setting
    if setting is Absent.SETTING:
        raise DataError(
            "epoch_setting() has nothing to give: this dataset is read without settings; "
            "pass run.shard(dataset, settings=...), a function of the epoch number"
        )
    return setting


def generator_seed(seed: int, epoch: int, index: int) -> int:
    """A seed for torch's CPU generator, which uses only the lower 32 bits of it.

    A hash cut to 32 bits would give some 116 pairs of equal generators among a million samples. Here the lower bits are
    a bijection of the index, so no two of an epoch's first 2**32 samples share a generator.
    """
    key = key64(_TORCH_STREAM, seed, epoch)
    low = (index ^ key) & _MASK32
    low = (low ^ (low >> 16)) * 0x85EBCA6B & _MASK32
    low = (low ^ (low >> 13)) * 0xC2B2AE35 & _MASK32
    low = (low ^ (low >> 16)) ^ (key >> 32)
    return sample_key(seed, epoch, index) >> 32 << 32 | low


def _current(asked: str) -> SampleLuck:
    luck = _LUCK.get()
    if luck is None:
        raise DataError(
            f"{asked} was called outside a sample: it works inside a dataset's __getitem__ while run.shard(...) reads "
            "it, in the thread that called it; in a test, write: with samestep.data.sample_rng.sample_luck(seed=0, "
            "epoch=0, index=3): dataset[3]"
        )
    return luck


@dataclass(frozen=True)
class SampleIds:
    """Which samples the rows of a batch are, for what is kept of them from one epoch to another."""

    shard: str
    """The name of the shard that they come from; the same in every run of one script."""
    epoch: int
    """The epoch in which they were read."""
    indices: list[int]
    """The dataset index of each row."""
    real: int
    """How many rows count; those behind them are padding."""


class _MicroBatch:
    """The one micro-batch that this process works on.

    Not a ContextVar: autograd recomputes checkpointed layers in threads of its own, which have no context, and a module
    must find the same keys there as in its forward pass.
    """

    __slots__ = ("keys", "samples")

    def __init__(self) -> None:
        self.keys: Tensor | Callable[[], Tensor] | None = None
        self.samples: Callable[[], SampleIds | None] | None = None


_MICRO_BATCH: Final = _MicroBatch()


def micro_batch_keys() -> Tensor | None:
    """Keys of the samples in the current micro-batch, int64 of shape (rows,); None outside a step."""
    keys = _MICRO_BATCH.keys
    if keys is None or isinstance(keys, Tensor):
        return keys
    made = _MICRO_BATCH.keys = keys()
    return made


def current_samples() -> SampleIds | None:
    """The samples of the batch that a shard has handed out last; None where no shard has one out."""
    return None if _MICRO_BATCH.samples is None else _MICRO_BATCH.samples()


def set_micro_batch(
    keys: Tensor | Callable[[], Tensor] | None, samples: Callable[[], SampleIds | None] | None = None
) -> None:
    """Say which samples the modules of the model see from now on; None when a step is over.

    A function is called when the keys are first asked for: most models never do, and they cost time at every step.
    """
    _MICRO_BATCH.keys, _MICRO_BATCH.samples = keys, samples


@contextmanager
def evaluating(samples: SampleIds) -> Generator[None]:
    """While a batch of an evaluation is out: its samples are known, and draw no luck."""
    before = _MICRO_BATCH.samples
    _MICRO_BATCH.samples = lambda: samples
    try:
        yield
    finally:
        _MICRO_BATCH.samples = before
