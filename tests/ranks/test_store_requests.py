"""What a run asks of the store that all ranks share: requests per rank and second, and the number of keys."""

import time
import warnings
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.checkpoint import save
from samestep.distributed import rank_warnings


def keys_after_each(folder, acts):
    """The number of keys in the store after each of several rounds of everything that uses it."""
    counts, kept, rank_warnings._KEPT = [], rank_warnings._KEPT, 1
    with warnings.catch_warnings(), Run(global_batch=4, seed=0, folder=folder) as run:
        warnings.simplefilter("ignore", UserWarning)
        warnings.filterwarnings("always", "round")
        model = run.wrap(nn.Linear(2, 1))
        train = run.shard(TensorDataset(torch.zeros(8, 2)), num_workers=0)
        checkpoint = run.checkpoint(folder, model=model, train=train, keep=2)
        early = run._lifecycle.context.metrics._early
        for act in range(acts):
            run.once(str, act)
            run.once(bytes, 5 << 20, per="node")
            with pytest.raises(ZeroDivisionError):
                run.once(divmod, 1, 0)
            checkpoint.save(act)
            checkpoint.wait()
            run.mean(1.0)
            early._is_urgent = lambda: True
            early._promise()
            early._is_urgent = lambda: False
            while not early.at_boundary():
                pass
            run.barrier()
            early.synced()
            warnings.warn(f"round {act}", RuntimeWarning, stacklevel=1)
            run.barrier()
            counts.append(run._comm.store.num_keys())
            run.barrier()
    rank_warnings._KEPT = kept
    return counts


@pytest.mark.slow
def test_the_store_does_not_grow_with_saves_and_other_collectives(ranks, tmp_path):
    for counts in ranks(2, keys_after_each, tmp_path, 5):
        assert len(set(counts[1:])) == 1, counts


@contextmanager
def counted_requests():
    """Count the requests of this rank to the store, in all of its threads."""
    names = ("set", "get", "add", "check", "wait", "append", "compare_set", "delete_key", "multi_get", "multi_set")
    before, requests = {name: getattr(dist.Store, name) for name in names}, Counter()

    def counted(name):
        def request(*args):
            requests[name] += 1
            return before[name](*args)

        return request

    for name in names:
        setattr(dist.Store, name, counted(name))
    try:
        yield requests
    finally:
        for name, method in before.items():
            setattr(dist.Store, name, method)


def requests_in_each_situation(folder, seconds):
    """By situation: how many requests rank 1 sends, and in how many seconds."""
    found = {}

    @contextmanager
    def situation(name):
        run.barrier()
        since = time.monotonic()
        with counted_requests() as requests:
            yield
            found[name] = sum(requests.values()), time.monotonic() - since
        run.barrier()

    def write_slowly(*args):
        time.sleep(seconds)
        return write(*args)

    with Run(global_batch=4, seed=0, folder=folder) as run:
        model = run.wrap(nn.Linear(2, 1))
        train = run.shard(TensorDataset(torch.zeros(4096, 2)), num_workers=0)
        checkpoint = run.checkpoint(folder, model=model, train=train)
        with situation("waiting in a collective"):
            if run.is_main:
                time.sleep(seconds)
            run.barrier()
        with situation("once"):
            run.once(time.sleep, seconds)
        write = save.write_verified
        save.write_verified = write_slowly if run.is_main else write
        try:
            checkpoint.save()
            with situation("saving"):
                checkpoint.wait()
        finally:
            save.write_verified = write
        with situation("training"):
            for epoch in train.epochs(1):
                for step in epoch:
                    for (x,) in step:
                        step.mean(model(x)[:, 0]).backward()
                    time.sleep(0.01)
                    if step.number == 100 * seconds:
                        break
    return found


@pytest.mark.slow
def test_a_rank_sends_few_requests_per_second_whatever_it_does(ranks, tmp_path):
    _, found = ranks(2, requests_in_each_situation, tmp_path, 3)
    assert list(found) == ["waiting in a collective", "once", "saving", "training"]
    for situation, (requests, seconds) in found.items():
        assert seconds > 2.5, situation
        # of two ranks, the one that waits also reads the status of both: test_rank_status.py has thousands of ranks
        assert requests <= 30 + 8 * seconds, (situation, found)
