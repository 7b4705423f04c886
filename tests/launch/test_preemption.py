"""Ranks that a signal or a time limit ends early: the signal is forwarded, they save, and a new launch resumes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from samestep.launch.failure_report import is_requested_exit
from samestep.launch.launcher import format_stop
from samestep.launch.rank_logs import RankFiles
from samestep.launch.signal_handler import SignalHandler
from samestep.training.preemption import StoppedEarly
from tests.launch.launched import Ended, Started, run_script, start
from tests.warm import Ranks, free_port

TRAIN = ["--nproc-per-node", "2", "--folder", "kept", "train.py"]
SCRIPT = """
    import sys, time, torch
    from torch import nn
    from torch.utils.data import TensorDataset
    from samestep import Run

    steps, pause = int(sys.argv[1]), float(sys.argv[2])
    with Run(global_batch=4, seed=0) as run:
        model = run.wrap(nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        data = run.shard(TensorDataset(torch.arange(4.0 * 4 * steps).view(-1, 4) / 99), shuffle=True, num_workers=0)
        run.checkpoint("out", model=model, optimizer=optimizer, train=data)
        for epoch in data.epochs(1):
            for step in epoch:
                for (x,) in step:
                    step.mean(model(x).square().sum(1)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step.number == 4:
                    open(f"up-{run.rank}", "w").close()
                time.sleep(pause)
        if run.is_main:
            torch.save([each.detach() for each in model.parameters()], "weights.pt")
"""


def saved_step(run: Started) -> int:
    return int((run.folder / "out" / "latest").read_text().removeprefix("step-"))


# The signal arrives after the script, while Python unloads its modules; torch takes a second.
ENDS_SLOWLY = """
    import os, signal, time
    from samestep import Run

    with Run(global_batch=4, seed=0) as run:
        run.barrier()

    class Late:
        def __del__(self, kill=os.kill, launcher=os.getppid(), sleep=time.sleep):
            kill(launcher, 15)
            sleep(2)

    late = Late()
"""


@pytest.mark.slow
def test_sigterm_while_finished_ranks_unload_their_modules_is_not_a_failure(tmp_path: Path):
    ended = start(tmp_path, ENDS_SLOWLY, "--nproc-per-node", "1", "--folder", "kept", "train.py").finish()
    assert (ended.code, ended.left) == (0, [])


@pytest.mark.slow
def test_a_time_limit_that_ends_before_the_ranks_start_is_reported(tmp_path: Path):
    ended = start(tmp_path, SLEEPS, "--time-limit", "1s", "--folder", "kept", "train.py").finish()
    assert ended.code == 124
    assert "samestep: the time limit of 1s is over" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.slow
def test_sigterm_saves_and_the_resumed_run_ends_with_the_same_weights(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = start(tmp_path, SCRIPT, "--max-restarts", "2", *TRAIN, "60", "0.1")
    run.wait_for_ranks(2, 60)
    run.process.send_signal(signal.SIGTERM)
    run.process.send_signal(signal.SIGTERM)  # as a cluster may do: it counts as the same signal
    ended = run.finish(60)
    assert (ended.code, ended.left) == (75, []), ended.err
    step = saved_step(run)
    assert 5 <= step < 60
    assert ended.err.endswith(f"samestep: preempted: saved step {step}; start the job again to resume\n")
    assert ended.err.count("\n") == 2
    assert not (tmp_path / "kept" / "logs" / "attempt-1").exists()

    again = start(tmp_path, SCRIPT, *TRAIN, "60", "0").finish(60)
    assert again.code == 0, again.err
    assert f"checkpoint: restored step {step} " in again.out
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    monkeypatch.chdir(undisturbed)
    ranks(2, run_script, tmp_path / "train.py", "60", "0")
    for mine, theirs in zip(torch.load(tmp_path / "weights.pt"), torch.load(undisturbed / "weights.pt"), strict=True):
        assert torch.equal(mine, theirs)


SLEEPS = """
    import time
    time.sleep(100)
"""


@pytest.fixture(scope="module")
def out_of_time(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Three launches with a time limit, by what they are doing; they run at the same time, since they mostly wait."""
    nodes = ("--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-conf", "is_host=1")
    launches = {
        "training": (SCRIPT, "--time-limit", "35s", *TRAIN, "2000", "0.1"),
        "sleeping": (SLEEPS, "--time-limit", "25s", "--max-restarts", "1", *TRAIN),
        "joining": ("", *nodes, "--time-limit", "12s", *TRAIN),
    }
    started = {name: start(tmp_path_factory.mktemp(name), *arguments) for name, arguments in launches.items()}
    return {name: each.finish() for name, each in started.items()}


@pytest.mark.slow
def test_a_time_limit_saves_and_ends_before_it_is_over(out_of_time: dict[str, Ended]):
    ended = out_of_time["training"]
    assert ended.code == 75, ended.err  # not 124, as when the launcher kills ranks at the time limit
    assert "the time limit: saved step-0" in ended.out
    assert "samestep: preempted: saved step " in ended.err


@pytest.mark.slow
def test_ranks_that_do_not_end_within_the_time_limit_are_killed_and_reported(out_of_time: dict[str, Ended]):
    ended = out_of_time["sleeping"]
    assert (ended.code, ended.left) == (124, [])
    assert ended.err.endswith(
        "samestep: the time limit of 25s is over: killed 2 rank(s) that had not ended by themselves; the last "
        "checkpoint, if there is one, is intact: start the job again to resume\n"
    )
    assert not (ended.folder / "kept" / "logs" / "attempt-1").exists()


@pytest.mark.slow
def test_a_time_limit_that_ends_while_waiting_for_other_nodes_is_reported(out_of_time: dict[str, Ended]):
    ended = out_of_time["joining"]
    assert (ended.code, ended.left) == (124, [])
    assert ended.err.endswith("samestep: the time limit of 12s is over, before any rank had started\n")


def test_a_time_limit_that_ends_while_ranks_save_after_a_signal_is_not_the_cause():
    with SignalHandler(shutdown_timeout=60, grace_period=60) as signals:
        rank = sleeper(ignores_sigterm=True)
        signals.rank_pids = frozenset([rank.pid])
        signal.raise_signal(signal.SIGTERM)
        signals.set_time_limit(0.1)
        assert rank.wait(30) == -signal.SIGKILL
        assert not signals.time_limit_reached


@pytest.mark.slow
def test_ranks_without_a_run_that_exit_with_75_are_not_restarted(tmp_path: Path):
    script = """
        import sys
        sys.exit(75)
    """
    ended = start(tmp_path, script, "--max-restarts", "3", *TRAIN).finish(50)
    assert ended.code == 75
    assert ended.err.endswith("samestep: preempted: the ranks ended with exit code 75; start the job again to resume\n")
    assert not (tmp_path / "kept" / "logs" / "attempt-1").exists()


@pytest.mark.slow
def test_a_rank_that_saves_on_sigterm_does_not_wait_for_a_failed_rank(tmp_path: Path):
    script = """
        import os, signal, time
        rank = os.environ["RANK"]
        received = []
        signal.signal(signal.SIGTERM, lambda *_: received.append("SIGTERM"))
        open("up-" + rank, "w").close()
        while not all(os.path.exists(f"up-{each}") for each in "012"):
            time.sleep(0.05)
        if rank == "1":
            raise ValueError("no such label")
        while rank == "0" or not received:
            time.sleep(0.1)
        raise RuntimeError("[pair.cc:553] Connection closed by peer")
    """
    three = ["--nproc-per-node", "3", "--folder", "kept", "train.py"]
    ended = start(tmp_path, script, *three, env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}).finish(80)
    assert ended.code == 1
    assert "samestep: 2 of 3 rank(s) on" in ended.err, ended.err
    assert "exit code 1, lost the connection to another rank" in ended.err
    failed = max((tmp_path / f"up-{rank}").stat().st_mtime for rank in (0, 1, 2))
    assert time.time() - failed < 25  # torch by itself waits 30 s
    assert "ended by the launcher after the first failure (SIGKILL)" in ended.err
    assert ended.err.endswith("ValueError: no such label\n")


def test_the_stop_message_of_a_rank_is_the_last_line_of_the_launcher(tmp_path: Path):
    without_message, with_message = RankFiles(tmp_path, 0), RankFiles(tmp_path, 1)
    assert format_stop(75, [without_message]).startswith(
        "samestep: preempted: the ranks ended with exit code 75; start the job"
    )
    assert format_stop(143, [without_message]) == "samestep: stopped: the ranks ended with exit code 143"
    with_message.error.write_text(
        json.dumps({"message": {"message": f"{StoppedEarly.__name__}: ended at step 3 with nothing saved"}})
    )
    assert format_stop(143, [without_message, with_message]) == "samestep: stopped: ended at step 3 with nothing saved"
    with_message.error.write_text(json.dumps({"message": {"message": "ValueError: 3"}}))
    assert "exit code 75" in format_stop(75, [without_message, with_message])


def test_an_exit_counts_as_requested_only_if_all_ranks_got_the_request():
    term = -signal.SIGTERM
    assert all(is_requested_exit(codes) for codes in ([75], [75, 75], [75, term], [143, 75]))
    assert not any(is_requested_exit(codes) for codes in ([], [term], [75, 1], [0], [75, -signal.SIGKILL]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_is_forwarded_to_running_ranks(number: signal.Signals):
    with SignalHandler(shutdown_timeout=5, grace_period=5) as signals:
        rank = sleeper()
        signals.rank_pids = frozenset([rank.pid])
        signal.raise_signal(number)
        assert rank.wait(30) == -number
        assert (signals.received, signals.warning) == ((number, None) if number == signal.SIGTERM else (None, number))


def sleeper(ignores_sigterm: bool = False) -> "subprocess.Popen[str]":
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " if ignores_sigterm else ""
    script = f"import signal, time; {ignore}print('up', flush=True); time.sleep(60)"
    started = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    with started.stdout as out:
        out.readline()
    return started


def test_only_ranks_that_still_run_count_as_killed_by_the_launcher():
    with SignalHandler(shutdown_timeout=5, grace_period=5) as signals:
        failed, waiting = sleeper(), sleeper()
        signals.rank_pids = frozenset([failed.pid, waiting.pid])
        failed.kill()
        os.waitid(os.P_PID, failed.pid, os.WEXITED | os.WNOWAIT)
        signals.kill_remaining_ranks()
        assert (waiting.wait(30), failed.wait(60)) == (-signal.SIGKILL, -signal.SIGKILL)
        assert signals.killed_pids == {waiting.pid}


@pytest.mark.slow
def test_ranks_that_save_for_longer_than_the_grace_period_are_killed():
    with SignalHandler(shutdown_timeout=5, grace_period=1) as signals:
        rank = sleeper(ignores_sigterm=True)
        signals.rank_pids = frozenset([rank.pid])
        signal.raise_signal(signal.SIGTERM)
        assert rank.wait(30) == -signal.SIGKILL


@pytest.mark.slow
def test_a_second_sigterm_kills_the_ranks_unless_it_follows_immediately(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("samestep.launch.signal_handler.DUPLICATE_SIGNAL_SECONDS", 1.0)
    with SignalHandler(shutdown_timeout=60, grace_period=60) as signals:
        rank = sleeper(ignores_sigterm=True)
        signals.rank_pids = frozenset([rank.pid])
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        time.sleep(1.1)
        assert rank.poll() is None
        signal.raise_signal(signal.SIGTERM)
        assert rank.wait(30) == -signal.SIGKILL
