"""The global generators of torch, Python and numpy, seeded by sample while code of the user reads data.

Transforms of torchvision and of most scripts draw from these generators. samestep seeds them from (seed, epoch, sample)
before `dataset[i]` and before a `collate_fn`, so that an augmentation is the same on any ranks and workers. In the
training process it restores them afterwards: the numbers that the script itself draws do not depend on its data.

Seeding costs more than reading a sample that is in memory, so `KeyedCalls` seeds only the generators that are used. It
seeds all of them for the first batch and finds out which ones move. The others it only watches. If one of them moves
later, it is seeded too from then on, and the batch is read again.
"""

import ctypes
import pickle
import random
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, get_worker_info

from samestep.data.permutation import Purpose, key64
from samestep.data.sample_rng import low_word

T = TypeVar("T")
Seed = Callable[[int], None]
"""Seeds the global generators for the sample with this dataset index or position."""

_LEGACY: Final[Any] = np.random  # numpy has no types for get_bit_generator and set_bit_generator
_SEARCH_DEPTH, _SEARCH_WIDTH, _SEARCH_VALUES = 5, 100, 5_000  # how far transforms are searched in a dataset
_MT19937_BYTES: Final = 624 * 4 + 4  # the state of a Mersenne Twister: 624 words and a position


class _GlobalGenerator(Protocol):
    """One of the three global generators."""

    def seed(self, word: int) -> None:
        """Seed it with a word of 64 bits, of which the lower 32 are different for every sample."""
        ...

    def state(self) -> object:
        """Return what `restore` needs."""
        ...

    def restore(self, state: object) -> None:
        """Restore a state."""
        ...

    def mark(self) -> object:
        """Return a value that changes if the generator is used; cheaper than `state`."""
        ...

    def restore_mark(self, mark: object) -> None:
        """Restore the generator as it was at `mark()`."""
        ...


class _TorchGenerator:
    """torch's generator of the CPU. CUDA generators are not seeded: datasets do not draw on the device."""

    def seed(self, word: int) -> None:
        """Seed it."""
        torch.default_generator.manual_seed(word)

    def state(self) -> torch.Tensor:
        """Return what `restore` needs."""
        return torch.default_generator.get_state()

    def restore(self, state: object) -> None:
        """Restore a state."""
        assert isinstance(state, torch.Tensor)
        torch.default_generator.set_state(state)

    def mark(self) -> bytes:
        """Return what changes if it is used."""
        return self.state().numpy().tobytes()

    def restore_mark(self, mark: object) -> None:
        """Restore it as it was at a mark."""
        assert isinstance(mark, bytes)
        self.restore(torch.frombuffer(bytearray(mark), dtype=torch.uint8))


class _PythonGenerator:
    """The generator of Python's module `random`."""

    def seed(self, word: int) -> None:
        """Seed it."""
        random.seed(word)

    def state(self) -> object:
        """Return what `restore` needs."""
        return random.getstate()

    def restore(self, state: object) -> None:
        """Restore a state."""
        assert isinstance(state, tuple)
        random.setstate(state)

    def mark(self) -> object:
        """Return what changes if it is used."""
        # getstate makes a tuple of 625 numbers, which takes 9 microseconds.
        if _PYTHON_STATE_IS_READABLE:
            return _read_python_state(_PYTHON), _PYTHON.gauss_next
        return random.getstate()

    def restore_mark(self, mark: object) -> None:
        """Restore it as it was at a mark."""
        assert isinstance(mark, tuple)
        if isinstance(mark[0], bytes):
            index, *words = np.frombuffer(mark[0], dtype=np.uint32).tolist()
            mark = (random.Random.VERSION, (*words, index), mark[1])
        self.restore(mark)


