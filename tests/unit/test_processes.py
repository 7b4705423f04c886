"""Whether a process that was known at a time still runs: processes end, their ids are reused, and clocks are set."""

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from samestep.environment.processes import process_runs, seconds_from_boot
from tests.launch.launched import wait_for


@pytest.fixture
def other() -> Iterator["subprocess.Popen[str]"]:
    """Another process, which waits."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_a_process_runs_until_it_ends_also_if_its_parent_has_not_collected_it(other: "subprocess.Popen[str]"):
    started = seconds_from_boot(other.pid)
    assert started >= seconds_from_boot(os.getpid())
    assert process_runs(other.pid, started)
    other.kill()
    wait_for(lambda: psutil.Process(other.pid).status() == psutil.STATUS_ZOMBIE, 120)
    assert not process_runs(other.pid, started)
    other.wait()
    assert not process_runs(other.pid, started)


def test_a_process_with_the_same_id_that_started_at_another_time_is_another_process():
    started = seconds_from_boot(os.getpid())
    assert process_runs(os.getpid(), started)
    assert not process_runs(os.getpid(), started - 60)
    assert not process_runs(os.getpid(), started + 60)


def test_a_clock_that_is_set_changes_no_start_of_a_process(monkeypatch: pytest.MonkeyPatch):
    started, boot_time, create_time = seconds_from_boot(os.getpid()), psutil.boot_time(), psutil.Process.create_time
    monkeypatch.setattr(psutil, "boot_time", lambda: boot_time + 3600)
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: create_time(process) + 3600)
    assert seconds_from_boot(os.getpid()) == pytest.approx(started, abs=1)
    assert process_runs(os.getpid(), started)
