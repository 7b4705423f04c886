"""The log writer of rank 0: opens the run's log files with the first record, and keeps what the summary needs."""

from collections import Counter
from collections.abc import Callable, Mapping

from samestep.loggers.console import Console
from samestep.loggers.loggers import Loggers

MetricKey = tuple[int, str]
"""The step and the name of a logged value."""
_SHOWN_PER_SYNC = 10  # metrics arrive about once per second, and a screen or a curve needs no more points


class LogWriter:
    """Writes averaged metrics and printed text; only rank 0 has one."""

    def __init__(self, open_loggers: Callable[[], Loggers], console: Console) -> None:
        self._open_loggers, self._console = open_loggers, console
        self._loggers: Loggers | None = None
        self._printed: list[str] = []
        self.last: dict[str, float] = {}
        """The last value of each metric."""
        self.counts: Counter[str] = Counter()
        """How often each metric was logged."""

    @property
    def is_open(self) -> bool:
        """Whether the log files exist."""
        return self._loggers is not None

    def expect(self, total: int, start: int) -> None:
        """Set the first and the last step, for the progress bar."""
        self._console.expect(total, start)

    def advance(self, step: int) -> None:
        """Move the progress bar."""
        self._console.advance(step)

    def print(self, text: str) -> None:
        """Print now; the text log gets it too, once it is open."""
        if self._loggers is not None:
            self._loggers.print(text)
        else:
            self._console.print(text)
            self._printed.append(text)

    def write(self, records: Mapping[MetricKey, float]) -> None:
        """Write one record per step, in order. metrics.jsonl gets all of them, other loggers a selection."""
        by_step: dict[int, dict[str, float]] = {}
        for (step, name), value in records.items():
            by_step.setdefault(step, {})[name] = value
        loggers = self._loggers or self._open()
        stride = -(-len(by_step) // _SHOWN_PER_SYNC)
        for left, step in zip(range(len(by_step) - 1, -1, -1), sorted(by_step), strict=True):
            values = by_step[step]
            shown = left % stride == 0 or not all(name.startswith("train/") for name in values)
            loggers.write(step, values, shown)
            self.last.update(values)
            self.counts.update(values.keys())

    def close(self, summary: Mapping[str, object]) -> None:
        """Close all files, and write the summary if there are any."""
        (self._loggers or self._console).close(summary)

    def _open(self) -> Loggers:
        self._loggers = self._open_loggers()
        for text in self._printed:
            self._loggers.print_to_file(text)
        return self._loggers
