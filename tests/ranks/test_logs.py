"""Values logged on all ranks become one record, averaged in one collective and written by rank 0."""

import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from samestep import Run, SamestepWarning, read_metrics
from samestep.distributed.metric_sync import MetricBatch, StepCallback, split_batches
from samestep.errors import LogError
from samestep.loggers.loggers import LogRow


def count_exchanges(run):
    """Record the exchanges between ranks from now on; `works` of each are its collectives."""
    calls = []
    inner = run._comm.start_exchange

    def counted(operation, values, site=None):
        calls.append(inner(operation, values, site))
        return calls[-1]

    run._comm.start_exchange = counted
    return calls


def log_several(folder):
    with Run(global_batch=4, folder=folder) as run:
        calls = count_exchanges(run)
        for step in range(3):
            run.log({"train/a": run.rank + step, "train/b": torch.tensor(2.0 * run.rank), "val/same": 0.1}, step=step)
        assert not calls  # nothing is sent before the sync
        run.log({"val/last": float("nan") if run.rank else 1.0}, step=2, now=True)
        return sum(len(exchange.works) for exchange in calls)


def test_logged_values_are_averaged_in_one_collective(ranks, tmp_path):
    assert ranks(3, log_several, tmp_path) == [1, 1, 1]
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2]
    for step, record in enumerate(records):
        assert record["train/a"] == 1 + step
        assert record["train/b"] == 2.0
        assert record["val/same"] == 0.1  # to the last bit, although 0.1 + 0.1 + 0.1 is not 0.3
    assert math.isnan(records[2]["val/last"])


def log_on_rank_0_only(folder):
    with Run(global_batch=4, folder=folder) as run:
        if run.is_main:
            run.log({"val/mine": 3.0, "val/also": 4.0}, step=0)
        run.log({"val/all": float(run.rank)}, step=0)


def test_values_logged_on_one_rank_only_are_written(ranks, tmp_path):
    ranks(2, log_on_rank_0_only, tmp_path)
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (record["val/mine"], record["val/also"], record["val/all"]) == (3.0, 4.0, 0.5)


def log_many(folder):
    with Run(global_batch=4, folder=folder) as run:
        run.log({f"val/m{k}": k + run.rank for k in range(700)}, step=0)


def test_more_values_than_fit_one_message_are_written(ranks, tmp_path):
    ranks(2, log_many, tmp_path)
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert [record[f"val/m{k}"] for k in range(700)] == [k + 0.5 for k in range(700)]


def train(folder):
    with Run(global_batch=4, folder=folder) as run:
        model = run.wrap(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)))
        groups = [
            {"params": part.parameters(), "lr": lr}
            for part, lr in zip(getattr(model, "module", model), (0.1, 0.2), strict=True)
        ]
        optimizer = torch.optim.SGD(groups)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        data = run.shard(torch.utils.data.TensorDataset(torch.ones(10, 1)))
        for epoch in data.epochs(2):
            for step in epoch:
                for (x,) in step:
                    step.mean(model(x)[:, 0] ** 2).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            run.log({"val/loss": float(epoch.number)}, step=epoch.number)
        run.print("all done")


@pytest.mark.parametrize("size", [1, 2])
def test_training_writes_learning_rates_losses_speed_text_curves_and_a_summary(ranks, tmp_path, size):
    ranks(size, train, tmp_path)
    records = read_metrics(tmp_path / "metrics.jsonl", by_step=True)
    assert [record["train/learning_rate/0"] for record in records] == [0.1 * 0.5**k for k in range(6)]
    assert [record["train/learning_rate/1"] for record in records] == [0.2 * 0.5**k for k in range(6)]
    assert all(record["train/loss"] > 0 for record in records)
    assert any("train/samples_per_s" in record for record in records)
    evaluated = [(record["step"], record["epoch"], record["val/loss"]) for record in records if "val/loss" in record]
    assert evaluated == [(2, 0, 0), (5, 1, 1)]
    assert "all done" in (tmp_path / "log.txt").read_text()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["samples"], summary["world_size"]) == ("finished", 6, 20, size)
    assert summary["metrics"]["val/loss"] == 1
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [point.step for point in curves.Scalars("train/loss")] == list(range(6))
    assert [point.step for point in curves.Scalars("val/loss")] == [2, 5]  # on the axis of the training curves
    assert [(point.step, point.value) for point in curves.Scalars("epoch")] == [(0, 0), (3, 1)]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1  # one writer


