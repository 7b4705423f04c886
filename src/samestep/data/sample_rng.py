"""Random numbers that belong to a sample: keyed by (seed, epoch, dataset index), the same on any ranks and workers.

Three places use them. A dataset calls `sample_rng()`, `sample_numpy_rng()` and `epoch_setting()` in its `__getitem__`;
the loader opens a `SampleContext` around that call. `Step.random` and `Step.normal` turn the keys of a micro-batch into
tensors with `uniform` and `normal`. Modules of a model find these keys with `micro_batch_keys()`.
"""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from enum import Enum
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.data.permutation import FACTORS, GOLDEN, SHIFTS, Purpose, key64, keyed_word, keyed_words
from samestep.errors import DataError

_LOW_24: Final = (1 << 24) - 1
_LOW_32: Final = (1 << 32) - 1
_LOW_40: Final = (1 << 40) - 1
_MAX_DIMENSIONS: Final = 8  # of one row, in a compiled graph
_UNIFORM_BITS: Final = {torch.bfloat16: 8, torch.float16: 11}


class _Setting(Enum):
    """The type of `NO_SETTING`: None is a valid setting, and an enum member keeps its identity through pickle."""

    NONE = "no setting"


NO_SETTING: Final = _Setting.NONE


class SampleGenerator(torch.Generator):
    """A generator that belongs to one sample."""


def sample_rng() -> torch.Generator:
    """Return the torch generator of the sample being read; repeated calls for one sample return the same generator.

    >>> with SampleContext(seed=0, epoch=0, index=3):
    ...     crop = torch.randint(0, 8, (2,), generator=sample_rng())
    """
    context, index = _current_sample("sample_rng()")
    if context.torch_rng is None:
        context.torch_rng = SampleGenerator()
        context.torch_rng.manual_seed(generator_seed(context.seed, context.epoch, index))
    return context.torch_rng


def sample_numpy_rng() -> np.random.Generator:
    """Return the numpy generator of the sample being read, which is independent of its torch generator."""
    context, index = _current_sample("sample_numpy_rng()")
    if context.numpy_rng is None:
        key = np.array([sample_key(context.seed, context.epoch, index), Purpose.NUMPY_STREAM], dtype=np.uint64)
        context.numpy_rng = np.random.Generator(np.random.Philox(key=key))
    return context.numpy_rng


def epoch_setting() -> object:
    """Return what `epoch_settings` of the shard returned for the epoch of the sample being read."""
    setting = _current_context("epoch_setting()").setting
    if setting is NO_SETTING:
        raise DataError(
            "epoch_setting() was called, but this dataset is read without epoch settings: "
            "pass run.shard(dataset, epoch_settings=...), a function of the epoch number"
        )
    return setting


class SampleContext:
    """The context in which one sample is read. Contexts may nest; the innermost is used.

    The loader opens one around `dataset[index]`. Open one yourself to test a dataset:

    >>> with SampleContext(seed=0, epoch=0, index=3, setting=224):
    ...     epoch_setting()
    224

    With `index=None` many samples are read at once by `__getitems__`: there is a setting, but no generator.
    """

    __slots__ = ("_token", "epoch", "index", "numpy_rng", "seed", "setting", "torch_rng")

    def __init__(self, seed: int, epoch: int, index: int | None, setting: object = NO_SETTING) -> None:
        self.seed, self.epoch, self.index, self.setting = seed, epoch, index, setting
        self.torch_rng: torch.Generator | None = None
        self.numpy_rng: np.random.Generator | None = None
        self._token: Token[SampleContext | None] | None = None

    def __enter__(self) -> Self:
        self._token = _CONTEXT.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._token is not None
        _CONTEXT.reset(self._token)

    def move_to(self, index: int) -> None:
        """Use this context for another sample; a batch then needs one `with` block instead of one per sample."""
        self.index = index
        self.torch_rng = self.numpy_rng = None


_CONTEXT: ContextVar[SampleContext | None] = ContextVar("samestep_sample_context", default=None)


def _current_context(caller: str) -> SampleContext:
    context = _CONTEXT.get()
    if context is None:
        raise DataError(
            f"{caller} was called outside a sample: it works inside a dataset's __getitem__ while run.shard(...) reads "
            "it, in the thread that called __getitem__; in a test, write: with samestep.data.sample_rng.SampleContext("
            "seed=0, epoch=0, index=3): dataset[3]"
        )
    return context


def _current_sample(caller: str) -> tuple[SampleContext, int]:
    context = _current_context(caller)
    if context.index is None:
        raise DataError(
            f"{caller} was called in a dataset's __getitems__, which reads many samples, but a generator belongs to "
            "one sample: call it in __getitem__, and remove __getitems__ from the dataset"
        )
    return context, context.index


def sample_key(seed: int, epoch: int, index: int) -> int:
    """Return the 64-bit key of one sample in one epoch; the keys of an epoch are distinct."""
    return keyed_word(_epoch_key(seed, epoch), index)