class _NumpyGenerator:
    """The generator of numpy's legacy functions, such as `np.random.rand`."""

    def seed(self, word: int) -> None:
        """Seed it."""
        if type(_LEGACY.get_bit_generator()) is not np.random.MT19937:  # another one cannot be seeded again
            _LEGACY.set_bit_generator(np.random.MT19937())
        np.random.seed(word & 0xFFFFFFFF)

    def state(self) -> object:
        """Return what `restore` needs."""
        return _LEGACY.get_bit_generator(), np.random.get_state(legacy=False)

    def restore(self, state: object) -> None:
        """Restore a state."""
        assert isinstance(state, tuple)
        if _LEGACY.get_bit_generator() is not state[0]:
            _LEGACY.set_bit_generator(state[0])
        np.random.set_state(state[1])

    def mark(self) -> bytes:
        """Return what changes if it is used."""
        # get_state takes 33 microseconds, which a dataset that draws nothing should not pay twice per batch.
        bit_generator = _LEGACY.get_bit_generator()
        if type(bit_generator) is np.random.MT19937 and _NUMPY_STATE_IS_READABLE:
            return ctypes.string_at(bit_generator.ctypes.state_address, _MT19937_BYTES)
        return pickle.dumps(np.random.get_state(legacy=False))

    def restore_mark(self, mark: object) -> None:
        """Restore it as it was at a mark."""
        assert isinstance(mark, bytes)
        if len(mark) == _MT19937_BYTES:
            words = np.frombuffer(mark, dtype=np.uint32)
            np.random.set_state(("MT19937", words[:-1], int(words[-1]), 0, 0.0))
        else:
            np.random.set_state(pickle.loads(mark))


# The marks below are read from the memory of the generators. Both layouts have not changed for many years, and if a
# check at import fails, the public and slower functions are used.


def _read_python_state(generator: random.Random) -> bytes:
    """Return index and words of a Python generator, which follow the header of the object."""
    return ctypes.string_at(id(generator) + object.__basicsize__, _MT19937_BYTES)


def _is_python_state_readable() -> bool:
    generator = random.Random(0)
    generator.random()
    words = np.frombuffer(_read_python_state(generator), dtype=np.uint32).tolist()
    return (*words[1:], words[0]) == generator.getstate()[1]


def _is_numpy_state_readable() -> bool:
    generator = np.random.MT19937(0)
    generator.random_raw(3)
    state = generator.state["state"]
    words = np.frombuffer(ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES), dtype=np.uint32)
    return bool((words[:-1] == state["key"]).all()) and int(words[-1]) == state["pos"]


_PYTHON: Final[Any] = random.random.__self__  # the generator of the functions in `random`
_PYTHON_STATE_IS_READABLE: Final = sys.implementation.name == "cpython" and _is_python_state_readable()
_NUMPY_STATE_IS_READABLE: Final = _is_numpy_state_readable()
_GENERATORS: Final[tuple[_GlobalGenerator, ...]] = (_TorchGenerator(), _PythonGenerator(), _NumpyGenerator())


def draws_nothing(dataset: Any) -> bool:
    """Return whether reading a dataset runs no code that could draw random numbers."""
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(draws_nothing(part) for part in dataset.datasets)
    return type(dataset) in (TensorDataset, torch.Tensor, np.ndarray, list, tuple, range)


def find_seedable(dataset: object) -> list[Any]:
    """Return the transforms of a dataset that have generators of their own and `set_random_seed`, as in albumentations.

    Found are attributes of the dataset and of the datasets, transforms, lists and dicts in it.
    """
    found, known = list[Any](), set[int]()
    level: list[Any] = [dataset]
    for _ in range(_SEARCH_DEPTH):
        below = list[Any]()
        for value in level:
            if (
                id(value) in known
                or len(known) > _SEARCH_VALUES
                or isinstance(value, type | ModuleType | torch.Tensor | np.ndarray)
            ):
                continue
            known.add(id(value))
            if callable(getattr(type(value), "set_random_seed", None)):
                found.append(value)  # it seeds those inside it
            elif isinstance(value, list | tuple | dict):
                parts = list(value.values()) if isinstance(value, dict) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
                below += parts[:_SEARCH_WIDTH]  # pyright: ignore[reportUnknownVariableType]
            else:
                below += list(getattr(value, "__dict__", {}).values())[:_SEARCH_WIDTH]
        level = below
    return found


