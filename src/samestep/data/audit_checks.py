"""Finds the faults in the records of one epoch or one evaluation, each with its samples, steps and ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from samestep.data.ledger import Records, ShardDescription
from samestep.data.ledger_reader import Fault, FaultKind, Generation, format_ranks
from samestep.data.partition import steps_per_epoch
from samestep.data.permutation import SampleOrder

_SHOWN: Final = 5  # samples, steps and ranges that a fault lists; it counts all of them

_Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RecordChecker:
    """Checks records against the description of the shard and the generations of the run."""

    description: ShardDescription
    generations: tuple[Generation, ...]

    def check_training(self, epoch: int, records: Records, start: int, stop: int) -> list[Fault]:
        """Return the faults of one epoch in which all steps from `start` to `stop` - 1 must be recorded."""
        batch, counting = self.description.global_batch, _counting(records)
        end = self._epoch_end(counting)
        missing, repeated = find_gaps(*_ranges(counting), min(start * batch, end), min(stop * batch, end))
        return [
            *self._wrong_weights(f"epoch {epoch}", records, epoch),
            *self._wrong_steps(counting, epoch, end),
            *self._missing_in_training(records, missing, epoch),
            *self._repeated(f"epoch {epoch}", counting, repeated, epoch),
            *self._absent_in_last_step(records, stop, epoch),
        ]

    def check_evaluation(
        self, generation: Generation, number: int, records: Records, must_be_complete: bool
    ) -> list[Fault]:
        """Return the faults of one evaluation; missing samples are a fault only if it must be complete."""
        where = f"evaluation {number} of generation {generation.number}"
        counting = _counting(records)
        end = _end_position(counting) if self.description.n is None else self.description.n
        missing, repeated = find_gaps(*_ranges(counting), 0, end if must_be_complete else 0)
        faults = list(self._wrong_weights(where, records, None))
        if missing.total:
            absent = _absent_ranks(generation, records)
            detail = f"; {format_ranks(absent)} recorded nothing in it" if absent else ""
            faults.append(self._fault("never counted", where, missing, None, absent, detail))
        return [*faults, *self._repeated(where, counting, repeated, None)]

    def steps_in_epoch(self, records: Records) -> int:
        """Return the steps of a complete epoch; for a stream, the steps that were recorded."""
        if self.description.n is None:
            return int(records["step"].max()) + 1 if len(records) else 0
        return steps_per_epoch(self.description.n, self.description.global_batch, self.description.drop_last)

    def _epoch_end(self, counting: Records) -> int:
        n, batch = self.description.n, self.description.global_batch
        return _end_position(counting) if n is None else min(n, self.steps_in_epoch(counting) * batch)

    def _wrong_weights(self, where: str, records: Records, epoch: int | None) -> Iterator[Fault]:
        wrong = records[(records["weight"] != 0) & (records["weight"] != 1)]
        if len(wrong):
            first, count = _ranges(wrong)
            ranks = tuple(np.unique(wrong["rank"]).tolist())
            detail = f"; the first has weight {wrong['weight'][0]} instead of 1; by {format_ranks(ranks)}"
            yield self._fault("wrong weight", where, Ranges(first, first + count), epoch, ranks, detail)

    def _wrong_steps(self, counting: Records, epoch: int, end: int) -> Iterator[Fault]:
        first, count = _ranges(counting)
        batch, step = self.description.global_batch, counting["step"].astype(np.int64)
        low, high = step * batch, np.minimum((step + 1) * batch, end)
        wrong = np.flatnonzero((first < low) | (first + count > high))
        if not wrong.size:
            return
        at = int(wrong[0])
        allowed = (
            f"has {low[at]} to {high[at] - 1}" if low[at] < high[at] else f"an epoch of {end} samples does not have"
        )
        text = (
            f"epoch {epoch}: {wrong.size} record(s) in the wrong step: rank {int(counting['rank'][at])} counted "
            f"positions {first[at]} to {first[at] + count[at] - 1} in step {int(step[at])}, which {allowed}"
        )
        ranks = tuple(np.unique(counting["rank"][wrong]).tolist())
        steps = tuple(np.unique(step[wrong])[:_SHOWN].tolist())
        yield Fault("wrong step", text, epoch, int(count[wrong].sum()), steps=steps, ranks=ranks)

    def _missing_in_training(self, records: Records, missing: "Ranges", epoch: int) -> Iterator[Fault]:
        if not missing.total:
            return
        step = missing.head(1)[0] // self.description.global_batch
        generation = self._generation_of(epoch, step)
        absent = _absent_ranks(generation, records[records["step"] == step])
        who = f"{format_ranks(absent)} recorded nothing" if absent else "every rank recorded something"
        detail = f"; {who} in step {step} (generation {generation.number}, {generation.world_size} ranks)"
        yield self._fault("never counted", f"epoch {epoch}", missing, epoch, absent, detail)

    def _repeated(self, where: str, counting: Records, repeated: "Ranges", epoch: int | None) -> Iterator[Fault]:
        if not repeated.total:
            return
        ranks = set[int]()
        first, count = _ranges(counting)
        for start, stop in zip(repeated.start[:_SHOWN], repeated.stop[:_SHOWN], strict=True):
            ranks |= set(counting["rank"][(first < stop) & (first + count > start)].tolist())
        by = tuple(sorted(ranks))
        yield self._fault("counted more than once", where, repeated, epoch, by, f"; by {format_ranks(by)}")

    def _absent_in_last_step(self, records: Records, stop: int, epoch: int) -> Iterator[Fault]:
        """Check the last step of a stream: its number of samples is unknown, but every rank must have recorded it."""
        if self.description.n is not None or not len(records) or stop < 1:
            return
        absent = _absent_ranks(self._generation_of(epoch, stop - 1), records[records["step"] == stop - 1])
        if absent:
            text = f"epoch {epoch}: {format_ranks(absent)} recorded nothing in step {stop - 1}, the last of the stream"
            yield Fault("never counted", text, epoch, steps=(stop - 1,), ranks=absent)

    def _generation_of(self, epoch: int, step: int) -> Generation:
        """Return the generation whose records of a step count."""
        return next(g for g in reversed(self.generations) if g.start <= (epoch, step))

    def _fault(
        self, kind: FaultKind, where: str, ranges: "Ranges", epoch: int | None, ranks: tuple[int, ...], detail: str
    ) -> Fault:
        positions = ranges.head(_SHOWN)
        samples = self._samples(positions, epoch)
        steps = () if epoch is None else tuple(dict.fromkeys(p // self.description.global_batch for p in positions))
        total = ranges.total
        listed = ", ".join(map(str, samples or positions)) + (", ..." if total > len(positions) else "")
        noun = ("sample" if samples else "position") + ("s" if total > 1 else "")
        in_steps = f" in {'step' if len(steps) == 1 else 'steps'} {', '.join(map(str, steps))}" if steps else ""
        problem = "with a wrong weight" if kind == "wrong weight" else kind
        text = f"{where}: {total} {noun} {problem}: {listed}{in_steps}{detail}"
        return Fault(kind, text, epoch, total, positions, samples, steps, ranks)

    def _samples(self, positions: tuple[int, ...], epoch: int | None) -> tuple[int, ...]:
        """Return the dataset indices at these positions; in an evaluation they are the positions themselves."""
        n = self.description.n
        if n is None or any(position >= n for position in positions):
            return ()
        if epoch is None:
            return positions
        if self.description.weighted:
            return ()
        order = SampleOrder(n, self.description.seed, self.description.shuffle)
        return tuple(order.at(epoch, np.array(positions, dtype=np.int64)).tolist())


@dataclass(frozen=True)
class Ranges:
    """Ranges of positions, one per row of the two arrays."""

    start: _Positions
    stop: _Positions

    @property
    def total(self) -> int:
        """The number of positions in all ranges."""
        return int((self.stop - self.start).sum())

    def head(self, limit: int) -> tuple[int, ...]:
        """Return the first positions."""
        found: list[int] = []
        for start, stop in zip(self.start[:limit].tolist(), self.stop[:limit].tolist(), strict=True):
            found += range(start, min(stop, start + limit - len(found)))
        return tuple(found)


def find_gaps(first: _Positions, count: _Positions, start: int, stop: int) -> tuple[Ranges, Ranges]:
    """Return (missing, repeated) positions of ranges that should cover start to stop - 1 exactly once.

    Repeated positions are found outside of start to stop too. A position that is in three ranges is repeated twice.

    >>> missing, repeated = find_gaps(np.array([0, 3, 4]), np.array([2, 2, 4]), start=0, stop=10)
    >>> missing.head(9), repeated.head(9)
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
    missing = Ranges(covered[gap], nexts[gap])
    return missing, Ranges(begins[again], np.minimum(ends[again], furthest[again - 1]))


def count_samples(records: Records) -> int:
    """Return how many samples these records counted."""
    return int(_counting(records)["count"].sum(dtype=np.int64))


def _counting(records: Records) -> Records:
    """Return the records that are not padding."""
    return records[(records["weight"] > 0) & (records["count"] > 0)]


def _ranges(records: Records) -> tuple[_Positions, _Positions]:
    return records["first"].astype(np.int64), records["count"].astype(np.int64)


def _end_position(counting: Records) -> int:
    first, count = _ranges(counting)
    return int((first + count).max()) if len(counting) else 0


def _absent_ranks(generation: Generation, records: Records) -> tuple[int, ...]:
    """Return the ranks of a generation that have none of these records."""
    present = set(records["rank"].tolist())
    return tuple(rank for rank in range(generation.world_size) if rank not in present)
