"""SignalHandler: what signals to the launcher do to it, to its ranks and to leftover processes."""

import os
import signal
import subprocess
import sys

import pytest

from samestep.launch.signal_handler import SignalHandler, StoppedBySignal

# The C library blocks until the shell command ends, whatever signals arrive.
BLOCKED = """
import ctypes
from samestep.launch.signal_handler import SignalHandler
with SignalHandler(shutdown_timeout=1, grace_period=1):
    ctypes.CDLL(None).system(b"echo up; exec sleep 60")
"""
# Objects of a module are deleted when Python exits, after all of the script's code.
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
# Its child outlives it, in a separate session, and ignores SIGTERM.
LEAVES_AN_ORPHAN = """
import subprocess, sys
orphan = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
child = subprocess.Popen([sys.executable, "-c", orphan], start_new_session=True, **streams)
child.stdout.readline()
print(child.pid)
"""


def test_a_signal_raises_an_exception_that_names_it():
    with SignalHandler(shutdown_timeout=5, grace_period=5) as signals:
        with pytest.raises(StoppedBySignal) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
        assert (caught.value.sigval, signals.received) == (signal.SIGTERM, signal.SIGTERM)
        with pytest.raises(StoppedBySignal, match="stopping after SIGTERM"):
            signals.raise_if_received()


def test_the_earlier_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    with SignalHandler(shutdown_timeout=5, grace_period=5):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.slow
def test_a_signal_ends_a_launcher_that_native_code_blocks():
    with subprocess.Popen([sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, text=True) as launcher:
        try:
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == "up\n"
            launcher.terminate()
            assert launcher.wait(60) == 128 + signal.SIGTERM
        finally:
            launcher.kill()


def test_a_signal_while_python_exits_does_not_change_the_exit_code():
    assert subprocess.run([sys.executable, "-c", ENDS_SLOWLY], timeout=150, check=False).returncode == 7


def test_a_signal_that_was_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalHandler(shutdown_timeout=5, grace_period=5) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
def test_an_orphan_in_its_own_session_is_ended_and_reaped():
    with SignalHandler(shutdown_timeout=1, grace_period=1) as signals:
        parent = subprocess.run(
            [sys.executable, "-c", LEAVES_AN_ORPHAN], stdout=subprocess.PIPE, text=True, check=True, timeout=120
        )
        orphan = int(parent.stdout)
        os.kill(orphan, 0)
        signals.end_descendants()
        with pytest.raises(ProcessLookupError):
            os.kill(orphan, 0)


def test_processes_that_were_started_before_are_not_ended():
    with subprocess.Popen([sys.executable, "-c", SLEEPS]) as bystander:
        with SignalHandler(shutdown_timeout=1, grace_period=1) as signals:
            signals.end_descendants()
            assert bystander.poll() is None
        bystander.kill()
