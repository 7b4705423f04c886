"""The faults in the records of one epoch or one evaluation, each with its samples, steps and ranks."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from samestep.data.ledger import Records, ShardDescription
from samestep.data.ledger_reader import Generation, ranks_text
from samestep.data.partition import steps_per_epoch
from samestep.data.permutation import SampleOrder

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
    def exactly_once(self) -> bool:
        """Whether every sample counted exactly once, as far as the run has come."""
        return not self.faults


@dataclass(frozen=True)
class Report:
    """The verdict on a run's folder."""

    folder: Path
    shards: tuple[ShardReport, ...]

    @property
    def exactly_once(self) -> bool:
        """Whether all shards are."""
        return all(shard.exactly_once for shard in self.shards)

    def as_record(self) -> dict[str, object]:
        """The same as plain values, for JSON."""
        shards = [{"exactly_once": shard.exactly_once, **asdict(shard)} for shard in self.shards]
        return {"folder": str(self.folder), "exactly_once": self.exactly_once, "shards": shards}


_Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ranges:
    """Ranges of positions, one in each row of the two arrays."""

    start: _Positions
    stop: _Positions

    @property
    def total(self) -> int:
        """How many positions they hold together."""
        return int((self.stop - self.start).sum())

    def first(self, limit: int) -> tuple[int, ...]:
        """The first few positions."""
        found: list[int] = []
        for start, stop in zip(self.start[:limit].tolist(), self.stop[:limit].tolist(), strict=True):
            found += range(start, min(stop, start + limit - len(found)))
        return tuple(found)


@dataclass(frozen=True)
class Coverage:
    """How ranges cover the positions from `start` to `stop`."""

    missing: Ranges
    """What no range holds."""
    repeated: Ranges
    """What a range holds that one before it holds too; a position that three hold is here twice."""


def cover(first: _Positions, count: _Positions, start: int, stop: int) -> Coverage:
    """How the ranges of `count` positions from `first` on cover start..stop; repetitions are sought outside it too.

    >>> coverage = cover(np.array([0, 3, 4]), np.array([2, 2, 4]), start=0, stop=10)
    >>> coverage.missing.first(9), coverage.repeated.first(9)
    ((2, 8, 9), (4,))
    """
    order = np.argsort(first, kind="stable")
    begins = first[order]
    ends = begins + count[order]
    furthest = np.maximum.accumulate(ends)
    covered = np.clip(np.concatenate([[start], furthest]), start, stop)
    nexts = np.clip(np.concatenate([begins, [stop]]), start, stop)
    gap = nexts > covered
    again = np.flatnonzero(begins[1:] < furthest[:-1]) + 1
    return Coverage(
        missing=Ranges(covered[gap], nexts[gap]),
        repeated=Ranges(begins[again], np.minimum(ends[again], furthest[again - 1])),
    )


_SHOWN: Final = 5
"""Samples, steps and ranges that a fault names; it counts them all."""