def evaluate_between_steps(folder, end):
    """Two epochs of three steps within one sync, with several evaluations after each."""
    with Run(global_batch=4, folder=folder) as run:
        model = run.wrap(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.log({"val/before": 1.0})
        for epoch in run.shard(torch.utils.data.TensorDataset(torch.ones(10, 1)), num_workers=0).epochs(2):
            for step in epoch:
                run._lifecycle.context.metrics._interval = 1000  # all of it is written at the end
                for (x,) in step:
                    step.mean(model(x)[:, 0] ** 2).backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log({"debug/scale": 1.0})
            run.log({"val/accuracy": epoch.number / 4}, step=epoch.number)
            run.log({"val/accuracy": epoch.number / 4 + 0.5})
            if run.rank == run.size - 1 and epoch.number == 0:
                run.log({"val/only_here": 1.0})
        run.log({"sweep/loss": 0.5}, step=4)
        run.log({"sweep/loss": 0.25}, step=3)
        run.log({"test/final": torch.tensor(0.5)})
        if end == "fails":
            raise ValueError("stop")


EVALUATIONS = [
    "step 0 | val/before 1",
    "epoch 0 | step 2 | val/accuracy 0",
    "epoch 0 | step 2 | val/accuracy 0.5000 | val/only_here 1",
    "epoch 1 | step 5 | val/accuracy 0.2500",
    "epoch 1 | step 5 | val/accuracy 0.7500",
    "step 4 | sweep/loss 0.5000",
    "step 3 | sweep/loss 0.2500",
    "epoch 1 | step 5 | test/final 0.5000",
]


@pytest.mark.parametrize(("size", "end"), [(1, "finishes"), (2, "finishes"), (1, "fails")])
def test_every_evaluation_is_in_every_logger_in_the_order_of_the_calls(ranks, tmp_path, size, end):
    (ranks if end == "finishes" else ranks.errors)(size, evaluate_between_steps, tmp_path, end)
    lines = [line.partition("  ")[2] for line in (tmp_path / "log.txt").read_text().splitlines()]
    results = ("val/", "sweep/", "test/")
    assert [line for line in lines if any(name in line for name in results) and line[0] in "es"] == EVALUATIONS
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(record["step"], record.get("epoch")) for record in records] == [
        *((0, None), (0, 0), (1, 0), (2, 0), (2, 0), (2, 0)),
        *((3, 1), (4, 1), (5, 1), (5, 1), (5, 1), (4, None), (3, None), (5, 1)),
    ]
    for record in records:
        assert ("train/loss" in record) == ("debug/scale" in record)  # evaluations have records of their own
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = [(point.step, point.value) for point in curves.Scalars("val/accuracy")]
    assert points == [(2, 0), (2, 0.5), (5, 0.25), (5, 0.75)]


def log_by_a_number_that_is_an_epoch(folder):
    with (
        Run(global_batch=4, folder=folder) as run,
        pytest.warns(SamestepWarning) if run.is_main else nullcontext() as w,
    ):
        for number, epoch in enumerate(run.shard(torch.utils.data.TensorDataset(torch.ones(10, 1))).epochs(2)):
            for step in epoch:
                for _ in step:
                    pass
            run.log({"val/loss": 0.5}, step=number + 1)
        return [str(each.message) for each in w or ()]


def test_an_epoch_as_a_step_number_is_a_warning_once(ranks, tmp_path):
    warned, silent = ranks(2, log_by_a_number_that_is_an_epoch, tmp_path)
    assert warned == [
        "run.log(..., step=1) after step 2 in epoch 0 records the values at step 1: if 1 is an epoch, leave step= out, "
        "since every record has its step and its epoch"
    ]
    assert silent == []


