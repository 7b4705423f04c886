"""One live run to a folder of checkpoints: who is refused, and that nobody who is gone keeps others out."""

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
from samestep.checkpoint import checkpoint_folder as lock
from samestep.errors import CheckpointError


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lock, "_PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(lock, "_BEAT_SECONDS", 0.1)


@pytest.fixture
def other():
    """A live process of this machine."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def holder(pid=None, **fields):
    began = psutil.Process(pid).create_time()
    return replace(lock._describe(), pid=pid or os.getpid(), began=began, token="theirs", **fields)


def put(folder, held):
    (folder / lock.NAME).write_text(json.dumps(asdict(held)))


def restore(folder, fail=False):
    with Run(global_batch=2, folder=folder / "logs") as run:
        run.checkpoint(folder, model=nn.Linear(1, 1))
        assert json.loads((folder / lock.NAME).read_text())["pid"] == os.getpid()
        if fail:
            raise ZeroDivisionError


def test_a_folder_is_held_until_the_run_ends_well_or_not(tmp_path):
    restore(tmp_path)
    assert not (tmp_path / lock.NAME).exists()
    with pytest.raises(ZeroDivisionError):
        restore(tmp_path, fail=True)
    assert not (tmp_path / lock.NAME).exists()


def test_a_second_live_run_is_refused_with_what_to_do(tmp_path, other):
    theirs = holder(other.pid)
    put(tmp_path, theirs)
    with pytest.raises(CheckpointError) as told:
        restore(tmp_path)
    assert str(told.value) == (
        f"{tmp_path} is in use by another run, process {other.pid} on {theirs.host} since {theirs.since}: two runs in "
        f"one folder lose each other's checkpoints; wait until it has ended, or end it (on {theirs.host}: kill "
        f"{other.pid}), or give run.checkpoint another folder"
    )
    assert json.loads((tmp_path / lock.NAME).read_text()) == asdict(theirs)


def test_a_run_that_was_killed_keeps_nobody_out(tmp_path, other):
    put(tmp_path, holder(other.pid))
    other.kill()
    restore(tmp_path)  # nobody has asked for its exit code yet: it is a zombie
    theirs = replace(holder(), pid=other.pid)
    other.wait()
    put(tmp_path, theirs)
    restore(tmp_path)
    assert not (tmp_path / lock.NAME).exists()


def test_a_run_that_is_about_to_end_is_waited_for(tmp_path, other, monkeypatch):
    monkeypatch.setattr(lock, "_PATIENCE_SECONDS", 30.0)
    put(tmp_path, holder(other.pid))
    ending = threading.Timer(0.5, other.kill)
    ending.start()
    restore(tmp_path)
    ending.join()


def test_a_number_that_another_process_has_got_since_keeps_nobody_out(tmp_path, other):
    put(tmp_path, replace(holder(other.pid), began=1.0))
    restore(tmp_path)


def test_another_start_of_the_same_job_takes_over_at_once(tmp_path, other, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "3f1c")
    put(tmp_path, holder(other.pid))
    assert lock.hold(tmp_path).release() is None
    put(tmp_path, holder(other.pid, launch="other"))
    with pytest.raises(CheckpointError, match="is in use by another run"):
        lock.hold(tmp_path)


def test_on_another_machine_the_beat_tells_who_lives(tmp_path):
    put(tmp_path, holder(1, host="elsewhere"))
    stopped = threading.Event()

    def beat():
        while not stopped.wait(0.1):
            os.utime(tmp_path / lock.NAME)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match="process 1 on elsewhere since"):
            lock.hold(tmp_path)
    finally:
        stopped.set()
        thread.join()
    lock.hold(tmp_path).release()  # silent from now on


def test_a_lock_that_nobody_finished_writing_keeps_nobody_out(tmp_path):
    (tmp_path / lock.NAME).touch()
    lock.hold(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_the_holder_says_again_and_again_that_he_lives(tmp_path):
    held = lock.hold(tmp_path)
    os.utime(tmp_path / lock.NAME, (0, 0))
    deadline = time.monotonic() + 20
    while (tmp_path / lock.NAME).stat().st_mtime == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (tmp_path / lock.NAME).stat().st_mtime > 0
    held.release()


def test_who_was_taken_over_leaves_the_lock_of_the_other_alone(tmp_path):
    first, second = lock.hold(tmp_path), lock.hold(tmp_path)  # this process once more
    first.release()
    assert (tmp_path / lock.NAME).exists()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_one_who_was_quicker_is_put_back(tmp_path):
    quicker = holder()
    put(tmp_path, quicker)
    lock._take_away(tmp_path / lock.NAME, replace(quicker, token="stale"), "mine")
    assert lock._read(tmp_path / lock.NAME)[0] == quicker


def test_a_folder_that_cannot_be_written_is_held_by_nobody(tmp_path):
    (tmp_path / "file").touch()
    assert lock.hold(tmp_path / "file") is None
