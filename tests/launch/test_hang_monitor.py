"""The launcher notices that ranks wait for too long, explains it once, and ends them as the user wants."""

import linecache
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from torch.distributed import HashStore

from samestep.cli import hang_command
from samestep.environment.processes import exit_code
from samestep.hang.evidence import Collective, Frame, ProcessInfo, Progress, RankEvidence
from samestep.launch import hang_monitor
from samestep.launch.failure_report import (
    Explanation,
    Failure,
    exit_code_after_hang,
    explains,
    format_hang_report,
    format_report,
)
from samestep.launch.hang_exchange import HangFolder, NodeInfo, NodeStore
from samestep.launch.hang_monitor import HangMonitor, Look, Ranks, Wait, next_action
from samestep.launch.job import Job
from samestep.launch.rank_logs import LauncherEvents, RankFiles
from samestep.launch.rendezvous import Rendezvous
from tests.launch.launched import wait_for

GENEROUS = 120.0  # seconds, only to detect a test that hangs


def progress(waiting, timeout=60.0, interval=0.1, calls=9):
    return Progress(calls=calls, waiting=waiting, timeout=timeout, interval=interval)


def wait(seconds, timeout=60.0):
    return Wait(seconds, timeout, 20.0)


@pytest.mark.parametrize(
    ("waits", "last", "policy", "action"),
    [
        (None, None, "default", "nothing"),
        (wait(21), None, "default", "look"),
        (wait(22), Look(21, "elsewhere"), "default", "nothing"),
        (wait(52), Look(21, "elsewhere"), "default", "look"),  # again: the cause may have changed
        (wait(57), Look(52, "elsewhere"), "default", "nothing"),
        (wait(58.5), Look(52, "elsewhere"), "default", "look"),  # the last one before the timeout
        (wait(59.5), Look(58.5, "elsewhere"), "default", "nothing"),
        (wait(61), Look(58.5, "elsewhere"), "default", "nothing"),  # ranks over gloo raise by themselves
        (wait(62.5), Look(58.5, "elsewhere"), "default", "end"),
        (wait(62.5), Look(58.5, ""), "default", "end"),  # without a cause as well
        (wait(62.5), Look(58.5, "elsewhere"), "report", "nothing"),  # torch's own timeouts act
        (wait(22), Look(21, "different_collectives"), "default", "nothing"),
        (wait(22), Look(21, "different_collectives"), "report", "nothing"),
        (wait(22), Look(21, "different_collectives"), "stop", "end"),
        (wait(22), Look(21, "different_collectives"), "restart", "end"),
        (wait(22), Look(21, "slow"), "stop", "nothing"),  # never before the timeout
        (wait(22), Look(21, "elsewhere"), "restart", "nothing"),  # it may come
        (wait(62.5), Look(21, "slow"), "stop", "end"),
        (None, Look(21, "elsewhere"), "default", "continue"),
        (wait(61, 0), None, "default", "look"),
        (wait(9000, 0), Look(8990, "elsewhere"), "default", "nothing"),  # never ended without a known timeout
        (wait(62, 0), Look(61, "stopped"), "stop", "nothing"),
    ],
)
def test_what_the_launcher_does(waits, last, policy, action):
    assert next_action(waits, last, policy, last_look=2.0) == action


def test_the_exit_code_of_a_child_stays_for_its_parent():
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)"], stdin=-1) as child:
        assert exit_code(child.pid) is None
        child.stdin.close()
        wait_for(lambda: exit_code(child.pid) is not None, GENEROUS)
        assert exit_code(child.pid) == 3
        assert child.wait() == 3
        assert exit_code(child.pid) == 0  # collected


def failure(rank, code=1, output="", **fields):
    is_traceback = output.startswith("Traceback")
    return Failure(rank, 100 + rank, code, 0.0, fields.pop("ended", False), output, is_traceback, **fields)


