"""metrics.jsonl: one record a line, written so that a kill costs at most the last one.

A line is `{"step": 12, "time": 1767225600.0, "train/loss": 0.43}`. JSON has no word for numbers that are not finite,
and readers that keep to the standard refuse Python's own: NaN is written as null, and so is infinity, whose sign is
then kept beside it as `"infinite": {"train/loss": 1}`. `read_metrics` gives both back as they were.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from samestep.errors import LogError
from samestep.log import warn as give_warning
from samestep.sinks.appended import AppendedFile, Tell


class MetricsFile:
    """A sink that appends each record with a single write to the operating system.

    A file that exists is continued, on a fresh line also where a kill tore the last one. There must be one writer only.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.time, warn: Tell = give_warning, say: Tell | None = None
    ) -> None:
        self._clock = clock
        self._file = AppendedFile(path, warn, say)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one record."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        record: dict[str, object] = {"step": step, "time": round(self._clock(), 3), **finite}
        signs = {name: round(math.copysign(1, value)) for name, value in values.items() if math.isinf(value)}
        if signs:
            record["infinite"] = signs
        self._file.append(json.dumps(record, allow_nan=False).encode() + b"\n")

    def close(self, summary: Mapping[str, object]) -> None:
        """Bring the file to the disk and close it; the summary has a file of its own."""
        del summary
        self._file.close()


def read_metrics(path: str | Path, by_step: bool = False) -> list[dict[str, float]]:
    """Every record of a metrics.jsonl in the order written; a line torn by a kill is left out.

    With `by_step`, one record a step, in order: what was logged at a step more than once (a run that was killed and
    went on from an older checkpoint) has its last value.

    ```python
    losses = [record["train/loss"] for record in read_metrics("runs/first/metrics.jsonl")]
    ```
    """
    path = Path(path)
    if not path.is_file():
        raise LogError(f"there is no file {path}: give the metrics.jsonl that lies in a run's folder")
    records = list(_records(path))
    if not by_step:
        return records
    merged: dict[float, dict[str, float]] = {}
    for record in records:
        merged.setdefault(record["step"], {}).update(record)
    return [merged[step] for step in sorted(merged)]


def _records(path: Path) -> Iterator[dict[str, float]]:
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        # Blocks that a crash of the machine left unwritten read as zeros.
        text = line.strip(b"\0\r ")
        if not text:
            continue
        try:
            record = json.loads(text)
        except ValueError as error:
            # Every record begins with a brace and none ends early, so a broken one that begins so was torn.
            if text.startswith(b"{"):
                continue
            raise LogError(_stranger(path, number)) from error
        if not isinstance(record, dict) or "step" not in record:
            raise LogError(_stranger(path, number))
        yield _restored(record)


def _restored(record: dict[str, object]) -> dict[str, float]:
    signs = record.pop("infinite", {})
    assert isinstance(signs, dict)
    restored: dict[str, float] = {}
    for name, value in record.items():
        if value is None:
            value = math.copysign(math.inf, signs[name]) if name in signs else math.nan
        assert isinstance(value, float | int)
        restored[name] = value
    return restored


def _stranger(path: Path, number: int) -> str:
    shape = '{"step": 12, "train/loss": 0.43}'
    return f"{path}, line {number} is not a record like {shape}: give the metrics.jsonl of a run"
