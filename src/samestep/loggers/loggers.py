"""All sinks as one: one writer, however many ranks there are."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import prod
from numbers import Real
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from samestep.disk import describe_os_error, write_atomically
from samestep.errors import LogError
from samestep.loggers.console import Console
from samestep.loggers.jsonl import MetricsFile, Tell
from samestep.loggers.tensorboard import open_tensorboard
from samestep.loggers.text_log import TextLog


def write_summary(path: Path, summary: Mapping[str, object]) -> None:
    """Write the summary so that a reader finds the old file or the new one, never a part, also after a crash.

    Keys are sorted. Numbers that are not finite become null, as JSON has no word for them.
    """
    text = json.dumps(_plain("summary", dict(summary)), indent=2, sort_keys=True, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


def _plain(place: str, value: object) -> object:
    """The value in JSON's own kinds."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Path():
            return str(value)
        case Mapping():
            return {str(key): _plain(f"{place}[{key!r}]", item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(f"{place}[{index}]", item) for index, item in enumerate(value)]
        case _:
            raise LogError(
                f"{place} is a {type(value).__name__}, which JSON cannot hold: "
                "give a number, a text, or lists and dicts of them, e.g. float(x)"
            )


# Fields of our own in a line of metrics.jsonl.
RESERVED = ("infinite", "step", "time")

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)

# What a wrong value most likely was meant to be, and how to log that.
_ADVICE: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (type(None), "leave it out, or log float('nan') for a missing number"),
    (str, "log one number; text goes to run.print(...)"),
    (Mapping, 'log each of its numbers under a name of its own, e.g. "val/accuracy"'),
    ((list, tuple, set), "log one number, e.g. sum(x) / len(x)"),
    (complex, "log one real number, e.g. abs(x)"),
)


def checked_values(values: Mapping[str, object]) -> dict[str, float]:
    """The values as plain numbers, or a LogError that names the first metric that is not one.

    NaN and infinity are numbers here: a loss that overflows is news to be logged, not a reason to stop.

    >>> checked_values({"train/loss": torch.tensor(0.5), "train/seen": 64})
    {'train/loss': 0.5, 'train/seen': 64}
    """
    return {check_metric_name(name): number(name, value) for name, value in values.items()}


def check_metric_name(name: object) -> str:
    """The name, if every sink can keep it as it is."""
    if not isinstance(name, str):
        raise LogError(f'a metric is named by a {type(name).__name__} ({name!r}): use a text such as "val/accuracy"')
    if name in RESERVED:
        raise LogError(f'"{name}" is a field of metrics.jsonl and cannot name a metric: use e.g. "train/{name}"')
    if not _NAME.fullmatch(name):
        raise LogError(
            f'"{name}" cannot name a metric: use letters, digits, "_", "-" and "." in parts joined by "/", '
            'e.g. "val/accuracy"'
        )
    return name


def check_log_step(step: object) -> int:
    """The step as a plain whole number from 0 on."""
    whole = step.item() if isinstance(step, np.integer | torch.Tensor) and step.ndim == 0 else step
    if not isinstance(whole, int) or isinstance(whole, bool) or whole < 0:
        raise LogError(f"step={step!r} is not a step: give a whole number from 0 on, e.g. step=epoch.number")
    return whole


def number(name: str, value: object) -> float:
    """One real number out of a Python number, a numpy scalar, or an array or tensor of one element."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = _single(name, value)
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float | int):
        return value
    if isinstance(value, Real):
        return float(value)
    raise LogError(f'"{name}" is {_article(value)}: {_advice(value)}')


def _single(name: str, value: "torch.Tensor | np.ndarray | np.generic") -> object:
    kind = "a tensor" if isinstance(value, torch.Tensor) else "an array"
    if prod(value.shape) != 1:
        raise LogError(f'"{name}" is {kind} of shape {tuple(value.shape)}: log one number, e.g. x.mean()')
    return value.item()


def _article(value: object) -> str:
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


def _advice(value: object) -> str:
    return next((advice for kind, advice in _ADVICE if isinstance(value, kind)), "log one number, e.g. float(x)")


METRICS = "metrics.jsonl"
TEXT = "log.txt"
CURVES = "tensorboard"
SUMMARY = "summary.json"


class Sink(Protocol):
    """Takes finished records: names and plain numbers, already reduced over the ranks."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take one record."""
        ...

    def close(self, summary: Mapping[str, object]) -> None:
        """Take leave; the summary is empty where the run ended with an exception."""
        ...


class Loggers:
    """All sinks of a run's first rank as one.

    `folder` is where the summary goes; without one there is none.
    """

    def __init__(
        self, console: Console, text: TextLog | None, others: Sequence[Sink], folder: Path | None, warn: Tell
    ) -> None:
        self._console, self._text, self._folder, self._warn = console, text, folder, warn
        self._all: tuple[Sink, ...] = (console, *([text] if text else []), *others)
        self._complete = tuple(sink for sink in others if isinstance(sink, MetricsFile))

    def write(self, step: int, values: Mapping[str, float], shown: bool = True) -> None:
        """Hand one record to every sink, or, where it is one of too many to be shown, to metrics.jsonl alone."""
        for sink in self._all if shown else self._complete:
            sink.write(step, values)

    def say(self, text: str) -> None:
        """Print text and keep it in the text log."""
        self._console.say(text)
        if self._text is not None:
            self._text.say(text)

    def keep(self, text: str) -> None:
        """Keep text in the text log that was printed before there was one."""
        if self._text is not None:
            self._text.say(text)

    def close(self, summary: Mapping[str, object]) -> None:
        """Close every sink, also where one of them fails to, and write the summary unless it is empty."""
        with ExitStack() as closing:
            for sink in self._all:
                closing.callback(sink.close, summary)
            if summary and self._folder is not None:
                closing.callback(self._summarize, self._folder / SUMMARY, summary)

    def _summarize(self, path: Path, summary: Mapping[str, object]) -> None:
        try:
            write_summary(path, summary)
        except OSError as error:  # how the run ended is known without it
            self._warn(f"{path} cannot be written: {describe_os_error(error)}; how the run ended is not kept there")


def open_loggers(folder: Path | None, console: Console, warn: Tell) -> Loggers:
    """Every sink there can be for a run's folder, or the console alone where there is none.

    `warn` is told what has to be left out, also where a disk takes nothing: no file of a log ends a training.
    """
    if folder is None:
        return Loggers(console, None, (), None, warn)
    text = TextLog(folder / TEXT, warn=warn, say=console.say)

    def say(told: str) -> None:
        """As Loggers.say, which is not there yet."""
        console.say(told)
        text.say(told)

    curves = open_tensorboard(folder / CURVES, warn, say)
    others: list[Sink] = [MetricsFile(folder / METRICS, warn=warn, say=say), *([curves] if curves else [])]
    return Loggers(console, text, others, folder, warn)
