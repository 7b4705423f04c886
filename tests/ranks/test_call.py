"""Ranks that have something to tell while steps have become slow."""

import os
import signal
import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.distributed import metric_sync as call
from samestep.training.preemption import StoppedEarly

QUICK, SLOW = 400, 0.25  # steps that set a long interval, then seconds that each later step takes


def slow_down(folder, told_by, evaluating):
    """Train quickly, then slowly; one rank is told to end at the first slow step. How many slow steps follow."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    interval = 0
    late, call._LATE_SECONDS = call._LATE_SECONDS, 0.5
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
                        run._lifecycle.context.metrics._steps = 0  # the last pulse was just now: the worst moment
                        if run.rank == told_by:
                            os.kill(os.getpid(), signal.SIGTERM)
                        if evaluating:
                            time.sleep(1.0)
                    if step.number >= QUICK:
                        time.sleep(SLOW)
            return None
    except StoppedEarly as early:
        return interval, int(str(early).removeprefix("saved step ")) - QUICK
    finally:
        call._LATE_SECONDS = late
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "told_by", "evaluating"), [(1, 0, False), (2, 1, False), (3, 0, True)])
def test_a_rank_that_is_told_to_end_is_heard_soon_where_steps_have_become_slow(
    ranks, tmp_path, size, told_by, evaluating
):
    ended = ranks(size, slow_down, tmp_path, told_by, evaluating, timeout=60)
    assert len(set(ended)) == 1  # all at one step
    interval, slow_steps = ended[0]
    assert interval >= 40  # so many slow steps would it have taken
    assert slow_steps <= 20


def wait_in_vain(folder):
    """The second rank has news and promises its next boundary; the first one looks no more and works on."""
    with Run(global_batch=2, seed=0) as run:
        run.mean(1.0)  # what came before: no rank waits for it any more
        calling = run._lifecycle.context.metrics._early
        if run.rank == 0:
            calling.close()
            while not (folder / "told").exists():
                time.sleep(0.05)
            raise TimeoutError("enough")
        run._comm.timeout = 1.5
        calling._is_urgent = lambda: True
        try:
            calling._promise()
            calling.at_boundary()
        finally:
            (folder / "told").touch()


@pytest.mark.slow
def test_a_rank_that_waits_for_the_called_pulse_names_it_and_not_what_came_before(ranks, tmp_path):
    _, told = ranks.errors(2, wait_in_vain, tmp_path)
    assert "rank 1 waits in the request for an early metric sync at test_call.py:" in told
    assert "rank 0 was last in run.mean at test_call.py:" in told


def meet(steps, told_at):
    """Count boundaries at a pace of each rank's own; at which of them the call has all ranks meet."""
    late, call._LATE_SECONDS = call._LATE_SECONDS, 0.0
    look, call._POLL_SECONDS = call._POLL_SECONDS, 0.01
    met, news = [], []
    try:
        with Run(global_batch=2, seed=0) as run:
            calling = run._lifecycle.context.metrics._early
            calling._is_urgent = lambda: bool(news)
            for at in range(1, steps + 1):
                if at in told_at.get(run.rank, ()):
                    news.append(at)
                time.sleep(0.001 * (run.rank + 1))
                if calling.at_boundary():
                    met.append((at, run.sum(len(news))))
                    news.clear()
                    calling.synced()
    finally:
        call._LATE_SECONDS, call._POLL_SECONDS = late, look
    return met


def test_ranks_that_do_not_wait_for_each_other_meet_at_the_same_boundaries(ranks):
    first, *others = ranks(3, meet, 300, {0: (50,), 1: (150, 151), 2: (250,)})
    assert all(each == first for each in others)
    assert sum(told for _, told in first) == 4
    assert first[0][0] >= 50  # the thread may look between the news and the boundary that it came before
    assert first[-1][0] >= 250
