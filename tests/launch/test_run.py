"""Real launches of scripts that do not import torch, which they do not need in order to fail."""

import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import termios
import time
from pathlib import Path

import pytest

from tests.launch.launched import start
from tests.small_disk import small_disk

HOST = socket.gethostname()
TRAIN = ("--folder", "kept", "train.py")

pytestmark = pytest.mark.slow

RAISES = """
    import os, sys, time
    rank = os.environ["RANK"]
    print("rank", rank, "started")
    print("threads", os.environ["OMP_NUM_THREADS"], "folder", os.environ["SAMESTEP_FOLDER"], file=sys.stderr)
    def deep():
        raise ValueError("boom on " + rank)
    if rank == "1":
        deep()
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def share_the_bf16_probe(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """The bfloat16 probe takes seconds: cache its result for all tests, outside of the home directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def test_the_traceback_of_a_failed_rank_comes_last(tmp_path: Path):
    ended = start(tmp_path, RAISES, "--nproc-per-node", "2", *TRAIN).finish()
    assert ended.code == 1
    traceback = f"""
rank 1 on {HOST}, exit code 1:
Traceback (most recent call last):
  File "{tmp_path}/train.py", line 9, in <module>
    deep()
  File "{tmp_path}/train.py", line 7, in deep
    raise ValueError("boom on " + rank)
ValueError: boom on 1
"""
    assert ended.err.endswith(traceback)
    assert ended.err.count("Traceback") == 1
    assert f"samestep: 1 of 2 rank(s) on {HOST} failed; logs of all ranks: {tmp_path}/kept/logs\n" in ended.err
    assert re.search(
        r"  rank 1    pid \d+ +exit code 1  <- first failure\n  rank 0    pid \d+ +ended by the laun", ended.err
    )
    assert ended.left == []


def test_every_rank_has_logs_and_the_console_shows_rank_0(tmp_path: Path):
    script = """
        import os, sys
        print("rank", os.environ["RANK"], "started")
        print("threads", os.environ["OMP_NUM_THREADS"], "in", os.environ["SAMESTEP_FOLDER"], file=sys.stderr)
    """
    # The longest limit is not too long for the timer of the launcher.
    ended = start(tmp_path, script, "--nproc-per-node", "2", "--time-limit", "36499d", *TRAIN).finish()
    assert (ended.code, ended.out) == (0, "rank 0 started\n")
    line = re.search(
        r"^samestep: logs in (.*); set for the ranks: OMP_NUM_THREADS=(\d+) \(\d+ cores? for 2 ranks, .*\)\n", ended.err
    )
    assert line
    assert line[1] == f"{tmp_path}/kept/logs"
    err = f"threads {line[2]} in {tmp_path}/kept\n"
    assert ended.err == line[0] + err
    assert ended.logs() == {
        "rank-0.out": "rank 0 started\n",
        "rank-0.err": err,
        "rank-1.out": "rank 1 started\n",
        "rank-1.err": err,
    }


def test_a_number_of_threads_set_by_the_user_is_kept(tmp_path: Path):
    ended = start(
        tmp_path, "import os; print(os.environ['OMP_NUM_THREADS'])", *TRAIN, env={"OMP_NUM_THREADS": "7"}
    ).finish()
    assert ended.out == "7\n"
    assert "set for the ranks: OMP_NUM_THREADS=7 (set by you)" in ended.err


def test_a_killed_rank_is_reported_with_its_last_lines_and_its_workers_end_too(tmp_path: Path):
    script = """
        import os, signal, subprocess, time
        if os.environ["RANK"] == "1":
            subprocess.Popen(["sleep", "300"])
            subprocess.Popen(["sleep", "300"], start_new_session=True)
            print("last line")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    """
    ended = start(tmp_path, script, "--nproc-per-node", "2", *TRAIN).finish()
    assert ended.code == 128 + signal.SIGKILL
    killed = "killed by SIGKILL: often the kernel's out-of-memory killer"
    assert ended.err.endswith(f"\nrank 1 on {HOST}, {killed}; its last lines:\nlast line\n")
    assert f"{killed}  <- first failure" in ended.err
    assert ended.left == []


def test_the_launcher_exits_with_the_exit_code_of_the_rank(tmp_path: Path):
    script = "import sys; print('no data', file=sys.stderr); sys.exit(7)"
    ended = start(tmp_path, script, "--nproc-per-node", "1", *TRAIN).finish()
    assert ended.code == 7
    assert ended.err.endswith(f"\nrank 0 on {HOST}, exit code 7; its last lines are above\n")
    assert ended.err.count("no data") == 1


