"""The ledger of one shard as it lies in its folder: records, starts, and what is damaged or torn.

Nothing is judged here but the state of the files; `audit` proves from what this gives.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from samestep.data.ledger import RECORD, SIZE, Kind, Records, ShardDescription, read_description, sound

Position = tuple[int, int]
"""(epoch, step)."""

_RANK_FILE = re.compile(r"rank-(\d{5})\.bin")


@dataclass(frozen=True)
class Generation:
    """One start of the run, from this position, on this many ranks."""

    number: int
    start: Position
    size: int
    seconds: float
    """When it began, since 1970."""
    ranks: frozenset[int]
    """Those that told of the start."""
    ends: dict[int, tuple[Position, bool]]
    """Up to where each rank that came to its end has trained, and whether the run ended well there."""

    @property
    def ended_well(self) -> bool:
        """Whether some rank says that the run was over, so that every rank must have recorded everything."""
        return any(well for _, well in self.ends.values())


@dataclass(frozen=True)
class Damage:
    """Something about the files that a sound ledger does not have."""

    text: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Ledger:
    """All that was recorded of one shard."""

    name: str
    description: ShardDescription
    generations: tuple[Generation, ...]
    """In the order of their numbers."""
    trained: Records
    evaluated: Records
    passed: Records
    damages: tuple[Damage, ...]
    notes: tuple[str, ...]


def read_ledger(shard: Path) -> Ledger:
    """Read every rank's file in the folder of one shard."""
    description = read_description(shard)
    files = [_read_file(path) for path in sorted(shard.glob("rank-*.bin")) if _RANK_FILE.fullmatch(path.name)]
    records = np.concatenate([file.records for file in files] or [np.empty(0, dtype=RECORD)])
    generations, disagreements = _generations(records)
    return Ledger(
        name=shard.name,
        description=description,
        generations=generations,
        trained=records[records["kind"] == Kind.TRAINED],
        evaluated=records[records["kind"] == Kind.EVALUATED],
        passed=records[records["kind"] == Kind.PASSED],
        damages=(*(damage for file in files for damage in file.damages), *disagreements),
        notes=tuple(note for file in files for note in file.notes),
    )


@dataclass(frozen=True)
class _File:
    records: Records
    damages: tuple[Damage, ...]
    notes: tuple[str, ...]


def _read_file(path: Path) -> _File:
    rank = int(path.stem.removeprefix("rank-"))
    size = path.stat().st_size
    # A run that goes on may append meanwhile, so only what was there at first is read.
    records = np.fromfile(path, dtype=RECORD, count=size // SIZE)
    whole = sound(records)
    damages, notes = list[Damage](), list[str]()
    last = int(np.flatnonzero(whole)[-1]) + 1 if whole.any() else 0
    torn = size - last * SIZE
    if torn:
        notes.append(f"{path.name}: its last {torn} bytes are a record torn by a kill or a crash and are left out")
    broken = np.flatnonzero(~whole[:last])
    if broken.size:
        some = "a record is" if broken.size == 1 else f"{broken.size} records are"
        damages.append(Damage(f"{path.name}: {some} damaged, the first is number {broken[0]}", (rank,)))
    kept = records[:last][whole[:last]]
    strange = kept["rank"][kept["rank"] != rank]
    if strange.size:
        others = tuple(int(other) for other in np.unique(strange))
        damages.append(
            Damage(f"{path.name}: {strange.size} records in it are of {ranks_text(others)}", (rank, *others))
        )
    return _File(kept, tuple(damages), tuple(notes))


def _generations(records: Records) -> tuple[tuple[Generation, ...], list[Damage]]:
    generations, damages = list[Generation](), list[Damage]()
    starts = records[records["kind"] == Kind.START]
    ends = records[records["kind"] == Kind.END]
    for number in np.unique(records["generation"]).tolist():
        own = starts[starts["generation"] == number]
        if not own.size:
            strays = records["rank"][records["generation"] == number]
            text = f"start {number} has records and no rank tells where it began"
            damages.append(Damage(text, tuple(np.unique(strays).tolist())))
            continue
        told = sorted({(int(s["epoch"]), int(s["step"]), int(s["count"])) for s in own})
        if len(told) > 1:
            told_text = " and ".join(f"epoch {epoch}, step {step} on {size} ranks" for epoch, step, size in told)
            text = f"ranks disagree about start {number}: {told_text}"
            damages.append(Damage(text, tuple(np.unique(own["rank"]).tolist())))
        epoch, step, size = told[0]
        seconds = int(own["first"].min()) / 1e6
        ranks = frozenset(own["rank"].tolist())
        generations.append(Generation(number, (epoch, step), size, seconds, ranks, _ends(ends, number)))
    return tuple(generations), damages


def _ends(ends: Records, generation: int) -> dict[int, tuple[Position, bool]]:
    own = ends[ends["generation"] == generation]
    return {int(end["rank"]): ((int(end["epoch"]), int(end["step"])), bool(end["weight"])) for end in own}


def ranks_text(ranks: tuple[int, ...] | npt.NDArray[np.integer], shown: int = 8) -> str:
    """'rank 3', or 'ranks 1, 2, 5', cut short where there are many."""
    names = ", ".join(str(rank) for rank in ranks[:shown])
    more = f" and {len(ranks) - shown} more" if len(ranks) > shown else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {names}{more}"
