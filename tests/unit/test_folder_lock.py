"""One live run per checkpoint folder: a second run is rejected, and a run that is gone does not block others."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import psutil
import pytest
from torch import nn

from samestep import Run
from samestep.checkpoint import folder_lock
from samestep.errors import CheckpointError


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(folder_lock, "_TAKEOVER_SECONDS", 1.0)
    monkeypatch.setattr(folder_lock, "_HEARTBEAT_SECONDS", 0.1)


@pytest.fixture
def other():
    """A live process on this machine."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def holder(pid=None, **fields):
    started_at = psutil.Process(pid).create_time()
    return replace(folder_lock._this_process(), pid=pid or os.getpid(), started_at=started_at, token="theirs", **fields)


def write_lock(folder, holder):
    (folder / folder_lock.LOCK_FILE).write_text(json.dumps(asdict(holder)))


def restore(folder, fail=False):
    with Run(global_batch=2, folder=folder / "logs") as run:
        run.checkpoint(folder, model=nn.Linear(1, 1))
        assert json.loads((folder / folder_lock.LOCK_FILE).read_text())["pid"] == os.getpid()
        if fail:
            raise ZeroDivisionError


def test_a_folder_is_locked_until_the_run_ends_or_fails(tmp_path):
    restore(tmp_path)
    assert not (tmp_path / folder_lock.LOCK_FILE).exists()
    with pytest.raises(ZeroDivisionError):
        restore(tmp_path, fail=True)
    assert not (tmp_path / folder_lock.LOCK_FILE).exists()


def test_a_second_live_run_is_rejected_with_what_to_do(tmp_path, other):
    theirs = holder(other.pid)
    write_lock(tmp_path, theirs)
    with pytest.raises(CheckpointError) as caught:
        restore(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} is in use by another run (process {other.pid} on {theirs.host} since {theirs.since}): two runs in "
        f"one folder would overwrite each other's checkpoints; wait until it ends, end it (on {theirs.host}: kill "
        f"{other.pid}), or pass another folder to run.checkpoint"
    )
    assert json.loads((tmp_path / folder_lock.LOCK_FILE).read_text()) == asdict(theirs)


def test_the_lock_of_a_killed_run_is_taken_over(tmp_path, other):
    write_lock(tmp_path, holder(other.pid))
    other.kill()
    restore(tmp_path)  # not waited for yet, so it is a zombie
    theirs = replace(holder(), pid=other.pid)
    other.wait()
    write_lock(tmp_path, theirs)
    restore(tmp_path)
    assert not (tmp_path / folder_lock.LOCK_FILE).exists()


def test_a_new_run_waits_for_a_run_that_is_about_to_end(tmp_path, other, monkeypatch):
    monkeypatch.setattr(folder_lock, "_TAKEOVER_SECONDS", 30.0)
    write_lock(tmp_path, holder(other.pid))
    ending = threading.Timer(0.5, other.kill)
    ending.start()
    restore(tmp_path)
    ending.join()


def test_a_lock_whose_pid_was_reused_is_taken_over(tmp_path, other):
    write_lock(tmp_path, replace(holder(other.pid), started_at=1.0))
    restore(tmp_path)


def test_a_restart_of_the_same_job_takes_the_lock_over_immediately(tmp_path, other, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "3f1c")
    write_lock(tmp_path, holder(other.pid))
    assert folder_lock.acquire(tmp_path).release() is None
    write_lock(tmp_path, holder(other.pid, launch="other"))
    with pytest.raises(CheckpointError, match="is in use by another run"):
        folder_lock.acquire(tmp_path)


def test_on_another_host_the_heartbeat_decides(tmp_path):
    write_lock(tmp_path, holder(1, host="elsewhere"))
    stopped = threading.Event()

    def heartbeat():
        while not stopped.wait(0.1):
            os.utime(tmp_path / folder_lock.LOCK_FILE)

    thread = threading.Thread(target=heartbeat)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match="process 1 on elsewhere since"):
            folder_lock.acquire(tmp_path)
    finally:
        stopped.set()
        thread.join()
    folder_lock.acquire(tmp_path).release()  # no heartbeat from now on


def test_an_incomplete_lock_file_is_taken_over(tmp_path):
    (tmp_path / folder_lock.LOCK_FILE).touch()
    folder_lock.acquire(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_the_holder_sends_heartbeats(tmp_path):
    lock = folder_lock.acquire(tmp_path)
    os.utime(tmp_path / folder_lock.LOCK_FILE, (0, 0))
    deadline = time.monotonic() + 120
    while (tmp_path / folder_lock.LOCK_FILE).stat().st_mtime == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (tmp_path / folder_lock.LOCK_FILE).stat().st_mtime > 0
    lock.release()


def test_a_holder_that_lost_the_lock_does_not_remove_it(tmp_path):
    first, second = folder_lock.acquire(tmp_path), folder_lock.acquire(tmp_path)  # the same process again
    first.release()
    assert (tmp_path / folder_lock.LOCK_FILE).exists()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_another_run_acquired_in_the_meantime_is_put_back(tmp_path):
    quicker = holder()
    write_lock(tmp_path, quicker)
    folder_lock._remove_stale(tmp_path / folder_lock.LOCK_FILE, replace(quicker, token="stale"), "mine")
    assert folder_lock._read(tmp_path / folder_lock.LOCK_FILE)[0] == quicker


def test_a_folder_that_cannot_be_written_is_not_locked(tmp_path):
    (tmp_path / "file").touch()
    assert folder_lock.acquire(tmp_path / "file") is None
