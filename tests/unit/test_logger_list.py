"""`Run(loggers=[...])`: what a logger gets, what happens if it fails or is slow, and which lists are mistakes."""

import csv
import json
import threading
import time
import warnings
from argparse import Namespace
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import TensorDataset

import samestep.loggers
from samestep import Run
from samestep.errors import ConfigError
from samestep.loggers import CSVLogger, MLflowLogger, TensorBoardLogger, WandbLogger, logger_thread
from samestep.loggers.logger_thread import LoggerThread, RunInfo
from tests.small_disk import small_disk


class Recorder:
    """Keeps its calls in a file of the run's folder, and raises in the method `fails`."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def open(self, run: RunInfo) -> None:
        self.calls = run.folder / "calls.jsonl"
        self.add("open", run.name, dict(run.config), run.resumed)

    def write(self, step, values, epoch) -> None:
        self.add("write", step, dict(values), epoch)

    def close(self, summary) -> None:
        self.add("close", summary["status"])

    def add(self, *call) -> None:
        with self.calls.open("a") as file:
            file.write(json.dumps([threading.current_thread() is threading.main_thread(), *call]) + "\n")
        if self.fails == call[0]:
            raise ValueError(f"boom in {call[0]}")


def train(folder, logger, config=None, steps=3, step_timeout=300.0):
    """Train a few steps; returns the warnings of this rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Run(global_batch=2, folder=folder, loggers=[logger], config=config, step_timeout=step_timeout) as run:
            model = run.wrap(torch.nn.Linear(1, 1))
            data = run.shard(TensorDataset(torch.ones(2 * steps, 1)), num_workers=0)
            for epoch in data.epochs(1):
                for step in epoch:
                    for (x,) in step:
                        step.mean(model(x)[:, 0] ** 2).backward()
                    run.log({"val/step": float(step.number)})
    return [str(each.message) for each in caught]


def calls_of(folder):
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def test_rank_0_opens_a_logger_writes_every_record_and_closes_it(ranks, tmp_path):
    assert ranks(2, train, tmp_path, Recorder(), {"lr": 0.1}) == [[], []]
    first, *records, last = calls_of(tmp_path)
    in_main, name, folder, config, resumed = first
    assert (in_main, name, folder, resumed) == (False, "open", tmp_path.name, False)
    assert config["lr"] == 0.1
    assert (config["samestep"]["global_batch"], config["samestep"]["ranks"]) == (2, 2)
    assert [(step, values["val/step"], epoch) for _, _, step, values, epoch in records] == [
        (step, float(step), 0) for step in range(3)
    ]
    assert last == [False, "close", "finished"]


def test_a_logger_knows_that_the_run_was_started_before(ranks, tmp_path):
    for _ in range(2):
        ranks(1, train, tmp_path, Recorder())
    assert [call[4] for call in calls_of(tmp_path) if call[1] == "open"] == [False, True]


