"""Records as text: how metrics are formatted on one line, and log.txt."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from samestep.disk import AppendFile
from samestep.messages import format_bytes, warn


class TextLog:
    """Logger that writes each record and each printed text to log.txt with a timestamp; continues an existing file."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.time,
        warn: Callable[[str], None] = warn,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._clock = clock
        self._file = AppendFile(path, warn, report)
        self._closed = False

    def write(
        self, step: int, values: Mapping[str, float], epoch: int | None = None, between_steps: bool = False
    ) -> None:
        """Append one record."""
        self.print(format_record(step, values, epoch=epoch if between_steps else None))

    def print(self, text: str) -> None:
        """Append text; its second and later lines are indented."""
        timestamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._clock()))
        lines = f"{timestamp}  " + text.replace("\n", f"\n{' ' * len(timestamp)}  ") + "\n"
        # a path may contain bytes that are not UTF-8
        self._file.append(lines.encode(errors="backslashreplace"))

    def close(self, summary: Mapping[str, object]) -> None:
        """Append the summary and close the file."""
        if self._closed:
            return
        self._closed = True
        if summary:
            shown = sorted(item for item in summary.items() if item[0] != "ledger")  # for `samestep audit` only
            self.print("\n".join(("summary", *(f"{name} {_text(value)}" for name, value in shown))))
        self._file.close()


def _text(value: object) -> str:
    return format_number(value) if isinstance(value, float | int) and not isinstance(value, bool) else str(value)


def format_record(step: int, values: Mapping[str, float], total: int | None = None, epoch: int | None = None) -> str:
    """Format a record as one line.

    >>> format_record(120, {"train/loss": 0.43117, "lr": 3e-4, "samples_per_s": 15321.4, "memory_bytes": 1.25 * 2**30})
    'step 120 | train/loss 0.4312 | lr 3.0e-04 | 15,321 samples/s | 1.2 GiB'
    >>> format_record(299, {"test/accuracy": 0.75}, epoch=2)
    'epoch 2 | step 299 | test/accuracy 0.7500'
    """
    metrics = (format_metric(name, value) for name, value in values.items())
    position = [] if epoch is None else [f"epoch {epoch}"]
    return " | ".join((*position, f"step {format_progress(step, total)}", *metrics))


def format_progress(step: int, total: int | None) -> str:
    """Format the step, and the last step if it is known."""
    return f"{step:,}" if total is None else f"{step:,}/{total:,}"


def format_metric(name: str, value: float) -> str:
    """Format a value with its name, or with a unit that makes the name redundant."""
    if is_learning_rate(name):
        return f"{name} {value:.1e}"
    if is_throughput(name):
        return f"{value:,.0f} samples/s" if value >= 10 else f"{value:.2f} samples/s"
    if is_memory(name):
        return format_bytes(value)
    return f"{name} {format_number(value)}"


def format_number(value: float) -> str:
    """Format a number with four decimals or digits, and an integer in full."""
    size = abs(value)
    if size < 1e15 and value == int(value):
        return f"{int(value):,}"
    if 1e-2 <= size < 1e5:
        return f"{value:,.4f}" if size < 1e3 else f"{value:,.1f}"
    return f"{value:.3e}"


def is_learning_rate(name: str) -> bool:
    """Whether the name is that of a learning rate: `lr`, `lr/1`, `train/learning_rate`."""
    return any(part in ("lr", "learning_rate") for part in name.split("/"))


def is_throughput(name: str) -> bool:
    """Whether the name ends with `samples_per_s`."""
    return name.rpartition("/")[2] == "samples_per_s"


def is_memory(name: str) -> bool:
    """Whether the name ends with `memory_bytes`."""
    return name.rpartition("/")[2] == "memory_bytes"
