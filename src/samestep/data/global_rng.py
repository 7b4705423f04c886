"""The global generators of torch, Python and numpy, seeded by sample while code of the user reads data.

Transforms of torchvision and of most scripts draw from these generators. samestep seeds them from (seed, epoch, sample)
before `dataset[i]` and before a `collate_fn`, so that an augmentation is the same on any ranks and workers. In the
training process it restores them afterwards: the numbers that the script itself draws do not depend on its data.

Seeding costs more than reading a sample that is in memory, so `KeyedCalls` seeds only the generators that are used. It
seeds all of them for the first batch and finds out which ones move. The others it only watches. If one of them moves
later, it is seeded too from then on, and the batch is read again.

To watch a generator must cost nearly nothing, and the public functions that return a state take 10 (Python) and 30
microseconds (numpy). So these two states are read from the memory of the generators, in 0.2 microseconds. The layouts
have not changed for many years; if a check at import finds another one, the public functions are used. Only these
restore a state.
"""

import ctypes
import pickle
import random
import struct
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, get_worker_info

from samestep.data.permutation import Purpose, key64
from samestep.data.sample_rng import low_word

T = TypeVar("T")
Seed = Callable[[int], None]
"""Seeds the global generators for the sample with this dataset index or position."""

_numpy: Final[Any] = np.random  # numpy has no types for these two
_get_bit_generator, _set_bit_generator = _numpy.get_bit_generator, _numpy.set_bit_generator
_MT19937_BYTES: Final = 624 * 4 + 4  # the state of a Mersenne Twister: 624 words and a position
_SEARCH_DEPTH, _SEARCH_WIDTH, _SEARCH_VALUES = 5, 100, 5_000  # how far transforms are searched in a dataset


class _GlobalGenerator(Protocol):
    """One of the three global generators."""

    def seed(self, word: int) -> None:
        """Seed it with a word of 64 bits, of which the lower 32 are different for every sample."""
        ...

    def snapshot(self) -> object:
        """Return its state. Two snapshots are equal if and only if no code used or set the generator between them."""
        ...

    def restore(self, snapshot: Any) -> None:
        """Restore the state of a snapshot."""
        ...


class _TorchGenerator:
    """torch's generator of the CPU. CUDA generators are not seeded: datasets do not draw on the device."""

    def seed(self, word: int) -> None:
        """Seed it."""
        torch.default_generator.manual_seed(word)

    def snapshot(self) -> bytes:
        """Return its state; bytes are compared several times quicker than tensors."""
        return torch.default_generator.get_state().numpy().tobytes()

    def restore(self, snapshot: Any) -> None:
        """Restore it."""
        torch.default_generator.set_state(torch.frombuffer(bytearray(snapshot), dtype=torch.uint8))


class _PythonGenerator:
    """The generator of Python's module `random`."""

    def __init__(self) -> None:
        self._generator: Any = random.random.__self__  # pyright: ignore[reportFunctionMemberAccess]
        self._memory = _python_memory(self._generator) if _is_python_readable() else None

    @property
    def is_fast(self) -> bool:
        """Whether the state is read from memory."""
        return self._memory is not None

    def seed(self, word: int) -> None:
        """Seed it."""
        random.seed(word)

    def snapshot(self) -> tuple[object, ...]:
        """Return its state: index and words, and the second of a pair of normal numbers."""
        if self._memory is None:
            return random.getstate()
        return self._memory.raw, self._generator.gauss_next

    def restore(self, snapshot: Any) -> None:
        """Restore it."""
        if self._memory is not None:
            index, *words = np.frombuffer(snapshot[0], dtype=np.uint32).tolist()
            snapshot = (random.Random.VERSION, (*words, index), snapshot[1])
        random.setstate(snapshot)


