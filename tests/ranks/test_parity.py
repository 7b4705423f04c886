"""One rank against several: the same weights and the same log for every model, strategy and partition."""

import gc
import os
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from samestep import Run, read_metrics
from tests.ranks.models import TASKS, dataset

pytestmark = pytest.mark.slow

GLOBAL_BATCH = 7  # divided by neither 2, 3 nor 4
EPOCHS = 2
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def train(name, strategy, dtype, micro_batch):
    """Train one task: (weights and buffers, mean loss of every step, norm of every gradient)."""
    task = TASKS[name]
    folder = Path(f"{name}-{strategy}-{dtype}-{micro_batch}")
    norms = []
    with Run(global_batch=GLOBAL_BATCH, seed=1, folder=folder) as run:
        model = run.wrap(task.model().to(dtype), strategy, sync_batchnorm=task.one_micro_batch)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        shard = run.shard(dataset(task, dtype), shuffle=True, micro_batch=micro_batch)
        for epoch in shard.epochs(EPOCHS):
            for step in epoch:
                for batch in step:
                    task.loss(model, step, batch).backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                norms.append(float(full(norm)))
                optimizer.step()
                optimizer.zero_grad()
        weights = {key.removeprefix("module."): full(value) for key, value in model.state_dict().items()}
        first = run.is_main
    losses = [r["train/loss"] for r in read_metrics(folder / "metrics.jsonl", by_step=True)] if first else []
    return weights, losses, norms


def full(tensor):
    """The full tensor of one that may be sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


@contextmanager
def one_group():
    """One process group for several runs, so that they use the same port one after the other."""
    several = "RANK" in os.environ
    if several:
        dist.init_process_group("gloo")
    yield
    gc.collect()  # a wrapper that outlives its group can hang the next one
    if several:
        dist.destroy_process_group()


def train_all(name, strategies):
    """Both precisions of one task in one job, in micro-batches; where gradients need no gathering, full slices too."""
    split = None if TASKS[name].one_micro_batch else 2
    cases = list(product(strategies, TOLERANCE, [split]))
    cases += [(strategy, torch.float64, None) for strategy in strategies if split and strategy in (None, "ddp")]
    with one_group():
        return {case: train(name, *case) for case in cases}


@cache
def alone(ranks, name):
    """The result of one rank; the reference of every comparison."""
    return ranks(1, train_all, name, (None,))[0]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", TASKS)
def test_any_number_of_ranks_trains_the_same_as_one(ranks, name, size):
    compare(alone(ranks, name), ranks(size, train_all, name, ("ddp", "fsdp")), name)


def test_hybrid_sharding_on_two_nodes_trains_the_same_as_one_rank(ranks):
    name = "masked tokens"
    compare(alone(ranks, name), ranks(4, train_all, name, ("hybrid",), nodes=2), name)


def compare(reference, by_rank, name):
    """Compare every case on every rank with the same case on one rank."""
    for rank, cases in enumerate(by_rank):
        for (strategy, dtype, split), (weights, losses, norms) in cases.items():
            expected, expected_losses, expected_norms = reference[None, dtype, split]
            where, tolerance = f"{strategy}, {dtype}, micro_batch={split}, rank {rank}", TOLERANCE[dtype]
            assert weights.keys() == expected.keys()
            for key, value in expected.items():
                gap = float((weights[key].double() - value.double()).abs().max())
                assert gap < tolerance, f"{key} differs by {gap:.1e} ({where})"
            assert norms == pytest.approx(expected_norms, rel=10 * tolerance), where
            if rank == 0:
                assert losses == pytest.approx(expected_losses, rel=10 * tolerance), where
                assert len(losses) == EPOCHS * -(-TASKS[name].samples // GLOBAL_BATCH)
