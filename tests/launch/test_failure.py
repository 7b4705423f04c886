import json
import logging
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from samestep.errors import LaunchError
from samestep.launch.failure_report import (
    Failure,
    by_cause,
    is_agents_doing,
    is_lost_peer,
    last_traceback,
    last_words,
    tell,
)
from samestep.launch.job import Job, Show
from samestep.launch.launcher import _explain
from samestep.launch.rank_logs import RankFiles, RankLogs
from samestep.launch.rendezvous import Rendezvous
from tests.small_disk import small_disk

OWN = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: mine'
GLOO = (
    'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    work.wait()\n'
    "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:6825. This is typically caused by a remote"
)
MISSING = 'Traceback (most recent call last):\n  File "a.py", line 1\nsamestep.errors.RankMissing: rank 0 waits in mean'


def failure(rank: int, code: int = 1, when: float = 100.0, said: str = "") -> Failure:
    ended = is_agents_doing(code, when - 100.0)
    return Failure(
        rank, pid=1000 + rank, code=code, when=when, ended=ended, said=said, traceback=said.startswith("Traceback")
    )


@pytest.mark.parametrize(
    ("failures", "root"),
    [
        ([failure(0, said=OWN)], 0),
        ([failure(0, when=101, said=OWN), failure(1, when=100, said=OWN)], 1),
        ([failure(2, said=OWN), failure(1, said=OWN)], 2),  # within a second the agent's order decides
        ([failure(0, when=100, said=GLOO), failure(1, when=101, said=OWN)], 1),
        ([failure(0, when=100, said=MISSING), failure(1, when=101, said=OWN)], 1),
        ([failure(0, when=100, said=GLOO), failure(1, code=-signal.SIGKILL, when=101)], 1),
        ([failure(0, code=-signal.SIGTERM, when=100), failure(1, when=100, said=GLOO)], 1),
        ([failure(0, code=-signal.SIGTERM, when=100), failure(1, when=100, code=3)], 1),
        ([failure(0, when=100, said=MISSING), failure(1, code=-signal.SIGKILL, when=130)], 0),  # it would not end
        ([failure(1, code=-signal.SIGTERM), failure(0, code=-signal.SIGTERM)], 1),
        ([failure(1, when=100, said=GLOO), failure(0, when=99, said=MISSING)], 0),
    ],
)
def test_the_root_cause_is_the_first_rank_that_failed_by_itself(failures: list[Failure], root: int):
    assert by_cause(failures)[0].rank == root


@pytest.mark.parametrize("words", ["Connection reset by peer", "Broken pipe", "torch.distributed.DistNetworkError: x"])
def test_lost_peers_are_known_by_their_message(words: str):
    assert is_lost_peer(f"Traceback (most recent call last):\n  File 'a.py'\nRuntimeError: {words}")


def test_a_frame_that_mentions_a_lost_peer_proves_nothing():
    assert not is_lost_peer(
        'Traceback (most recent call last):\n  File "a.py"\n    say("Broken pipe")\nValueError: mine'
    )


@pytest.mark.parametrize(
    ("code", "words", "exit_code"),
    [
        (1, "exit code 1", 1),
        (255, "exit code 255", 255),
        (-9, "killed by SIGKILL: often the kernel's out-of-memory killer", 137),
        (-11, "killed by SIGSEGV: a crash in native code", 139),
        (-7, "killed by SIGBUS: often shared memory (/dev/shm) that is full", 135),
        (-6, "killed by SIGABRT: native code gave up", 134),
        (-4, "killed by SIGILL: an instruction that this CPU lacks; `samestep doctor` looks for it", 132),
        (-15, "killed by SIGTERM", 143),
        (-40, "killed by signal 40", 168),
    ],
)
def test_endings_are_told_in_words(code: int, words: str, exit_code: int):
    assert (failure(0, code).ending, failure(0, code).exit_code) == (words, exit_code)


def test_the_report_ends_with_the_first_failing_ranks_traceback():
    failures = [failure(0, said=GLOO), failure(2, code=-15), failure(11, when=101, said=OWN)]
    assert tell(failures, ranks=12, host="node1", logs="/runs/x/logs", other_nodes=True) == (
        "samestep: 2 of 12 rank(s) on node1 failed; what each of them printed is in /runs/x/logs\n"
        "  rank 11   pid 1011     exit code 1  <- first failure\n"
        "  rank 0    pid 1000     exit code 1, when it lost a peer\n"
        "  rank 2    pid 1002     ended by the launcher after the first failure (SIGTERM)\n"
        "\n"
        "rank 11 on node1, exit code 1:\n" + OWN
    )


def test_a_node_whose_ranks_only_lost_their_peers_points_to_the_others():
    hint = "  No rank failed by itself here: look for the cause in the logs of the other nodes.\n"
    assert hint in tell([failure(0, said=GLOO)], 1, "node1", "logs", other_nodes=True)
    assert hint not in tell([failure(0, said=GLOO)], 1, "node1", "logs", other_nodes=False)
    assert hint not in tell([failure(0, said=OWN)], 1, "node1", "logs", other_nodes=True)


def test_a_rank_that_printed_nothing_is_told_so():
    assert tell([failure(0, code=3)], 1, "node1", "logs", False).endswith(
        "\nrank 0 on node1, exit code 3; it printed nothing"
    )


def test_lines_that_stand_above_are_not_told_twice_but_a_traceback_comes_last():
    usage = replace(failure(0, code=2, said="train.py: error: --lr is required"), shown=True)
    assert tell([usage], 1, "node1", "logs", False).endswith("\nrank 0 on node1, exit code 2; its last lines are above")
    raised = replace(failure(0, said=OWN), shown=True)
    assert tell([raised], 1, "node1", "logs", False).endswith(f"\nrank 0 on node1, exit code 1:\n{OWN}")


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


