import os
import signal
import subprocess
import sys

import pytest

from samestep.launch.signal_handler import Stop, Stopped

# The C library waits for the shell, whatever signals come, and it is the shell that says so.
HELD_UP = """
import ctypes
from samestep.launch.signal_handler import Stop
with Stop(patience=1, grace=1):
    ctypes.CDLL(None).system(b"echo up; exec sleep 60")
"""
# What a module holds goes when Python ends, after all of the script's own code.
ENDS_SLOWLY = """
import os, signal
from samestep.launch.signal_handler import keep_exit_code
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), numbers=(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)):
        for number in numbers:
            kill(pid, number)
late = Late()
keep_exit_code()
raise SystemExit(7)
"""
SLEEPS = "import time; time.sleep(60)"
# Its child outlives it, in a session of its own, and ignores a polite request.
LEAVES_AN_ORPHAN = """
import subprocess, sys
orphan = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
child = subprocess.Popen([sys.executable, "-c", orphan], start_new_session=True, **streams)
child.stdout.readline()
print(child.pid)
"""


def test_a_signal_raises_and_names_itself():
    with Stop(patience=5, grace=5) as stop:
        with pytest.raises(Stopped) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
        assert (caught.value.sigval, stop.received) == (signal.SIGTERM, signal.SIGTERM)
        with pytest.raises(Stopped, match="stopping after SIGTERM"):
            stop.check()


def test_the_old_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with Stop(patience=5, grace=5):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_ends_a_launcher_that_is_held_up_in_native_code():
    with subprocess.Popen([sys.executable, "-c", HELD_UP], stdout=subprocess.PIPE, text=True) as launcher:
        try:
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == "up\n"
            launcher.terminate()
            assert launcher.wait(60) == 128 + signal.SIGTERM
        finally:
            launcher.kill()


def test_a_signal_while_python_ends_does_not_change_the_exit_code():
    assert subprocess.run([sys.executable, "-c", ENDS_SLOWLY], timeout=60, check=False).returncode == 7


def test_a_signal_that_was_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop(patience=5, grace=5) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans on")
def test_an_orphan_in_its_own_session_is_ended_and_reaped():
    with Stop(patience=1, grace=1) as stop:
        parent = subprocess.run(
            [sys.executable, "-c", LEAVES_AN_ORPHAN], stdout=subprocess.PIPE, text=True, check=True, timeout=30
        )
        orphan = int(parent.stdout)
        os.kill(orphan, 0)
        stop.end_leftovers()
        with pytest.raises(ProcessLookupError):
            os.kill(orphan, 0)


def test_processes_that_were_there_before_are_spared():
    with subprocess.Popen([sys.executable, "-c", SLEEPS]) as bystander:
        with Stop(patience=1, grace=1) as stop:
            stop.end_leftovers()
            assert bystander.poll() is None
        bystander.kill()
