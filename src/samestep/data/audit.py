"""Checks from the ledger of a run that every sample counted exactly once, across restarts and changes of world size.

Over all ranks, the positions of every epoch must be recorded once, with weight 1, in the step they belong to. A new
generation (start of the run) supersedes what earlier ones recorded at or after its first step, since it continues from
weights that have not seen those samples. Epochs that some rank has finished must be complete. The last epoch is checked
up to the step that all ranks have recorded, since a rank may still hold its newest records in memory.

Positions prove nothing if ranks read different data at them: options and probes of the data (content_probe.py) must be
the same on all ranks and in all generations.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from samestep.data.ledger import (
    BUFFER_RECORDS,
    OPTIONS,
    Fault,
    FaultKind,
    Generation,
    Ledger,
    Position,
    RecordKind,
    Records,
    format_ranks,
    read_ledger,
    read_probe,
)  # fmt: skip
from samestep.data.partition import steps_per_epoch
from samestep.data.permutation import SampleOrder
from samestep.errors import LedgerError

_STEP_BITS: Final = 40  # epoch and step are compared as one number; steps are below 2**40
_SHOWN: Final = 5  # samples, steps and ranges that a fault lists; it counts all of them

_Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EpochReport:
    """How much of one epoch was checked."""

    number: int
    complete: bool
    steps: int  # steps that all ranks have recorded, or should have
    samples: int  # samples that counted in these steps


@dataclass(frozen=True)
class EvaluationReport:
    """One evaluation."""

    generation: int
    number: int
    complete: bool  # whether every rank finished it; an evaluation that was left early or killed is not a fault
    samples: int


@dataclass(frozen=True)
class GenerationReport:
    """One start of the run."""

    number: int
    epoch: int
    step: int
    world_size: int
    started_at: float  # seconds since 1970


@dataclass(frozen=True)
class ShardReport:
    """What the audit found for one shard."""

    name: str
    generations: tuple[GenerationReport, ...]
    epochs: tuple[EpochReport, ...]
    evaluations: tuple[EvaluationReport, ...]
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]  # messages that are not faults

    @property
    def exactly_once(self) -> bool:
        """Whether every sample counted exactly once, as far as the run has come."""
        return not self.faults


@dataclass(frozen=True)
class AuditReport:
    """What the audit found in a run's folder."""

    folder: Path
    shards: tuple[ShardReport, ...]

    @property
    def exactly_once(self) -> bool:
        """Whether every sample of every shard counted exactly once."""
        return all(shard.exactly_once for shard in self.shards)

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain values for JSON."""
        shards = [{"exactly_once": shard.exactly_once, **asdict(shard)} for shard in self.shards]
        return {"folder": str(self.folder), "exactly_once": self.exactly_once, "shards": shards}


def audit(folder: Path) -> AuditReport:
    """Check the ledgers of all shards in a run's folder."""
    ledgers = folder / "ledger"
    shards = sorted(path for path in ledgers.iterdir() if path.is_dir()) if ledgers.is_dir() else []
    if not shards:
        raise LedgerError(
            f"{folder} is not the folder of a run with a ledger (there is no {ledgers}/SHARD/shard.json): name the "
            "folder of a run with ledger=True"
        )
    return AuditReport(folder, tuple(_ShardAudit(read_ledger(shard)).report() for shard in shards))