def test_closed_streams_are_connected_to_dev_null(tmp_path: Path):
    script = "import sys; print('hello'); print('there', file=sys.stderr)"
    ended = start(tmp_path, script, "--nproc-per-node", "1", *TRAIN, preexec_fn=lambda: os.closerange(0, 3)).finish()
    assert ended.code == 0
    assert ended.logs() == {"rank-0.out": "hello\n", "rank-0.err": "there\n"}


def test_a_full_disk_is_reported_as_a_possible_cause(tmp_path: Path):
    with small_disk(tmp_path / "kept", 64) as disk:
        (disk.path / "logs" / "attempt-0").mkdir(parents=True)
        disk.fill()
        ended = start(tmp_path, "print('hello')", "--nproc-per-node", "1", *TRAIN).finish()
    assert ended.code == 1
    message = f"samestep: the disk of {disk.path}/logs is full, so the logs may be incomplete: free space\n"
    assert message in ended.err
    assert "Traceback" not in ended.err


def test_a_setting_that_torch_rejects_is_reported_in_one_line(tmp_path: Path):
    ended = start(tmp_path, "", "--rdzv-conf", "read_timeout=soon", *TRAIN).finish()
    assert ended.code == 2
    last = ended.err.splitlines()[-1]
    assert last.startswith("samestep: torch rejects --rdzv-conf: The rendezvous configuration option 'read_timeout'")
    assert last.endswith("; pass timeouts in whole seconds, as in --rdzv-conf join_timeout=600")


def test_the_error_file_of_torch_is_preferred_to_the_log(tmp_path: Path):
    script = """
        import json, os, sys
        extra = {"py_callstack": "Traceback ...\\nValueError: recorded", "timestamp": "1"}
        error = {"message": "ValueError: recorded", "extraInfo": extra}
        open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write(json.dumps({"message": error}))
        raise ValueError("printed")
    """
    ended = start(tmp_path, script, "--nproc-per-node", "1", *TRAIN).finish()
    assert ended.code == 1
    assert ended.err.endswith(f"\nrank 0 on {HOST}, exit code 1:\nTraceback ...\nValueError: recorded\n")


# Rank 0 and its worker end on SIGTERM; rank 1 and its worker, in a separate session, only on SIGKILL.
STUBBORN = """
    import os, signal, subprocess, sys, time
    rank = os.environ["RANK"]
    worker = "import time; time.sleep(300)"
    if rank == "1":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", worker], start_new_session=rank == "1")
    open("up-" + rank, "w").close()
    while True:
        time.sleep(1)
"""