def sample_keys(seed: int, epoch: int, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return `sample_key` of many dataset indices."""
    return keyed_words(_epoch_key(seed, epoch), indices)


def sample_key_tensor(seed: int, epoch: int, indices: Tensor) -> Tensor:
    """Return `sample_key` of many int64 indices on their device, as int64 numbers with the same 64 bits."""
    if indices.dtype != torch.int64:
        raise DataError(f"indices are {indices.dtype} and must be torch.int64: use indices.long()")
    return _mix64_(((indices + 1) * _signed(GOLDEN)).add_(_signed(_epoch_key(seed, epoch))))


def _epoch_key(seed: int, epoch: int) -> int:
    return key64(Purpose.SAMPLE, seed, epoch)


def generator_seed(seed: int, epoch: int, index: int) -> int:
    """Return a seed for the torch generator of a sample.

    torch's CPU generator uses only the lower 32 bits of its seed. A hash truncated to 32 bits would give about 116
    pairs of equal generators among a million samples. Here the lower bits are a bijection of the index, so no two of
    the first 2**32 samples of an epoch share a generator.
    """
    return sample_key(seed, epoch, index) >> 32 << 32 | low_word(key64(Purpose.TORCH_STREAM, seed, epoch), index)


def low_word(key: int, index: int) -> int:
    """Return a word of 32 bits that is different for each of the first 2**32 indices."""
    low = (index ^ key) & _LOW_32
    low = (low ^ (low >> 16)) * 0x85EBCA6B & _LOW_32
    low = (low ^ (low >> 13)) * 0xC2B2AE35 & _LOW_32
    return (low ^ (low >> 16)) ^ (key >> 32)


def uniform(keys: Tensor, shape: Sequence[int], salt: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers in [0, 1) for each key, of shape (rows, *shape), in steps of 2**-24 (2**-8 in bfloat16).

    Use a different `salt` for each purpose: two calls with the same salt return the same numbers. An element depends on
    its own index alone: the first elements of a larger shape are those of a smaller one, in every dimension.

    >>> keys = torch.tensor([7, 8, 9])
    >>> bool((uniform(keys, (5,), salt=1)[1:2] == uniform(keys[1:2], (5,), salt=1)).all())
    True
    """
    words = _random_words(keys, shape, salt)
    bits = _UNIFORM_BITS.get(dtype, 24)  # more than the dtype holds would round up to 1
    numbers = (words >> (64 - bits)) & ((1 << bits) - 1)
    return numbers.to(torch.float32).mul_(2.0**-bits).to(dtype).view(len(keys), *shape)


def normal(keys: Tensor, shape: Sequence[int], salt: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return standard normal numbers for each key, of shape (rows, *shape), with absolute values below 7.45.

    They are keyed like those of `uniform` and use the same bits, so do not use one salt for both functions.
    """
    words = _random_words(keys, shape, salt, per_word=2)
    # Box-Muller: a word makes two numbers. Its upper 40 bits give a radius with a long tail, its lower 24 an angle.
    radius = (((words >> 24) & _LOW_40) + 1).to(torch.float32).mul_(2.0**-40).log_().mul_(-2.0).sqrt_()
    angle = (words & _LOW_24).to(torch.float32).mul_(2.0 * math.pi * 2.0**-24)
    pairs = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1).flatten(start_dim=-2)
    return pairs[..., : shape[-1] if shape else 1].reshape(len(keys), *shape).to(dtype)


def keep_mask(keys: Tensor, shape: Sequence[int], salt: int, p: float) -> Tensor:
    """Return which elements dropout with probability `p` keeps, as booleans of shape (rows, *shape).

    A word decides about four neighbors, so `p` is rounded to a multiple of 2**-16.
    """
    words = _random_words(keys, shape, salt, per_word=4)
    if torch.compiler.is_compiling():  # Inductor cannot view a word as four numbers
        shifts = torch.arange(4, device=keys.device) * 16
        quarters = (((words.unsqueeze(-1) >> shifts) & 0xFFFF) ^ 0x8000).flatten(start_dim=-2) - 0x8000
    else:
        quarters = words.view(torch.int16)  # the order of the bytes is that of x86 and CUDA: the lowest quarter first
    return (quarters >= keep_threshold(p))[..., : shape[-1] if shape else 1].reshape(len(keys), *shape)


def keep_threshold(p: float) -> int:
    """Return the smallest signed 16-bit number that means "keep" if dropout drops with probability `p`."""
    return round(p * (1 << 16)) - (1 << 15)


def row_starts(keys: Tensor, salt: int) -> Tensor:
    """Return the start of each row's SplitMix64 stream for this salt."""
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise DataError(
            f"keys are {keys.dtype} of shape {tuple(keys.shape)} and must be torch.int64 of shape (rows,): "
            "take them from micro_batch_keys() or sample_key_tensor(...)"
        )
    return _mix64_(keys + salt_word(salt))


def salt_word(salt: int) -> int:
    """Return what a salt adds to a key, as a signed 64-bit number."""
    return _signed(key64(Purpose.ELEMENT, salt))


def _random_words(keys: Tensor, shape: Sequence[int], salt: int, per_word: int = 1) -> Tensor:
    """Return 64-bit words of shape (rows, *shape), where one word serves `per_word` neighbors of the last dimension.

    The counter of a word is the sum of its indices times one large odd stride per dimension. It does not depend on the
    sizes, so that a sample which is padded to another length keeps its numbers.
    """
    starts = row_starts(keys, salt)
    sizes = (*shape[:-1], -(-shape[-1] // per_word)) if shape else (1,)
    counters = _counters(sizes, keys.device)
    return _mix64_(starts.view(-1, *[1] * len(sizes)) + counters)


def _counters(sizes: Sequence[int], device: torch.device) -> Tensor:
    counters = torch.full((), _signed(GOLDEN), dtype=torch.int64, device=device)
    strides: Sequence[int | Tensor] = dimension_strides(len(sizes))
    if torch.compiler.is_compiling():  # Inductor would compute indices times constants in 32 bits
        strides = _STRIDES_FOR_GRAPHS[device][-len(sizes) :].unbind()
    for size, stride in zip(sizes, strides, strict=True):
        counters = counters.unsqueeze(-1) + torch.arange(size, dtype=torch.int64, device=device) * stride
    return counters


def prepare_for_graphs(device: torch.device) -> None:
    """Make the strides of the counters a tensor on `device`, which a compiled graph takes as an input."""
    if device not in _STRIDES_FOR_GRAPHS:
        with torch.inference_mode(mode=False):  # kept for graphs that are trained, whichever comes first
            _STRIDES_FOR_GRAPHS[device] = torch.tensor(dimension_strides(_MAX_DIMENSIONS), device=device)


_STRIDES_FOR_GRAPHS: Final[dict[torch.device, Tensor]] = {}


def dimension_strides(dimensions: int) -> list[int]:
    """Return how much the counter of a word grows along each dimension, as signed 64-bit numbers."""
    strides = [GOLDEN]
    for number in range(1, dimensions):
        strides.append(key64(Purpose.DIMENSION, number) | 1)
    return [_signed(stride) for stride in reversed(strides)]


def _mix64_(words: Tensor) -> Tensor:
    """Apply `mix64` in place. int64 products wrap like unsigned ones; the masks make torch's signed shifts logical."""
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        words ^= (words >> shift) & ((1 << (64 - shift)) - 1)
        words *= _signed(factor)
    words ^= (words >> SHIFTS[2]) & ((1 << (64 - SHIFTS[2])) - 1)
    return words


def _signed(word: int) -> int:
    """Return the int64 number with the bits of an unsigned 64-bit word."""
    return word - (1 << 64) if word >> 63 else word


@dataclass(frozen=True)
class SampleIds:
    """Which samples the rows of a batch are; a cache of teacher outputs uses them as keys."""

    shard: str  # the name of the shard, the same in every run of a script
    epoch: int  # the epoch in which the samples were read
    indices: list[int]  # the dataset index of each row
    real: int  # how many rows are samples; the rows after them are padding


@dataclass(slots=True)
class _MicroBatch:
    """The micro-batch that this process computes.

    This is not a ContextVar: autograd recomputes checkpointed layers in its own threads, which have no context, and a
    module must find the same keys there as in its forward pass.
    """

    keys: Tensor | Callable[[], Tensor] | None = None
    samples: Callable[[], SampleIds | None] | None = None


_MICRO_BATCH: Final = _MicroBatch()


def micro_batch_keys() -> Tensor | None:
    """Return the keys of the samples in the current micro-batch, int64 of shape (rows,), or None outside a step."""
    keys = _MICRO_BATCH.keys
    if keys is None or isinstance(keys, Tensor):
        return keys
    _MICRO_BATCH.keys = computed = keys()
    return computed


def current_samples() -> SampleIds | None:
    """Return the samples of the batch that a shard yielded last, or None if no shard is being iterated."""
    return None if _MICRO_BATCH.samples is None else _MICRO_BATCH.samples()


def set_micro_batch(
    keys: Tensor | Callable[[], Tensor] | None, samples: Callable[[], SampleIds | None] | None = None
) -> None:
    """Set the samples that the modules of the model see from now on; pass None at the end of a step.

    `keys` may be a function. It is called when a module first asks for the keys: most models never do, and computing
    them in every step costs time.
    """
    _MICRO_BATCH.keys, _MICRO_BATCH.samples = keys, samples


@contextmanager
def evaluation_batch(samples: SampleIds | None, keys: Callable[[], Tensor]) -> Generator[None]:
    """Set the samples of an evaluation batch and their keys while the block runs."""
    before = _MICRO_BATCH.keys, _MICRO_BATCH.samples
    set_micro_batch(keys, None if samples is None else lambda: samples)
    try:
        yield
    finally:
        set_micro_batch(*before)
