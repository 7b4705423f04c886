"""Loggers: which names and numbers they accept, metrics.jsonl, log.txt, TensorBoard and summary.json."""

import json
import math
import subprocess
import sys
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from samestep.errors import LogError
from samestep.loggers.console import open_console
from samestep.loggers.loggers import (
    Loggers,
    LogRow,
    check_log_step,
    check_metric_name,
    check_metric_value,
    write_summary,
)
from samestep.loggers.run_files import (
    JsonlLogger,
    TextLog,
    format_number,
    format_record,
    open_tensorboard,
    read_metrics,
)
from samestep.messages import format_bytes, format_duration


def strict(text):
    """Parse strict JSON: Python's own parser also accepts NaN and Infinity."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


# Names and numbers


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (0.5, 0.5),
        (3, 3),
        (True, 1),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.array([2.0]), 2.0),
        (torch.tensor(0.25), 0.25),
        (torch.tensor([[4]]), 4),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (Fraction(1, 4), 0.25),
        (math.inf, math.inf),
    ],
)
def test_a_number_is_accepted_from_python_numpy_and_torch(value, number):
    assert check_metric_value("val/accuracy", value) == number


def test_nan_is_accepted():
    assert math.isnan(check_metric_value("train/loss", torch.tensor(math.nan)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(3), '"accuracy" is a tensor of shape (3,): log one number, e.g. x.mean()'),
        (torch.zeros(0), '"accuracy" is a tensor of shape (0,): log one number, e.g. x.mean()'),
        (np.zeros((2, 2)), '"accuracy" is an array of shape (2, 2): log one number, e.g. x.mean()'),
        (None, "\"accuracy\" is None: leave it out, or log float('nan') for a missing number"),
        ("good", '"accuracy" is a str: log one number; text goes to run.print(...)'),
        (
            {"top1": 0.5},
            '"accuracy" is a dict: log each of its numbers under its own name, e.g. "val/accuracy"',
        ),
        ([0.5, 0.6], '"accuracy" is a list: log one number, e.g. sum(x) / len(x)'),
        (1j, '"accuracy" is a complex: log one real number, e.g. abs(x)'),
        (torch.tensor(1j), '"accuracy" is a complex: log one real number, e.g. abs(x)'),
        (object(), '"accuracy" is an object: log one number, e.g. float(x)'),
    ],
)
def test_the_error_for_an_invalid_value_names_its_type_and_what_to_log_instead(value, message):
    with pytest.raises(LogError) as caught:
        check_metric_value("accuracy", value)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["loss", "train/loss", "val/top-5_acc", "a/b/c.d", "lr/0"])
def test_metric_names_can_have_groups(name):
    assert check_metric_name(name) == name


@pytest.mark.parametrize("name", ["", "/loss", "train/", "train//loss", "val/top 5", "val/größe", "loss\n"])
def test_a_name_that_some_logger_would_change_is_rejected(name):
    with pytest.raises(LogError) as caught:
        check_metric_name(name)
    assert str(caught.value) == (
        f'"{name}" cannot name a metric: use letters, digits, "_", "-" and "." in parts joined by "/", '
        'e.g. "val/accuracy"'
    )


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("time", 'use e.g. "train/time"'),
        ("infinite", 'use e.g. "train/infinite"'),
        ("step", "leave it out, since every record has it"),
        ("epoch", "leave it out, since every record has it"),
    ],
)
def test_the_names_of_fields_of_metrics_jsonl_are_rejected(name, advice):
    with pytest.raises(LogError) as caught:
        check_metric_name(name)
    assert str(caught.value) == f'"{name}" is a field of metrics.jsonl and cannot name a metric: {advice}'


def test_a_name_that_is_not_a_string_is_rejected():
    with pytest.raises(LogError) as caught:
        check_metric_name(3)
    assert str(caught.value) == 'a metric has the name 3, a int: use a string such as "val/accuracy"'


@pytest.mark.parametrize("step", [12, np.int64(12), torch.tensor(12)])
def test_an_integer_of_python_numpy_or_torch_is_a_valid_step(step):
    assert json.dumps(check_log_step(step)) == "12"


@pytest.mark.parametrize("step", [-1, 1.5, None, True, "3"])
def test_anything_else_is_not_a_valid_step(step):
    with pytest.raises(LogError) as caught:
        check_log_step(step)
    assert str(caught.value) == (f"step must be an integer of at least 0, got {step!r}: pass e.g. step=epoch.number")


# Formatting


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.43117, "0.4312"),
        (12, "12"),
        (64000.0, "64,000"),
        (0.0, "0"),
        (12345.678, "12,345.7"),
        (0.00012, "1.200e-04"),
        (1.5e9 + 0.5, "1.500e+09"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_are_short_and_integers_are_shown_in_full(value, text):
    assert format_number(value) == text


def test_learning_rates_speed_and_memory_are_recognized_by_their_names():
    values = {"train/loss": 0.43117, "lr": 3e-4, "train/samples_per_s": 15321.4, "train/memory_bytes": 1.25 * 2**30}
    assert format_record(120, values) == "step 120 | train/loss 0.4312 | lr 3.0e-04 | 15,321 samples/s | 1.2 GiB"
    values = {"lr/1": 1e-3, "samples_per_s": 2.5}
    assert format_record(120, values, total=1000) == "step 120/1,000 | lr/1 1.0e-03 | 2.50 samples/s"


def test_bytes_and_durations_are_formatted_in_their_largest_unit():
    assert [format_bytes(n) for n in (512, 2048, 64 * 2**20, 3 * 2**40)] == ["512 B", "2.0 KiB", "64.0 MiB", "3.0 TiB"]
    assert [format_duration(s) for s in (0, 59.6, 3599, 3600, 90061)] == [
        "0:00",
        "1:00",
        "59:59",
        "1:00:00",
        "25:01:01",
    ]


# metrics.jsonl


def test_each_record_is_one_line_and_is_written_immediately(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    logger = JsonlLogger(path, clock=lambda: 1767225600.1234)
    logger.write(12, {"train/loss": 0.5, "train/seen": 64})
    assert path.read_text() == '{"step": 12, "time": 1767225600.123, "train/loss": 0.5, "train/seen": 64}\n'
    logger.write(13, {"train/loss": 0.25})
    assert len(path.read_text().splitlines()) == 2
    logger.close({})
    logger.close({})


def test_nan_and_infinity_are_written_as_strict_json_and_read_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    logger.write(0, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0})
    logger.close({})
    written = strict(path.read_text())
    assert [written[name] for name in "abcd"] == [None, None, None, 1.0]
    (read,) = read_metrics(path)
    assert math.isnan(read["a"])
    assert [read[name] for name in "bcd"] == [math.inf, -math.inf, 1.0]
    assert sorted(read) == ["a", "b", "c", "d", "step", "time"]


@pytest.mark.parametrize("kept", range(1, 60, 7))
def test_a_line_cut_off_by_a_kill_is_skipped_and_the_next_writer_starts_a_new_line(tmp_path, kept):
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path, clock=lambda: 1.0)
    logger.write(1, {"train/loss": 0.5})
    first_record = path.stat().st_size
    logger.write(2, {"train/loss": 0.25, "val/accuracy": 0.125})
    logger.close({})
    with path.open("r+b") as file:
        file.truncate(first_record + kept)
    assert [record["step"] for record in read_metrics(path)] == [1]
    again = JsonlLogger(path)
    again.write(3, {"train/loss": 0.125})
    again.close({})
    assert [(record["step"], record["train/loss"]) for record in read_metrics(path)] == [(1, 0.5), (3, 0.125)]


def test_a_killed_writer_loses_no_record_that_it_had_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    script = (
        "import sys, pathlib\n"
        "from samestep.loggers.run_files import JsonlLogger\n"
        "logger = JsonlLogger(pathlib.Path(sys.argv[1]))\n"
        "for step in range(10**9):\n"
        "    logger.write(step, {'train/loss': 1 / (step + 1)})\n"
        "    print(step, flush=True)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    reported = [int(writer.stdout.readline()) for _ in range(200)]
    writer.kill()
    reported += [int(step) for step in writer.stdout.read().split("\n")[:-1]]
    writer.wait()
    writer.stdout.close()
    steps = [record["step"] for record in read_metrics(path)]
    assert steps[: len(reported)] == reported
    assert steps == list(range(len(steps)))


def test_with_by_step_the_last_value_of_each_name_counts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path, clock=lambda: 1.0)
    logger.write(2, {"train/loss": 2.0, "val/accuracy": 0.5})
    logger.write(3, {"train/loss": 3.0})
    logger.write(1, {"train/loss": 1.0})
    logger.write(2, {"train/loss": 2.5})
    logger.close({})
    assert read_metrics(str(path), by_step=True) == [
        {"step": 1, "time": 1.0, "train/loss": 1.0},
        {"step": 2, "time": 1.0, "train/loss": 2.5, "val/accuracy": 0.5},
        {"step": 3, "time": 1.0, "train/loss": 3.0},
    ]
    assert [record["step"] for record in read_metrics(path)] == [2, 3, 1, 2]


def test_zero_bytes_left_by_a_machine_crash_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "time": 1.0}\n' + b"\0" * 40)
    assert read_metrics(path) == [{"step": 1, "time": 1.0}]


@pytest.mark.parametrize("text", ["step,loss\n1,0.5\n", "[1, 2]\n", '{"loss": 1}\n'])
def test_a_file_that_is_not_a_metrics_file_is_rejected(tmp_path, text):
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(LogError) as caught:
        read_metrics(path)
    assert str(caught.value) == (
        f'{path}, line 1 is not a record like {{"step": 12, "train/loss": 0.43}}: pass the metrics.jsonl of a run'
    )


def test_a_missing_metrics_file_raises(tmp_path):
    with pytest.raises(LogError) as caught:
        read_metrics(tmp_path / "metrics.jsonl")
    assert str(caught.value) == (
        f"{tmp_path / 'metrics.jsonl'} does not exist: pass the metrics.jsonl in a run's folder"
    )


def test_reading_metrics_does_not_import_torch(tmp_path):
    script = "import sys, samestep.loggers.run_files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


# log.txt


def test_the_text_log_contains_timestamps_records_and_printed_text(tmp_path):
    path = tmp_path / "log.txt"
    logger = TextLog(path, clock=lambda: 0.0)
    logger.print("two ranks\non one node")
    logger.write(120, {"train/loss": 0.4312, "lr": 3e-4})
    logger.close({"epochs": 3, "best": "val/accuracy", "loss": 0.25})
    logger.close({})
    stamps = {text[:19] for text in path.read_text().splitlines() if text[0].isdigit()}
    (stamp,) = stamps
    gap = " " * 19
    assert path.read_text().splitlines() == [
        f"{stamp}  two ranks",
        f"{gap}  on one node",
        f"{stamp}  step 120 | train/loss 0.4312 | lr 3.0e-04",
        f"{stamp}  summary",
        f"{gap}  best val/accuracy",
        f"{gap}  epochs 3",
        f"{gap}  loss 0.2500",
    ]


def test_the_text_log_is_continued_and_accepts_any_text(tmp_path):
    path = tmp_path / "log.txt"
    for text in ("größer", "a path \udcff that is not UTF-8"):
        logger = TextLog(path)
        logger.print(text)
        assert len(path.read_text(encoding="utf-8").splitlines()) >= 1
        logger.close({})
    first, second = path.read_text(encoding="utf-8").splitlines()
    assert first.endswith("  größer")
    assert second.endswith(r"  a path \udcff that is not UTF-8")


# TensorBoard


def test_tensorboard_reads_back_every_point(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    warned = []
    logger = open_tensorboard(tmp_path, warned.append)
    for step in range(3):
        logger.write(step, {"train/loss": 1 / (step + 1), "lr": 3e-4})
    logger.write(3, {"train/loss": math.nan})
    logger.close({})
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert sorted(read.Tags()["scalars"]) == ["lr", "train/loss"]
    points = read.Scalars("train/loss")
    assert [point.step for point in points] == [0, 1, 2, 3]
    assert [point.value for point in points[:3]] == pytest.approx([1, 0.5, 1 / 3])
    assert math.isnan(points[3].value)
    assert warned == []


def test_without_tensorboard_a_warning_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    warned = []
    assert open_tensorboard(tmp_path, warned.append) is None
    (text,) = warned
    assert text.startswith("TensorBoard is not installed (")
    assert text.endswith("), so samestep writes no curves: pip install 'samestep[tensorboard]'")


# summary.json


def test_the_summary_is_sorted_indented_strict_json(tmp_path):
    path = tmp_path / "run" / "summary.json"
    write_summary(path, {"seconds": 1.5, "best": {"b": math.nan, "a": (1, None)}, "folder": tmp_path, "done": True})
    assert path.read_text() == (
        '{\n  "best": {\n    "a": [\n      1,\n      null\n    ],\n    "b": null\n  },\n'
        f'  "done": true,\n  "folder": "{tmp_path}",\n  "seconds": 1.5\n}}\n'
    )
    assert [found.name for found in path.parent.iterdir()] == ["summary.json"]


def test_a_failed_summary_write_leaves_the_old_file_and_no_temporary_file(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_summary(path, {"loss": 1})

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_summary(path, {"loss": 2})
    assert json.loads(path.read_text()) == {"loss": 1}
    assert [found.name for found in tmp_path.iterdir()] == ["summary.json"]


def test_an_invalid_summary_value_is_rejected_with_its_path(tmp_path):
    with pytest.raises(LogError) as caught:
        write_summary(tmp_path / "summary.json", {"best": [1, torch.zeros(2)]})
    assert str(caught.value) == (
        "summary['best'][1] is a Tensor, which JSON cannot represent: "
        "pass a number, a string, or lists and dicts of them, e.g. float(x)"
    )
    assert list(tmp_path.iterdir()) == []


# All loggers together


def test_every_logger_receives_every_record(tmp_path, capsys):
    loggers = Loggers(open_console(sys.stdout), lambda: tmp_path, warnings.warn)
    loggers.print("hello")
    loggers.write({(LogRow(1, 1, 0), "train/loss"): 0.5})
    loggers.close({"steps": 1})
    assert capsys.readouterr().out == "hello\nstep 1 | train/loss 0.5000\n"
    assert [record["train/loss"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [0.5]
    assert "hello" in (tmp_path / "log.txt").read_text()
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1}
    assert list((tmp_path / "tensorboard").iterdir())


def test_without_a_folder_no_file_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    loggers = Loggers(open_console(sys.stdout), lambda: None, warnings.warn)
    loggers.print("hello")
    loggers.write({(LogRow(1, 1, 0), "train/loss"): 0.5})
    loggers.close({"steps": 1})
    assert capsys.readouterr().out == "hello\nstep 1 | train/loss 0.5000\n"
    assert list(Path().iterdir()) == []


def test_an_empty_summary_is_not_written(tmp_path):
    loggers = Loggers(open_console(sys.stdout), lambda: tmp_path, warnings.warn)
    loggers.write({(LogRow(1, 1, 0), "train/loss"): 0.5})
    loggers.close({})
    assert not (tmp_path / "summary.json").exists()


def test_a_failed_summary_write_warns_and_the_other_loggers_are_closed(tmp_path):
    warned = []
    loggers = Loggers(open_console(sys.stdout), lambda: tmp_path, warned.append)
    loggers.write({(LogRow(1, 1, 0), "train/loss"): 0.5})
    (tmp_path / "summary.json").mkdir()
    loggers.close({"steps": 1})
    assert warned == [
        f"{tmp_path / 'summary.json'} cannot be written: a folder is where a file is needed: choose another "
        "folder; the run has no summary"
    ]
    with pytest.raises(ValueError, match="closed file"):
        loggers.print("too late")