@dataclass(frozen=True)
class Judge:
    """Judges records by what the shard is and on which ranks it was read."""

    description: ShardDescription
    generations: tuple[Generation, ...]

    def steps_of(self, records: Records) -> int:
        """Steps of a whole epoch; of a stream's as many as were recorded."""
        if self.description.n is None:
            return int(records["step"].max()) + 1 if len(records) else 0
        return steps_per_epoch(self.description.n, self.description.global_batch, self.description.drop_last)

    def training(self, epoch: int, records: Records, start: int, stop: int) -> list[Fault]:
        """Faults of one epoch, in which everything from step `start` to step `stop` must have been recorded."""
        batch, counting = self.description.global_batch, _counting(records)
        first, count = _positions(counting)
        end = self._end_of_epoch(counting)
        coverage = cover(first, count, min(start * batch, end), min(stop * batch, end))
        return [
            *self._wrong_weights(f"epoch {epoch}", records, epoch),
            *self._wrong_steps(counting, epoch, end),
            *self._missing_in_training(records, coverage.missing, epoch),
            *self._repeated(f"epoch {epoch}", counting, coverage.repeated, epoch),
            *self._absent_at_the_end(records, stop, epoch),
        ]

    def evaluation(self, generation: Generation, number: int, records: Records, due: bool) -> list[Fault]:
        """Faults of one evaluation; that something is missing is one only where it is `due`."""
        where = f"evaluation {number} of start {generation.number}"
        counting = _counting(records)
        coverage = cover(*_positions(counting), 0, self._end_of_evaluation(counting) if due else 0)
        missing = list[Fault]()
        if coverage.missing.total:
            absent = _without(generation, records)
            told = f"; {ranks_text(absent)} recorded nothing in it" if absent else ""
            missing.append(self._fault("never counted", where, coverage.missing, None, absent, told))
        return [
            *self._wrong_weights(where, records, None),
            *missing,
            *self._repeated(where, counting, coverage.repeated, None),
        ]

    def _end_of_epoch(self, counting: Records) -> int:
        n, batch = self.description.n, self.description.global_batch
        return _furthest(counting) if n is None else min(n, self.steps_of(counting) * batch)

    def _end_of_evaluation(self, counting: Records) -> int:
        return _furthest(counting) if self.description.n is None else self.description.n

    def _missing_in_training(self, records: Records, missing: Ranges, epoch: int) -> Iterator[Fault]:
        if not missing.total:
            return
        step = missing.first(1)[0] // self.description.global_batch
        owner = self._owner(epoch, step)
        absent = _without(owner, records[records["step"] == step])
        told = f" recorded nothing in step {step}" if absent else f"every rank recorded something in step {step}"
        told = f"; {ranks_text(absent) if absent else ''}{told} (start {owner.number}, {owner.size} ranks)"
        yield self._fault("never counted", f"epoch {epoch}", missing, epoch, absent, told)

    def _repeated(self, where: str, counting: Records, repeated: Ranges, epoch: int | None) -> Iterator[Fault]:
        if not repeated.total:
            return
        ranks = set[int]()
        first, count = _positions(counting)
        for start, stop in zip(repeated.start[:_SHOWN], repeated.stop[:_SHOWN], strict=True):
            ranks |= set(counting["rank"][(first < stop) & (first + count > start)].tolist())
        by = tuple(sorted(ranks))
        yield self._fault("counted again", where, repeated, epoch, by, f"; by {ranks_text(by)}")

    def _wrong_steps(self, counting: Records, epoch: int, end: int) -> Iterator[Fault]:
        first, count = _positions(counting)
        batch, step = self.description.global_batch, counting["step"].astype(np.int64)
        low, high = step * batch, np.minimum((step + 1) * batch, end)
        wrong = np.flatnonzero((first < low) | (first + count > high))
        if not wrong.size:
            return
        at = int(wrong[0])
        rank, step_at = int(counting["rank"][at]), int(step[at])
        holds = f"holds {low[at]} to {high[at] - 1}" if low[at] < high[at] else f"is not in an epoch of {end} samples"
        text = (
            f"epoch {epoch}: {wrong.size} records are not of their step: rank {rank} counted positions {first[at]} to "
            f"{first[at] + count[at] - 1} in step {step_at}, which {holds}"
        )
        ranks = tuple(np.unique(counting["rank"][wrong]).tolist())
        steps = tuple(np.unique(step[wrong])[:_SHOWN].tolist())
        yield Fault("wrong step", text, epoch, int(count[wrong].sum()), steps=steps, ranks=ranks)

    def _wrong_weights(self, where: str, records: Records, epoch: int | None) -> Iterator[Fault]:
        wrong = records[(records["weight"] != 0) & (records["weight"] != 1)]
        if not len(wrong):
            return
        first, count = _positions(wrong)
        ranks = tuple(np.unique(wrong["rank"]).tolist())
        told = f"; the first weighs {wrong['weight'][0]} and not 1; by {ranks_text(ranks)}"
        yield self._fault("wrong weight", where, Ranges(first, first + count), epoch, ranks, told)

    def _absent_at_the_end(self, records: Records, stop: int, epoch: int) -> Iterator[Fault]:
        """Of a stream nobody knows how many samples its last step had, but every rank must have been there."""
        if self.description.n is not None or not len(records) or stop < 1:
            return
        absent = _without(self._owner(epoch, stop - 1), records[records["step"] == stop - 1])
        if absent:
            text = f"epoch {epoch}: {ranks_text(absent)} recorded nothing in step {stop - 1}, the last of the stream"
            yield Fault("never counted", text, epoch, steps=(stop - 1,), ranks=absent)

    def _owner(self, epoch: int, step: int) -> Generation:
        """The start whose records of a step are those that count."""
        return next(g for g in reversed(self.generations) if g.start <= (epoch, step))

    def _fault(
        self, kind: FaultKind, where: str, ranges: Ranges, epoch: int | None, ranks: tuple[int, ...], told: str
    ) -> Fault:
        positions = ranges.first(_SHOWN)
        samples = self._samples(positions, epoch)
        steps = () if epoch is None else tuple(dict.fromkeys(p // self.description.global_batch for p in positions))
        total = ranges.total
        names = ", ".join(map(str, samples or positions)) + (", ..." if total > len(positions) else "")
        noun = ("sample" if samples else "position") + ("s" if total > 1 else "")
        in_steps = f" in {'step' if len(steps) == 1 else 'steps'} {', '.join(map(str, steps))}" if steps else ""
        text = f"{where}: {total} {noun} {kind}: {names}{in_steps}{told}"
        return Fault(kind, text, epoch, total, positions, samples, steps, ranks)

    def _samples(self, positions: tuple[int, ...], epoch: int | None) -> tuple[int, ...]:
        """The dataset indices at these positions: in an evaluation the positions themselves, else by the order."""
        n, known = self.description.n, not self.description.weighted
        if n is None or any(position >= n for position in positions):
            return ()
        if epoch is None:
            return positions
        if not known:
            return ()
        order = SampleOrder(n, self.description.seed, self.description.shuffle)
        return tuple(order.at(epoch, np.array(positions, dtype=np.int64)).tolist())


def counted(records: Records) -> int:
    """Samples that these records counted."""
    return int(_counting(records)["count"].sum(dtype=np.int64))


def _counting(records: Records) -> Records:
    return records[(records["weight"] > 0) & (records["count"] > 0)]


def _positions(records: Records) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    return records["first"].astype(np.int64), records["count"].astype(np.int64)


def _furthest(counting: Records) -> int:
    first, count = _positions(counting)
    return int((first + count).max()) if len(counting) else 0


def _without(generation: Generation, records: Records) -> tuple[int, ...]:
    """Ranks of a start that none of these records is of."""
    present = set(records["rank"].tolist())
    return tuple(rank for rank in range(generation.size) if rank not in present)
