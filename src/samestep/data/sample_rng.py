"""Randomness of the sample being read: the same on any ranks and workers, its own for every sample and epoch.

`sample_rng()` and `current_setting()` work inside a dataset's `__getitem__`, in the thread that called it; a block of
`sample_luck` opens them there, and in a test of a dataset. `micro_batch_keys()` is the same thought for modules of a
model: the keys of the samples in front of them.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from enum import Enum
from typing import Final, Self

import numpy as np
import torch
from torch import Tensor

from samestep.data.keyed import sample_key
from samestep.data.mix import key64
from samestep.errors import DataError

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


def current_setting() -> object:
    """What the shard's `settings` function gave for the epoch of the sample being read."""
    setting = _current("current_setting()").setting
    if setting is Absent.SETTING:
        raise DataError(
            "current_setting() has nothing to give: this dataset is read without settings; "
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
class Samples:
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
        self.samples: Callable[[], Samples | None] | None = None


_MICRO_BATCH: Final = _MicroBatch()


def micro_batch_keys() -> Tensor | None:
    """Keys of the samples in the current micro-batch, int64 of shape (rows,); None outside a step."""
    keys = _MICRO_BATCH.keys
    if keys is None or isinstance(keys, Tensor):
        return keys
    made = _MICRO_BATCH.keys = keys()
    return made


def current_samples() -> Samples | None:
    """The samples of the batch that a shard has handed out last; None where no shard has one out."""
    return None if _MICRO_BATCH.samples is None else _MICRO_BATCH.samples()


def set_micro_batch(
    keys: Tensor | Callable[[], Tensor] | None, samples: Callable[[], Samples | None] | None = None
) -> None:
    """Say which samples the modules of the model see from now on; None when a step is over.

    A function is called when the keys are first asked for: most models never do, and they cost time at every step.
    """
    _MICRO_BATCH.keys, _MICRO_BATCH.samples = keys, samples


@contextmanager
def evaluating(samples: Samples) -> Generator[None]:
    """While a batch of an evaluation is out: its samples are known, and draw no luck."""
    before = _MICRO_BATCH.samples
    _MICRO_BATCH.samples = lambda: samples
    try:
        yield
    finally:
        _MICRO_BATCH.samples = before