class _NumpyGenerator:
    """The generator of numpy's legacy functions, such as `np.random.rand`."""

    def __init__(self) -> None:
        self._bits: Any = None
        self._words = (ctypes.c_char * 0)()
        offset = _find_numpy_gauss()
        self._gauss = None if offset is None else _numpy_gauss(np.random.rand.__self__, offset)  # pyright: ignore[reportFunctionMemberAccess]

    @property
    def is_fast(self) -> bool:
        """Whether the state is read from memory."""
        return self._gauss is not None

    def seed(self, word: int) -> None:
        """Seed it."""
        if type(_get_bit_generator()) is not np.random.MT19937:  # another one cannot be seeded again
            _set_bit_generator(np.random.MT19937())
        np.random.seed(word & 0xFFFFFFFF)

    def snapshot(self) -> tuple[object, ...]:
        """Return its bit generator, the state of it, and the second of a pair of normal numbers."""
        bits = _get_bit_generator()
        if self._gauss is None or (bits is not self._bits and type(bits) is not np.random.MT19937):
            return bits, pickle.dumps(np.random.get_state(legacy=False))
        if bits is not self._bits:
            self._bits, self._words = bits, _numpy_memory(bits)
        return bits, self._words.raw, self._gauss.raw

    def restore(self, snapshot: Any) -> None:
        """Restore it."""
        if _get_bit_generator() is not snapshot[0]:
            _set_bit_generator(snapshot[0])
        if len(snapshot) == 2:
            np.random.set_state(pickle.loads(snapshot[1]))
        else:
            words = np.frombuffer(snapshot[1], dtype=np.uint32)
            np.random.set_state(("MT19937", words[:-1], int(words[-1]), *_GAUSS.unpack(snapshot[2])))


# The states in memory


def _python_memory(generator: random.Random) -> "ctypes.Array[ctypes.c_char]":
    """Index and words of a Python generator, which follow the header of the object."""
    return (ctypes.c_char * _MT19937_BYTES).from_address(id(generator) + object.__basicsize__)


def _is_python_readable() -> bool:
    if sys.implementation.name != "cpython":
        return False
    generator = random.Random(0)
    generator.random()
    words = np.frombuffer(_python_memory(generator).raw, dtype=np.uint32).tolist()
    return (*words[1:], words[0]) == generator.getstate()[1]


def _numpy_memory(bits: np.random.MT19937) -> "ctypes.Array[ctypes.c_char]":
    """Words and position of numpy's Mersenne Twister."""
    return (ctypes.c_char * _MT19937_BYTES).from_address(bits.ctypes.state_address)


_GAUSS: Final = struct.Struct("ixxxxd")
"""Whether a RandomState keeps the second of a pair of normal numbers, and the number."""


def _numpy_gauss(generator: np.random.RandomState, offset: int) -> "ctypes.Array[ctypes.c_char]":
    return (ctypes.c_char * _GAUSS.size).from_address(id(generator) + offset)


def _find_numpy_gauss() -> int | None:
    """Return where a RandomState has `_GAUSS`; None if the memory of numpy's generators is not as expected."""
    bits = np.random.MT19937(0)
    bits.random_raw(3)
    words, state = np.frombuffer(_numpy_memory(bits).raw, dtype=np.uint32), bits.state["state"]
    if not (words[:-1] == state["key"]).all() or int(words[-1]) != state["pos"]:
        return None
    generator = np.random.RandomState(bits)
    generator.standard_normal()
    kept = _GAUSS.pack(1, generator.get_state(legacy=False)["gauss"])  # pyright: ignore[reportArgumentType, reportCallIssue]
    size = np.random.RandomState.__basicsize__
    offset = ctypes.string_at(id(generator), size).find(kept) if sys.implementation.name == "cpython" else -1
    if offset < 0:
        return None
    generator.standard_normal()
    return offset if _GAUSS.unpack(_numpy_gauss(generator, offset).raw)[0] == 0 else None


_GENERATORS: Final[tuple[_GlobalGenerator, ...]] = (_TorchGenerator(), _PythonGenerator(), _NumpyGenerator())
PYTHON_GENERATORS: Final = _GENERATORS[1:]
"""Those of Python and numpy."""

_TORCH_SNAPSHOT, _PYTHON_SNAPSHOT, _NUMPY_SNAPSHOT = (generator.snapshot for generator in _GENERATORS)


def _take_snapshots() -> tuple[object, ...]:
    """Return a snapshot of each generator."""
    return _TORCH_SNAPSHOT(), _PYTHON_SNAPSHOT(), _NUMPY_SNAPSHOT()