def seed_transforms(transforms: Sequence[Any], seed: int, epoch: int, index: int) -> None:
    """Seed what `find_seedable` found for a sample."""
    word = low_word(key64(Purpose.READ_SAMPLE, seed, epoch, len(_GENERATORS)), index)
    for number, transform in enumerate(transforms):
        transform.set_random_seed((word + number) & 0x7FFFFFFF)


def _seeder(purpose: int, seed: int, epoch: int, generators: tuple[int, ...]) -> Seed:
    """Return the function that seeds these generators for a sample."""
    streams = [(_GENERATORS[number], key64(purpose, seed, epoch, number)) for number in generators]

    def seed_sample(index: int) -> None:
        for generator, key in streams:
            generator.seed(low_word(key, index) | (key ^ index) >> 32 << 32)

    return seed_sample


@contextmanager
def keyed_globals(purpose: int, seed: int, epoch: int) -> Generator[Seed]:
    """Yield the function that seeds all global generators for a sample; restore them afterwards.

    A data worker does not restore them, since they belong to it alone.
    """
    saved = None if get_worker_info() else [generator.state() for generator in _GENERATORS]
    try:
        yield _seeder(purpose, seed, epoch, tuple(range(len(_GENERATORS))))
    finally:
        for generator, state in zip(_GENERATORS, saved or (), strict=False):
            generator.restore(state)


class KeyedCalls:
    """Calls code of the user with the global generators seeded, as far as the code uses them.

    >>> calls = KeyedCalls(Purpose.READ_SAMPLE)
    >>> def read(seed_sample: Seed) -> list[int]:
    ...     numbers = []
    ...     for index in (4, 7, 4):
    ...         seed_sample(index)
    ...         numbers.append(random.randrange(1000))
    ...     return numbers
    >>> first, second, third = calls.call(0, 0, read)
    >>> first == third, first == second
    (True, False)
    """

    def __init__(self, purpose: int) -> None:
        self._purpose = purpose
        self._seeded: tuple[int, ...] = ()  # the generators that this code uses
        self._learned = False

    @property
    def draws(self) -> bool:
        """Whether this code has drawn from a global generator."""
        return bool(self._seeded)

    def call(self, seed: int, epoch: int, function: Callable[[Seed], T]) -> T:
        """Return `function(seed_sample)`; it calls `seed_sample(index)` before each sample.

        If it uses a generator for the first time after the first call, it is called twice.
        """
        if not self._learned:
            result = self._learn(seed, epoch, function)
            self._learned = True
            return result
        while True:
            result, moved = self._call_watched(seed, epoch, function)
            if not moved:
                return result
            self._seeded = tuple(sorted({*self._seeded, *moved}))

    def _learn(self, seed: int, epoch: int, function: Callable[[Seed], T]) -> T:
        """Seed all generators, and find out which ones move after they were seeded."""
        marks: list[object] = []

        def find_moved() -> None:
            moved = {number for number, mark in enumerate(marks) if _GENERATORS[number].mark() != mark}
            self._seeded = tuple(sorted(moved.union(self._seeded)))

        with keyed_globals(self._purpose, seed, epoch) as seed_sample:

            def seed_and_mark(index: int) -> None:
                find_moved()
                seed_sample(index)
                marks[:] = [generator.mark() for generator in _GENERATORS]

            result = function(seed_and_mark)
            find_moved()
        return result

    def _call_watched(self, seed: int, epoch: int, function: Callable[[Seed], T]) -> tuple[T, list[int]]:
        """Seed the generators that are used; return the result and the other generators that moved."""
        in_worker = get_worker_info() is not None
        saved = [] if in_worker else [_GENERATORS[number].state() for number in self._seeded]
        watched = [number for number in range(len(_GENERATORS)) if number not in self._seeded]
        marks = [_GENERATORS[number].mark() for number in watched]
        try:
            result = function(_seeder(self._purpose, seed, epoch, self._seeded))
        finally:
            for number, state in zip(self._seeded, saved, strict=False):
                _GENERATORS[number].restore(state)
        moved = [number for number, mark in zip(watched, marks, strict=True) if _GENERATORS[number].mark() != mark]
        if not in_worker:
            for number, mark in zip(watched, marks, strict=True):
                if number in moved:
                    _GENERATORS[number].restore_mark(mark)
        return result, moved