def log_after_a_restart(folder, stop_after):
    with Run(global_batch=4, folder=folder) as run:
        model = run.wrap(torch.nn.Linear(1, 1))
        train = run.shard(torch.utils.data.TensorDataset(torch.ones(8, 1)), num_workers=0)
        checkpoint = run.checkpoint(f"{folder}/checkpoints", model=model, train=train)
        for epoch in train.epochs(2):
            for step in epoch:
                for (x,) in step:
                    step.mean(model(x)[:, 0]).backward()
                if step.number == stop_after:
                    checkpoint.save()
            if stop_after in (2 * epoch.number, 2 * epoch.number + 1):
                return
            run.log({"val/accuracy": epoch.number / 2}, step=epoch.number)


@pytest.mark.slow
def test_an_evaluation_after_a_restart_is_at_the_step_of_an_uninterrupted_run(ranks, tmp_path):
    for stop_after in (1, 2, 3, None):
        ranks(2, log_after_a_restart, tmp_path, stop_after)
    records = [record for record in read_metrics(tmp_path / "metrics.jsonl") if "val/accuracy" in record]
    assert [(record["step"], record["epoch"], record["val/accuracy"]) for record in records] == [(1, 0, 0), (3, 1, 0.5)]


def print_only(folder):
    with Run(global_batch=4, folder=folder) as run:
        run.print("once and for all")
        return run.folder == Path(folder)


def test_printing_alone_creates_no_folder(ranks, tmp_path):
    assert ranks(2, print_only, tmp_path / "never") == [True, True]
    assert not (tmp_path / "never").exists()


def fail(folder):
    with Run(global_batch=4, folder=folder) as run:
        run.log({"val/a": 1.0}, step=0, now=True)
        raise ValueError("stop")


def test_the_summary_of_a_failed_run_has_the_status_failed(ranks, tmp_path):
    ranks.errors(2, fail, tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_the_error_for_an_invalid_metric_names_it(tmp_path):
    with Run(global_batch=4, folder=tmp_path) as run:
        with pytest.raises(LogError, match=r'"accuracy" is a tensor of shape \(3,\): log one number, e.g. x.mean\(\)'):
            run.log({"accuracy": torch.zeros(3)}, step=0)
        with pytest.raises(LogError, match="step must be an integer of at least 0, got -1"):
            run.log({"accuracy": 1.0}, step=-1)
        with pytest.raises(LogError, match='"val accuracy" cannot name a metric'):
            run.log({"val accuracy": 1.0}, step=0)


def train_and_record_waits(folder, steps, per_step, interval, late):
    """Train with some values logged per step; returns what starts and what waits, with the step in which it does."""
    events = []
    with Run(global_batch=4, seed=0, folder=folder, replica_check_every=0) as run:
        model = run.wrap(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = run.shard(torch.arange(4.0 * steps)[:, None], num_workers=0)
        metrics, comm = run._lifecycle.context.metrics, run._comm
        metrics._next_interval = lambda: interval
        if late:  # values are sent one sync later, as those of a GPU
            metrics._device = torch.device("cuda")
            measured, torch.cuda.max_memory_allocated = torch.cuda.max_memory_allocated, lambda _: 0
        start, wait = comm.start_exchange, comm.continue_exchange
        number = lambda: run._lifecycle.context.progress.steps  # noqa: E731
        for epoch in data.epochs(1):
            for step in epoch:
                if step.number == 2:  # the first steps check and compare more
                    comm.start_exchange = lambda *args: events.append(("start", number())) or start(*args)
                    comm.continue_exchange = lambda pending: events.append(("wait", number())) or wait(pending)
                for x in step:
                    loss = model(x)[:, 0] ** 2
                    step.mean(loss).backward()
                    step.log({"loss/mine": loss})
                optimizer.step()
                optimizer.zero_grad()
                names = per_step if run.rank or step.number % 12 else per_step + 1
                run.log({f"value/{name}": float(step.number + run.rank) for name in range(names)})
        comm.start_exchange, comm.continue_exchange = start, wait
    if late:
        torch.cuda.max_memory_allocated = measured
    return events


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("per_step", "interval"), [(1, 4), (1, 1), (40, 8)])  # 320 values do not fit into a frame
def test_no_step_waits_for_an_exchange_that_it_has_started(ranks, tmp_path, per_step, interval, late):
    for events in ranks(2, train_and_record_waits, tmp_path, 50, per_step, interval, late):
        started = -1
        for kind, step in events:
            assert kind == "start" or step > started
            started = step if kind == "start" else started
        assert sum(kind == "wait" for kind, _ in events) >= 5
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(50))  # all are written, in order
    assert all(record["value/0"] == record["step"] + 0.5 for record in records)
    assert all("loss/mine" in record and "train/loss" in record for record in records)
    assert [record["step"] for record in records if f"value/{per_step}" in record] == [0, 12, 24, 36, 48]


