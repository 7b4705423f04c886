"""Reports of failed ranks: the root cause first, its traceback last, and what is read from the logs."""

import json
import logging
import signal
from dataclasses import replace
from pathlib import Path

import pytest

import samestep
from samestep.errors import LaunchError
from samestep.launch.failure_report import (
    Failure,
    format_report,
    is_ended_by_agent,
    last_traceback,
    read_last_output,
    sort_by_cause,
)
from samestep.launch.job import Job, ShowRanks
from samestep.launch.launcher import explain_rendezvous_error
from samestep.launch.rank_logs import RankFiles, RankLogs
from samestep.launch.rendezvous import Rendezvous
from tests.small_disk import small_disk

OWN = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: mine'
GLOO = (
    'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    work.wait()\n'
    "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:6825. This is typically caused by a remote"
)
MISSING = 'Traceback (most recent call last):\n  File "a.py", line 1\nsamestep.errors.RankMissing: rank 0 waits in mean'


def failure(rank: int, code: int = 1, time: float = 100.0, output: str = "") -> Failure:
    return Failure(
        rank,
        pid=1000 + rank,
        code=code,
        time=time,
        ended_by_launcher=is_ended_by_agent(code, time - 100.0),
        output=output,
        is_traceback=output.startswith("Traceback"),
    )


@pytest.mark.parametrize(
    ("failures", "root"),
    [
        ([failure(0, output=OWN)], 0),
        ([failure(0, time=101, output=OWN), failure(1, time=100, output=OWN)], 1),
        ([failure(2, output=OWN), failure(1, output=OWN)], 2),  # within a second the agent's order counts
        ([failure(0, time=100, output=GLOO), failure(1, time=101, output=OWN)], 1),
        ([failure(0, time=100, output=MISSING), failure(1, time=101, output=OWN)], 1),
        ([failure(0, time=100, output=GLOO), failure(1, code=-signal.SIGKILL, time=101)], 1),
        ([failure(0, code=-signal.SIGTERM, time=100), failure(1, time=100, output=GLOO)], 1),
        ([failure(0, code=-signal.SIGTERM, time=100), failure(1, time=100, code=3)], 1),
        ([failure(0, time=100, output=MISSING), failure(1, code=-signal.SIGKILL, time=130)], 0),  # the agent killed it
        ([failure(1, code=-signal.SIGTERM), failure(0, code=-signal.SIGTERM)], 1),
        ([failure(1, time=100, output=GLOO), failure(0, time=99, output=MISSING)], 0),
    ],
)
def test_the_root_cause_is_the_first_rank_that_failed_by_itself(failures: list[Failure], root: int):
    assert sort_by_cause(failures)[0].rank == root


ALONE = (
    'Traceback (most recent call last):\n  File "/home/me/train.py", line 16, in <module>\n'
    "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete"
)
IN_PASS = ALONE.replace("Runtime", '  File "/lib/python3.11/site-packages/torch/_tensor.py", line 623\nRuntime')


@pytest.mark.parametrize("code", [-signal.SIGTERM, -signal.SIGKILL])
def test_a_rank_that_the_agent_ended_while_it_left_after_its_exception_can_be_the_first(code: int):
    first, second = failure(1, output=IN_PASS), failure(0, code, 130.0, output=ALONE)
    assert sort_by_cause([first, second]) == [second, first]
    report = format_report([first, second], 2, "here", Path("logs"), several_nodes=False)
    assert report.splitlines()[:3] == [
        "samestep: 2 of 2 rank(s) on here failed; logs of all ranks: logs",
        "  rank 0    pid 1000     ended by the launcher after an exception  <- first failure",
        "  rank 1    pid 1001     exit code 1, it had waited until the timeout",
    ]
    assert report.endswith(f"rank 0 on here, ended by the launcher after an exception:\n{ALONE}")
    assert second.exit_code == 1


