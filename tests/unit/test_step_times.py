"""What the steps of a rank are spent on, and how long it waits for others, on the host and on a GPU."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from samestep.distributed import step_times
from samestep.distributed.communicator import Communicator
from samestep.distributed.step_times import StepTimes
from samestep.environment.world import World


class Clock:
    """A clock that stands still until it is moved."""

    now = 100.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Event:
    """A CUDA event at some millisecond; None: the GPU has not come to it."""

    def __init__(self, milliseconds):
        self.milliseconds = milliseconds

    def query(self):
        return self.milliseconds is not None

    def elapsed_time(self, end):
        return end.milliseconds - self.milliseconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(step_times, "time", clock)
    return clock


def make_times(device="cpu", size=2):
    comm = Communicator(World(size=size), 60.0, 60.0)
    return StepTimes(comm, torch.device(device)), comm


def test_phases_exclude_each_other_and_the_time_in_which_the_rank_waits(clock):
    times, comm = make_times()
    times.begin_step()
    clock.now += 1
    with times.phase("evaluation"):
        clock.now += 2
        with times.phase("checkpoint"):
            clock.now += 10
            comm.waited += 6  # for others, in the checkpoint
        clock.now += 2
    for _ in times.time_reads(iter([1, 2])):
        clock.now += 1
    clock.now += 3
    times.enter("other")
    found = {phase: seconds for phase, seconds in times.phases.items() if seconds}
    assert found == {"other": 6, "checkpoint": 4, "evaluation": 4}


def test_reading_counts_as_data_and_ends_with_the_batches(clock):
    times, _ = make_times()

    def batches():
        for number in range(3):
            clock.now += 5
            yield number

    seen = []
    for number in times.time_reads(batches()):
        seen.append(number)
        clock.now += 1
    times.enter("other")
    assert seen == [0, 1, 2]
    assert (times.phases["data"], times.phases["other"]) == (15, 3)


def test_an_error_of_the_data_ends_the_phase(clock):
    times, _ = make_times()

    def batches():
        clock.now += 5
        raise ValueError("broken")
        yield

    with pytest.raises(ValueError, match="broken"):
        next(times.time_reads(batches()))
    clock.now += 1
    times.enter("other")
    assert (times.phases["data"], times.phases["other"]) == (5, 1)


def test_what_happens_before_the_first_step_does_not_count(clock):
    times, comm = make_times()
    clock.now += 50
    comm.waited += 40
    times.begin_step()
    clock.now += 2
    times.start_waiting()
    clock.now += 1
    times.stop_waiting()
    times.end_step()
    interval, waits = times.take()
    assert (waits, interval.seconds, interval.phases["other"]) == ([1], 3, 2)
    assert times.take()[1] == []


def test_only_the_first_collective_of_a_forward_pass_counts(clock):
    times, comm = make_times()
    for _ in range(2):  # micro-batches
        times.begin_micro_batch()
        for seconds in (1, 100):
            times.meet()
            clock.now += seconds
            times.have_met()
    with torch.no_grad():  # an evaluation
        times.begin_micro_batch()
        times.meet()
        clock.now += 1000
        times.have_met()
    assert comm.waited == 2


def test_one_rank_keeps_no_waits():
    times, _ = make_times(size=1)
    times.begin_step()
    times.end_step()
    assert times.steps == 1
    assert times.take()[1] == []


def test_the_times_of_a_gpu_are_read_one_sync_later_and_unknown_if_it_is_far_behind(clock):
    times, _ = make_times("cuda")
    times._record = lambda: Event(None)
    times.begin_step()
    for pairs in ([(Event(0), Event(500))], [(Event(600), Event(700)), (Event(800), Event(850))], []):
        times._pairs = pairs
        clock.now += 2
        times.end_step()
    assert times.take()[1] == []
    times._pairs = [(Event(900), Event(None))]
    clock.now += 1
    times.end_step()
    interval, waits = times.take()
    assert waits == pytest.approx([0.5, 0.15, 0.0])
    assert (interval.seconds, interval.phases["other"]) == (6, 6)
    assert len(times._unused) == 6  # to be recorded again
    interval, (wait,) = times.take()
    assert math.isnan(wait)
    assert interval.seconds == 1


def train_a_step(times, clock):
    """Steps of 1 s of data, 2 s forward, 3 s backward of which it waits 1 s, and 1 s for the optimizer."""
    times.begin_step()
    for _ in times.time_reads(clock.sleep(1) for _ in range(1)):
        times.begin_micro_batch()
        clock.now += 2
        times.enter("backward")
        clock.now += 2
        times.start_waiting()
        clock.now += 1
        times._end_reducing()
        times.enter("optimizer")
        clock.now += 1
    times.end_step()


def test_the_phases_of_one_step_per_interval_are_measured_on_the_gpu(clock):
    times, _ = make_times("cuda")
    events = []

    def record():
        events.append(Event(clock.now * 1000))
        return events[-1]

    times._record = record
    train_a_step(times, clock)
    recorded = len(events)
    for _ in range(2):
        train_a_step(times, clock)
    assert len(events) - recorded == 2 * 2  # other steps have the two events around the waiting only
    assert times.take()[0].device_phases is None  # of the interval before, which has no steps
    train_a_step(times, clock)
    interval, waits = times.take()
    assert (interval.count, interval.marked_step, waits) == (3, 0, [1, 1, 1])
    found = {phase: seconds for phase, seconds in interval.device_phases.items() if seconds}
    assert found == {"forward": 2, "backward": 3, "optimizer": 1, "data": 1}
    events[0].milliseconds = None
    assert interval.device_phases is None  # a GPU that is far behind


def test_a_module_with_hooks_can_be_copied_and_pickled():
    times, comm = make_times()
    norm = nn.BatchNorm1d(2)
    norm.register_forward_pre_hook(times.meet)
    norm.register_forward_hook(times.have_met)
    loaded = pickle.loads(pickle.dumps(norm))
    assert loaded(torch.ones(3, 2)).shape == (3, 2)
    assert comm.waited == 0
    assert copy.deepcopy(norm)(torch.ones(3, 2)).shape == (3, 2)
