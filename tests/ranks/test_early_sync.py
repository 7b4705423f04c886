"""Early metric syncs: a rank with an urgent control value while steps have become slow."""

import os
import signal
import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.distributed import metric_sync
from samestep.training.preemption import StoppedEarly

QUICK, SLOW = 400, 0.25  # steps that set a long interval, then seconds that each later step takes


def slow_down(folder, signaled, evaluating):
    """Train quickly, then slowly; one rank gets SIGTERM in the first slow step. Returns how many slow steps follow."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    interval = 0
    late, metric_sync._LATE_SECONDS = metric_sync._LATE_SECONDS, 0.5
    try:
        with Run(global_batch=2, seed=0, folder=folder, replica_check_every=0) as run:
            model = run.wrap(nn.Linear(1, 1))
            data = run.shard(TensorDataset(torch.zeros(2 * QUICK + 400, 1)), num_workers=0)
            run.checkpoint(folder, model=model, train=data)
            for epoch in data.epochs(1):
                for step in epoch:
                    for (x,) in step:
                        step.mean(model(x).sum(1)).backward()
                    if step.number == QUICK:
                        interval = run._lifecycle.context.metrics._interval
                        run._lifecycle.context.metrics._steps = 0  # the last sync was just now: the worst case
                        if run.rank == signaled:
                            os.kill(os.getpid(), signal.SIGTERM)
                        if evaluating:
                            time.sleep(1.0)
                    if step.number >= QUICK:
                        time.sleep(SLOW)
            return None
    except StoppedEarly as early:
        return interval, int(str(early).removeprefix("saved step ")) - QUICK
    finally:
        metric_sync._LATE_SECONDS = late
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "signaled", "evaluating"), [(1, 0, False), (2, 1, False), (3, 0, True)])
def test_a_signal_ends_the_run_soon_after_steps_have_become_slow(ranks, tmp_path, size, signaled, evaluating):
    ended = ranks(size, slow_down, tmp_path, signaled, evaluating, timeout=150)
    assert len(set(ended)) == 1  # all at the same step
    interval, slow_steps = ended[0]
    assert interval >= 40  # slow steps until the next regular sync
    assert slow_steps <= 20


def wait_for_an_agreement(folder):
    """Rank 1 requests a sync and promises its next boundary; rank 0 does not poll and keeps working."""
    with Run(global_batch=2, seed=0) as run:
        run.mean(1.0)  # complete: no rank waits in it
        early = run._lifecycle.context.metrics._early
        if run.rank == 0:
            early.close()
            while not (folder / "raised").exists():
                time.sleep(0.05)
            raise TimeoutError("enough")
        run._comm.timeout = 1.5
        early._is_urgent = lambda: True
        try:
            early._promise()
            early.at_boundary()
        finally:
            (folder / "raised").touch()


@pytest.mark.slow
def test_a_rank_that_waits_for_an_early_sync_names_it(ranks, tmp_path):
    _, text = ranks.errors(2, wait_for_an_agreement, tmp_path)
    assert "rank 1 waits in the request for an early metric sync at test_early_sync.py:" in text
    assert "rank 0 was last in run.mean at test_early_sync.py:" in text


def sync_boundaries(urgent_at):
    """Count boundaries at a different pace on each rank until all ranks know of all that is urgent: where they sync."""
    late, metric_sync._LATE_SECONDS = metric_sync._LATE_SECONDS, 0.0
    look, metric_sync._POLL_SECONDS = metric_sync._POLL_SECONDS, 0.01
    synced_at, urgent = [], []
    try:
        with Run(global_batch=2, seed=0) as run:
            early = run._lifecycle.context.metrics._early
            early._is_urgent = lambda: bool(urgent)
            at, missing = 0, sum(map(len, urgent_at.values()))
            while missing:
                at += 1
                if at in urgent_at.get(run.rank, ()):
                    urgent.append(at)
                time.sleep(0.001 * (run.rank + 1))
                if early.at_boundary():
                    synced_at.append((at, run.sum(len(urgent))))
                    missing -= synced_at[-1][1]
                    urgent.clear()
                    early.synced()
    finally:
        metric_sync._LATE_SECONDS, metric_sync._POLL_SECONDS = late, look
    return synced_at


def test_ranks_at_a_different_pace_sync_at_the_same_boundaries(ranks):
    first, *others = ranks(3, sync_boundaries, {0: (50,), 1: (150, 151), 2: (250,)})
    assert all(each == first for each in others)
    assert sum(notified for _, notified in first) == 4
    assert first[0][0] >= 50  # the thread may look between the urgent and the boundary that it came before
    assert first[-1][0] >= 250
