"""What an audit found: epochs, evaluations and starts of each shard, and faults with their samples, ranks and steps."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

FaultKind = Literal[
    "never counted", "counted again", "wrong step", "wrong weight", "wrong rank", "damaged file", "cut off"
]


@dataclass(frozen=True)
class Fault:
    """One way in which a ledger does not show that every sample counted exactly once."""

    kind: FaultKind
    text: str
    """What is wrong, for a person."""
    epoch: int | None = None
    """None where the fault is not in training, or in no one epoch."""
    count: int = 0
    """How many samples are concerned; those below are the first few."""
    positions: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()
    """Dataset indices of these positions; empty where the order is drawn by weights, or the data is a stream."""
    steps: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class EpochReport:
    """How far one epoch is proved."""

    number: int
    complete: bool
    steps: int
    """Steps that all ranks have recorded, or should have."""
    samples: int
    """Samples that counted in these steps."""


@dataclass(frozen=True)
class EvaluationReport:
    """One pass over the data in which nothing was learnt."""

    generation: int
    number: int
    complete: bool
    """Whether every rank came to its end; one that was left early or killed proves nothing, and is no fault."""
    samples: int


@dataclass(frozen=True)
class StartReport:
    """One start of the run."""

    number: int
    epoch: int
    step: int
    world_size: int
    seconds: float
    """When, since 1970."""


@dataclass(frozen=True)
class ShardReport:
    """The verdict on one shard."""

    name: str
    starts: tuple[StartReport, ...]
    epochs: tuple[EpochReport, ...]
    evaluations: tuple[EvaluationReport, ...]
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]
    """What is worth knowing and no fault."""

    @property
    def sound(self) -> bool:
        """Whether every sample counted exactly once, as far as the run has come."""
        return not self.faults


@dataclass(frozen=True)
class Report:
    """The verdict on a run's folder."""

    folder: Path
    shards: tuple[ShardReport, ...]

    @property
    def sound(self) -> bool:
        """Whether all shards are."""
        return all(shard.sound for shard in self.shards)

    def as_record(self) -> dict[str, object]:
        """The same as plain values, for JSON."""
        shards = [{"sound": shard.sound, **asdict(shard)} for shard in self.shards]
        return {"folder": str(self.folder), "sound": self.sound, "shards": shards}
