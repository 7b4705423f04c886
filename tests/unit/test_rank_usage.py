"""What a rank spends its time on and uses: how phases of a GPU divide an interval, and what a record contains."""

import ctypes
import math
import time

import numpy as np
import pytest
import torch

from samestep.distributed.step_times import PHASES, StepInterval
from samestep.environment import gpus
from samestep.environment.gpus import GpuUtilization
from samestep.training.rank_times import RankUsage, Usage, pack_usage, spent, usage_record

USAGE = RankUsage(2.0**30, 1.5, math.nan)


class Event:
    """A CUDA event at some second; None: the GPU has not come to it."""

    def __init__(self, second):
        self.second = second

    def query(self):
        return self.second is not None

    def elapsed_time(self, end):
        return 1000 * (end.second - self.second)


def interval(seconds=10.0, count=5, marks=(), **phases):
    found = StepInterval(seconds, {phase: phases.get(phase, 0.0) for phase in PHASES}, count=count)
    found.marks = [(phase, Event(second)) for phase, second in marks]
    return found


def test_on_the_cpu_phases_are_those_of_the_host_and_the_waiting_is_that_of_the_steps():
    phases, waited = spent(interval(forward=4.0, data=1.0), [1.0, math.nan, 2.0, 0.0])
    assert (phases["forward"], phases["data"]) == (4.0, 1.0)
    assert waited == pytest.approx(4.0)  # a step that is not known waits as long as the others on average


def test_on_a_gpu_one_step_divides_the_time_of_all_and_what_the_host_does_stays():
    marks = [("data", 0), ("forward", 1), ("backward", 3), ("optimizer", 7), ("other", 8)]
    measured = interval(10.0, 5, marks, checkpoint=2.0, forward=0.1, backward=0.1)
    phases, waited = spent(measured, [1.0] * 5)
    found = {phase: seconds for phase, seconds in phases.items() if seconds}
    assert found == pytest.approx({"data": 1, "forward": 2, "backward": 3, "optimizer": 1, "checkpoint": 2})
    assert waited == pytest.approx(1)
    assert sum(phases.values()) + waited == pytest.approx(10.0)


def test_a_gpu_that_is_far_behind_leaves_the_times_of_the_host():
    phases, _ = spent(interval(10.0, 5, [("forward", 0), ("other", None)], forward=3.0), [])
    assert phases["forward"] == 3.0


def test_a_record_has_a_number_per_rank_or_a_summary_of_many():
    row = pack_usage(interval(10.0, 5, forward=4.0), [1.0] * 5, USAGE)
    record = usage_record(np.array([row, row]))
    assert record == {
        "steps": 5,
        "seconds": 10,
        "phases": {"forward": [4, 4]},
        "communication": [5, 5],
        "memory_bytes": [1074000000, 1074000000],
        "cpu_cores": [1.5, 1.5],
    }
    slow = pack_usage(interval(10.0, 5, forward=8.0), [0.0] * 5, USAGE)
    record = usage_record(np.array([*[row] * 16, slow]))
    assert record["phases"] == {"forward": {"min": 4, "mean": 4.235, "max": 8, "rank_of_max": 16}}


def test_an_interval_without_steps_is_no_record():
    assert usage_record(np.array([pack_usage(interval(0.0, 0), [], USAGE)])) == {}


def test_the_use_of_this_process_is_measured_between_two_calls():
    usage = Usage(torch.device("cpu"))
    since = time.perf_counter()
    while time.perf_counter() - since < 0.2:
        pass
    busy = usage.take()
    time.sleep(0.2)
    idle = usage.take()
    assert idle.cores < busy.cores  # whatever else the machine does
    assert busy.memory > 2**20
    assert math.isnan(busy.gpu)
    usage.close()


class Nvml:
    """NVML with one GPU."""

    def __init__(self, result=0):
        self.result, self.names = result, []

    def nvmlInit_v2(self):  # noqa: N802  # the name is NVML's
        return 0

    def nvmlDeviceGetHandleByUUID(self, name, _):  # noqa: N802
        self.names.append(name)
        return self.result

    def nvmlDeviceGetUtilizationRates(self, _, found):  # noqa: N802
        ctypes.cast(found, ctypes.POINTER(ctypes.c_uint))[0] = 87
        return 0


def wait_until_known(utilization):
    since = time.monotonic()
    while math.isnan(utilization.percent) and time.monotonic() - since < 10:
        time.sleep(0.01)
    return utilization.percent


def test_the_driver_is_asked_for_the_gpu_by_its_uuid(monkeypatch):
    monkeypatch.setattr(gpus, "_UTILIZATION_SECONDS", 0.01)
    nvml = Nvml()
    utilization = GpuUtilization("GPU-5ba3", nvml)
    assert wait_until_known(utilization) == 87.0
    assert nvml.names == [b"GPU-5ba3"]
    utilization.close()


def test_without_the_driver_the_utilization_is_unknown(monkeypatch):
    monkeypatch.setattr(gpus, "_NVML", "libno-such-driver.so.1")
    assert math.isnan(GpuUtilization("GPU-5ba3").percent)
    unknown = GpuUtilization("GPU-0000", Nvml(result=6))  # not found
    time.sleep(0.05)
    assert math.isnan(unknown.percent)
