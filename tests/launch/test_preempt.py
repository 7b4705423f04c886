"""Ranks that are told to end early under the launcher: passed on, understood, not started anew, gone on with later."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from samestep.launch.failure_report import is_told_to_end
from samestep.launch.launcher import _tell_end
from samestep.launch.rank_logs import RankFiles
from samestep.launch.signal_handler import Stop
from tests.launch.started import Ended, Started, run_script, start
from tests.warm import Ranks

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
        data = run.shard(TensorDataset(torch.arange(4.0 * 4 * steps).view(-1, 4) / 99), shuffle=True, workers=0)
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


# The signal comes when all of the script is over and Python unloads its modules, torch's for a second.
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
def test_sigterm_while_ranks_that_ended_well_unload_their_modules_is_no_failure(tmp_path: Path):
    ended = start(tmp_path, ENDS_SLOWLY, "--nproc-per-node", "1", "--folder", "kept", "train.py").finish()
    assert (ended.code, ended.left) == (0, [])


@pytest.mark.slow
def test_a_time_limit_that_is_over_before_anything_has_begun_is_told_as_such(tmp_path: Path):
    ended = start(tmp_path, SLEEPS, "--time-limit", "1s", "--folder", "kept", "train.py").finish()
    assert ended.code == 124
    assert "samestep: the time limit of 1s is over, and " in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves_and_another_start_ends_with_the_same_weights(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = start(tmp_path, SCRIPT, "--max-restarts", "2", *TRAIN, "60", "0.1")
    run.ranks_are_up(2, 60)
    run.process.send_signal(signal.SIGTERM)
    run.process.send_signal(signal.SIGTERM)  # as a cluster may: it is the same signal
    ended = run.finish(60)
    assert (ended.code, ended.left) == (75, []), ended.err
    step = saved_step(run)
    assert 5 <= step < 60
    assert ended.err.endswith(f"samestep: preempted: saved step {step}, start again to go on\n")
    assert ended.err.count("\n") == 2
    assert not (tmp_path / "kept" / "logs" / "attempt-1").exists()

    again = start(tmp_path, SCRIPT, *TRAIN, "60", "0").finish(60)
    assert again.code == 0, again.err
    assert f"checkpoint: restored step {step} " in again.out
    calm = tmp_path / "calm"
    calm.mkdir()
    monkeypatch.chdir(calm)
    ranks(2, run_script, tmp_path / "train.py", "60", "0")
    for mine, theirs in zip(torch.load(tmp_path / "weights.pt"), torch.load(calm / "weights.pt"), strict=True):
        assert torch.equal(mine, theirs)


SLEEPS = """
    import time
    time.sleep(100)
"""


@pytest.fixture(scope="module")
def out_of_time(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Launches whose time is limited, by what they are at; all at once, for most of their time they wait."""
    nodes = ("--nnodes", "2", "--rdzv-endpoint", "localhost:0", "--rdzv-conf", "is_host=1")
    launches = {
        "training": (SCRIPT, "--time-limit", "35s", *TRAIN, "2000", "0.1"),
        "sleeping": (SLEEPS, "--time-limit", "25s", "--max-restarts", "1", *TRAIN),
        "meeting": ("", *nodes, "--time-limit", "12s", *TRAIN),
    }
    live = {name: start(tmp_path_factory.mktemp(name), *typed) for name, typed in launches.items()}
    return {name: each.finish() for name, each in live.items()}


@pytest.mark.slow
def test_a_time_limit_saves_and_ends_before_it_is_over(out_of_time: dict[str, Ended]):
    ended = out_of_time["training"]
    assert ended.code == 75, ended.err  # and not 124, with which the launcher ends what is left when the time is over
    assert "the time limit: saved step-0" in ended.out
    assert "samestep: preempted: saved step " in ended.err


@pytest.mark.slow
def test_ranks_that_do_not_end_in_time_are_killed_and_it_is_said(out_of_time: dict[str, Ended]):
    ended = out_of_time["sleeping"]
    assert (ended.code, ended.left) == (124, [])
    assert ended.err.endswith(
        "samestep: the time limit of 25s is over, and 2 rank(s) had not ended by themselves: they were killed; what "
        "the last checkpoint holds, if there is one, is safe: start again to go on\n"
    )
    assert not (ended.folder / "kept" / "logs" / "attempt-1").exists()


@pytest.mark.slow
def test_a_time_limit_that_is_over_while_other_nodes_are_waited_for_is_told_as_such(out_of_time: dict[str, Ended]):
    ended = out_of_time["meeting"]
    assert (ended.code, ended.left) == (124, [])
    assert ended.err.endswith("samestep: the time limit of 12s is over, and no rank was at work yet\n")


def test_a_time_limit_that_is_over_while_ranks_save_because_of_a_signal_is_not_the_cause():
    with Stop(patience=60, grace=60) as stop:
        rank = sleeper(stubborn=True)
        stop.ranks = frozenset([rank.pid])
        signal.raise_signal(signal.SIGTERM)
        stop.limit(0.1)
        assert rank.wait(30) == -signal.SIGKILL
        assert not stop.time_is_over


