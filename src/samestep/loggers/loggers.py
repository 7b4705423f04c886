"""All loggers of a run, on rank 0: console, log.txt, metrics.jsonl, events, summary.json, and those of your list."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from samestep.disk import describe_os_error, write_atomically
from samestep.errors import LogError
from samestep.loggers.console import Console
from samestep.loggers.logger_thread import Logger, LoggerThread
from samestep.loggers.run_files import METRICS_FILE, WAIT_PREFIX, EventLog, JsonlLogger, TextLog
from samestep.loggers.trackers import TensorBoardLogger

CONFIG_FILE = "config.json"
TEXT_FILE = "log.txt"
SUMMARY_FILE = "summary.json"
_ABOUT_RUN = ("ranks", "nodes", "command", "versions")  # what trackers show besides the options of Run
_SHOWN_PER_SYNC = 10  # metrics arrive about once per second, and a screen or a curve needs no more points


class EpochNumber(int):
    """The number of an epoch: an integer that `run.log` can tell from a step."""


class LogRow(NamedTuple):
    """The record that a logged value belongs to; the same on all ranks."""

    position: int  # how many steps this process has begun and ended: odd inside a step, even between two steps
    step: int
    epoch: int | None  # None for values logged before training, or with a step number of your own
    repeat: int = 0  # how often the name was logged before in this record; between two steps every value counts

    @property
    def between_steps(self) -> bool:
        """Whether its values were logged between two steps, such as the results of an evaluation."""
        return self.position % 2 == 0


MetricKey = tuple[LogRow, str]
"""The record and the name of a logged value."""


class Loggers:
    """All loggers of a run, on rank 0.

    The files are opened with the first record, in `folder()`; without a folder only the console is used. A disk error
    never raises: `warn` receives the file and the reason, and training continues.
    """

    def __init__(
        self,
        console: Console,
        folder: Callable[[], Path | None],
        warn: Callable[[str], None],
        loggers: Sequence[Logger] | None = None,
        describe: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """Create them; `describe` returns the content of config.json."""
        self.console, self._get_folder, self._warn = console, folder, warn
        self._given = [TensorBoardLogger()] if loggers is None else loggers
        self._describe, self._described = describe, dict[str, Any]()
        self._folder: Path | None = None
        self._text: TextLog | None = None
        self._jsonl: JsonlLogger | None = None
        self._all: list[Console | TextLog | JsonlLogger | LoggerThread] = [console]
        self._events = EventLog(warn, self.print)
        self._printed: list[str] = []  # before log.txt was open
        self.is_open = False  # whether anything was logged, so that there are files
        self.last: dict[str, float] = {}  # the last value of each metric
        self.counts: Counter[str] = Counter()  # how often each metric was logged

    def print(self, text: str) -> None:
        """Print text now; log.txt receives it too, as soon as it is open."""
        self.console.print(text)
        if self._text is not None:
            self._text.print(text)
        elif not self.is_open:
            self._printed.append(text)

    def record(self, event: str, fields: Mapping[str, object]) -> None:
        """Record an event in events.jsonl, as soon as there are files."""
        self._events.record(event, fields)

    def begin_training(self) -> None:
        """Write the events from now on: the first step may take minutes, and the run may be killed in it."""
        if not self._events.is_open and (folder := self._get_folder()) is not None:
            self._open_events(folder)

    @property
    def has_files(self) -> bool:
        """Whether something is written already, so that the folder must stay the same."""
        return self.is_open or self._events.is_open

    def record_times(self, step: int, fields: Mapping[str, object]) -> None:
        """Record in times.jsonl what the ranks have spent their time on."""
        self._events.record_times(step, fields)

    def write(self, values: Mapping[MetricKey, float], times: Mapping[int, float] | None = None) -> None:
        """Write the records in the order in which they were logged; `times` has when that was, by their positions.

        metrics.jsonl receives all of them, the other loggers a selection of those that contain nothing but `train/...`;
        the last one before an evaluation is always among them.
        """
        if not self.is_open:
            self._open()
        records = _group(values)
        training = [_is_training(record) for _, record in records]
        left = sum(training)
        stride = -(-left // _SHOWN_PER_SYNC)
        for index, (row, record) in enumerate(records):
            left -= training[index]
            shown = not all(training[index : index + 2]) or left % stride == 0
            readable = {name: value for name, value in record.items() if not name.startswith(WAIT_PREFIX)}
            for logger in self._all:
                if isinstance(logger, JsonlLogger):
                    logger.write(row.step, record, row.epoch, row.between_steps, (times or {}).get(row.position))
                elif shown:
                    part = readable if logger in (self.console, self._text) else record
                    logger.write(row.step, part, row.epoch, row.between_steps)
            self.last.update(readable)
            self.counts.update(readable.keys())

    def close(self, summary: Mapping[str, object], longest_wait: float = math.inf) -> None:
        """Close every logger, even if one of them raises, and write summary.json unless it is empty.

        It waits at most `longest_wait` seconds for the loggers of your list.
        """
        for logger in self._all:
            if isinstance(logger, LoggerThread):
                logger.end(summary, longest_wait)  # all at the same time
        with ExitStack() as closing:
            closing.callback(self._events.close)
            for logger in self._all:
                closing.callback(logger.close, summary)
            folder = self._folder if self.is_open or not summary else self._get_folder()
            if self._events.is_waiting and (here := folder or self._get_folder()) is not None and here.is_dir():
                closing.callback(self._open_events, here)  # nothing was logged, but the launcher has made the folder
            if summary and folder is not None:
                closing.callback(self._write_summary, folder / SUMMARY_FILE, summary)

    def _open(self) -> None:
        self.is_open, self._folder = True, self._get_folder()
        if self._folder is None:
            return
        resumed = (self._folder / METRICS_FILE).is_file()
        self._open_events(self._folder)
        self._text = TextLog(self._folder / TEXT_FILE, warn=self._warn, report=self.console.print)
        for text in self._printed:
            self._text.print(text)
        self._jsonl = JsonlLogger(self._folder / METRICS_FILE, warn=self._warn, report=self.print)
        self._all += [self._text, self._jsonl]
        about = {name: self._described[name] for name in _ABOUT_RUN if name in self._described}
        config = {**self._described.get("config", {}), "samestep": {**self._described.get("run", {}), **about}}
        self._all += [LoggerThread(each, self._folder, config, resumed, self._warn, self.print) for each in self._given]

    def _open_events(self, folder: Path) -> None:
        """Write the events from now on, and how the run was started."""
        if not self._events.is_open and self._describe is not None:
            self._described = self._describe()
            text = json.dumps(_to_json("config", self._described), indent=2, allow_nan=False) + "\n"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_atomically(folder / CONFIG_FILE, text)
            except OSError as error:
                path, cause = folder / CONFIG_FILE, describe_os_error(error)
                self._warn(f"{path} cannot be written: {cause}; `samestep rerun` cannot repeat the run")
        self._events.open(folder)

    def _write_summary(self, path: Path, summary: Mapping[str, object]) -> None:
        try:
            write_summary(path, summary)
        except OSError as error:
            self._warn(f"{path} cannot be written: {describe_os_error(error)}; the run has no summary")


def _group(values: Mapping[MetricKey, float]) -> list[tuple[LogRow, dict[str, float]]]:
    """The records of these values, in the order in which they were logged.

    A step has one record. Between two steps a record ends where a name comes again, or where the step differs.
    """
    records: list[tuple[LogRow, dict[str, float]]] = []
    of_steps: dict[LogRow, dict[str, float]] = {}
    for (row, name), value in sorted(values.items(), key=lambda item: item[0][0].position):
        if not row.between_steps:
            if row not in of_steps:
                records.append((row, of_steps.setdefault(row, {})))
            of_steps[row][name] = value
        elif records and records[-1][0][:3] == row[:3] and name not in records[-1][1]:
            records[-1][1][name] = value
        else:
            records.append((row, {name: value}))
    return records


def _is_training(record: Mapping[str, float]) -> bool:
    return all(name.startswith(("train/", WAIT_PREFIX)) for name in record)


def write_summary(path: Path, summary: Mapping[str, object]) -> None:
    """Write summary.json atomically, with sorted keys; numbers that are not finite become null."""
    text = json.dumps(_to_json("summary", dict(summary)), indent=2, sort_keys=True, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


def _to_json(path: str, value: object) -> object:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Path():
            return str(value)
        case Mapping():
            return {str(key): _to_json(f"{path}[{key!r}]", item) for key, item in value.items()}
        case list() | tuple():
            return [_to_json(f"{path}[{index}]", item) for index, item in enumerate(value)]
        case _:
            raise LogError(
                f"{path} is a {type(value).__name__}, which JSON cannot represent: "
                "pass a number, a string, or lists and dicts of them, e.g. float(x)"
            )


# What `run.log` accepts

_RESERVED_NAMES = ("epoch", "infinite", "step", "time")  # fields of a line of metrics.jsonl
_METRIC_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)
_ADVICE: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (type(None), "leave it out, or log float('nan') for a missing number"),
    (str, "log one number; text goes to run.print(...)"),
    (Mapping, 'log each of its numbers under its own name, e.g. "val/accuracy"'),
    ((list, tuple, set), "log one number, e.g. sum(x) / len(x)"),
    (complex, "log one real number, e.g. abs(x)"),
)


def check_metric_name(name: object) -> str:
    """Return the name if every logger can store it unchanged."""
    if not isinstance(name, str):
        raise LogError(f'a metric has the name {name!r}, a {type(name).__name__}: use a string such as "val/accuracy"')
    if name in _RESERVED_NAMES:
        advice = "leave it out, since every record has it" if name in ("epoch", "step") else f'use e.g. "train/{name}"'
        raise LogError(f'"{name}" is a field of metrics.jsonl and cannot name a metric: {advice}')
    if not _METRIC_NAME.fullmatch(name):
        raise LogError(
            f'"{name}" cannot name a metric: use letters, digits, "_", "-" and "." in parts joined by "/", '
            'e.g. "val/accuracy"'
        )
    return name


def check_log_step(step: object) -> int:
    """Return the step as a Python int of at least 0."""
    value = step.item() if isinstance(step, np.integer | torch.Tensor) and step.ndim == 0 else step
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise LogError(f"step must be an integer of at least 0, got {step!r}: pass e.g. step=epoch.number")
    return int(value)


def check_metric_value(name: str, value: object) -> float:
    """Return one real number from a Python number, a NumPy scalar, or an array or tensor with one element.

    NaN and infinity are valid: a loss that overflows must appear in the log.

    >>> check_metric_value("train/loss", torch.tensor(0.5))
    0.5
    """
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        if prod(value.shape) != 1:
            kind = "a tensor" if isinstance(value, torch.Tensor) else "an array"
            raise LogError(f'"{name}" is {kind} of shape {tuple(value.shape)}: log one number, e.g. x.mean()')
        value = value.item()
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float | int):
        return value
    if isinstance(value, Real):
        return float(value)
    kind = type(value).__name__
    article = "an" if kind[0].lower() in "aeiou" else "a"
    advice = next((advice for types, advice in _ADVICE if isinstance(value, types)), "log one number, e.g. float(x)")
    raise LogError(f'"{name}" is {"None" if value is None else f"{article} {kind}"}: {advice}')