def test_a_rank_that_the_agent_ended_after_it_was_stopped_or_lost_a_peer_is_not_the_first():
    stopped = "Traceback (most recent call last):\nsamestep.training.preemption.StoppedEarly: saved step 4"
    for output in (stopped, MISSING):
        ended, own = failure(0, -signal.SIGTERM, output=output), failure(1, time=101.0, output=OWN)
        assert sort_by_cause([ended, own]) == [own, ended]
    report = format_report([failure(0, -signal.SIGTERM, output=stopped), own], 2, "here", Path(), False)
    assert "rank 0    pid 1000     ended by the launcher after the first failure (SIGTERM)" in report
    report = format_report([ended, own], 2, "here", Path(), False)
    assert "rank 0    pid 1000     ended by the launcher after an exception, lost the connection to" in report


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("rank 0 waits in mean at a.py:1 since 300 s: rank 1 was last in barrier", "it had waited until the timeout"),
        ("rank 0 has waited at a.py:1 for 25 s, because 1 rank(s) have not", "it had waited until the timeout"),
        ("rank 0 waits in mean at a.py:1, but rank 1 failed: ValueError", "lost the connection to another rank"),
    ],
)
def test_a_rank_that_waited_until_the_timeout_of_samestep_did_not_lose_its_connection(message: str, reason: str):
    waited = failure(0, output=MISSING.replace("rank 0 waits in mean", message))
    rows = format_report([waited, failure(1, output=OWN)], 2, "here", Path("logs"), several_nodes=False).splitlines()
    assert rows[2] == f"  rank 0    pid 1000     exit code 1, {reason}"


@pytest.mark.parametrize(
    ("code", "ending", "exit_code"),
    [
        (1, "exit code 1", 1),
        (255, "exit code 255", 255),
        (-9, "killed by SIGKILL: often the kernel's out-of-memory killer", 137),
        (-11, "killed by SIGSEGV: a crash in native code", 139),
        (-7, "killed by SIGBUS: often a full /dev/shm (shared memory)", 135),
        (-6, "killed by SIGABRT: native code aborted", 134),
        (-4, "killed by SIGILL: an instruction that this CPU lacks; run `samestep doctor`", 132),
        (-15, "killed by SIGTERM", 143),
        (-40, "killed by signal 40", 168),
    ],
)
def test_exit_codes_and_signals_are_described(code: int, ending: str, exit_code: int):
    assert (failure(0, code).ending, failure(0, code).exit_code) == (ending, exit_code)


def test_every_exit_code_is_kept_and_a_killed_subprocess_is_named():
    failures = [Failure(0, 1, code, 0.0, ended_by_launcher=False, output="", is_traceback=False) for code in range(256)]
    assert [failure.exit_code for failure in failures] == list(range(256))
    hints = {failure.code: failure.ending.partition(": ")[2] for failure in failures if ": " in failure.ending}
    text = "`sys.exit` got the return code of a subprocess that {} killed"
    names = {241: "SIGTERM", 245: "SIGSEGV", 247: "SIGKILL", 249: "SIGBUS", 250: "SIGABRT"}
    assert hints == {code: text.format(name) for code, name in names.items()}


def test_the_report_ends_with_the_traceback_of_the_first_failing_rank():
    failures = [failure(0, output=GLOO), failure(2, code=-15), failure(11, time=101, output=OWN)]
    assert format_report(failures, ranks=12, host="node1", logs="/runs/x/logs", several_nodes=True) == (
        "samestep: 2 of 12 rank(s) on node1 failed; logs of all ranks: /runs/x/logs\n"
        "  rank 11   pid 1011     exit code 1  <- first failure\n"
        "  rank 0    pid 1000     exit code 1, lost the connection to another rank\n"
        "  rank 2    pid 1002     ended by the launcher after the first failure (SIGTERM)\n"
        "\n"
        "rank 11 on node1, exit code 1:\n" + OWN
    )


def test_a_node_whose_ranks_only_lost_their_peers_points_to_the_other_nodes():
    hint = "  No rank on this node failed by itself: look for the cause in the logs of the other nodes.\n"
    assert hint in format_report([failure(0, output=GLOO)], 1, "node1", "logs", several_nodes=True)
    assert hint not in format_report([failure(0, output=GLOO)], 1, "node1", "logs", several_nodes=False)
    assert hint not in format_report([failure(0, output=OWN)], 1, "node1", "logs", several_nodes=True)


