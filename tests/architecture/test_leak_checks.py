"""The checks for leftovers: each kind is named, and a test that leaves one fails."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import leak_checks

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def leftovers(tmp_path, ranks, monkeypatch):
    """Take a snapshot with an empty repository; calling the fixture returns what was left behind since."""
    monkeypatch.setattr(leak_checks, "GRACE_SECONDS", 0.2)
    before = leak_checks.take_snapshot(tmp_path)
    return lambda: leak_checks.leftovers(before, tmp_path, ranks.pids)


def test_a_test_that_does_nothing_leaves_nothing(leftovers):
    assert leftovers() == []


def test_a_variable_is_named_with_both_values(leftovers, monkeypatch):
    monkeypatch.setenv("LEFT_BEHIND", "1")
    remedy = "use monkeypatch.setenv or monkeypatch.delenv"
    assert leftovers() == [f"the variable LEFT_BEHIND was None and is '1': {remedy}"]


def test_a_deleted_variable_is_named(leftovers, monkeypatch):
    monkeypatch.delenv("PATH")
    [line] = leftovers()
    assert line.startswith("the variable PATH was '")
    assert "and is None" in line


def test_a_thread_is_named_and_a_daemon_is_not(leftovers):
    end = threading.Event()
    threads = [threading.Thread(target=end.wait, name=name, daemon=name == "daemon") for name in ("daemon", "worker")]
    for thread in threads:
        thread.start()
    try:
        assert leftovers() == ["the thread 'worker' is still running: join it"]
    finally:
        end.set()
        for thread in threads:
            thread.join()


def test_a_process_started_by_a_child_is_named_too(leftovers):
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as child:
        grandchild = int(child.stdout.readline())
        lines = leftovers()
        os.kill(grandchild, signal.SIGKILL)
    assert sorted(int(line.split()[2]) for line in lines) == sorted([child.pid, grandchild])


def test_a_child_process_is_named_with_its_command(leftovers):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        [line] = leftovers()
        child.kill()
    assert line.startswith(f"the process {child.pid} is still running: {sys.executable} -c import time")
    assert leftovers() == []


def test_a_file_in_the_repository_is_named_and_an_edited_source_is_not(leftovers, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "metrics.jsonl").touch()
    (tmp_path / "draft.py").touch()
    assert leftovers() == ["the file runs/metrics.jsonl was left in the repository: write to tmp_path"]


def test_a_process_group_is_named_and_closed(leftovers, tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert leftovers() == ["a process group is still open in this process: close the Run, or use the ranks fixture"]
    leak_checks.clean_up(leak_checks.take_snapshot(tmp_path))
    assert leftovers() == []


@pytest.mark.slow
def test_a_test_that_leaves_something_behind_fails(tmp_path):
    (tmp_path / "test_leak.py").write_text("import os\ndef test_leak():\n    os.environ['LEFT_BEHIND'] = '1'\n")
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import *\nfrom tests.conftest import _leaves_nothing_behind\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-o",
        f"pythonpath={REPOSITORY}",
        str(tmp_path),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ), check=False)
    assert ended.returncode == 1
    assert "this test leaves something behind:\nthe variable LEFT_BEHIND was None and is '1'" in ended.stdout
