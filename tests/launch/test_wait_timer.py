"""How long ranks wait in their collectives, and from when on a wait is too long."""

import pytest

from samestep.hang.evidence import Progress
from samestep.launch.wait_timer import Wait, WaitTimer, expected_wait


def progress(waiting, timeout=60.0, interval=0.1, calls=9):
    return Progress(calls=calls, waiting=waiting, timeout=timeout, interval=interval)


@pytest.mark.parametrize(
    ("usual", "timeout", "longest", "expected"),
    [
        (0.01, 1800, 0, 20),  # never less than 20 s
        (5, 1800, 0, 50),  # a multiple of the usual time
        (5, 60, 0, 36),  # but before the timeout
        (0.01, 5, 0, 3),
        (None, 1800, 0, 60),  # before the first collectives
        (None, 0, 0, 60),  # while ranks connect, the timeout is not known
        (0.01, 0, 0, 60),
        (10, 0, 0, 100),
        (0.01, 1800, 300, 600),  # ranks once waited for 300 s, and then continued
    ],
)
def test_a_wait_is_too_long_after_a_multiple_of_the_usual_time_and_well_before_the_timeout(
    usual, timeout, longest, expected
):
    assert expected_wait(usual, timeout, longest) == pytest.approx(expected)


def test_the_wait_that_is_nearest_to_its_timeout_counts():
    waits = {0: progress(25.0), 1: progress(30.0, timeout=1800.0), 2: progress(0.0), 3: None, 4: progress(15.0)}
    assert WaitTimer().update(waits, now=100.0) == Wait(seconds=25.0, timeout=60.0, expected=20.0)
    assert WaitTimer().update({0: progress(19.0), 1: progress(0.0)}, now=100.0) is None


def test_a_collective_in_a_queue_waits_only_since_those_before_it_are_complete():
    timer = WaitTimer()
    assert timer.update({0: progress(18.0)}, now=100.0) is None
    assert timer.update({0: progress(21.1)}, now=103.0) == Wait(21.0, 60.0, 20.0)  # the same one
    assert timer.update({0: progress(21.0, calls=10)}, now=104.0) is None  # the oldest only since 103
    assert timer.update({0: None}, now=120.0) is None
    assert timer.update({0: progress(64.0, calls=10)}, now=147.0) == Wait(44.0, 60.0, 36.0)


def test_a_wait_that_ended_well_makes_the_next_one_of_that_length_expected():
    timer = WaitTimer()
    assert timer.update({0: progress(21.0, timeout=600)}, now=100.0) is not None
    assert timer.update({0: progress(0.0, calls=10)}, now=101.0) is None
    assert timer.update({0: progress(30.0, timeout=600)}, now=200.0) is None
    assert timer.update({0: progress(43.0, timeout=600)}, now=213.0).expected == 42.0


def test_a_rank_that_answers_that_it_does_not_wait_is_not_late_and_continues_with_the_next_call_of_any_rank():
    timer = WaitTimer()
    assert timer.update({0: progress(21.0), 1: progress(0.0)}, now=100.0) == Wait(21.0, 60.0, 20.0)
    assert timer.update({0: progress(0.0), 1: progress(0.0)}, now=101.0) is None  # complete, or it has raised
    assert (timer.longest, timer.has_continued) == (21.0, False)
    assert timer.update({0: progress(0.0), 1: progress(0.0, calls=10)}, now=102.0) is None
    assert timer.has_continued


def test_a_rank_that_does_not_answer_keeps_its_wait_which_neither_grows_nor_has_a_timeout():
    timer = WaitTimer()
    timer.update({0: progress(21.0), 1: progress(0.0)}, now=100.0)
    for now in (101.0, 500.0):
        assert timer.update({0: None, 1: progress(0.0)}, now=now) == Wait(21.0, 0.0, 20.0)
    assert timer.update({1: progress(0.0)}, now=501.0) is None  # it has ended
