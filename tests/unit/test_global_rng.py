"""The global generators are watched without being moved, and restored exactly."""

import random

import numpy as np
import pytest
import torch

from samestep.data.global_rng import _GENERATORS as GENERATORS
from samestep.data.global_rng import KeyedCalls, keyed_globals
from samestep.data.permutation import Purpose

DRAWS = (lambda: float(torch.rand(1)), random.random, lambda: float(np.random.rand()))
NORMAL_DRAWS = (lambda: float(torch.randn(1)), lambda: random.gauss(0, 1), lambda: float(np.random.randn()))


@pytest.fixture(autouse=True)
def _restore():
    with keyed_globals(Purpose.READ_SAMPLE, 0, 0):
        yield


def test_states_are_read_from_memory_in_this_python_and_numpy():
    assert [generator.is_fast for generator in GENERATORS[1:]] == [True, True]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("number", "draw"), list(enumerate(DRAWS)) + list(enumerate(NORMAL_DRAWS)))
def test_a_snapshot_changes_with_every_draw_and_restores_the_generator(monkeypatch, number, draw, fast):
    generator = GENERATORS[number]
    if not fast and number > 0:
        monkeypatch.setattr(generator, "_gauss" if number == 2 else "_memory", None)
    for already_drawn in range(2):  # of a pair of normal numbers, the first or both
        before = generator.snapshot()
        assert generator.snapshot() == before
        expected = [draw() for _ in range(1300 + already_drawn)]
        assert len({generator.snapshot() for _ in range(700) if draw() is not None}) == 700
        assert generator.snapshot() != before
        generator.restore(before)
        assert [draw() for _ in range(1300 + already_drawn)] == expected


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
            if seed is not None:
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


def test_code_that_draws_nothing_is_not_asked_to_seed_until_it_draws():
    calls, given, draws = KeyedCalls(Purpose.READ_SAMPLE), [], False

    def read(seed):
        given.append(seed)
        if seed is not None:
            seed(3)
        return random.random() if draws else 0.0

    expected = KeyedCalls(Purpose.READ_SAMPLE).call(0, 0, lambda seed: (seed(3), random.random())[1])
    assert [calls.call(0, 0, read) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert given[0] is not None
    assert given[1:] == [None, None]
    draws = True
    random.seed(8)
    assert calls.call(0, 0, read) == expected
    assert random.random() == random.Random(8).random()
    assert given[3] is None
    assert given[4] is not None
    assert len(given) == 5


def test_whether_a_read_fails_by_chance_depends_on_the_sample_only():
    calls = KeyedCalls(Purpose.READ_SAMPLE)
    calls.call(0, 0, lambda seed: seed(0))
    drawn = []

    def fail_half(seed):
        if seed is not None:
            seed(3)
        drawn.append(random.random())
        if drawn[-1] < 0.5:
            raise KeyError
        return drawn[-1]

    random.seed(1)
    assert random.random() < 0.5
    random.seed(1)
    assert calls.call(0, 0, fail_half) == drawn[1]  # 0.77, as for any other process
    assert drawn[0] < 0.5
    assert random.random() == drawn[0]


def test_the_second_of_a_pair_of_normal_numbers_belongs_to_the_script():
    calls = KeyedCalls(Purpose.READ_SAMPLE)
    calls.call(0, 0, lambda seed: seed(0))
    np.random.seed(4)
    _, second, third = (np.random.randn() for _ in range(3))
    np.random.seed(4)
    np.random.randn()  # numpy keeps the second number

    def read(seed):
        if seed is not None:
            seed(3)
        return np.random.randn()

    assert calls.call(0, 0, read) != second
    assert (np.random.randn(), np.random.randn()) == (second, third)


def test_an_error_restores_the_generators_too():
    random.seed(1)
    expected = random.Random(1).random()

    def fail(seed):
        if seed is not None:
            seed(0)
        random.random()
        raise KeyError

    calls = KeyedCalls(Purpose.READ_SAMPLE)
    for _ in range(3):
        with pytest.raises(KeyError):
            calls.call(0, 0, fail)
    calls.call(0, 0, lambda seed: seed(0))
    for _ in range(2):  # a late draw
        with pytest.raises(KeyError):
            calls.call(0, 0, fail)
    assert random.random() == expected


def test_the_numbers_of_a_sample_are_fixed_for_all_versions():
    with keyed_globals(Purpose.READ_SAMPLE, 0, 0) as seed:
        seed(3)
        drawn = [round(draw(), 6) for draw in DRAWS]
    assert drawn == [0.047322, 0.767475, 0.753982]
