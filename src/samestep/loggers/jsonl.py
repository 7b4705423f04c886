"""metrics.jsonl: one record per line, written so that a kill loses at most the last record.

A line is `{"step": 12, "epoch": 0, "time": 1767225600.0, "train/loss": 0.43}`. Strict JSON has no NaN and no infinity:
both are written as null, and the sign of an infinity is stored as `"infinite": {"train/loss": 1}`. `read_metrics`
restores them.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from samestep.disk import AppendFile
from samestep.errors import LogError
from samestep.messages import warn


class JsonlLogger:
    """Logger that appends each record with a single write; continues an existing file. Use one writer only."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.time,
        warn: Callable[[str], None] = warn,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._clock = clock
        self._file = AppendFile(path, warn, report)

    def write(
        self, step: int, values: Mapping[str, float], epoch: int | None = None, between_steps: bool = False
    ) -> None:
        """Append one record."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        position = {"step": step} if epoch is None else {"step": step, "epoch": epoch}
        record: dict[str, object] = {**position, "time": round(self._clock(), 3), **finite}
        signs = {name: round(math.copysign(1, value)) for name, value in values.items() if math.isinf(value)}
        if signs:
            record["infinite"] = signs
        self._file.append(json.dumps(record, allow_nan=False).encode() + b"\n")

    def close(self, summary: Mapping[str, object]) -> None:
        """Flush and close the file."""
        del summary  # it has its own file
        self._file.close()


def read_metrics(path: str | Path, by_step: bool = False) -> list[dict[str, float]]:
    """Read every record of a metrics.jsonl in the order written; skip a line that a kill cut off.

    With `by_step=True` you get one record per step, in order. If a value was logged more than once at a step (the run
    was killed and resumed from an older checkpoint), the last one counts.

    ```python
    losses = [record["train/loss"] for record in read_metrics("runs/first/metrics.jsonl")]
    ```
    """
    path = Path(path)
    if not path.is_file():
        raise LogError(f"{path} does not exist: pass the metrics.jsonl in a run's folder")
    records = list(_records(path))
    if not by_step:
        return records
    merged: dict[float, dict[str, float]] = {}
    for record in records:
        merged.setdefault(record["step"], {}).update(record)
    return [merged[step] for step in sorted(merged)]


def _records(path: Path) -> Iterator[dict[str, float]]:
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        text = line.strip(b"\0\r ")  # blocks that were not written before a crash read as zeros
        if not text:
            continue
        try:
            record = json.loads(text)
        except ValueError:
            if text.startswith(b"{"):  # a record that was cut off by a kill
                continue
            record = None
        if not isinstance(record, dict) or "step" not in record:
            example = '{"step": 12, "train/loss": 0.43}'
            raise LogError(f"{path}, line {number} is not a record like {example}: pass the metrics.jsonl of a run")
        signs = record.pop("infinite", {})
        for name in [name for name, value in record.items() if value is None]:
            record[name] = math.copysign(math.inf, signs[name]) if name in signs else math.nan
        yield record