@pytest.mark.slow
def test_ranks_without_a_run_that_end_with_75_are_not_started_anew(tmp_path: Path):
    script = """
        import sys
        sys.exit(75)
    """
    ended = start(tmp_path, script, "--max-restarts", "3", *TRAIN).finish(50)
    assert ended.code == 75
    assert ended.err.endswith("samestep: preempted: the ranks ended with exit code 75, start again to go on\n")
    assert not (tmp_path / "kept" / "logs" / "attempt-1").exists()


@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_failed_does_not_take_the_end_for_a_signal_to_save(tmp_path: Path):
    script = """
        import os, signal, time
        rank = os.environ["RANK"]
        told = []
        signal.signal(signal.SIGTERM, lambda *_: told.append("told"))
        open("up-" + rank, "w").close()
        while not all(os.path.exists(f"up-{each}") for each in "012"):
            time.sleep(0.05)
        if rank == "1":
            raise ValueError("no such label")
        while rank == "0" or not told:
            time.sleep(0.1)
        raise ConnectionError("Connection closed by peer")
    """
    three = ["--nproc-per-node", "3", "--folder", "kept", "train.py"]
    ended = start(tmp_path, script, *three, env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}).finish(80)
    assert ended.code == 1
    assert "samestep: 2 of 3 rank(s) on" in ended.err, ended.err
    assert "exit code 1, when it lost a peer" in ended.err
    failed = max((tmp_path / f"up-{rank}").stat().st_mtime for rank in (0, 1, 2))
    assert time.time() - failed < 25  # torch by itself waits 30 s
    assert "ended by the launcher after the first failure (SIGKILL)" in ended.err
    assert ended.err.endswith("ValueError: no such label\n")


def test_what_ranks_had_to_say_is_the_launchers_last_word(tmp_path: Path):
    silent, speaking = RankFiles(tmp_path, 0), RankFiles(tmp_path, 1)
    assert _tell_end(75, [silent]).startswith("samestep: preempted: the ranks ended with exit code 75, start again")
    assert _tell_end(143, [silent]) == "samestep: stopped: the ranks ended with exit code 143"
    speaking.error.write_text(json.dumps({"message": {"message": "EndedEarly: ended at step 3 with nothing saved"}}))
    assert _tell_end(143, [silent, speaking]) == "samestep: stopped: ended at step 3 with nothing saved"
    speaking.error.write_text(json.dumps({"message": {"message": "ValueError: 3"}}))
    assert "exit code 75" in _tell_end(75, [silent, speaking])


def test_only_ranks_that_all_were_told_to_end_count_as_told():
    term = -signal.SIGTERM
    assert all(is_told_to_end(codes) for codes in ([75], [75, 75], [75, term], [143, 75]))
    assert not any(is_told_to_end(codes) for codes in ([], [term], [75, 1], [0], [75, -signal.SIGKILL]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_is_passed_on_to_living_ranks(number: signal.Signals):
    with Stop(patience=5, grace=5) as stop:
        rank = sleeper()
        stop.ranks = frozenset([rank.pid])
        signal.raise_signal(number)
        assert rank.wait(30) == -number
        assert (stop.received, stop.warned) == ((number, None) if number == signal.SIGTERM else (None, number))


def sleeper(stubborn: bool = False) -> "subprocess.Popen[str]":
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " if stubborn else ""
    script = f"import signal, time; {ignore}print('up', flush=True); time.sleep(60)"
    started = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    with started.stdout as out:
        out.readline()
    return started


def test_only_ranks_that_still_live_count_as_ended_by_the_launcher():
    with Stop(patience=5, grace=5) as stop:
        failed, waiting = sleeper(), sleeper()
        stop.ranks = frozenset([failed.pid, waiting.pid])
        failed.kill()
        os.waitid(os.P_PID, failed.pid, os.WEXITED | os.WNOWAIT)
        stop.end_ranks()
        assert (waiting.wait(30), failed.wait(60)) == (-signal.SIGKILL, -signal.SIGKILL)
        assert stop.ended == {waiting.pid}


def test_ranks_that_save_for_longer_than_the_grace_are_killed():
    with Stop(patience=5, grace=1) as stop:
        rank = sleeper(stubborn=True)
        stop.ranks = frozenset([rank.pid])
        signal.raise_signal(signal.SIGTERM)
        assert rank.wait(30) == -signal.SIGKILL


def test_a_second_sigterm_kills_at_once_but_not_one_that_follows_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("samestep.launch.signal_handler._ECHO_SECONDS", 1.0)
    with Stop(patience=60, grace=60) as stop:
        rank = sleeper(stubborn=True)
        stop.ranks = frozenset([rank.pid])
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        time.sleep(1.1)
        assert rank.poll() is None
        signal.raise_signal(signal.SIGTERM)
        assert rank.wait(30) == -signal.SIGKILL
