"""Preemption: a signal ends the run on all ranks at a step boundary after a save, and it resumes exactly."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.data.audit import audit
from samestep.training.preemption import Preemption, StoppedEarly, TimeLimit
from tests.ranks.models import TASKS, dataset

EPOCHS = 3  # of four steps each: 23 samples, 7 at a time


def train(folder, strategy, signal_at, keep=True, number=signal.SIGTERM, after=0):
    """Train; the last rank gets a signal in step `signal_at`. Returns the weights, or how the run ended early."""
    evaluated = []
    before = signal.signal(number, signal.SIG_DFL)  # warm ranks dump their stacks at SIGUSR1
    try:
        with Run(global_batch=7, seed=2, folder=folder, ledger=True) as run:
            task = TASKS["mlp"]
            model = run.wrap(task.model(), None if run.size == 1 else strategy)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            data = run.shard(dataset(task, torch.float32), shuffle=True, num_workers=0, micro_batch=3)
            if keep:
                run.checkpoint(folder, model=model, optimizer=optimizer, train=data)
            for epoch in data.epochs(EPOCHS):
                for step in epoch:
                    for batch in step:
                        task.loss(model, step, batch).backward()
                    if step.number == signal_at and run.rank == run.size - 1:
                        os.kill(os.getpid(), number)
                    run.log({"mark": 1.0}, now=True)  # sync now instead of within a second
                    optimizer.step()
                    optimizer.zero_grad()
                evaluated.append((epoch.number, run.sum(1)))
            with torch.no_grad():
                weights = {name: value.clone() for name, value in model.state_dict().items()}
            return weights, evaluated
    except StoppedEarly as early:
        return early.code, early.status, str(early), evaluated
    finally:
        signal.signal(number, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "number"), [("ddp", signal.SIGTERM), ("fsdp", signal.SIGUSR1), ("ddp", signal.SIGUSR2)]
)
def test_a_signal_on_one_rank_ends_all_at_the_same_step_and_resumes_to_the_same_weights(
    ranks, tmp_path, strategy, number
):
    calm, _ = ranks(2, train, tmp_path / "calm", "ddp", None)[0]
    folder = tmp_path / "stormy"
    for signal_at in (1, 7):
        for code, status, text, _ in ranks(2, train, folder, strategy, signal_at, True, number):
            assert (code, status, text) == (75, "preempted", f"saved step {signal_at + 1}")
        assert (folder / "latest").read_text() == f"step-{signal_at + 1:08}\n"
        assert json.loads((folder / "summary.json").read_text())["status"] == "preempted"
    (weights, evaluated), _ = ranks(2, train, folder, "ddp", None)
    # step 7 was the last of its epoch: the code after the loop over steps runs after the resume
    assert evaluated == [(1, 2), (2, 2)]
    assert all(torch.equal(weights[name], calm[name]) for name in calm)
    report = audit(folder)
    assert report.exactly_once
    assert [(epoch.number, epoch.samples) for epoch in report.shards[0].epochs] == [(at, 23) for at in range(EPOCHS)]
    assert "SIG" in (folder / "log.txt").read_text()


@pytest.mark.slow
def test_a_run_without_checkpoint_continues_after_a_warning_signal_and_ends_at_sigterm(ranks, tmp_path):
    calm, _ = ranks(2, train, tmp_path / "calm", "ddp", None, False)[0]
    warned, evaluated = ranks(2, train, tmp_path / "warned", "ddp", 2, False, signal.SIGUSR2)[0]
    assert all(torch.equal(warned[name], calm[name]) for name in calm)
    assert len(evaluated) == EPOCHS
    result = (tmp_path / "warned" / "log.txt").read_text()
    assert result.count("SIGUSR2: this run has no checkpoint to save (run.checkpoint makes one), so it continues") == 1
    for ended in ranks(2, train, tmp_path / "ended", "ddp", 2, False):
        assert ended == (143, "stopped", "ended at step 3 with nothing saved", [])
    result = (tmp_path / "ended" / "log.txt").read_text()
    assert "SIGTERM: this run has no checkpoint to save (run.checkpoint makes one); it ends at step 3 and its" in result
    assert json.loads((tmp_path / "ended" / "summary.json").read_text())["status"] == "stopped"


def number_by_epoch(folder, signal_in):
    """Number checkpoints by epoch, and get a signal in one of them."""
    try:
        with Run(global_batch=2, seed=0, folder=folder) as run:
            model = run.wrap(nn.Linear(1, 1))
            data = run.shard(TensorDataset(torch.zeros(8, 1)), num_workers=0)
            checkpoint = run.checkpoint(folder, model=model, train=data, keep=9)
            for epoch in data.epochs(4):
                for step in epoch:
                    for (x,) in step:
                        step.mean(model(x).sum(1)).backward()
                    if epoch.number == signal_in:
                        os.kill(os.getpid(), signal.SIGTERM)
                    run.log({"mark": 1.0}, now=True)
                checkpoint.save(step=epoch.number)
    except StoppedEarly:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return sorted(path.name for path in Path(folder).glob("step-*"))


def test_a_checkpoint_before_exit_follows_the_numbers_of_the_script(ranks, tmp_path):
    (names,) = ranks(1, number_by_epoch, tmp_path, 2)
    assert names == ["step-00000000", "step-00000001-2"]
    (names,) = ranks(1, number_by_epoch, tmp_path, 2)  # another signal, right after it was restored
    assert names == ["step-00000000", "step-00000001-3"]
    (names,) = ranks(1, number_by_epoch, tmp_path, None)
    assert names[-2:] == ["step-00000002", "step-00000003"]


def test_a_checkpoint_before_exit_does_not_block_the_numbers_of_the_script(ranks, tmp_path):
    (names,) = ranks(1, number_by_epoch, tmp_path, 0)
    assert len(names) == 1  # numbered by steps, since the script has not saved yet
    assert int(names[0].removeprefix("step-")) >= 1
    (names,) = ranks(1, number_by_epoch, tmp_path, None)
    assert names == ["step-00000000", "step-00000001", "step-00000002", "step-00000003"]
    assert (tmp_path / "latest").read_text() == "step-00000003\n"


def handlers(numbers):
    """Which handlers are installed inside a run and after it, if the script has one for SIGUSR2."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    mine = signal.signal(signal.SIGUSR2, own)
    try:
        with Run(global_batch=1, seed=0):
            inside = [signal.getsignal(number) for number in numbers]
        after = [signal.getsignal(number) for number in numbers]
        return [each in (own, signal.SIG_DFL) for each in inside], [each in (own, signal.SIG_DFL) for each in after]
    finally:
        signal.signal(signal.SIGUSR2, mine)
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def own(number, frame):
    pass


