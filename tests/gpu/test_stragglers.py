"""A rank that makes the others wait on the GPU is named, and measuring it does not wait for the GPU."""

import re
import time
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from samestep import Run, read_metrics
from samestep.training import rank_times
from tests.gpu.test_nccl import missing_for

WIDTH, STEPS, INTERVAL, LATE = 2048, 24, 3, 0.06
STEADY = range(8, 20)
TIMEOUT = 200


class Rows(Dataset):
    """Ones; the slow rank sleeps when it reads the first row of its part of a step."""

    def __init__(self, late):
        self.late = late

    def __len__(self):
        return 8 * STEPS

    def __getitem__(self, index):
        if index % 4 == 0:
            time.sleep(self.late)
        return torch.ones(WIDTH)


def occupy_gpu(seconds):
    """Queue about so many seconds of work for the GPU; the host does not wait for it."""
    torch.cuda._sleep(int(seconds * 1.5e9))


def train(folder, slow, where, steady):
    """Train some steps with tiny windows; returns the warnings, the backend, and how often a rank was measured."""
    warnings.filterwarnings("ignore", "Synchronization debug mode")
    before = rank_times._WINDOW_STEPS, rank_times._WINDOW_SECONDS, rank_times._SHARE
    rank_times._WINDOW_STEPS, rank_times._WINDOW_SECONDS, rank_times._SHARE = INTERVAL, 0.0, 0.4
    try:
        with (
            warnings.catch_warnings(record=True) as caught,
            Run(global_batch=8, seed=0, folder=folder, precision="fp32", replica_check_every=0) as run,
        ):
            warnings.simplefilter("always")
            late = LATE if run.rank == slow else 0.0
            model = run.wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
            context = run._lifecycle.context
            context.metrics._next_interval = lambda: INTERVAL
            for epoch in run.shard(Rows(late if where == "data" else 0.0), num_workers=0).epochs(1):
                for step in epoch:
                    if steady:
                        torch.cuda.set_sync_debug_mode("error" if step.number in STEADY else "default")
                    for x in step:
                        if where == "compute" and late:
                            occupy_gpu(late)
                        step.mean(model(x)[:, 0].square()).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            torch.cuda.set_sync_debug_mode("default")
            found = [str(each.message) for each in caught if "makes the others wait" in str(each.message)]
            return found, run._comm.backend, context.times.steps
    finally:
        torch.cuda.set_sync_debug_mode("default")
        rank_times._WINDOW_STEPS, rank_times._WINDOW_SECONDS, rank_times._SHARE = before


ACTIONS = {"compute": "computing", "data": "reading data"}


@pytest.mark.parametrize("where", ["compute", "data"])
def test_a_rank_whose_gpu_is_late_is_named_without_waiting_for_the_gpu(ranks, tmp_path, where):
    steady = missing_for(2) is None  # gloo copies tensors through the host
    results = ranks(2, train, tmp_path, 1, where, steady, timeout=TIMEOUT)
    (messages, backend, steps), (others, *_) = results
    assert (backend == "nccl") == steady
    assert steps == STEPS
    assert not others
    assert len(messages) == 1, messages
    assert re.match(r"rank 1 makes the others wait for [\d.]+ ms of every [\d.]+ ms step", messages[0])
    assert f" per step {ACTIONS[where]}, the others " in messages[0]
    waits = [record for record in read_metrics(tmp_path / "metrics.jsonl") if "ranks/wait/1" in record]
    assert len(waits) >= STEPS // INTERVAL - 3
    assert sum(record["ranks/wait/1"] for record in waits) > 4 * sum(record["ranks/wait/0"] for record in waits)


def test_even_ranks_on_gpus_give_no_warning_and_no_additional_records(ranks, tmp_path):
    for messages, _, steps in ranks(2, train, tmp_path, None, "compute", False, timeout=TIMEOUT):
        assert not messages
        assert steps == STEPS
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(STEPS))
    assert any("ranks/wait/0" in record for record in records)