class RankCallback(StepCallback):
    def __init__(self, rank):
        self.rank, self.seen = rank, []

    def sync_value(self):
        return 7.0 + self.rank

    def on_sync(self, values):
        self.seen.append(values)


def log_while_a_callback_is_added(folder):
    """Returns whether a sync was pending then, and which control values the callback got."""
    with Run(global_batch=4, seed=0, folder=folder) as run:
        metrics, callback = run._lifecycle.context.metrics, RankCallback(run.rank)
        metrics._next_interval = lambda: 1  # a sync starts at every step boundary
        model = run.wrap(torch.nn.Linear(1, 1))
        for epoch in run.shard(torch.utils.data.TensorDataset(torch.ones(8, 1)), num_workers=0).epochs(3):
            for step in epoch:
                for (x,) in step:
                    step.mean(model(x)[:, 0]).backward()
                run.log({"a": 100 + step.number, "b": 200 + step.number})
            if epoch.number == 0:
                pending = metrics._started is not None
                metrics.callbacks.append(callback)  # as run.checkpoint does
    return pending, callback.seen


def test_a_callback_that_is_added_during_a_sync_changes_no_value(ranks, tmp_path):
    for pending, seen in ranks(2, log_while_a_callback_is_added, tmp_path):
        assert pending
        assert seen == [[7.0, 8.0]] * len(seen) != []
    records = read_metrics(tmp_path / "metrics.jsonl", by_step=True)
    assert [(record["a"], record["b"]) for record in records] == [(100 + step, 200 + step) for step in range(6)]


def test_values_that_do_not_fit_the_metrics_of_a_sync_raise():
    row = LogRow(0, 0, 0)
    batches = [MetricBatch([(row, "a"), (row, "b")]), MetricBatch([(row, "c")])]
    assert split_batches(batches, [1.0, 2.0, 3.0]) == [{(row, "a"): 1.0, (row, "b"): 2.0}, {(row, "c"): 3.0}]
    for values in ([1.0, 2.0], [1.0, 2.0, 3.0, 4.0]):
        with pytest.raises(AssertionError, match=f"{len(values)} values for 3 metrics"):
            split_batches(batches, values)


def log_values_of_rank_0(folder):
    with Run(global_batch=4, folder=folder) as run:
        metrics, row = run._lifecycle.context.metrics, LogRow(0, 0, 0)
        rate = torch.tensor(0.1 + run.rank, dtype=torch.float64)
        metrics.add_rank0_value((row, "tensor"), rate)
        metrics.add_rank0_value((row, "number"), float(rate))
        rate.fill_(5.0)  # what the optimizer does with it afterwards is not this value
        run.log({"mean": run.rank}, step=0)


def test_rank_0_writes_its_own_learning_rate_also_if_it_is_a_tensor(ranks, tmp_path):
    ranks(2, log_values_of_rank_0, tmp_path)
    found = {name: value for record in read_metrics(tmp_path / "metrics.jsonl") for name, value in record.items()}
    assert (found["tensor"], found["number"], found["mean"]) == (0.1, 0.1, 0.5)


def test_several_values_are_printed_like_print_does(tmp_path, capsys):
    with Run(global_batch=4, folder=tmp_path) as run:
        run.print("rows", 3, torch.tensor(0.5))
        run.print(1, None, sep=" | ")
        run.print()
        run.log({"value": 1.0}, now=True)
    out = capsys.readouterr().out
    assert "rows 3 tensor(0.5000)\n1 | None\n\n" in out
    assert "rows 3 tensor(0.5000)" in (tmp_path / "log.txt").read_text()