def test_a_signal_handler_of_the_script_is_kept_and_all_handlers_are_restored(ranks):
    ((inside, after),) = ranks(1, handlers, [signal.SIGTERM, signal.SIGUSR2])
    assert inside == [False, True]
    assert after == [True, True]


def python(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", dedent(script)], cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.slow
def test_an_echo_of_a_signal_counts_once_and_a_second_signal_ends_the_process(tmp_path):
    result = python(
        """
        import os, signal, time
        from samestep.training import preemption
        preemption.DUPLICATE_SIGNAL_SECONDS = 1.0
        signals = preemption.SignalRecorder()
        signals.install()
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        print("continues", signals.received, flush=True)
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGTERM)
        print("should not be", flush=True)
        """,
        tmp_path,
    )
    assert (result.returncode, result.stdout) == (-signal.SIGTERM, "continues 4\n")


@pytest.mark.slow
def test_a_process_forked_by_the_script_still_ends_at_a_signal(tmp_path):
    result = python(
        """
        import os, signal, time
        from samestep.training import preemption
        signals = preemption.SignalRecorder()
        signals.install()
        child = os.fork()
        if not child:
            time.sleep(30)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), signals.received)
        """,
        tmp_path,
    )
    assert result.stdout == "-15 0\n"


def test_a_time_limit_reserves_two_saves_and_the_longest_pause():
    limit = TimeLimit(time.time() + 100)  # margin: 5 s
    assert not limit.check(save_seconds=0.0)
    assert not limit.check(save_seconds=45.5)
    assert limit.check(save_seconds=48.0)
    time.sleep(1.5)
    assert limit.check(save_seconds=46.8)


class Saver(Preemption):
    def save_seconds(self):
        return 25.0


def test_a_time_limit_reserves_time_for_every_checkpoint_of_a_run():
    with Run(global_batch=4) as run:
        context = run._lifecycle.context
        context.callbacks.append(Saver(context, None))
        preemption = Preemption(context, time.time() + 100)
        assert preemption.sync_value() == 0.0
        context.callbacks.append(Saver(context, None))
        assert preemption.sync_value() == 3.0  # the time limit


GROUP = """
    import os, signal, sys, time, psutil, torch
    from torch import nn
    from torch.utils.data import Dataset
    from samestep import Run

    class Slow(Dataset):
        def __len__(self):
            return 400
        def __getitem__(self, index):
            time.sleep(0.01)
            return torch.full((1,), float(index))

    if __name__ == "__main__":
        torch.multiprocessing.set_start_method(sys.argv[1])
        with Run(global_batch=4, seed=0, folder="out") as run:
            model = run.wrap(nn.Linear(1, 1))
            data = run.shard(Slow(), num_workers=2)
            run.checkpoint("out", model=model, train=data)
            for epoch in data.epochs(1):
                for step in epoch:
                    for x in step:
                        step.mean(model(x).sum(1)).backward()
                    if step.number == 3:
                        family = psutil.Process().children(recursive=True)
                        assert len(family) >= 2
                        for each in family:
                            each.send_signal(signal.Signals[sys.argv[2]])
                        time.sleep(0.5)  # they get it before this process
                    if step.number == 12:  # far beyond the prefetched batches: the workers still run
                        os.kill(os.getpid(), signal.Signals[sys.argv[2]])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "number"), [("fork", "SIGTERM"), ("spawn", "SIGTERM"), ("forkserver", "SIGTERM"), ("fork", "SIGUSR1")]
)
def test_data_workers_keep_running_when_every_process_gets_the_signal(tmp_path, method, number):
    (tmp_path / "train.py").write_text(dedent(GROUP))
    result = subprocess.run(
        [sys.executable, "train.py", method, number],
        cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert result.returncode == 75, result.stderr
    assert f"{number}: saved step-000000" in result.stdout
    assert int((tmp_path / "out" / "latest").read_text().removeprefix("step-")) >= 13
