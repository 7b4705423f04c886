"""Which rank makes the others wait, how the times of ranks travel, and what the warning says."""

import math

import numpy as np
import pytest

from samestep.distributed.step_times import COMPUTING, PHASES, StepInterval
from samestep.training import rank_times
from samestep.training.rank_times import RankTimes, caused_waits, pack_interval, straggler_message, wait_metrics

STEPS, STEP = 50, 0.06
NO_PHASES = dict.fromkeys(PHASES, 0.0)


def times(waited, steps=STEPS, step_seconds=STEP, **phases):
    """The times of ranks that wait so many seconds per step, with seconds per step and rank of some phases."""
    waited = np.asarray(waited, dtype=float)
    seconds = {phase: np.asarray(phases.get(phase, [0.0] * len(waited))) * steps for phase in PHASES}
    return RankTimes(steps, steps * step_seconds, seconds, waited * steps, np.full(len(waited), float(steps)))


def test_the_rank_that_waits_least_makes_the_others_wait():
    waits = np.array([[0.012, 0.010], [0.002, 0.010], [0.008, 0.001]])
    # 0.002 and 0.001 s is what the exchange itself takes
    assert caused_waits(waits) == pytest.approx([0.0, (0.010 - 0.002) / 2, (0.010 - 0.001) / 2])


def test_steps_that_are_not_known_on_all_ranks_do_not_count():
    waits = np.array([[0.012, math.nan, 0.5], [0.002, 0.010, math.nan]])
    assert caused_waits(waits) == pytest.approx([0.0, 0.010])
    assert caused_waits(waits[:, 1:]) is None
    assert wait_metrics(None) == {}


def test_each_of_a_few_ranks_has_a_metric_and_many_ranks_a_summary():
    assert wait_metrics(np.array([0.0, 0.25])) == {"ranks/wait/0": 0.0, "ranks/wait/1": 0.25}
    assert len(wait_metrics(np.zeros(16))) == 16
    many = np.zeros(17)
    many[3] = 0.17
    assert wait_metrics(many) == {
        "ranks/wait/min": 0.0,
        "ranks/wait/mean": pytest.approx(0.01),
        "ranks/wait/max": 0.17,
        "ranks/wait/slowest": 3.0,
    }


@pytest.mark.parametrize("steps", [0, 1, 24, 25, 1000])
def test_the_times_of_any_number_of_steps_travel_in_the_same_number_of_values(steps):
    phases = {phase: 1.0 + index for index, phase in enumerate(PHASES)}
    packed = pack_interval(StepInterval(2.0, phases), [0.5] * steps)
    assert len(packed) == len(pack_interval(StepInterval(1.0, NO_PHASES), []))
    assert len(packed) <= 36  # of 247 that one message holds
    read = RankTimes.from_rows(np.array([packed, packed]))
    assert (read.steps, read.seconds) == (steps, 2.0)
    assert {phase: list(values) for phase, values in read.phases.items()} == {p: [s, s] for p, s in phases.items()}
    assert list(read.waited) == [0.5 * steps] * 2
    assert list(read.known) == [steps] * 2


def test_steps_that_are_sent_one_by_one_are_spread_over_the_interval():
    packed = pack_interval(StepInterval(1.0, NO_PHASES), [float(step) for step in range(100)])
    sent = [value for value in packed[rank_times._HEADER :] if not math.isnan(value)]
    assert sent == [float(step) for step in range(0, 100, 5)]


def test_a_step_whose_end_the_gpu_has_not_reached_is_left_out():
    packed = pack_interval(StepInterval(1.0, NO_PHASES), [0.5, math.nan, 0.25])
    read = RankTimes.from_rows(np.array([packed]))
    assert (read.steps, list(read.waited), list(read.known)) == (3, [0.75], [2])


@pytest.mark.parametrize(
    ("waited", "slow"),
    [
        ([0.012, 0.012, 0.012, 0.0], {3}),
        ([0.014, 0.014, 0.014, 0.002], {3}),  # the exchange itself takes 2 ms
        ([0.010, 0.010, 0.010, 0.010], set()),  # they take turns
        ([0.012, 0.011, 0.010, 0.009], set()),  # below 10 %
        ([0.020, 0.020, 0.0, 0.0], {2, 3}),  # a slow node
        ([0.0, 0.012], {0}),
    ],
)
def test_a_rank_is_slow_if_the_others_wait_for_it_more_than_a_tenth_of_the_time(waited, slow):
    window = times(waited)
    late = window.late()
    assert {rank for rank in range(len(waited)) if window.is_slow(late[rank])} == slow


def test_no_rank_is_slow_by_less_than_a_millisecond_or_if_a_rank_knows_no_step():
    fast = times([0.0009, 0.0], step_seconds=0.002)
    assert not any(map(fast.is_slow, fast.late()))
    unknown = times([0.5, 0.0])
    unknown.known[0] = 0
    assert not any(map(unknown.is_slow, unknown.late()))


@pytest.mark.parametrize("phase", PHASES)
def test_the_phase_of_a_slow_rank_is_the_one_in_which_it_spends_more_than_the_others(phase):
    spent = {"forward": [0.03, 0.03, 0.03], "data": [0.01, 0.01, 0.01], "checkpoint": [0.0, 0.001, 0.0]}
    spent[phase] = [0.01, 0.01, 0.031]
    assert times([0.02, 0.02, 0.0], **spent).slow_phase(2) == (None if phase in COMPUTING else phase)


def test_the_message_says_who_how_long_why_and_what_to_do():
    window = times([0.012, 0.012, 0.012, 0.0], data=[0.009, 0.009, 0.009, 0.031])
    assert straggler_message(window, [3], ["gpu-06", "gpu-06", "gpu-07", "gpu-07"], on_gpu=True) == (
        "rank 3 (node gpu-07) makes the others wait for 12 ms of every 60 ms step (20%): it spends 31 ms per step "
        "reading data, the others 9 ms; pass a larger num_workers to run.shard, and check the disk or network from "
        "which its node reads; if some samples are expensive, prepare them before training"
    )


@pytest.mark.parametrize(
    ("on_gpu", "found"),
    [(True, "it spends 60 ms per step computing, the others 40 ms"), (False, "it spends 50 ms per step computing")],
)
def test_on_a_gpu_all_that_is_not_waiting_counts_as_computing(on_gpu, found):
    window = times([0.02, 0.02, 0.0, 0.0], forward=[0.01, 0.01, 0.02, 0.02], backward=[0.02, 0.02, 0.03, 0.03])
    text = straggler_message(window, [2, 3], ["here"] * 4, on_gpu)
    assert text.startswith("rank 2 makes the others wait for 13.3 ms of every 60 ms step (22%), and so do rank(s) 3")
    assert ("it spends 60 ms" if on_gpu else "it spends 50 ms") in text
    assert found.split(",")[0] in text
    assert "nvidia-smi" in text