def _find_used(snapshots: tuple[object, ...]) -> list[int]:
    """Return the numbers of the generators that were used since these snapshots."""
    now = _take_snapshots()
    if now == snapshots:
        return []
    return [number for number, (old, new) in enumerate(zip(snapshots, now, strict=True)) if old != new]


def _restore_snapshots(snapshots: tuple[object, ...]) -> list[int]:
    """Restore the generators that were used since these snapshots; return their numbers."""
    used = _find_used(snapshots)
    for number in used:
        _GENERATORS[number].restore(snapshots[number])
    return used


def draws_nothing(dataset: Any) -> bool:
    """Return whether reading a dataset runs no code that could draw random numbers."""
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(draws_nothing(part) for part in dataset.datasets)
    return type(dataset) in (TensorDataset, torch.Tensor, np.ndarray, list, tuple, range)


def find_seedable(dataset: object) -> list[Any]:
    """Return the transforms of a dataset that have generators of their own and `set_random_seed`, as in albumentations.

    Found are attributes of the dataset and of datasets, transforms, lists and dicts in it, and what its `__getitem__`
    and the functions in it refer to: global variables, defaults and variables of an enclosing function.
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
            else:
                below += _values_in(value)[:_SEARCH_WIDTH]
        level = below
    return found


def _values_in(value: Any) -> list[Any]:
    """Return the objects that a value contains, or that a function uses."""
    if isinstance(value, list | tuple):
        return list(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, dict):
        return list(value.values())  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        enclosing = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]  # those with a value
        used = [value.__globals__.get(name) for name in value.__code__.co_names]
        return [*enclosing, *used, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    reading = [getattr(type(value), name, None) for name in ("__getitem__", "__call__")]
    functions = [function for function in reading if isinstance(function, FunctionType)]
    return [*list(getattr(value, "__dict__", {}).values()), *functions]


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
    saved = None if get_worker_info() else _take_snapshots()
    try:
        yield _seeder(purpose, seed, epoch, tuple(range(len(_GENERATORS))))
    finally:
        if saved is not None:
            _restore_snapshots(saved)


class KeyedCalls:
    """Calls code of the user with the global generators seeded, as far as the code uses them.

    >>> calls = KeyedCalls(Purpose.READ_SAMPLE)
    >>> def read(seed_sample: Seed | None) -> list[int]:
    ...     numbers = []
    ...     for index in (4, 7, 4):
    ...         if seed_sample is not None:
    ...             seed_sample(index)
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

    def call(self, seed: int, epoch: int, function: Callable[[Seed | None], T]) -> T:
        """Return `function(seed_sample)`; it calls `seed_sample(index)` before each sample, unless it is None.

        If it uses a generator for the first time after the first call, it is called twice. What it did before that,
        also an exception, does not count: it depends on the state in which this process had the generator.
        """
        if not self._learned:
            result = self._learn(seed, epoch, function)
            self._learned = True
            return result
        while True:
            before = _take_snapshots()
            try:
                result = function(_seeder(self._purpose, seed, epoch, self._seeded) if self._seeded else None)
            except BaseException as error:
                if self._find_moved(before) and isinstance(error, Exception):
                    continue
                raise
            if _take_snapshots() == before or not self._find_moved(before):
                return result

    def _learn(self, seed: int, epoch: int, function: Callable[[Seed | None], T]) -> T:
        """Seed all generators, and find out which ones move after they were seeded."""
        marks: tuple[object, ...] = ()

        def find_moved() -> None:
            moved = {number for number, mark in enumerate(marks) if _GENERATORS[number].snapshot() != mark}
            self._seeded = tuple(sorted(moved.union(self._seeded)))

        with keyed_globals(self._purpose, seed, epoch) as seed_sample:

            def seed_and_mark(index: int) -> None:
                nonlocal marks
                find_moved()
                seed_sample(index)
                marks = _take_snapshots()

            result = function(seed_and_mark)
            find_moved()
        return result

    def _find_moved(self, before: tuple[object, ...]) -> bool:
        """Restore the generators, and return whether one moved that was not seeded; from now on it is."""
        moved = _find_used(before) if get_worker_info() else _restore_snapshots(before)
        known = len(self._seeded)
        if moved:
            self._seeded = tuple(sorted({*self._seeded, *moved}))
        return len(self._seeded) > known
