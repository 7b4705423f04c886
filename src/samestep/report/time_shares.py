"""What the ranks of a run spent their time on, from the records of times.jsonl."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from samestep.distributed.step_times import PHASES
from samestep.report.run_data import Record

WAITING: Final = "waiting"
PARTS: Final[tuple[str, ...]] = (
    "forward",
    "backward",
    WAITING,
    "optimizer",
    "other",
    "data",
    "logging",
    "checkpoint",
    "evaluation",
)
"""The parts of the time in the order in which they are shown; together they are the phases and the waiting."""
MEANINGS: Final[Mapping[str, str]] = {
    "forward": "from getting a micro-batch to the start of backward()",
    "backward": "backward passes, without waiting for other ranks",
    WAITING: "for other ranks and for gradients that are being exchanged",
    "optimizer": "optimizer.step()",
    "other": "the rest of your loop, such as gradient clipping and zero_grad()",
    "data": "waiting for the next micro-batch",
    "logging": "the exchange and writing of metrics",
    "checkpoint": "checkpoints, as long as training waits for them",
    "evaluation": "inside run.evaluate and loops over shards",
}


@dataclass(frozen=True)
class TimeShares:
    """Seconds by part: of all ranks together, and of each rank if there are few."""

    steps: int
    seconds: float  # of rank 0 in the training loop
    mean: Mapping[str, float]  # over the ranks
    by_rank: Mapping[int, Mapping[str, float]]
    step_seconds: float  # the mean duration of a step

    def share(self, part: str) -> float:
        """The share of a part in the time of all ranks."""
        total = sum(self.mean.values())
        return self.mean[part] / total if total else 0.0


def sum_times(records: Iterable[Record]) -> TimeShares | None:
    """The sum of the records; None if there is none."""
    steps, seconds = 0, 0.0
    mean: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    by_rank: dict[int, dict[str, float]] = {}
    for record in records:
        steps, seconds = steps + record["steps"], seconds + record["seconds"]
        columns: dict[str, Any] = {**record["phases"], WAITING: record.get(WAITING, [])}
        for part, values in columns.items():
            if part not in mean:
                continue
            if isinstance(values, Mapping):  # a summary of many ranks
                mean[part] += values["mean"]
            elif values:
                mean[part] += sum(values) / len(values)
                for rank, value in enumerate(values):
                    by_rank.setdefault(rank, dict.fromkeys(PARTS, 0.0))[part] += value
    assert set(PARTS) == {*PHASES, WAITING}
    return TimeShares(steps, seconds, mean, by_rank, seconds / steps) if steps else None


def peak(records: Iterable[Record], name: str) -> float | None:
    """The largest value of a column over all ranks; None if it was never recorded."""
    found = list[float]()
    for record in records:
        values = record.get(name)
        if isinstance(values, Mapping):
            found.append(values["max"])
        elif values:
            found += [value for value in values if value is not None]
    return max(found, default=None)