def test_if_no_rank_failed_by_itself_the_ranks_that_the_others_waited_for_are_named():
    failures = [failure(0, output=MISSING), failure(1, code=-signal.SIGTERM), failure(2, output=GLOO)]
    report = format_report(failures, 3, "here", Path("logs"), several_nodes=False).splitlines()
    assert report[4] == "  No rank failed by itself: the others may have waited for rank 1, which the launcher ended."
    failed = [*failures, failure(3, output=OWN)]
    assert "failed by itself" not in format_report(failed, 4, "here", Path("logs"), several_nodes=False)


def test_a_rank_without_output_is_reported_as_such():
    assert format_report([failure(0, code=3)], 1, "node1", "logs", False).endswith(
        "\nrank 0 on node1, exit code 3; it printed nothing"
    )


def test_lines_shown_above_are_not_repeated_but_a_traceback_is():
    usage = replace(failure(0, code=2, output="train.py: error: --lr is required"), already_shown=True)
    assert format_report([usage], 1, "node1", "logs", False).endswith(
        "\nrank 0 on node1, exit code 2; its last lines are above"
    )
    raised = replace(failure(0, output=OWN), already_shown=True)
    assert format_report([raised], 1, "node1", "logs", False).endswith(f"\nrank 0 on node1, exit code 1:\n{OWN}")


CHAIN = """\
step 1
Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'old news'
step 2
Traceback (most recent call last):
  File "a.py", line 3, in <module>
KeyError: 'inner'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 5, in <module>
ValueError: outer
and its second line
"""


def test_the_last_traceback_includes_the_exceptions_it_was_raised_from():
    assert last_traceback(CHAIN.splitlines()) == CHAIN.splitlines()[5:]


def test_the_rank_prefix_of_torch_is_removed():
    lines = ["[rank1]: Traceback (most recent call last):", '[rank1]:   File "a.py"', "[rank1]: ValueError: x"]
    assert last_traceback(lines) == ["Traceback (most recent call last):", '  File "a.py"', "ValueError: x"]


def test_lines_without_a_traceback_give_an_empty_list():
    assert last_traceback(["step 1", "Original Traceback (most recent call last):"]) == []


def test_a_very_long_traceback_is_shortened_in_the_middle():
    lines = ["Traceback (most recent call last):", *(f"  frame {number}" for number in range(1000)), "RecursionError"]
    short = last_traceback(lines)
    assert (len(short), short[0], short[100], short[-1]) == (201, lines[0], "  ...", "RecursionError")


def write_logs(folder: Path, err: str = "", out: str = "", screen: str | None = None) -> RankFiles:
    files = RankFiles(folder, 1)
    files.err.write_text(err)
    files.out.write_text(out)
    if screen is not None:
        files.screen.write_text(screen)
    return files


def test_a_log_line_of_native_code_after_the_traceback_is_omitted(tmp_path: Path):
    warning = "[rank0]:[W1115 04:11:01.123456 ProcessGroup.cpp:1] Warning: destroy_process_group() was not called"
    assert read_last_output(write_logs(tmp_path, f"{OWN}\n{warning}\n"), crashed=False) == (OWN, True)


def test_a_crash_shows_the_end_of_the_log_and_no_older_traceback(tmp_path: Path):
    files = write_logs(tmp_path, err=OWN, out="\n".join(f"step {number}" for number in range(50)))
    output, is_traceback = read_last_output(files, crashed=True)
    assert not is_traceback
    assert output.splitlines()[-1] == "ValueError: mine"
    assert len(output.splitlines()) == 20


WATCHDOG = (
    "[rank0]:[E1116 12:00:00.123456 ProcessGroupNCCL.cpp:688] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=40, OpType=ALLREDUCE, NumelIn=5, NumelOut=5, Timeout(ms)=20000) ran for 20012 milliseconds before "
    "timing out."
)
ABORTED = [
    "step 5",
    WATCHDOG,
    "[rank0]:[W1116 12:00:00.2 TCPStore.cpp:125] [c10d] recvValue failed",
    "terminate called after throwing an instance of 'c10::DistBackendError'",
    *[f"frame #{number}: <unknown function> + 0x1 (0x7f in /lib/libc.so.6)" for number in range(40)],
    "Fatal Python error: Aborted",
]


