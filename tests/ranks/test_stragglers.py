"""A rank that makes the others wait is named once with what it does meanwhile; even ranks give no warning."""

import json
import time
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from samestep import Run, read_metrics
from samestep.distributed import metric_sync
from samestep.training import rank_times

BASE, LATE = 0.01, 0.07  # seconds of a step on every rank, and in addition on the slow one
STEPS, INTERVAL = 11, 3


class Rows(Dataset):
    """Ones; the rank that is slow sleeps when it reads the first row of its part of a step."""

    def __init__(self, count, rows, late):
        self.count, self.rows, self.late = count, rows, late

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index % self.rows == 0:
            time.sleep(self.late)
        return torch.ones(4)


class Records(IterableDataset):
    """The same as a stream."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return (self.rows[index] for index in range(len(self.rows)))


class State:
    """A part of a checkpoint whose state takes some time."""

    def __init__(self, late):
        self.late = late

    def state_dict(self):
        time.sleep(self.late)
        return {}

    def load_state_dict(self, state):
        pass


class Net(nn.Module):
    """A small network; the slow rank sleeps in its forward pass."""

    def __init__(self, late, batchnorm):
        super().__init__()
        self.late, self.first, self.last = late, nn.Linear(4, 4), nn.Linear(4, 1)
        self.norm = nn.BatchNorm1d(4) if batchnorm else nn.Identity()

    def forward(self, x):
        time.sleep(self.late)
        return self.last(self.norm(self.first(x)))[:, 0]


def train(folder, slow=None, where="forward", strategy="ddp", batchnorm=False, micro_batch=None, stream=False):
    """Train some steps with tiny windows; returns the warnings, and the phases that this rank has measured."""
    window = rank_times._WINDOW_STEPS, rank_times._WINDOW_SECONDS, rank_times._SHARE
    rank_times._WINDOW_STEPS, rank_times._WINDOW_SECONDS = INTERVAL, 0.0
    if slow is None:
        rank_times._SHARE = 0.7  # of such a small window; the cores are shared with other tests
    try:
        with warnings.catch_warnings(record=True) as caught, Run(global_batch=8, seed=0, folder=folder) as run:
            warnings.simplefilter("always")
            late = LATE * (3 if where == "checkpoint" else 1) if run.rank == slow else 0.0  # a save takes long anyway
            part = {where: late}
            net = Net(part.get("forward", 0.0), batchnorm)
            model = run.wrap(net, strategy if run.size > 1 else None, sync_batchnorm=batchnorm)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            rows = Rows(8 * STEPS, 8 // run.size, part.get("data", 0.0))
            if stream:
                data = run.stream(Records(rows), decode=lambda row: (time.sleep(part.get("decode", 0.0) / 4), row)[1])
            else:
                data = run.shard(rows, num_workers=0, micro_batch=micro_batch)
            checkpoint = run.checkpoint(folder, model=model, data=data, state=State(part.get("checkpoint", 0.0)))
            context = run._lifecycle.context
            context.metrics._next_interval = lambda: INTERVAL
            for epoch in data.epochs(1):
                for step in epoch:
                    for x in step:
                        time.sleep(BASE / len(step))
                        step.mean(model(x).square()).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if where == "checkpoint" and step.number % 3 == 0:
                        checkpoint.save()
                    if where == "evaluation" and step.number % 2:
                        with run.evaluate(model) as evaluated:
                            time.sleep(2 * late)
                            run.mean(evaluated(x))
            return [str(each.message) for each in caught if "makes the others wait" in str(each.message)], dict(
                context.times.phases
            )
    finally:
        rank_times._WINDOW_STEPS, rank_times._WINDOW_SECONDS, rank_times._SHARE = window


CASES = [
    ("data", {}),
    ("forward", {}),
    ("checkpoint", {}),
    ("evaluation", {}),
    ("forward", {"micro_batch": 2}),
    ("data", {"strategy": "fsdp"}),
    ("data", {"batchnorm": True}),
    ("decode", {"stream": True}),
]
ACTIONS = {"forward": "computing", "data": "reading data", "decode": "reading data"}
ACTIONS |= {"checkpoint": "saving checkpoints", "evaluation": "evaluating"}


@pytest.mark.parametrize(("where", "options"), CASES, ids=lambda value: value if isinstance(value, str) else None)
def test_a_slow_rank_is_named_once_with_what_it_does(ranks, tmp_path, where, options):
    (messages, _), (others, phases) = ranks(2, train, tmp_path, 1, where, *pack(options))
    assert len(messages) == 1, messages
    assert not others  # rank 0 alone warns
    assert messages[0].startswith("rank 1 makes the others wait for ")
    assert f" per step {ACTIONS[where]}, the others " in messages[0]
    measured = {"decode": "data"}.get(where, where)
    assert phases[measured] > 0.8 * LATE * (STEPS - 3)  # the first step is not measured in full
    waits = [record for record in read_metrics(tmp_path / "metrics.jsonl") if "ranks/wait/1" in record]
    assert waits
    assert sum(record["ranks/wait/1"] for record in waits) > 1.5 * sum(record["ranks/wait/0"] for record in waits)
    assert "ranks/wait" not in (tmp_path / "log.txt").read_text()
    assert not any("ranks/" in name for name in json.loads((tmp_path / "summary.json").read_text())["metrics"])


def pack(options):
    """The options as positional arguments of `train` after `where`."""
    given = {"strategy": "ddp", "batchnorm": False, "micro_batch": None, "stream": False, **options}
    return given.values()


@pytest.mark.parametrize("size", [1, 2])
def test_even_ranks_give_no_warning_and_one_rank_no_metric(ranks, tmp_path, size):
    for messages, _ in ranks(size, train, tmp_path):
        assert not messages
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(STEPS))  # no additional records
    assert sum("ranks/wait/0" in record for record in records) >= (STEPS // INTERVAL - 1 if size > 1 else 0)
    assert size > 1 or not any("ranks/wait/0" in record for record in records)


def weights_with(folder, measured):
    """The weights after some steps, with times measured or not, at the shortest and the longest interval."""
    found = []
    for interval in (1, 1000):
        with Run(global_batch=6, seed=0, folder=folder / str(interval)) as run:
            model = run.wrap(nn.Linear(4, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            context = run._lifecycle.context
            context.metrics._next_interval = lambda interval=interval: interval
            if not measured:
                context.times.watch_backward = lambda *_: None
            rows = torch.arange(80.0).reshape(20, 4) / 80  # the last step has two samples
            for epoch in run.shard(torch.utils.data.TensorDataset(rows), micro_batch=2, num_workers=0).epochs(2):
                for step in epoch:
                    for (x,) in step:
                        step.mean(model(x).square().sum(1)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            found.append([p.detach().flatten().tolist() for p in model.parameters()])
            assert context.times.steps == 8
    return found


def test_measuring_changes_no_number_at_any_interval(ranks, tmp_path):
    with_times = ranks(2, weights_with, tmp_path / "on", True)
    assert with_times == ranks(2, weights_with, tmp_path / "off", False)
    records = read_metrics(tmp_path / "on" / "1" / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(8))
    assert sum("ranks/wait/1" in record for record in records) >= 7  # every step is a sync


def train_without_metrics(folder):
    with Run(global_batch=2, seed=0, folder=folder) as run:
        data = run.shard([torch.ones(1)] * 8, num_workers=0)
        run._lifecycle.context.metrics._next_interval = lambda: 1
        for epoch in data.epochs(1):
            for step in epoch:
                for _ in step:
                    run.barrier()


def test_a_run_that_logs_nothing_writes_no_waits(ranks, tmp_path):
    ranks(2, train_without_metrics, tmp_path)
    names = {name for record in read_metrics(tmp_path / "metrics.jsonl") for name in record}
    assert names <= {"step", "epoch", "time", "train/samples_per_s"}


def test_the_exchange_of_times_needs_no_additional_collective(ranks, tmp_path):
    assert len(set(ranks(2, count_syncs, tmp_path))) == 1


def count_syncs(folder):
    """A sync has one collective, also with the times of the ranks."""
    with Run(global_batch=2, seed=0, folder=folder) as run:
        model, started = run.wrap(nn.Linear(1, 1)), []
        context, start = run._lifecycle.context, run._comm.start_exchange
        context.metrics._next_interval = lambda: 5

        def record(operation, values, site=None):
            if operation == metric_sync._OPERATION:
                started.append(start(operation, values, site))
                return started[-1]
            return start(operation, values, site)

        run._comm.start_exchange = record
        for epoch in run.shard([torch.ones(1)] * 42, num_workers=0).epochs(1):
            for step in epoch:
                for x in step:
                    step.mean(model(x)[:, 0]).backward()
        assert len(started) >= 3
        assert all(len(each.works) == 1 for each in started)
        return len(started)