TIMED_OUT = (
    'Traceback (most recent call last):\n  File "train.py", line 31\n    loss.backward()\n'
    "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 5000ms for recv operation to complete"
)
CLOSED = TIMED_OUT.replace("Timed out waiting 5000ms for recv operation to complete", "Connection closed by peer")
WATCHDOG = "[rank2]:[E1116 10:00:00 ProcessGroupNCCL.cpp:632] Watchdog caught collective operation timeout"
HANG = Explanation("samestep: rank 1 is holding up the other 4 ranks for 60 s.\n  ...", [1], "full report: hang/x.txt")


def test_the_report_of_a_failure_begins_with_the_cause_and_names_the_victims():
    failures = [
        failure(0, output=TIMED_OUT),
        failure(1, code=-signal.SIGTERM, ended=True),
        failure(2, code=-signal.SIGABRT, output=WATCHDOG),
        failure(3, output=CLOSED),
        failure(4, ended_after_hang=True),
    ]
    assert format_hang_report(failures, HANG, 5, "gpu-07", Path("/runs/logs")).splitlines() == [
        "samestep: rank 1 is holding up the other 4 ranks for 60 s.",
        "  ...",
        "  full report: hang/x.txt",
        "samestep: 5 of 5 rank(s) on gpu-07 ended because of it; logs of all ranks: /runs/logs",
        "  rank 1    pid 101      ended by the launcher  <- the cause",
        "  rank 0    pid 100      victim: exit code 1, it had waited until the timeout",
        "  rank 2    pid 102      victim: killed by SIGABRT: NCCL waited too long for another rank",
        "  rank 3    pid 103      victim: exit code 1, lost the connection to another rank",
        "  rank 4    pid 104      victim: ended by the launcher while it waited",
    ]
    assert exit_code_after_hang(failures, HANG) == 1


def test_the_rank_that_is_the_most_likely_cause_is_the_first_row():
    failures = [failure(0, output=TIMED_OUT), failure(1, output=TIMED_OUT), failure(2, output=TIMED_OUT)]
    report = format_hang_report(failures, replace(HANG, culprits=[2, 0]), 3, "gpu-07", Path("/runs/logs"))
    rows = [row.split()[:2] for row in report.splitlines() if " pid " in row]
    assert rows == [["rank", "2"], ["rank", "0"], ["rank", "1"]]


def test_a_rank_that_the_others_waited_for_and_that_failed_is_shown_with_its_traceback_and_exit_code():
    own = "Traceback (most recent call last):\n  File x\nValueError: no such sample"
    failures = [failure(0, output=CLOSED), failure(1, code=3, output=own)]
    report = format_hang_report(failures, HANG, 2, "gpu-07", Path("/runs/logs"))
    assert "rank 1    pid 101      exit code 3  <- the cause" in report
    assert report.endswith(f"rank 1 on gpu-07, exit code 3:\n{own}")
    assert exit_code_after_hang(failures, HANG) == 3


def test_an_error_of_samestep_says_more_than_that_a_rank_has_ended_but_less_than_the_cause_of_a_hang():
    error = "RankMissing: rank 0 waits in run.barrier at x.py:1 since 60 s: rank 1 was last in run.mean"
    missing = f"Traceback (most recent call last):\n  File x\nsamestep.errors.{error}"
    after_failure = replace(HANG, is_of_failure=True)
    assert explains(HANG, [failure(0, output=missing)])
    assert explains(after_failure, [failure(0, output=CLOSED)])
    assert not explains(after_failure, [failure(0, output=missing)])
    rows = format_report([failure(0, output=missing), failure(1, ended_after_hang=True)], 2, "gpu-07", Path(), False)
    assert "rank 1    pid 101      ended by the launcher after the first failure (exit code 1)" in rows
    row = format_hang_report([failure(0, output=missing)], HANG, 2, "gpu-07", Path())
    assert "rank 0    pid 100      victim: exit code 1, it had waited until the timeout" in row


