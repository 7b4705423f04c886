"""One live run per checkpoint folder: a second run is rejected, and a run that is gone does not block others."""

import json
import os
import resource
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
from samestep.environment.processes import seconds_from_boot
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
    pid = pid or os.getpid()
    theirs = replace(folder_lock._this_process(), pid=pid, started_at=seconds_from_boot(pid), token="theirs")
    return replace(theirs, **fields)


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


def test_the_lock_of_a_killed_run_goes_to_the_next_run(tmp_path, other):
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


def test_a_lock_whose_pid_was_reused_goes_to_the_next_run(tmp_path, other):
    write_lock(tmp_path, replace(holder(other.pid), started_at=1.0))
    restore(tmp_path)


def test_a_restart_of_the_same_job_takes_the_lock_over_immediately(tmp_path, other, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "3f1c")
    write_lock(tmp_path, holder(other.pid))
    assert folder_lock.acquire(tmp_path).release() is None
    write_lock(tmp_path, holder(other.pid, launch="other"))
    with pytest.raises(CheckpointError, match="is in use by another run"):
        folder_lock.acquire(tmp_path)


@pytest.mark.slow
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


def test_an_incomplete_lock_file_is_replaced(tmp_path):
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


def test_a_lock_that_another_run_acquired_in_the_meantime_stays(tmp_path):
    quicker, path = holder(), tmp_path / folder_lock.LOCK_FILE
    write_lock(tmp_path, quicker)
    assert not folder_lock._change(path, replace(quicker, token="stale"), replace(quicker, token="mine"))
    assert folder_lock._read(path)[0] == quicker
    assert list(tmp_path.iterdir()) == [path]


def compete(folder, start, answers, finished):
    """In a fork: lock the folder at the same instant as others, answer whether it worked, and hold it until the end."""
    code = 1
    try:
        os.read(start, 1)  # returns in all processes when the parent closes its end
        try:
            lock = folder_lock.acquire(folder)
        except CheckpointError:
            lock = None
        os.write(answers, b"-" if lock is None else b"x")
        os.read(finished, 1)
        code = 0
    finally:
        os._exit(code)  # like a kill: what is locked stays locked


@pytest.mark.slow
@pytest.mark.parametrize("left", ["nothing", "the lock of a killed run", "an empty file", "garbage"])
def test_of_many_runs_that_start_at_the_same_instant_one_gets_the_folder(tmp_path, monkeypatch, left):
    monkeypatch.setattr(folder_lock, "_TAKEOVER_SECONDS", 0.1)
    monkeypatch.setattr(folder_lock, "_POLL_SECONDS", 0.01)
    for _ in range(5):
        if left == "nothing":
            (tmp_path / folder_lock.LOCK_FILE).unlink(missing_ok=True)
        elif left != "the lock of a killed run":  # which is what every round leaves
            (tmp_path / folder_lock.LOCK_FILE).write_bytes(b"\xff{" if left == "garbage" else b"")
        start, answers, finished = os.pipe(), os.pipe(), os.pipe()
        children = []
        for _ in range(6):
            if not (child := os.fork()):
                os.close(start[1])
                os.close(finished[1])
                compete(tmp_path, start[0], answers[1], finished[0])
            children.append(child)
        os.close(start[1])
        os.close(answers[1])
        got = b"".join(os.read(answers[0], 1) for _ in children)
        os.close(finished[1])
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)
        for file in (start[0], finished[0], answers[0]):
            os.close(file)
        assert got.count(b"x") == 1, got
        assert [path.name for path in tmp_path.iterdir()] == [folder_lock.LOCK_FILE]


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe\x00", b"[1, 2]", b"{}", b"null", b"[" * 50_000, b"x" * (1 << 20), b'{"pid": 1e400}'],
    ids=["bytes", "list", "empty object", "null", "deep", "huge", "infinite"],
)
def test_a_lock_file_of_garbage_is_replaced_at_once(tmp_path, monkeypatch, content):
    monkeypatch.setattr(folder_lock, "_TAKEOVER_SECONDS", 3600.0)
    (tmp_path / folder_lock.LOCK_FILE).write_bytes(content)
    folder_lock.acquire(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fields", [{"pid": -1}, {"pid": 1 << 40}, {"pid": "1"}, {"started_at": None}, {"token": 7}])
def test_a_lock_file_with_absurd_values_is_replaced(tmp_path, fields):
    (tmp_path / folder_lock.LOCK_FILE).write_text(json.dumps({**asdict(folder_lock._this_process()), **fields}))
    folder_lock.acquire(tmp_path).release()


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda path: path.mkdir(), "a directory"),
        (lambda path: path.symlink_to("nowhere"), "a symbolic link"),
        (os.mkfifo, "a named pipe"),
    ],
)
def test_something_else_with_the_name_of_the_lock_is_an_error(tmp_path, make, kind):
    path = tmp_path / folder_lock.LOCK_FILE
    make(path)
    with pytest.raises(CheckpointError) as caught:
        restore(tmp_path)
    assert str(caught.value) == (
        f"{path} is {kind}, and samestep needs a file of this name to keep other runs out of the folder: remove it if "
        "no run uses the folder, or pass another folder to run.checkpoint"
    )


def test_a_lock_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    write_lock(tmp_path, holder())

    def refuse(path, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(tmp_path), "open", refuse)  # root may read everything
    with pytest.raises(
        CheckpointError, match=r"run\.lock is a file of another user that you cannot read, and samestep"
    ):
        folder_lock._read(tmp_path / folder_lock.LOCK_FILE)


def test_a_clock_that_is_set_does_not_make_a_live_run_look_ended(tmp_path, other, monkeypatch):
    write_lock(tmp_path, holder(other.pid))
    boot_time, create_time = psutil.boot_time(), psutil.Process.create_time
    monkeypatch.setattr(psutil, "boot_time", lambda: boot_time + 3600)
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: create_time(process) + 3600)
    with pytest.raises(CheckpointError, match="is in use by another run"):
        folder_lock.acquire(tmp_path)


def test_a_disk_without_hard_links_is_locked_too(tmp_path, other, monkeypatch):
    def refuse(source, target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    lock = folder_lock.acquire(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [folder_lock.LOCK_FILE]
    lock.release()
    write_lock(tmp_path, holder(other.pid))
    with pytest.raises(CheckpointError, match="is in use by another run"):
        folder_lock.acquire(tmp_path)


def test_a_lock_that_cannot_be_written_is_removed(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))  # a disk that is full after one byte
        with pytest.raises(OSError, match="File too large"):
            folder_lock._create_without_link(tmp_path / folder_lock.LOCK_FILE, b"two")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_not_locked(tmp_path):
    (tmp_path / "file").touch()
    assert folder_lock.acquire(tmp_path / "file") is None
