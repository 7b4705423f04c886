"""The global generators are watched without being moved, and restored exactly."""

import random

import numpy as np
import pytest
import torch

from samestep.data import global_rng
from samestep.data.global_rng import KeyedCalls, keyed_globals
from samestep.data.permutation import Purpose

DRAWS = (lambda: float(torch.rand(1)), random.random, lambda: float(np.random.rand()))


@pytest.fixture(autouse=True)
def _restore():
    with keyed_globals(Purpose.READ_SAMPLE, 0, 0):
        yield


def test_states_are_readable_in_this_python_and_numpy():
    assert global_rng._PYTHON_STATE_IS_READABLE
    assert global_rng._NUMPY_STATE_IS_READABLE


@pytest.mark.parametrize(("number", "draw"), list(enumerate(DRAWS)))
def test_a_mark_changes_with_every_draw_and_restores_the_generator(number, draw):
    generator = global_rng._GENERATORS[number]
    before = generator.mark()
    assert generator.mark() == before
    expected = [draw() for _ in range(1300)]
    assert len({generator.mark() for _ in range(700) if draw() is not None}) == 700
    assert generator.mark() != before
    generator.restore_mark(before)
    assert [draw() for _ in range(1300)] == expected


def test_another_bit_generator_of_numpy_is_restored():
    outer = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        expected = np.random.Generator(np.random.PCG64(3)).bit_generator.random_raw()
        with keyed_globals(Purpose.READ_SAMPLE, 0, 0) as seed:
            seed(5)
            drawn = np.random.rand()
            seed(5)
            assert np.random.rand() == drawn
        assert np.random.get_bit_generator().random_raw() == expected
    finally:
        np.random.set_bit_generator(outer)


def test_only_generators_that_are_used_are_seeded_and_a_late_one_reads_again():
    calls, reads, late = KeyedCalls(Purpose.READ_SAMPLE), [], False

    def read(seed):
        numbers = []
        for index in range(3):
            seed(index)
            reads.append(index)
            numbers.append((random.random(), float(np.random.rand()) if late else 0.0))
        return numbers

    first = calls.call(0, 0, read)
    assert calls._seeded == (1,)
    assert calls.call(0, 0, read) == first
    assert len(reads) == 6
    late = True
    second = calls.call(0, 0, read)
    assert calls._seeded == (1, 2)
    assert len(reads) == 12  # this batch twice
    assert calls.call(0, 0, read) == second
    assert [row[0] for row in second] == [row[0] for row in first]


def test_an_error_restores_the_generators_too():
    random.seed(1)
    expected = random.Random(1).random()

    def fail(seed):
        seed(0)
        random.random()
        raise KeyError

    with pytest.raises(KeyError):
        KeyedCalls(Purpose.READ_SAMPLE).call(0, 0, fail)
    assert random.random() == expected


def test_the_numbers_of_a_sample_are_fixed_for_all_versions():
    with keyed_globals(Purpose.READ_SAMPLE, 0, 0) as seed:
        seed(3)
        drawn = [round(draw(), 6) for draw in DRAWS]
    assert drawn == [0.047322, 0.767475, 0.753982]