def test_the_lines_of_the_watchdog_of_nccl_are_shown_without_the_frames_of_native_code(tmp_path: Path):
    files = RankFiles(tmp_path, 0)
    files.err.write_text("\n".join(ABORTED))
    output, is_traceback = read_last_output(files, crashed=True)
    assert not is_traceback
    assert output.splitlines() == [WATCHDOG, "step 5", ABORTED[3], ABORTED[-1]]


def test_a_rank_that_the_watchdog_of_nccl_aborted_is_not_the_cause():
    victim = failure(0, code=-signal.SIGABRT, time=100, output="\n".join(ABORTED))
    cause = failure(1, time=105, output=OWN)
    assert victim.kind == "lost peer"
    assert sort_by_cause([victim, cause]) == [cause, victim]
    report = format_report([victim, cause], 2, "here", Path("logs"), several_nodes=False)
    assert "rank 1    pid 1001     exit code 1  <- first failure" in report
    assert "rank 0    pid 1000     killed by SIGABRT: NCCL waited too long for another rank\n" in report
    assert failure(0, code=-signal.SIGABRT, output="free(): invalid pointer").kind == "failed"


MISMATCH = [
    "step 1",
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
    "  what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 72 vs 18. Received "
    "data size doesn't match expected size. Is there a distributed collective mismatch in your code?",
    "Fatal Python error: Aborted",
]
STACK = [
    "Thread 0x00007f6fe097f6c0 (most recent call first):",
    '  File "/opt/lib/python3.11/threading.py", line 331 in wait',
    "Current thread 0x00007f7002ff9b80 (most recent call first):",
    *['  File "/opt/lib/python3.11/site-packages/torch/_tensor.py", line 623 in backward'] * 30,
    *['  File "<frozen importlib._bootstrap>", line 1147 in _find_and_load_unlocked'] * 30,
    f'  File "{Path(samestep.__file__).parent}/parallel/draw_rules.py", line 405 in rule',
    '  File "/home/me/train.py", line 25 in <module>',
    "Extension modules: numpy._core._multiarray_umath, torch._C (total: 23)",
]


def test_after_a_crash_the_message_of_native_code_and_the_line_of_the_script_are_shown(tmp_path: Path):
    files = write_logs(tmp_path, "\n".join([*MISMATCH, *STACK]))
    output, is_traceback = read_last_output(files, crashed=True)
    assert not is_traceback
    assert output.splitlines() == [*MISMATCH, '  File "/home/me/train.py", line 25 in <module>']


def test_a_rank_that_gloo_aborted_because_ranks_made_different_calls_is_not_the_cause():
    victim = failure(0, code=-signal.SIGABRT, time=100, output="\n".join(MISMATCH))
    cause = failure(1, time=105, output=OWN)
    assert sort_by_cause([victim, cause]) == [cause, victim]
    ending = "killed by SIGABRT: gloo got data of another collective: ranks made different calls"
    report = format_report([victim, cause], 2, "here", Path("logs"), several_nodes=False)
    assert f"rank 0    pid 1000     {ending}\n" in report
    alone = format_report(
        [victim, failure(1, code=-signal.SIGTERM, time=100)], 2, "here", Path("logs"), several_nodes=False
    )
    assert f"rank 0    pid 1000     {ending}  <- first failure" in alone
    assert "may have waited" not in alone


def timeout(*files: str) -> str:
    frames = "".join(f'  File "{file}", line 1, in wrapper\n' for file in files)
    return f"Traceback (most recent call last):\n{frames}RuntimeError: [gloo/buffer.cc:78] Timed out waiting 5000ms"


def test_of_ranks_that_timed_out_the_one_in_a_collective_of_the_script_comes_first():
    torch = "/opt/lib/python3.11/site-packages/torch"
    collective = f"{torch}/distributed/c10d_logger.py", f"{torch}/distributed/distributed_c10d.py"
    cause = failure(0, time=101, output=timeout("/home/me/train.py", *collective))
    for frames in ((f"{torch}/autograd/graph.py",), (f"{torch}/distributed/fsdp/collectives.py", *collective)):
        victim = failure(1, time=100, output=timeout("/home/me/train.py", *frames))
        assert sort_by_cause([victim, cause]) == [cause, victim]
        assert sort_by_cause([victim, failure(0, time=101, output=OWN)])[0].rank == 0