@pytest.mark.parametrize(
    ("method", "consequence", "lost"),
    [
        ("open", "training continues without it", "3"),
        ("write", "training continues", "3"),
        ("close", "its last records may be missing there", ""),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_logger_that_raises_is_one_warning_and_training_continues(ranks, tmp_path, size, method, consequence, lost):
    warned, *others = ranks(size, train, tmp_path, Recorder(method))
    assert warned == [f"Recorder.{method} failed, {consequence}: ValueError: boom in {method}"]
    assert all(not each for each in others)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    report = f"Recorder lacks {lost} record(s), which metrics.jsonl has"
    assert (report in (tmp_path / "log.txt").read_text()) == bool(lost)


def fail_after_a_step(folder):
    with Run(global_batch=2, folder=folder, loggers=[Recorder()]) as run:
        for epoch in run.shard(TensorDataset(torch.ones(4, 1)), num_workers=0).epochs(1):
            for step in epoch:
                for _ in step:
                    pass
                run.log({"val/step": 1.0}, now=True)
                raise KeyError("mine")


def test_after_a_failure_a_logger_is_closed_with_the_status(ranks, tmp_path):
    ranks.errors(1, fail_after_a_step, tmp_path)
    assert calls_of(tmp_path)[-1] == [False, "close", "failed"]


class NeverCloses:
    """Waits in `close` for longer than the other ranks wait for rank 0."""

    def open(self, run: RunInfo) -> None:
        pass

    def write(self, step, values, epoch) -> None:
        pass

    def close(self, summary) -> None:
        threading.Event().wait(60)


def test_the_other_ranks_do_not_time_out_while_rank_0_waits_for_a_logger(ranks, tmp_path):
    warned, others = ranks(2, train, tmp_path, NeverCloses(), None, 3, 8.0)
    assert warned == ["NeverCloses was not closed within 4 s: its last records may be missing there"]
    assert others == []
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"


# The thread


class Blocked:
    """Waits in `write` until it is released."""

    def __init__(self) -> None:
        self.released, self.steps = threading.Event(), []

    def open(self, run: RunInfo) -> None:
        self.info = run

    def write(self, step, values, epoch) -> None:
        self.released.wait(60)
        self.steps.append(step)

    def close(self, summary) -> None:
        pass


@pytest.fixture
def blocked(tmp_path):
    """A thread whose logger is blocked, with its warnings and reports."""
    logger, warned, reported = Blocked(), [], []
    thread = LoggerThread(logger, tmp_path, {}, False, warned.append, reported.append)
    yield logger, thread, warned, reported
    logger.released.set()
    thread._thread.join(60)


def test_training_does_not_wait_for_a_slow_logger(blocked):
    logger, thread, warned, reported = blocked
    for step in range(100):
        thread.write(step, {"x": 1.0})
    assert logger.steps == []
    logger.released.set()
    thread.close({"status": "finished"})
    assert logger.steps == list(range(100))
    assert warned == reported == []


def test_records_that_wait_longest_are_dropped_before_memory_fills(blocked, monkeypatch):
    monkeypatch.setattr(logger_thread, "_LONGEST_QUEUE", 5)
    logger, thread, warned, reported = blocked
    for step in range(50):
        thread.write(step, {"x": 1.0})
    assert warned == ["Blocked is slower than training logs: records that waited longest are lost"]
    logger.released.set()
    thread.close({"status": "finished"})
    assert logger.steps[-5:] == [45, 46, 47, 48, 49]
    assert reported == [f"Blocked lacks {50 - len(logger.steps)} record(s), which metrics.jsonl has"]


def test_the_end_of_the_run_does_not_wait_forever(blocked, monkeypatch):
    monkeypatch.setattr(logger_thread, "_FINISHED_SECONDS", 0.01)
    _, thread, warned, _ = blocked
    thread.write(0, {"x": 1.0})
    thread.close({"status": "finished"})
    thread.close({"status": "finished"})
    assert warned == ["Blocked was not closed within 0 s: its last records may be missing there"]


def test_a_logger_can_warn(blocked):
    logger, thread, warned, _ = blocked
    logger.released.set()
    thread.write(0, {"x": 1.0})
    thread.close({})
    logger.info.warn("no space left there")
    thread._show_messages()
    assert warned == ["no space left there"]


# The list


class OnlyWrites:
    def write(self, step, values, epoch) -> None:
        pass


@pytest.mark.parametrize(
    ("loggers", "message"),
    [
        ("wandb", "loggers is a str: pass a list, e.g. loggers=[samestep.loggers.CSVLogger()]"),
        ([CSVLogger], "loggers[0] is the class CSVLogger: create a logger with CSVLogger()"),
        (
            [CSVLogger(), OnlyWrites()],
            "loggers[1] is a OnlyWrites without open, close: pass e.g. samestep.loggers.CSVLogger(), or an object with "
            "the methods of samestep.loggers.Logger",
        ),
    ],
)
def test_a_list_that_is_wrong_raises_at_run(loggers, message):
    with pytest.raises(ConfigError) as caught:
        Run(global_batch=2, loggers=loggers)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("logger", "package"),
    [
        (WandbLogger("digits"), "wandb"),
        (MLflowLogger("digits"), "mlflow"),
        (TensorBoardLogger(), "tensorboard"),
    ],
)
def test_a_missing_package_raises_at_run_with_the_install_command(logger, package, monkeypatch):
    monkeypatch.setattr(logger_thread, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        Run(global_batch=2, loggers=[logger])
    assert str(caught.value) == (
        f"{type(logger).__name__} needs {package}, which is not installed: pip install 'samestep[{package}]'"
    )


def test_the_names_of_samestep_loggers_are_imported_when_they_are_used():
    assert {"CSVLogger", "Logger", "MLflowLogger", "RunInfo", "TensorBoardLogger", "WandbLogger"} == set(
        samestep.loggers.__all__
    )
    assert all(getattr(samestep.loggers, name) for name in samestep.loggers.__all__)
    with pytest.raises(AttributeError, match=r"has no attribute 'CometLogger'; it has CSVLogger, Logger"):
        _ = samestep.loggers.CometLogger


@dataclass
class Settings:
    lr: float = 0.1


@pytest.mark.parametrize("config", [{"lr": 0.1}, Settings(), Namespace(lr=0.1)])
def test_hyperparameters_are_a_dict_a_dataclass_or_of_argparse(ranks, tmp_path, config):
    ranks(1, train, tmp_path, Recorder(), config)
    assert json.loads((tmp_path / "config.json").read_text())["config"] == {"lr": 0.1}
    assert calls_of(tmp_path)[0][3]["lr"] == 0.1


@pytest.mark.parametrize("config", [0.1, [("lr", 0.1)], Settings, {1: 2}])
def test_hyperparameters_without_names_raise_at_run(config):
    with pytest.raises(
        ConfigError, match=r"has no names: pass a dict, a dataclass or the result of argparse, e.g. con"
    ):
        Run(global_batch=2, config=config)


def test_a_secret_is_neither_recorded_nor_sent(ranks, tmp_path):
    inside = {"tracker": {"api_key": "abc"}, "users": [{"password": "abc"}], "args": Namespace(secret="abc")}
    ranks(1, train, tmp_path, Recorder(), {"hf_token": "abc", "max_tokens": 5, **inside})
    hidden = {"tracker": {"api_key": "***"}, "users": [{"password": "***"}], "args": {"secret": "***"}}
    known = {"hf_token": "***", "max_tokens": 5, **hidden}
    assert json.loads((tmp_path / "config.json").read_text())["config"] == known
    assert calls_of(tmp_path)[0][3].items() >= known.items()


def test_hyperparameters_inside_of_others_may_have_any_names(ranks, tmp_path):
    assert ranks(2, train, tmp_path, Recorder(), {"widths": {(1, 2): 8}}) == [[], []]
    assert calls_of(tmp_path)[0][3]["widths"] == {"(1, 2)": 8}


# CSV


def wait_for(condition):
    """Wait until a thread has come so far."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def open_csv(folder, warned=None):
    logger = CSVLogger()
    logger.open(RunInfo(folder, "run", {}, False, (warned if warned is not None else []).append))
    return logger


def table(folder):
    return list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))


def test_a_metric_that_appears_later_becomes_a_column(tmp_path):
    logger = open_csv(tmp_path)
    logger.write(0, {"train/loss": 0.5}, 0)
    logger.write(1, {"train/loss": 0.25}, 0)
    logger.write(1, {"val/accuracy": float("nan")}, None)
    logger.close({})
    assert (tmp_path / "metrics.csv").read_text() == (
        "step,epoch,train/loss,val/accuracy\n0,0,0.5,\n1,0,0.25,\n1,,,nan\n"
    )


def test_a_row_that_a_kill_has_cut_off_is_removed(tmp_path):
    logger = open_csv(tmp_path)
    for step in range(3):
        logger.write(step, {"train/loss": 0.5}, 0)
    logger.close({})
    path = tmp_path / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-3])
    logger = open_csv(tmp_path)
    logger.write(1, {"train/loss": 0.25, "val/accuracy": 1.0}, 0)
    logger.close({})
    assert [(row["step"], row["train/loss"], row["val/accuracy"]) for row in table(tmp_path)] == [
        ("0", "0.5", ""),
        ("1", "0.5", ""),
        ("1", "0.25", "1.0"),
    ]


def test_a_full_disk_costs_rows_and_leaves_no_broken_ones(tmp_path):
    with small_disk(tmp_path / "disk", 128) as disk:
        warned, reported = [], []
        logger, tried = CSVLogger(), []
        write = logger.write

        def count(*record):
            try:
                write(*record)
            finally:
                tried.append(record)

        logger.write = count
        thread = LoggerThread(logger, disk.path, {}, False, warned.append, reported.append)
        thread.write(0, {"train/loss": 0.5})
        wait_for(lambda: (disk.path / "metrics.csv").exists() and bool(table(disk.path)))
        disk.fill()
        for step in range(1, 1000):
            thread.write(step, {"train/loss": 0.5})
        wait_for(lambda: len(tried) == 1000)
        disk.make_space()
        thread.write(1000, {"train/loss": 0.25, "val/accuracy": 1.0})
        thread.close({"status": "finished"})
        assert warned == ["CSVLogger.write failed, training continues: OSError: [Errno 28] No space left on device"]
        rows = table(disk.path)
        assert rows[-1] == {"step": "1000", "epoch": "", "train/loss": "0.25", "val/accuracy": "1.0"}
        steps = [int(row["step"]) for row in rows[:-1]]
        assert steps == list(range(len(steps)))
        assert reported == [f"CSVLogger lacks {1000 - len(steps)} record(s), which metrics.jsonl has"]
