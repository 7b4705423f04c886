"""What the ranks of a run spent their time on, from the records of times.jsonl."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from samestep.distributed.step_times import PHASES
from samestep.report.run_records import Record

COMMUNICATION: Final = "communication"
PARTS: Final[tuple[str, ...]] = (
    "forward",
    "backward",
    COMMUNICATION,
    "optimizer",
    "other",
    "data",
    "logging",
    "checkpoint",
    "evaluation",
)
"""The parts of the time in the order in which they are shown; together they are the phases and the communication."""
MEANINGS: Final[Mapping[str, str]] = {
    "forward": "from getting a micro-batch to the start of backward()",
    "backward": "backward passes, without waiting for other ranks",
    COMMUNICATION: "waiting for other ranks, and for gradients that are being exchanged",
    "optimizer": "optimizer.step()",
    "other": "the rest of your loop, such as gradient clipping and zero_grad()",
    "data": "waiting for the next micro-batch",
    "logging": "the exchange and writing of metrics",
    "checkpoint": "checkpoints, as long as training waits for them",
    "evaluation": "inside run.evaluate and loops over shards",
}

_FEWEST_RANKS: Final = 2
_SLOW_SHARE: Final = 0.05  # of a step: a rank that needs this much longer than the others is named
_SLOW_SECONDS: Final = 1e-3
_ENOUGH_SECONDS: Final = 5.0  # of all steps: in fewer, the first writes and allocations count too much


@dataclass(frozen=True)
class TimeShares:
    """Seconds by part: of all ranks together, and of each rank if there are few."""

    steps: int
    seconds: float  # of rank 0 in the training loop
    mean: Mapping[str, float]  # over the ranks
    by_rank: Mapping[int, Mapping[str, float]]
    rank_steps: Mapping[int, int]  # how many steps each rank was part of; after a restart there may be fewer ranks
    step_seconds: float  # the mean duration of a step

    def share(self, part: str) -> float:
        """The share of a part in the time of all ranks."""
        total = sum(self.mean.values())
        return self.mean[part] / total if total else 0.0

    def of_rank(self, rank: int) -> dict[str, float]:
        """Seconds per step of a rank by part."""
        return {part: seconds / self.rank_steps[rank] for part, seconds in self.by_rank[rank].items()}


def slowest_rank(shares: TimeShares) -> tuple[int, float, str] | None:
    """The rank that needs the longest without communication, if it needs much longer than the others.

    Returns the rank, how many seconds per step more than the median of the ranks, and the part with most of them.
    """
    if len(shares.by_rank) < _FEWEST_RANKS or shares.seconds < _ENOUGH_SECONDS:
        return None
    ranks = {rank: shares.of_rank(rank) for rank in shares.by_rank}
    own = {rank: sum(parts.values()) - parts[COMMUNICATION] for rank, parts in ranks.items()}
    slowest, middle = max(own, key=lambda rank: own[rank]), statistics.median_low(own.values())
    later = own[slowest] - middle
    if later < max(_SLOW_SHARE * shares.step_seconds, _SLOW_SECONDS):
        return None
    more = {
        part: seconds - statistics.median_low(parts[part] for parts in ranks.values())
        for part, seconds in ranks[slowest].items()
        if part != COMMUNICATION
    }
    return slowest, later, max(more, key=lambda part: more[part])


def sum_times(records: Iterable[Record]) -> TimeShares | None:
    """The sum of the records; None if there is none."""
    steps, seconds = 0, 0.0
    mean: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    by_rank: dict[int, dict[str, float]] = {}
    rank_steps = Counter[int]()
    for record in records:
        steps, seconds = steps + record["steps"], seconds + record["seconds"]
        columns: dict[str, Any] = {**record["phases"], COMMUNICATION: record.get(COMMUNICATION, [])}
        count = max((len(values) for values in columns.values() if isinstance(values, list)), default=0)
        rank_steps.update(dict.fromkeys(range(count), record["steps"]))
        for part, values in columns.items():
            if part not in mean:
                continue
            if isinstance(values, Mapping):  # a summary of many ranks
                mean[part] += values["mean"]
            elif values:
                mean[part] += sum(values) / len(values)
                for rank, value in enumerate(values):
                    by_rank.setdefault(rank, dict.fromkeys(PARTS, 0.0))[part] += value
    assert set(PARTS) == {*PHASES, COMMUNICATION}
    return TimeShares(steps, seconds, mean, by_rank, rank_steps, seconds / steps) if steps else None


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