def test_terminal_colors_are_removed(tmp_path: Path):
    files = write_logs(tmp_path, screen="\x1b[31mred\x1b[0m\r\nlast\r\n")
    assert read_last_output(files, crashed=True) == ("red\nlast", False)


def test_a_truncated_error_file_falls_back_to_the_log(tmp_path: Path):
    files = write_logs(tmp_path, err=OWN)
    files.error.write_text(json.dumps({"message": {"message": "x", "extraInfo": {}}})[:20])
    assert read_last_output(files, crashed=False) == (OWN, True)


def test_logs_of_an_earlier_run_are_renamed(tmp_path: Path):
    for word in ("first", "second"):
        files = write_logs(tmp_path, out=word)
        files.rename_existing()
    assert not files.out.exists()
    assert (tmp_path / "rank-1.out.1").read_text() == "first"
    assert (tmp_path / "rank-1.out.2").read_text() == "second"


@pytest.mark.parametrize(
    ("host", "reason"),
    [("no..where", "the host name no..where cannot be resolved"), ("[::1]", "timed out")],
)
def test_a_failed_rendezvous_is_explained(host: str, reason: str):
    rendezvous = Rendezvous("c10d", f"{host}:29400", "id", {}, 2, 2, None)
    job = Job("train.py", False, (), 1, rendezvous, 0, Path("kept"))
    where = f"at {host}:29400 (TimeoutError: {reason})"
    message = explain_rendezvous_error(job, TimeoutError(), had_started=False)
    assert message.startswith(f"the launchers of 2 node(s) did not find each other {where}: check that --rdzv-endpoint")
    assert explain_rendezvous_error(job, TimeoutError(), had_started=True) == (
        f"the launchers of 2 node(s) lost their rendezvous {where}: the launcher that ended first reports the cause; "
        "the logs of the ranks on this node are in kept/logs; start all launchers again to resume"
    )


def variables(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": "0"}


def test_an_unwritable_log_folder_is_reported(tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "attempt-0").touch()
    message = r"cannot write the logs of the ranks to .* \(File exists\): choose another --folder"
    with pytest.raises(LaunchError, match=message):
        RankLogs(tmp_path / "file", "first").open_agent_log("node1")
    with pytest.raises(LaunchError, match=message):
        RankLogs(tmp_path, "first").open({0: variables(0)})


def test_agent_log_records_lost_on_a_full_disk_are_ignored(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    with small_disk(tmp_path / "disk", 64) as disk:
        log = RankLogs(disk.path / "logs", "first").open_agent_log("node1")
        disk.fill()
        log.emit(logging.LogRecord("agent", logging.INFO, "", 1, "joined", None, None))
        disk.make_space()
        log.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("show", "printed", "shown"),
    [
        ("first", {"rank-2.out": "", "rank-2.err": "usage"}, True),
        ("first", {"rank-2.out": "a result", "rank-2.err": "usage"}, False),  # stdout may have been redirected
        ("first", {"rank-2.log": "usage"}, True),
        ("first", {"rank-2.log": "a result", "rank-2.err": "usage"}, False),
        ("all", {"rank-2.out": "", "rank-2.err": "usage"}, False),  # each line has the rank as a prefix
    ],
)
def test_a_rank_counts_as_shown_if_the_console_has_all_its_output(
    tmp_path: Path, show: ShowRanks, printed: dict[str, str], shown: bool
):
    logs = RankLogs(tmp_path, show)
    logs.open({0: variables(2), 1: variables(3)})
    for name, text in printed.items():
        (tmp_path / "attempt-0" / name).write_text(text)
    (tmp_path / "attempt-0" / "rank-3.err").write_text("usage")
    logs.close()
    assert (logs.has_shown(2), logs.has_shown(3)) == (shown, False)
