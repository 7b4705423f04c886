"""Reads the ledger of one shard: all records, the generations of the run, and what is corrupt in the files."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from samestep.data.ledger import (
    RECORD,
    RECORD_BYTES,
    RecordKind,
    Records,
    ShardDescription,
    read_description,
    valid_mask,
)  # fmt: skip

Position = tuple[int, int]
"""(epoch, step)."""

FaultKind = Literal[
    "never counted", "counted more than once", "wrong step", "wrong weight", "wrong rank",
    "corrupt file", "truncated file",
]  # fmt: skip

_RANK_FILE = re.compile(r"rank-(\d{5})\.bin")


@dataclass(frozen=True)
class Generation:
    """One start of the run at (epoch, step) in a world of some size."""

    number: int
    start: Position
    world_size: int
    started_at: float  # seconds since 1970
    ranks: frozenset[int]  # the ranks that have a start record
    ends: dict[int, tuple[Position, bool]]
    """For each rank that has an end record: up to where it has trained, and whether the run succeeded."""

    @property
    def succeeded(self) -> bool:
        """Whether some rank recorded that the run succeeded: then every rank must have recorded everything."""
        return any(success for _, success in self.ends.values())


@dataclass(frozen=True)
class Fault:
    """One way in which a ledger does not show that every sample counted exactly once."""

    kind: FaultKind
    text: str  # the message for the user
    epoch: int | None = None  # None if the fault is in an evaluation, or not in a single epoch
    count: int = 0  # how many samples are affected; the fields below list the first few
    positions: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()
    """Dataset indices at these positions; empty for a stream and for samples drawn with sampling weights."""
    steps: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ledger:
    """Everything that was recorded for one shard."""

    name: str
    description: ShardDescription
    generations: tuple[Generation, ...]  # sorted by number
    trained: Records
    evaluated: Records
    evaluation_ends: Records
    faults: tuple[Fault, ...]  # what is corrupt in the files
    notes: tuple[str, ...]


def read_ledger(shard: Path) -> Ledger:
    """Read the files of all ranks in the folder of one shard."""
    description = read_description(shard)
    faults, notes = list[Fault](), list[str]()
    paths = [path for path in sorted(shard.glob("rank-*.bin")) if _RANK_FILE.fullmatch(path.name)]
    parts = [_read_file(path, faults, notes) for path in paths]
    records = np.concatenate(parts or [np.empty(0, dtype=RECORD)])
    return Ledger(
        name=shard.name,
        description=description,
        generations=_read_generations(records, faults),
        trained=records[records["kind"] == RecordKind.TRAINED],
        evaluated=records[records["kind"] == RecordKind.EVALUATED],
        evaluation_ends=records[records["kind"] == RecordKind.EVALUATION_END],
        faults=tuple(faults),
        notes=tuple(notes),
    )


def _read_file(path: Path, faults: list[Fault], notes: list[str]) -> Records:
    """Return the valid records of one rank; add what is wrong with its file to the two lists."""
    rank = int(path.stem.removeprefix("rank-"))
    size = path.stat().st_size
    # A live run may append meanwhile: read only what is there now.
    records = np.fromfile(path, dtype=RECORD, count=size // RECORD_BYTES)
    valid = valid_mask(records)
    end = int(np.flatnonzero(valid)[-1]) + 1 if valid.any() else 0
    if incomplete := size - end * RECORD_BYTES:
        notes.append(f"{path.name}: the last {incomplete} bytes are an incomplete record of a killed process; ignored")
    corrupt = np.flatnonzero(~valid[:end])
    if corrupt.size:
        text = f"{path.name}: {_count(corrupt.size, 'corrupt record')}, first record {corrupt[0]}"
        faults.append(Fault("corrupt file", text, ranks=(rank,)))
    own = records[:end][valid[:end]]
    foreign = own["rank"][own["rank"] != rank]
    if foreign.size:
        others = tuple(int(other) for other in np.unique(foreign))
        text = f"{path.name}: {_count(foreign.size, 'record')} of {format_ranks(others)}"
        faults.append(Fault("corrupt file", text, ranks=(rank, *others)))
    return own


def _read_generations(records: Records, faults: list[Fault]) -> tuple[Generation, ...]:
    generations = list[Generation]()
    starts = records[records["kind"] == RecordKind.START]
    ends = records[records["kind"] == RecordKind.END]
    for number in np.unique(records["generation"]).tolist():
        own = starts[starts["generation"] == number]
        if not own.size:
            ranks = np.unique(records["rank"][records["generation"] == number])
            text = f"generation {number} has records but no start record"
            faults.append(Fault("corrupt file", text, ranks=tuple(ranks.tolist())))
            continue
        claims = sorted({(int(start["epoch"]), int(start["step"]), int(start["count"])) for start in own})
        if len(claims) > 1:
            listed = " and ".join(f"epoch {epoch}, step {step} on {size} ranks" for epoch, step, size in claims)
            text = f"ranks disagree about the start of generation {number}: {listed}"
            faults.append(Fault("corrupt file", text, ranks=tuple(np.unique(own["rank"]).tolist())))
        epoch, step, world_size = claims[0]
        generations.append(
            Generation(
                number=number,
                start=(epoch, step),
                world_size=world_size,
                started_at=int(own["first"].min()) / 1e6,
                ranks=frozenset(own["rank"].tolist()),
                ends={
                    int(end["rank"]): ((int(end["epoch"]), int(end["step"])), bool(end["weight"]))
                    for end in ends[ends["generation"] == number]
                },
            )
        )
    return tuple(generations)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"


def format_ranks(ranks: tuple[int, ...] | npt.NDArray[np.integer], shown: int = 8) -> str:
    """Return 'rank 3', or 'ranks 1, 2, 5', shortened if there are many."""
    names = ", ".join(str(rank) for rank in ranks[:shown])
    more = f" and {len(ranks) - shown} more" if len(ranks) > shown else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {names}{more}"