@pytest.mark.parametrize(
    ("number", "whole_group", "code"),
    [(signal.SIGINT, True, 130), (signal.SIGINT, False, 130), (signal.SIGTERM, False, 143)],
    ids=["Ctrl-C", "SIGINT to the launcher", "SIGTERM to the launcher"],
)
def test_a_signal_ends_every_process(tmp_path: Path, number: signal.Signals, whole_group: bool, code: int):
    run = start(tmp_path, STUBBORN, "--nproc-per-node", "2", *TRAIN, env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"})
    run.wait_for_ranks(2)
    assert len(run.processes()) == 6  # the launcher, its guard, two ranks and their workers
    start_time = time.monotonic()
    (os.killpg if whole_group else os.kill)(run.process.pid, number)
    ended = run.finish()
    assert ended.left == []
    assert time.monotonic() - start_time < 25.0  # torch by itself waits 30 s
    assert ended.code == code
    assert ended.err.endswith(f"samestep: stopped by {number.name}; all ranks have ended\n")


def test_a_signal_also_ends_a_later_attempt(tmp_path: Path):
    script = """
        import os, sys, time
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit(1)
        open("up-0", "w").close()
        time.sleep(60)
    """
    run = start(tmp_path, script, "--nproc-per-node", "1", "--max-restarts", "3", *TRAIN)
    run.wait_for_ranks(1)
    run.process.send_signal(signal.SIGTERM)
    ended = run.finish()
    assert (ended.code, ended.left) == (143, [])
    assert not (tmp_path / "kept" / "logs" / "attempt-2").exists()


def test_a_second_interrupt_does_not_wait(tmp_path: Path):
    run = start(tmp_path, STUBBORN, "--nproc-per-node", "2", *TRAIN, env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"})
    run.wait_for_ranks(2)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    ended = run.finish(50)  # not 60 s
    assert (ended.code, ended.left) == (130, [])


def test_a_module_gets_its_arguments_unchanged(tmp_path: Path):
    package = tmp_path / "lab"
    package.mkdir()
    (package / "train.py").write_text("import json, sys; print(json.dumps([sys.argv[1:], sys.path[0], __name__]))")
    arguments = ["--help", "--nproc_per_node=3", "-m", "a b", "", "--", "$HOME ${local_rank} $$", "--verbose"]
    ended = start(tmp_path, "", "--nproc_per_node=1", "--folder", "kept", "-m", "lab.train", *arguments).finish()
    assert ended.code == 0, ended.err
    assert json.loads(ended.out) == [arguments, str(tmp_path), "__main__"]


def test_two_concurrent_runs_do_not_join_each_other(tmp_path: Path):
    script = """
        import os, time
        open("up-" + os.environ["TORCHELASTIC_RUN_ID"], "w").close()
        while len([name for name in os.listdir() if name.startswith("up-")]) < 2:
            time.sleep(0.05)
        print(os.environ["MASTER_PORT"], os.environ["WORLD_SIZE"], os.environ["SAMESTEP_FOLDER"])
        print(os.environ["SAMESTEP_FOLDER_IS_EXPLICIT"])
    """
    runs = [start(tmp_path, script, "--nproc-per-node", "1", "train.py") for _ in range(2)]
    printed = [run.finish().out.split() for run in runs]
    assert printed[0][0] != printed[1][0]
    assert printed[0][1] == printed[1][1]
    assert printed[0][2] != printed[1][2]
    assert printed[0][3] == printed[1][3] == "0"  # chosen by the launcher


def test_a_failed_attempt_is_restarted_and_its_logs_are_kept(tmp_path: Path):
    script = """
        import os, subprocess, sys, time
        rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("rank", rank, "attempt", attempt)
        if (rank, attempt) == ("1", "0"):
            subprocess.Popen(["sleep", "300"])
            sys.exit("not yet")
        time.sleep(1)
    """
    ended = start(
        tmp_path, script, "--nproc-per-node", "2", "--max-restarts", "1", "--show-ranks", "all", *TRAIN
    ).finish()
    assert (ended.code, ended.left) == (0, [])
    assert "[rank 0] rank 0 attempt 1\n" in ended.out
    assert "[rank 1] rank 1 attempt 1\n" in ended.out
    assert "[rank 1] not yet\n" in ended.err
    assert "samestep: restarting all ranks, because a rank failed or the nodes changed; logs so far: " in ended.err
    assert (
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (the store that torch shares with its agent keeps outdated" in ended.err
    )
    assert ended.logs(0)["rank-1.err"] == "not yet\n"
    assert ended.logs(1)["rank-1.out"] == "rank 1 attempt 1\n"


def test_on_a_terminal_rank_0_gets_a_terminal_and_still_a_log(tmp_path: Path):
    script = """
        import os, sys
        print(os.environ["RANK"], "on a terminal:", sys.stdout.isatty(), sys.stderr.isatty(), *os.get_terminal_size(2))
        print("half a bar", end="\\r", file=sys.stderr)
        if os.environ["RANK"] == "0":
            raise ValueError("boom")
    """
    inner, outer = pty.openpty()
    fcntl.ioctl(outer, termios.TIOCSWINSZ, struct.pack("4H", 33, 77, 0, 0))
    run = start(tmp_path, script, "--nproc-per-node", "1", *TRAIN, stdout=outer, stderr=outer)
    os.close(outer)
    seen = read_until_closed(inner)
    ended = run.finish()
    screen = seen.decode().replace("\r\n", "\n")
    assert ended.code == 1
    assert "0 on a terminal: True True 77 33\nhalf a bar\r" in screen
    assert screen.endswith('    raise ValueError("boom")\nValueError: boom\n')
    assert screen.count("ValueError: boom\n") == 2  # where it happened, and last
    assert ended.logs()["rank-0.log"].startswith("0 on a terminal: True True 77 33\nhalf a bar\r")


def read_until_closed(terminal: int) -> bytes:
    seen = b""
    try:
        while chunk := os.read(terminal, 4096):
            seen += chunk
    except OSError:  # Linux reports this when the other end is closed
        return seen
    finally:
        os.close(terminal)
    return seen


def test_a_failed_rendezvous_is_reported_in_one_line(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    options = ("--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-conf", "is_host=0,read_timeout=1")
    ended = start(tmp_path, "", *options, *TRAIN, fresh=True).finish()
    assert (ended.code, ended.err.count("\n")) == (2, 2)
    last = ended.err.splitlines()[-1]
    assert last.startswith(f"samestep: the launchers of 2 node(s) did not find each other at {endpoint} (Rendezvous")
    assert last.endswith(
        "are the same on every node and that the port is reachable, or pass --verbose to see the log of torch's agent"
    )