def test_a_hang_does_not_explain_that_a_rank_fails_which_no_rank_waited_for():
    own = "Traceback (most recent call last):\n  File x\nValueError: no such sample"
    assert not explains(HANG, [failure(0, output=CLOSED), failure(2, code=-signal.SIGKILL)])
    assert not explains(HANG, [failure(0, code=3, output=own)])
    assert explains(HANG, [failure(1, code=3, output=own), failure(0, output=CLOSED)])  # it was the cause
    connecting = "Traceback (most recent call last):\n  File x\ntorch.distributed.DistStoreError: "
    for text in (
        "Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
        "wait timeout after 300000ms, keys: /default_pg/0//cuda//0",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",  # TORCH_NCCL_BLOCKING_WAIT
    ):
        assert explains(HANG, [failure(0, output=connecting + text)])


def test_without_a_temporary_folder_the_ranks_run_without_the_watch(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    said = []
    job = Job("train.py", False, (), 2, Rendezvous.__new__(Rendezvous), 0, tmp_path)
    monitor = HangMonitor(job, said.append, LauncherEvents(tmp_path, "a", said.append))
    assert monitor.variables() == {}
    monitor.start(Ranks(0, {}, {}, 0, 1, 2, HashStore()))
    monitor.close()
    (line,) = said
    assert line.startswith("samestep: the launcher does not watch for hangs, since it cannot create a temporary folder")


def test_ranks_are_watched_on_linux_only(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    assert hang_monitor.open_probe(pytest.fail) is None
    answer = CliRunner().invoke(hang_command.command, [])
    assert str(answer.exception).startswith("`samestep hang` needs Linux, this is darwin: use `py-spy dump")


class FakeProbe:
    """Ranks 0 and 1, processes of this test: rank 0 waits in a collective, and rank 1 sleeps."""

    def __init__(self):
        self.began, self.timeout, self.looks, self.ended, self.requests = None, 60.0, 0, [], 0
        self.is_healthy = False  # it answers that it waits for no rank
        self.debugger = False  # whether rank 1 is in a debugger
        self.is_different = False  # whether rank 1 waits in another collective
        self.is_silent = False  # whether rank 1 has stopped answering
        self.last_lines = {}  # of the logs, by rank
        self.errors, self.read_errors = {}, dict  # why collectives cannot be read, by process

    @property
    def waiting(self):
        return time.monotonic() - self.began if self.began is not None else 0.0

    @waiting.setter
    def waiting(self, seconds):
        self.began = time.monotonic() - seconds if seconds else None

    def progress_of(self, pids):
        self.requests += 1
        self.errors = self.read_errors()
        waits = progress(self.waiting, self.timeout) if self.began is not None or self.is_healthy else None
        return {pid: progress(0.0) if number else waits for number, pid in enumerate(pids)}

    def collect(self, pids, logs, exit_codes=None):
        self.looks += 1
        now = time.time()

        def call(number, pending, called):
            line = [Frame("/lab/train.py", 31, "main")]
            return Collective("0", number, "all_reduce", [[4]], ["Float"], called, pending, self.timeout, stack=line)

        done = call(39, False, now - self.waiting - 1)
        stacks = [{"main": [Frame("/lab/train.py", line, "main")]} for line in (31, 27)]
        waiting = [done, call(40, True, now - self.waiting)] if self.waiting else [done]
        if self.debugger:
            stacks[1] = {"main": [Frame("/usr/lib/python3.11/pdb.py", 1, "cmdloop"), *stacks[1]["main"]]}
        other = [done, replace(call(40, True, now - self.waiting), name="barrier")] if self.is_different else [done]
        if self.is_silent:
            stacks[1] = {}
        return [
            RankEvidence(rank, "gpu-07", ProcessInfo(pid, "sleeping", stacks=stacks[rank]), collectives=calls,
                         collected=now, exit_code=(exit_codes or {}).get(rank),
                         last_lines=self.last_lines.get(rank, []))
            for (rank, pid), calls in zip(pids.items(), (waiting, None if self.is_silent else other), strict=True)
        ]  # fmt: skip

    def end(self, pid, seconds=2.0, exit_code=1):
        self.ended.append(pid)
        return False

    def close(self):
        pass


class Watched:
    """A monitor with real processes as ranks and a fake probe."""

    def __init__(self, folder, policy, nodes=1):
        self.said, self.probe = [], FakeProbe()
        job = Job("train.py", False, (), 2, Rendezvous.__new__(Rendezvous), 0, folder, on_hang=policy)
        self.monitor = HangMonitor(job, self.said.append, LauncherEvents(folder, "a", self.said.append), self.probe)
        self.ranks = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
        self.pids = pids = {rank: process.pid for rank, process in enumerate(self.ranks)}
        logs = {rank: RankFiles(folder, rank) for rank in pids}
        self.store = HashStore()
        self.monitor.start(Ranks(0, pids, logs, 0, nodes, 2 * nodes, self.store))

    def end_rank(self, rank, code):
        """Replace a rank by a process that has ended with this exit code, and that this test has not collected."""
        ended = subprocess.Popen([sys.executable, "-c", f"exit({code})"])
        wait_for(lambda: exit_code(ended.pid) == code, GENEROUS)
        self.pids[rank] = ended.pid
        self.ranks.append(ended)

    def tick(self, count=20):
        before = self.probe.requests
        wait_for(lambda: self.probe.requests > before + count, GENEROUS)

    def close(self):
        self.monitor.close()
        for process in self.ranks:
            process.kill()
            process.wait()


@pytest.fixture
def watch(tmp_path, monkeypatch):
    monkeypatch.setattr(hang_monitor, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(hang_monitor, "_CONTINUES_SECONDS", 0.5)
    monkeypatch.setattr(hang_monitor, "_END_AGAIN_SECONDS", 0.2)
    monkeypatch.setattr(hang_monitor, "_EXCHANGE_SECONDS", 0.1)
    opened = []

    def open_watch(policy="default", nodes=1):
        opened.append(Watched(tmp_path, policy, nodes))
        return opened[-1]

    yield open_watch
    for each in opened:
        each.close()


def test_a_hang_is_reported_once_and_its_end_as_well(watch, tmp_path):
    watched = watch()
    wait_for(lambda: watched.probe.requests > 20, GENEROUS)
    assert (watched.said, watched.probe.looks) == ([], 0)  # ranks that do not wait are not looked at
    watched.probe.waiting, watched.probe.is_healthy = 25.0, True
    wait_for(lambda: bool(watched.said), GENEROUS)
    before = watched.probe.requests
    wait_for(lambda: watched.probe.requests > before + 20, GENEROUS)
    (summary,) = watched.said
    assert re.fullmatch(r"samestep: rank 1 is holding up rank 0 for \d+ s\.", summary.splitlines()[0])
    assert summary.splitlines()[-1] == f"  full report: {tmp_path}/hang/report-0-1.txt"
    assert (tmp_path / "hang/report-0-1.json").exists()
    watched.probe.waiting = 0.0
    wait_for(lambda: len(watched.said) == 2, GENEROUS)
    assert watched.said[1].startswith("samestep: the ranks continue after 2")
    watched.monitor.stop()
    assert watched.monitor.explanation is None  # it is over
    assert all(process.poll() is None for process in watched.ranks)


def test_ranks_over_nccl_are_ended_two_seconds_after_the_timeout(watch):
    watched = watch()
    watched.probe.waiting = 63.0
    for process in watched.ranks:
        assert process.wait(GENEROUS) == -signal.SIGKILL  # the probe has not agreed to end them
    watched.monitor.stop()
    assert watched.monitor.explanation.culprits == [1]
    assert watched.monitor.ended_pids == {process.pid for process in watched.ranks} == set(watched.probe.ended)
    assert not watched.monitor.forbids_restart


def test_a_culprit_that_stops_answering_before_the_end_keeps_its_cause(watch):
    """For example a rank that is exiting."""
    watched = watch()
    watched.probe.waiting, watched.probe.debugger = 57.0, True
    wait_for(lambda: bool(watched.said), GENEROUS)
    watched.probe.is_silent = True
    for process in watched.ranks:
        process.wait(GENEROUS)
    watched.monitor.stop()
    (summary,) = watched.said
    assert "debugger" in summary
    assert "debugger" in watched.monitor.explanation.summary


def test_of_ranks_in_different_collectives_one_that_is_exiting_is_not_another_cause(watch):
    watched = watch()
    watched.probe.waiting, watched.probe.is_different = 57.0, True
    wait_for(lambda: bool(watched.said), GENEROUS)
    watched.probe.is_silent = True
    for process in watched.ranks:
        process.wait(GENEROUS)
    watched.monitor.stop()
    (summary,) = watched.said
    assert "they are in different collectives" in summary
    assert (watched.monitor.explanation.culprits, watched.monitor.explanation.summary) == (
        [0, 1],
        summary.rpartition("\n")[0],
    )


def test_a_wait_that_is_over_before_the_timeout_ends_no_rank_although_no_rank_calls_a_collective_after_it(watch):
    watched = watch()
    watched.probe.waiting, watched.probe.is_healthy = 25.0, True
    wait_for(lambda: bool(watched.said), GENEROUS)
    watched.probe.waiting = 0.0
    wait_for(lambda: len(watched.said) == 2, GENEROUS)
    watched.tick()
    assert watched.said[1].startswith("samestep: the ranks continue after 2")
    assert watched.probe.ended == []


def test_a_rank_that_raises_after_its_wait_does_not_count_as_continuing(watch, monkeypatch):
    monkeypatch.setattr(hang_monitor, "_CONTINUES_SECONDS", GENEROUS)
    watched = watch()
    watched.probe.waiting, watched.probe.is_healthy = 25.0, True
    wait_for(lambda: bool(watched.said), GENEROUS)
    watched.probe.waiting = 0.0
    watched.tick()
    watched.monitor.stop()
    assert len(watched.said) == 1
    assert watched.monitor.explanation.culprits == [1]


@pytest.mark.parametrize("by", ["timeout", "error file"])
def test_a_rank_that_has_raised_keeps_the_cause_however_late_it_ends(watch, tmp_path, by):
    """On a busy machine, a rank that has raised takes longer to end than ranks usually take to continue."""
    watched = watch("report")  # which ends no rank
    watched.probe.waiting, watched.probe.is_healthy = 25.0 if by == "error file" else 58.5, True
    wait_for(lambda: bool(watched.said) and (by == "error file" or watched.probe.waiting > 59.5), GENEROUS)
    if by == "error file":
        error = RankFiles(tmp_path, 0).error
        error.parent.mkdir(parents=True, exist_ok=True)
        error.write_text("{}")
    watched.probe.waiting = 0.0
    since = time.monotonic()
    wait_for(lambda: time.monotonic() > since + 4 * hang_monitor._CONTINUES_SECONDS, GENEROUS)
    watched.tick()
    assert len(watched.said) == 1
    watched.monitor.stop()
    assert watched.monitor.explanation.culprits == [1]


def test_a_rank_that_caught_its_error_counts_as_continuing_in_the_end(watch, tmp_path, monkeypatch):
    monkeypatch.setattr(hang_monitor, "_ENDS_LATE_SECONDS", 1.0)
    watched = watch()
    watched.probe.waiting, watched.probe.is_healthy = 25.0, True
    wait_for(lambda: bool(watched.said), GENEROUS)
    error = RankFiles(tmp_path, 0).error
    error.parent.mkdir(parents=True, exist_ok=True)
    error.write_text("{}")
    watched.probe.waiting = 0.0
    wait_for(lambda: len(watched.said) == 2, GENEROUS)
    assert watched.said[1].startswith("samestep: the ranks continue after 2")


@pytest.mark.parametrize("seconds", [63.0, 40.0])
@pytest.mark.parametrize("policy", ["default", "report"])
def test_a_rank_that_catches_its_timeout_and_exits_with_0_ends_the_rank_that_is_missing(
    watch, monkeypatch, seconds, policy
):
    """Otherwise the job would keep its GPUs until the other rank ends, which may be never."""
    monkeypatch.setattr(hang_monitor, "_RAISE_SECONDS", GENEROUS)
    watched = watch(policy)
    watched.probe.waiting, watched.probe.is_healthy = seconds, True
    wait_for(lambda: bool(watched.said), GENEROUS)
    watched.end_rank(0, 0)
    watched.probe.waiting = 0.0
    if policy == "default" and seconds > watched.probe.timeout:
        assert watched.ranks[1].wait(GENEROUS) == -signal.SIGKILL
        watched.monitor.stop()
        assert watched.monitor.explanation.culprits == [1]
        assert len(watched.said) == 1
        return
    if seconds > watched.probe.timeout:
        watched.tick(100)
        assert len(watched.said) == 1  # the wait has not ended well
    else:
        wait_for(lambda: len(watched.said) == 2, GENEROUS)
        assert re.fullmatch(
            r"samestep: no rank waits any more, after \d+ s; rank 0 has ended with exit code 0", watched.said[1]
        )
    assert watched.ranks[1].poll() is None


def test_ranks_that_do_not_wait_any_more_at_the_last_look_are_not_ended(watch, monkeypatch):
    watched = watch()
    collect = FakeProbe.collect

    def collect_late(self, *arguments):
        return [replace(each, collectives=each.collectives[:1]) for each in collect(self, *arguments)]

    monkeypatch.setattr(FakeProbe, "collect", collect_late)
    watched.probe.waiting = 63.0
    wait_for(lambda: watched.probe.looks >= 3, GENEROUS)
    watched.tick()
    assert watched.probe.ended == []
    assert all(process.poll() is None for process in watched.ranks)


@pytest.mark.parametrize("seconds", [59.0, 63.0])
def test_a_wait_of_another_node_that_it_does_not_repeat_ends_no_rank(watch, seconds):
    watched = watch(nodes=2)
    watched.probe.is_healthy = True
    other = NodeStore(watched.store, "samestep/hang/0", 1, 2)
    try:
        other.set_wait({"seconds": seconds, "timeout": 60.0, "expected": 20.0})
        wait_for(lambda: watched.probe.looks >= 1, GENEROUS)
        watched.tick(100)  # its launcher is busy, or its node is gone
        assert watched.probe.ended == []
        other.set_wait(None)
        watched.tick()
        watched.monitor.stop()
        assert watched.monitor.explanation is None
    finally:
        other.close()


def test_ranks_that_are_ended_without_a_known_cause_are_named_and_other_nodes_end_theirs(watch, monkeypatch):
    monkeypatch.setattr(hang_monitor, "find_cause", lambda *arguments: None)
    watched = watch(nodes=2)
    watched.probe.waiting = 63.0
    for process in watched.ranks:
        assert process.wait(GENEROUS) == -signal.SIGKILL
    watched.monitor.stop()
    text = r"samestep: rank 0 waited for \d+ s in a collective with a timeout of 60 s, and the cause is not known\.\n"
    assert re.match(text, watched.said[0])
    assert re.match(text, watched.monitor.explanation.summary)
    other = NodeStore(watched.store, "samestep/hang/0", 1, 2)
    try:
        assert other.new_requests()[-1].kind == "end"
    finally:
        other.close()


def test_a_rank_that_fails_for_another_reason_during_a_hang_is_the_failure(watch):
    watched = watch()
    watched.probe.waiting = 25.0
    wait_for(lambda: bool(watched.said), GENEROUS)
    watched.ranks[0].kill()  # rank 1 is the one that works alone
    wait_for(lambda: exit_code(watched.ranks[0].pid) is not None, GENEROUS)
    watched.monitor.rank_failed()
    watched.monitor.stop()
    assert watched.monitor.explanation is None
    assert watched.probe.ended == []


def test_a_rank_that_the_others_waited_for_and_that_fails_is_explained(watch):
    watched = watch()
    watched.probe.waiting = 25.0
    wait_for(lambda: bool(watched.said), GENEROUS)
    watched.ranks[1].kill()
    wait_for(lambda: exit_code(watched.ranks[1].pid) is not None, GENEROUS)
    watched.monitor.rank_failed()
    watched.monitor.stop()
    assert watched.monitor.explanation.culprits == [1]


def test_a_rank_that_took_long_to_exit_has_ended_before_the_others(watch):
    watched = watch()
    watched.probe.waiting = 25.0
    wait_for(lambda: bool(watched.said), GENEROUS)
    assert "rank 1 is holding up rank 0" in watched.said[0]  # it was exiting
    watched.probe.last_lines[0] = [
        "Traceback (most recent call last):",
        '  File "/lab/train.py", line 31, in main',
        "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4522",
    ]
    watched.end_rank(1, 0)
    watched.end_rank(0, 1)
    watched.monitor.rank_failed()
    watched.monitor.stop()
    assert watched.monitor.explanation.culprits == [1]
    assert watched.monitor.explanation.summary.startswith("samestep: rank 1 has ended before the others.")


def test_with_report_ranks_are_left_to_torch(watch):
    watched = watch("report")
    watched.probe.waiting = 63.0
    wait_for(lambda: bool(watched.said), GENEROUS)
    before = watched.probe.requests
    wait_for(lambda: watched.probe.requests > before + 20, GENEROUS)
    assert watched.probe.ended == []
    watched.monitor.rank_failed()
    watched.monitor.stop()
    assert watched.monitor.explanation.summary.startswith("samestep: rank 1 is holding up rank 0")


def test_a_run_that_is_stopped_at_a_hang_is_not_restarted(watch):
    watched = watch("stop")
    watched.probe.waiting = 63.0
    for process in watched.ranks:
        process.wait(GENEROUS)
    watched.monitor.stop()
    assert watched.monitor.forbids_restart


def test_a_folder_on_a_drive_that_hangs_does_not_keep_the_launcher(watch, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr("samestep.launch.hang_exchange._WAIT_SECONDS", 0.1)
    monkeypatch.setattr(HangFolder, "requests", lambda self: release.wait(GENEROUS) and ())
    watched = watch()
    try:
        watched.tick()
        watched.probe.waiting = 63.0
        for process in watched.ranks:
            assert process.wait(GENEROUS) == -signal.SIGKILL
        assert "the full report is not written yet: " in watched.said[0]
    finally:
        release.set()


def test_a_report_that_cannot_be_written_does_not_keep_the_summary_from_the_user(watch, tmp_path):
    (tmp_path / "hang").touch()  # a file instead of a folder
    watched = watch()
    watched.probe.waiting = 25.0
    wait_for(lambda: bool(watched.said), GENEROUS)
    assert watched.said[0].splitlines()[0].startswith("samestep: rank 1 is holding up rank 0 for ")
    why = "a file is where a folder is needed: choose another folder"
    assert watched.said[0].endswith(f"\n  the full report cannot be written to {tmp_path / 'hang'} ({why})")


def test_a_node_that_does_not_answer_is_part_of_the_cause(watch):
    watched = watch(nodes=2)
    other = NodeStore(watched.store, "samestep/hang/0", 1, 2)
    try:
        other.introduce(NodeInfo("gpu-08", [2, 3]))
        watched.probe.waiting = 25.0
        wait_for(lambda: bool(watched.said), GENEROUS)
        assert "\n  node gpu-08 does not answer (ranks 2 and 3)\n" in watched.said[0]
    finally:
        other.close()


def test_a_script_on_a_drive_that_hangs_does_not_keep_the_launcher(watch, monkeypatch):
    release, read = threading.Event(), linecache.getlines

    def hang(*arguments):
        if threading.current_thread().name.startswith("samestep"):
            release.wait(GENEROUS)
        return read(*arguments)

    monkeypatch.setattr("samestep.launch.hang_exchange._WAIT_SECONDS", 0.1)
    monkeypatch.setattr("linecache.getlines", hang)
    watched = watch()
    try:
        watched.probe.waiting = 63.0
        for process in watched.ranks:
            assert process.wait(GENEROUS) == -signal.SIGKILL
        assert re.match(r"samestep: rank 1 is holding up rank 0 for \d+ s\.\n  what to do: ", watched.said[0])
    finally:
        release.set()


def test_the_launcher_answers_a_user(watch, tmp_path):
    watched = watch()
    wait_for(lambda: HangFolder(tmp_path).launcher() is not None, GENEROUS)
    healthy = HangFolder(tmp_path).ask(GENEROUS, lambda: True)
    assert healthy["text"].startswith("samestep: no rank waits")
    assert "/lab/train.py:27" in healthy["text"]
    watched.probe.waiting = 12.0  # not yet too long for a report of the launcher
    held_up = HangFolder(tmp_path).ask(GENEROUS, lambda: True)
    assert held_up["text"].startswith("samestep: rank 1 is holding up rank 0 for 1")
    assert held_up["report"]["cause"]["culprits"] == [1]
    assert watched.said == []


def test_a_user_is_answered_with_the_ranks_of_all_nodes(watch, tmp_path, monkeypatch):
    monkeypatch.setattr(hang_monitor, "_EXCHANGE_SECONDS", GENEROUS)
    watched = watch(nodes=2)
    wait_for(lambda: HangFolder(tmp_path).launcher() is not None, GENEROUS)
    other = Answers(watched.store)
    try:
        held_up = HangFolder(tmp_path).ask(GENEROUS, lambda: True)
    finally:
        other.stop()
    ranks = {(each["rank"], each["node"]) for each in held_up["report"]["ranks"]}
    assert ranks == {(0, "gpu-07"), (1, "gpu-07"), (2, "gpu-08"), (3, "gpu-08")}
    assert (
        "rank 3 (node gpu-08, pid 4003): sleeps, 0 pending collectives, at /lab/train.py:12 in main" in held_up["text"]
    )


class Answers:
    """The launcher of a second node, whose ranks 2 and 3 wait for no other rank."""

    def __init__(self, store):
        self._nodes, self._stopped = NodeStore(store, "samestep/hang/0", 1, 2), threading.Event()
        self._nodes.introduce(NodeInfo("gpu-08", [2, 3]))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._stopped.wait(0.01):
            for request in self._nodes.new_requests():
                stacks = {"main": [Frame("/lab/train.py", 12, "main")]}
                found = [
                    RankEvidence(rank, "gpu-08", ProcessInfo(4000 + rank, "sleeping", stacks=stacks), collectives=[])
                    for rank in (2, 3)
                ]
                self._nodes.answer(request.number, [each.to_json() for each in found])

    def stop(self):
        self._stopped.set()
        self._thread.join()
        self._nodes.close()


def test_collectives_that_cannot_be_read_at_two_looks_are_reported_once(watch):
    watched = watch()
    watched.tick()
    (pid, other), error = watched.pids.values(), "AttributeError: module 'torch' has no attribute '_world'"
    reads = iter([{pid: error}, {}, {other: error}, {}])  # for example, while the script imports torch
    watched.probe.read_errors = lambda: next(reads, {})
    watched.tick()
    assert watched.said == []
    watched.probe.read_errors = lambda: {pid: error, other: error}
    wait_for(lambda: bool(watched.said), GENEROUS)
    watched.tick()
    (line,) = watched.said
    assert line.startswith(f"samestep: the launcher cannot read the collectives of rank 0 ({error}), so it cannot")
    assert all(process.poll() is None for process in watched.ranks)


def test_a_watch_that_fails_says_so_and_leaves_the_ranks_alone(watch, monkeypatch):
    def fail(self, pids):
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(FakeProbe, "progress_of", fail)
    watched = watch()
    wait_for(lambda: bool(watched.said), GENEROUS)
    assert watched.said == [
        "samestep: the launcher has stopped watching for hangs (ZeroDivisionError: a mistake); the ranks continue"
    ]
    assert all(process.poll() is None for process in watched.ranks)
