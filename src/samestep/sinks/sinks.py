"""All sinks as one: one writer, however many ranks there are."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from samestep.disk import in_words
from samestep.sinks.appended import Tell
from samestep.sinks.console import Console
from samestep.sinks.metrics_file import MetricsFile
from samestep.sinks.summary_file import write_summary
from samestep.sinks.tensorboard import open_tensorboard
from samestep.sinks.text_log import TextLog

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


class Sinks:
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
            self._warn(f"{path} cannot be written: {in_words(error)}; how the run ended is not kept there")


def open_sinks(folder: Path | None, console: Console, warn: Tell) -> Sinks:
    """Every sink there can be for a run's folder, or the console alone where there is none.

    `warn` is told what has to be left out, also where a disk takes nothing: no file of a log ends a training.
    """
    if folder is None:
        return Sinks(console, None, (), None, warn)
    text = TextLog(folder / TEXT, warn=warn, say=console.say)

    def say(told: str) -> None:
        """As Sinks.say, which is not there yet."""
        console.say(told)
        text.say(told)

    curves = open_tensorboard(folder / CURVES, warn, say)
    others: list[Sink] = [MetricsFile(folder / METRICS, warn=warn, say=say), *([curves] if curves else [])]
    return Sinks(console, text, others, folder, warn)