def test_the_last_traceback_keeps_the_exceptions_it_grew_from():
    assert last_traceback(CHAIN.splitlines()) == CHAIN.splitlines()[5:]


def test_torchs_rank_prefix_is_taken_off():
    lines = ["[rank1]: Traceback (most recent call last):", '[rank1]:   File "a.py"', "[rank1]: ValueError: x"]
    assert last_traceback(lines) == ["Traceback (most recent call last):", '  File "a.py"', "ValueError: x"]


def test_no_traceback_is_an_empty_list():
    assert last_traceback(["step 1", "Original Traceback (most recent call last):"]) == []


def test_an_endless_traceback_is_shortened_in_the_middle():
    lines = ["Traceback (most recent call last):", *(f"  frame {number}" for number in range(1000)), "RecursionError"]
    short = last_traceback(lines)
    assert (len(short), short[0], short[100], short[-1]) == (201, lines[0], "  ...", "RecursionError")


def written(folder: Path, err: str = "", out: str = "", screen: str | None = None) -> RankFiles:
    files = RankFiles(folder, 1)
    files.err.write_text(err)
    files.out.write_text(out)
    if screen is not None:
        files.screen.write_text(screen)
    return files


def test_a_warning_of_native_code_after_the_traceback_is_left_out(tmp_path: Path):
    warning = "[rank0]:[W1115 04:11:01.123456 ProcessGroup.cpp:1] Warning: destroy_process_group() was not called"
    assert last_words(written(tmp_path, f"{OWN}\n{warning}\n"), crashed=False) == (OWN, True)


def test_a_crash_shows_the_end_of_the_log_and_no_older_traceback(tmp_path: Path):
    files = written(tmp_path, err=OWN, out="\n".join(f"step {number}" for number in range(50)))
    said, traceback = last_words(files, crashed=True)
    assert not traceback
    assert said.splitlines()[-1] == "ValueError: mine"
    assert len(said.splitlines()) == 20


def test_colours_of_a_terminal_are_taken_off(tmp_path: Path):
    files = written(tmp_path, screen="\x1b[31mred\x1b[0m\r\nlast\r\n")
    assert last_words(files, crashed=True) == ("red\nlast", False)


def test_an_error_file_that_was_cut_short_falls_back_to_the_log(tmp_path: Path):
    files = written(tmp_path, err=OWN)
    files.error.write_text(json.dumps({"message": {"message": "x", "extraInfo": {}}})[:20])
    assert last_words(files, crashed=False) == (OWN, True)


def test_logs_of_an_earlier_run_are_set_aside(tmp_path: Path):
    for word in ("first", "second"):
        files = written(tmp_path, out=word)
        files.set_aside()
    assert not files.out.exists()
    assert (tmp_path / "rank-1.out.1").read_text() == "first"
    assert (tmp_path / "rank-1.out.2").read_text() == "second"


@pytest.mark.parametrize(
    ("host", "reason"),
    [("no..where", "the name no..where leads nowhere from here"), ("[::1]", "time is over")],
)
def test_nodes_that_did_not_meet_are_told_why(host: str, reason: str):
    meeting = Rendezvous("c10d", f"{host}:29400", "id", {}, 2, 2, None)
    job = Job("train.py", False, (), 1, meeting, 0, Path("kept"))
    told = _explain(job, TimeoutError(), had_met=False)
    assert told.startswith(f"the launchers of 2 node(s) did not meet at {host}:29400 (TimeoutError: {reason}): check")
    told = _explain(job, TimeoutError(), had_met=True)
    lost = f"the launchers of 2 node(s) have lost each other at {host}:29400 (TimeoutError: {reason}): "
    assert told == (
        f"{lost}the one that ended first tells why; what the ranks here printed is in kept/logs; start all again to "
        "go on"
    )


def variables(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": "0"}


def test_a_folder_that_cannot_hold_logs_is_told_in_one_line(tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "attempt-0").touch()
    told = r"what the ranks print cannot be kept in .* \(File exists\): name another --folder"
    with pytest.raises(LaunchError, match=told):
        RankLogs(tmp_path / "file", "first").open_agents("node1")
    with pytest.raises(LaunchError, match=told):
        RankLogs(tmp_path, "first").open({0: variables(0)})


def test_what_an_agent_says_on_a_full_disk_is_passed_over(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    with small_disk(tmp_path / "disk", 64) as disk:
        log = RankLogs(disk.path / "logs", "first").open_agents("node1")
        disk.fill()
        log.emit(logging.LogRecord("agent", logging.INFO, "", 1, "joined", None, None))
        disk.make_space()
        log.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("show", "printed", "shown"),
    [
        ("first", {"rank-2.out": "", "rank-2.err": "usage"}, True),
        ("first", {"rank-2.out": "a result", "rank-2.err": "usage"}, False),  # which may have gone elsewhere
        ("first", {"rank-2.log": "usage"}, True),
        ("first", {"rank-2.log": "a result", "rank-2.err": "usage"}, False),
        ("all", {"rank-2.out": "", "rank-2.err": "usage"}, False),  # with the rank before each line
    ],
)
def test_a_rank_was_shown_where_all_it_printed_stands_above(
    tmp_path: Path, show: Show, printed: dict[str, str], shown: bool
):
    logs = RankLogs(tmp_path, show)
    logs.open({0: variables(2), 1: variables(3)})
    for name, text in printed.items():
        (tmp_path / "attempt-0" / name).write_text(text)
    (tmp_path / "attempt-0" / "rank-3.err").write_text("usage")
    logs.close()
    assert (logs.has_shown(2), logs.has_shown(3)) == (shown, False)