class _ShardAudit:
    """Checks the ledger of one shard; every check adds what it finds to `_faults` and `_notes`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._description, self._generations = ledger, ledger.description, ledger.generations
        self._faults, self._notes = [*ledger.faults], [*ledger.notes]

    def report(self) -> ShardReport:
        """Run all checks."""
        self._check_ranks()
        self._check_options()
        self._check_probes()
        n, batch = self._description.n, self._description.global_batch
        if self._description.drop_last and n is not None and n % batch:
            self._notes.append(f"drop_last=True leaves {n % batch} of {n} samples out of every epoch")
        epochs = self._check_epochs() if self._generations else []
        evaluations = self._check_evaluations()
        generations = tuple(GenerationReport(g.number, *g.start, g.world_size, g.started_at) for g in self._generations)
        found = tuple(self._faults), tuple(self._notes)
        return ShardReport(self._ledger.name, generations, tuple(epochs), tuple(evaluations), *found)

    def _check_ranks(self) -> None:
        """Find records of ranks that a generation did not have, and ranks without a start record."""
        records = np.concatenate([self._ledger.trained, self._ledger.evaluated])
        for generation in self._generations:
            ranks = np.unique(records["rank"][records["generation"] == generation.number])
            had = f"generation {generation.number} had {generation.world_size} ranks"
            beyond = tuple(ranks[ranks >= generation.world_size].tolist())
            if beyond:
                text = f"{had}, but there are records of {format_ranks(beyond)}"
                self._faults.append(Fault("wrong rank", text, ranks=beyond))
            silent = tuple(rank for rank in range(generation.world_size) if rank not in generation.ranks)
            if silent and ranks.size:
                text = f"{had}, but {format_ranks(silent)} has no start record"
                self._faults.append(Fault("wrong rank", text, ranks=silent))

    # Data

    def _check_options(self) -> None:
        """Find options that are not the same on all ranks and in all starts."""
        options = self._ledger.options
        for number, name in enumerate(OPTIONS):
            own = options[options["epoch"] == number]
            if len(own) and (own["first"] != own["first"][0]).any():
                first, other = own[0], own[own["first"] != own["first"][0]][0]
                text = f"{name} is not the same for {_format_process(first)} and {_format_process(other)}"
                ranks = tuple(sorted({int(first["rank"]), int(other["rank"])}))
                self._faults.append(Fault("different data", text, ranks=ranks))

    def _check_probes(self) -> None:
        """Find samples whose content was not the same on all ranks and in all starts."""
        probes = self._ledger.probes
        probes = probes[np.lexsort((probes["rank"], probes["generation"]))]
        known, reported = dict[tuple[int, int], np.void](), set[tuple[int, int]]()
        for record in probes:
            probe = read_probe(record)
            first = known.setdefault((probe.epoch, probe.index), record)
            process = int(record["generation"]), int(record["rank"])
            if process in reported or read_probe(first).equals(probe):
                continue
            reported.add(process)  # one sample of each process is enough
            noun, samples = ("record", ()) if self._description.n is None else ("sample", (probe.index,))
            text = (
                f"{noun} {probe.index} was not the same for {_format_process(first)} and {_format_process(record)}: "
                "they did not read the same data"
            )
            ranks = tuple(sorted({int(first["rank"]), process[1]}))
            self._faults.append(Fault("different data", text, samples=samples, ranks=ranks))
        records = np.concatenate([self._ledger.trained, self._ledger.evaluated])
        for generation in self._generations:
            ranks, probed = (
                set(part["rank"][part["generation"] == generation.number].tolist()) for part in (records, probes)
            )
            if missing := tuple(sorted(ranks - probed)):
                self._add_missing_probes(generation, missing, bool(probed))

    def _add_missing_probes(self, generation: Generation, missing: tuple[int, ...], others: bool) -> None:
        text = f"generation {generation.number}: {format_ranks(missing)} recorded no probes of the data"
        if others:
            self._faults.append(Fault("corrupt file", f"{text}, but other ranks did", ranks=missing))
        elif generation.world_size > 1:
            self._notes.append(f"{text}, so it is unknown whether all ranks read the same data")

    # Training

    def _check_epochs(self) -> list[EpochReport]:
        live = self._without_superseded()
        begin_epoch, begin_step = begin = min(generation.start for generation in self._generations)
        if begin > (0, 0):
            self._notes.append(f"the ledger begins at {_format(begin)}: earlier steps are not checked")
        end_epoch, end_step = self._checked_until(live)
        reports = list[EpochReport]()
        for epoch in range(begin_epoch, end_epoch + 1):
            records = live[slice(*np.searchsorted(live["epoch"], [epoch, epoch + 1]))]
            start = begin_step if epoch == begin_epoch else 0
            stop = self._steps_in_epoch(records) if epoch < end_epoch else end_step
            if stop <= start and not len(records):
                continue  # it has not begun
            checked = records[(records["step"] >= start) & (records["step"] < stop)]
            reports.append(EpochReport(epoch, epoch < end_epoch, max(0, stop - start), _count_samples(checked)))
            self._check_epoch(epoch, records, start, stop)
        return reports

    def _without_superseded(self) -> Records:
        """Return the training records that no later generation supersedes, sorted by epoch."""
        records = self._ledger.trained
        numbers = _position_numbers(records)
        keep = np.zeros(len(records), dtype=bool)
        limit = np.iinfo(np.int64).max
        for generation in reversed(self._generations):
            keep |= (records["generation"] == generation.number) & (numbers < limit)
            limit = min(limit, _position_number(generation.start))
        live = records[keep]
        return live[np.argsort(live["epoch"], kind="stable")]

    def _checked_until(self, live: Records) -> Position:
        """Return the position before which everything must be recorded."""
        last = self._generations[-1]
        recorded = _recorded_until(live, last)
        newest_epoch, newest_step = max(recorded)
        # The end of an epoch is step 0 of the next one. That of a stream is known once a rank recorded a later epoch.
        epochs = {epoch for epoch, _ in recorded if self._description.n is not None or epoch < newest_epoch}
        steps = {epoch: self._steps_in_epoch(live[live["epoch"] == epoch]) for epoch in epochs}
        reached = [(epoch + 1, 0) if step >= steps.get(epoch, step + 1) else (epoch, step) for epoch, step in recorded]
        slowest, fastest = min(reached), max(reached)
        if last.succeeded or slowest == fastest:
            return fastest
        behind = tuple(rank for rank, position in enumerate(reached) if position == slowest)
        progress = f"{format_ranks(behind)} recorded up to {_format(slowest)}, others up to {_format(fastest)}"
        if slowest[0] == newest_epoch and newest_step - slowest[1] <= BUFFER_RECORDS:
            self._notes.append(f"{progress}: steps that all ranks have recorded are checked")
            return slowest
        text = f"{progress}: the file is truncated, or the rank stopped long before the others"
        self._faults.append(Fault("truncated file", text, ranks=behind))
        return max(slowest, (newest_epoch, 0))

    def _steps_in_epoch(self, records: Records) -> int:
        """Return the steps of a complete epoch; for a stream, the steps that were recorded."""
        if self._description.n is None:
            return int(records["step"].max()) + 1 if len(records) else 0
        return steps_per_epoch(self._description.n, self._description.global_batch, self._description.drop_last)

    def _check_epoch(self, epoch: int, records: Records, start: int, stop: int) -> None:
        """Check one epoch in which all steps from `start` to `stop` - 1 must be recorded."""
        n, batch, counting = self._description.n, self._description.global_batch, _counting(records)
        end = _end_position(counting) if n is None else min(n, self._steps_in_epoch(counting) * batch)
        missing, repeated = find_gaps(*_ranges(counting), min(start * batch, end), min(stop * batch, end))
        where = f"epoch {epoch}"
        self._check_weights(where, records, epoch)
        self._check_steps(counting, epoch, end)
        if missing.total:
            step = missing.head(1)[0] // batch
            generation = self._generation_of(epoch, step)
            absent = _absent_ranks(generation, records[records["step"] == step])
            who = f"{format_ranks(absent)} recorded nothing" if absent else "every rank recorded something"
            detail = f"; {who} in step {step} (generation {generation.number}, {generation.world_size} ranks)"
            self._add_fault("never counted", where, missing, epoch, absent, detail)
        self._check_repeated(where, counting, repeated, epoch)
        if n is None and len(records) and stop >= 1:
            # The number of samples in the last step of a stream is unknown, but every rank must have recorded it.
            absent = _absent_ranks(self._generation_of(epoch, stop - 1), records[records["step"] == stop - 1])
            if absent:
                text = f"{where}: {format_ranks(absent)} recorded nothing in step {stop - 1}, the last of the stream"
                self._faults.append(Fault("never counted", text, epoch, steps=(stop - 1,), ranks=absent))

    def _generation_of(self, epoch: int, step: int) -> Generation:
        """Return the generation whose records of a step count."""
        return next(g for g in reversed(self._generations) if g.start <= (epoch, step))

    def _check_steps(self, counting: Records, epoch: int, end: int) -> None:
        first, count = _ranges(counting)
        batch, step = self._description.global_batch, counting["step"].astype(np.int64)
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
        self._faults.append(Fault("wrong step", text, epoch, int(count[wrong].sum()), steps=steps, ranks=ranks))

    # Evaluation

    def _check_evaluations(self) -> list[EvaluationReport]:
        generations = {generation.number: generation for generation in self._generations}
        records = np.concatenate([self._ledger.evaluated, self._ledger.evaluation_ends])
        keys = (records["generation"].astype(np.int64) << 32) + records["epoch"]
        order = np.argsort(keys, kind="stable")
        keys, starts = np.unique(keys[order], return_index=True)
        groups = zip(keys.tolist(), np.split(records[order], starts[1:]), strict=False)
        reports, finished_later = list[EvaluationReport](), set[int]()
        # From last to first: if all ranks finished an evaluation, then the records before it were written too.
        for key, group in reversed(list(groups)):
            generation, number = generations.get(key >> 32), key & 0xFFFFFFFF
            if generation is None:
                continue
            evaluated = group[group["kind"] == RecordKind.EVALUATED]
            finished = np.unique(group["rank"][group["kind"] == RecordKind.EVALUATION_END])
            complete = len(finished) >= generation.world_size
            later = generation.succeeded or generation.number in finished_later
            if complete:
                finished_later.add(generation.number)
            reports.insert(0, EvaluationReport(generation.number, number, complete, _count_samples(evaluated)))
            self._check_evaluation(generation, number, evaluated, complete or (len(finished) > 0 and later))
        return reports

    def _check_evaluation(self, generation: Generation, number: int, records: Records, must_be_complete: bool) -> None:
        """Check one evaluation; missing samples are a fault only if it must be complete."""
        where, counting = f"evaluation {number} of generation {generation.number}", _counting(records)
        end = _end_position(counting) if self._description.n is None else self._description.n
        missing, repeated = find_gaps(*_ranges(counting), 0, end if must_be_complete else 0)
        self._check_weights(where, records, None)
        if missing.total:
            absent = _absent_ranks(generation, records)
            detail = f"; {format_ranks(absent)} recorded nothing in it" if absent else ""
            self._add_fault("never counted", where, missing, None, absent, detail)
        self._check_repeated(where, counting, repeated, None)

    # Both

    def _check_weights(self, where: str, records: Records, epoch: int | None) -> None:
        wrong = records[(records["weight"] != 0) & (records["weight"] != 1)]
        if len(wrong):
            first, count = _ranges(wrong)
            ranks = tuple(np.unique(wrong["rank"]).tolist())
            detail = f"; the first has weight {wrong['weight'][0]} instead of 1; by {format_ranks(ranks)}"
            self._add_fault("wrong weight", where, Ranges(first, first + count), epoch, ranks, detail)

    def _check_repeated(self, where: str, counting: Records, repeated: "Ranges", epoch: int | None) -> None:
        if not repeated.total:
            return
        ranks = set[int]()
        first, count = _ranges(counting)
        for start, stop in zip(repeated.start[:_SHOWN], repeated.stop[:_SHOWN], strict=True):
            ranks |= set(counting["rank"][(first < stop) & (first + count > start)].tolist())
        by = tuple(sorted(ranks))
        self._add_fault("counted more than once", where, repeated, epoch, by, f"; by {format_ranks(by)}")

    def _add_fault(
        self, kind: FaultKind, where: str, ranges: "Ranges", epoch: int | None, ranks: tuple[int, ...], detail: str
    ) -> None:
        positions, total = ranges.head(_SHOWN), ranges.total
        samples = self._samples(positions, epoch)
        steps = () if epoch is None else tuple(dict.fromkeys(p // self._description.global_batch for p in positions))
        listed = ", ".join(map(str, samples or positions)) + (", ..." if total > len(positions) else "")
        noun = ("sample" if samples else "position") + ("s" if total > 1 else "")
        in_steps = f" in {'step' if len(steps) == 1 else 'steps'} {', '.join(map(str, steps))}" if steps else ""
        problem = "with a wrong weight" if kind == "wrong weight" else kind
        text = f"{where}: {total} {noun} {problem}: {listed}{in_steps}{detail}"
        self._faults.append(Fault(kind, text, epoch, total, positions, samples, steps, ranks))

    def _samples(self, positions: tuple[int, ...], epoch: int | None) -> tuple[int, ...]:
        """Return the dataset indices at these positions; in an evaluation they are the positions themselves."""
        description = self._description
        if description.n is None or any(position >= description.n for position in positions):
            return ()
        if epoch is None:
            return positions
        if description.weighted:
            return ()
        order = SampleOrder(description.n, description.seed, description.shuffle)
        return tuple(order.at(epoch, np.array(positions, dtype=np.int64)).tolist())


def _recorded_until(live: Records, last: Generation) -> list[Position]:
    """Return for each rank of the last generation up to where it has recorded training."""
    own = live[(live["generation"] == last.number) & (live["rank"] < last.world_size)]
    furthest = np.full(last.world_size, _position_number(last.start), dtype=np.int64)
    np.maximum.at(furthest, own["rank"], _position_numbers(own) + 1)
    found = [(number >> _STEP_BITS, number & ((1 << _STEP_BITS) - 1)) for number in furthest.tolist()]
    for rank, (position, _) in last.ends.items():
        if rank < last.world_size:
            found[rank] = max(found[rank], position)
    return found


def _format_process(record: np.void) -> str:
    return f"rank {int(record['rank'])} of generation {int(record['generation'])}"


def _format(position: Position) -> str:
    return f"epoch {position[0]}, step {position[1]}"


def _position_number(position: Position) -> int:
    """Return epoch and step as one number that grows with training."""
    return (position[0] << _STEP_BITS) + position[1]


def _position_numbers(records: Records) -> npt.NDArray[np.int64]:
    return (records["epoch"].astype(np.int64) << _STEP_BITS) + records["step"].astype(np.int64)


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


def _count_samples(records: Records) -> int:
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
