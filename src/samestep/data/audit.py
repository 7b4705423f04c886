"""Checks from the ledger of a run that every sample counted exactly once, across restarts and changes of world size.

Over all ranks, the positions of every epoch must be recorded once, with weight 1, in the step they belong to. A new
generation (start of the run) supersedes what earlier ones recorded at or after its first step, since it continues from
weights that have not seen those samples. Epochs that some rank has finished must be complete. The last epoch is checked
up to the step that all ranks have recorded, since a rank may still hold its newest records in memory.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from samestep.data.audit_checks import RecordChecker, count_samples
from samestep.data.ledger import BUFFER_RECORDS, Records
from samestep.data.ledger_reader import Fault, Generation, Ledger, Position, format_ranks, read_ledger
from samestep.errors import LedgerError

_STEP_BITS: Final = 40  # epoch and step are compared as one number; steps are below 2**40


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
    return AuditReport(folder, tuple(audit_shard(read_ledger(shard)) for shard in shards))


def audit_shard(ledger: Ledger) -> ShardReport:
    """Check the ledger of one shard."""
    faults, notes = [*ledger.faults, *_wrong_ranks(ledger)], [*ledger.notes]
    description = ledger.description
    if description.drop_last and description.n is not None and description.n % description.global_batch:
        dropped = description.n % description.global_batch
        notes.append(f"drop_last=True leaves {dropped} of {description.n} samples out of every epoch")
    checker = RecordChecker(description, ledger.generations)
    epochs = _check_epochs(ledger, checker, faults, notes) if ledger.generations else []
    evaluations = _check_evaluations(ledger, checker, faults)
    generations = tuple(GenerationReport(g.number, *g.start, g.world_size, g.started_at) for g in ledger.generations)
    return ShardReport(ledger.name, generations, tuple(epochs), tuple(evaluations), tuple(faults), tuple(notes))


def _wrong_ranks(ledger: Ledger) -> Iterator[Fault]:
    """Find records of ranks that a generation did not have, and ranks without a start record."""
    records = np.concatenate([ledger.trained, ledger.evaluated])
    for generation in ledger.generations:
        ranks = np.unique(records["rank"][records["generation"] == generation.number])
        had = f"generation {generation.number} had {generation.world_size} ranks"
        beyond = tuple(ranks[ranks >= generation.world_size].tolist())
        if beyond:
            yield Fault("wrong rank", f"{had}, but there are records of {format_ranks(beyond)}", ranks=beyond)
        silent = tuple(rank for rank in range(generation.world_size) if rank not in generation.ranks)
        if silent and ranks.size:
            yield Fault("wrong rank", f"{had}, but {format_ranks(silent)} has no start record", ranks=silent)


# Training


def _check_epochs(ledger: Ledger, checker: RecordChecker, faults: list[Fault], notes: list[str]) -> list[EpochReport]:
    live = _without_superseded(ledger)
    begin_epoch, begin_step = begin = min(generation.start for generation in ledger.generations)
    if begin > (0, 0):
        notes.append(f"the ledger begins at {_format(begin)}: earlier steps are not checked")
    end_epoch, end_step = _checked_until(ledger, live, checker, faults, notes)
    reports = list[EpochReport]()
    for epoch in range(begin_epoch, end_epoch + 1):
        low, high = np.searchsorted(live["epoch"], [epoch, epoch + 1])
        records = live[low:high]
        start = begin_step if epoch == begin_epoch else 0
        stop = checker.steps_in_epoch(records) if epoch < end_epoch else end_step
        if stop <= start and not len(records):
            continue  # it has not begun
        checked = records[(records["step"] >= start) & (records["step"] < stop)]
        reports.append(EpochReport(epoch, epoch < end_epoch, max(0, stop - start), count_samples(checked)))
        faults += checker.check_training(epoch, records, start, stop)
    return reports


def _without_superseded(ledger: Ledger) -> Records:
    """Return the training records that no later generation supersedes, sorted by epoch."""
    records = ledger.trained
    numbers = _position_numbers(records)
    keep = np.zeros(len(records), dtype=bool)
    limit = np.iinfo(np.int64).max
    for generation in reversed(ledger.generations):
        keep |= (records["generation"] == generation.number) & (numbers < limit)
        limit = min(limit, _position_number(generation.start))
    live = records[keep]
    return live[np.argsort(live["epoch"], kind="stable")]


def _checked_until(
    ledger: Ledger, live: Records, checker: RecordChecker, faults: list[Fault], notes: list[str]
) -> Position:
    """Return the position before which everything must be recorded."""
    last = ledger.generations[-1]
    recorded = _recorded_until(live, last)
    newest_epoch, newest_step = max(recorded)
    reached = _normalized(recorded, newest_epoch, live, checker)
    slowest, fastest = min(reached), max(reached)
    if last.succeeded or slowest == fastest:
        return fastest
    behind = tuple(rank for rank, position in enumerate(reached) if position == slowest)
    progress = f"{format_ranks(behind)} recorded up to {_format(slowest)}, others up to {_format(fastest)}"
    if slowest[0] == newest_epoch and newest_step - slowest[1] <= BUFFER_RECORDS:
        notes.append(f"{progress}: steps that all ranks have recorded are checked")
        return slowest
    text = f"{progress}: the file is truncated, or the rank stopped long before the others"
    faults.append(Fault("truncated file", text, ranks=behind))
    return max(slowest, (newest_epoch, 0))


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


def _normalized(recorded: list[Position], newest_epoch: int, live: Records, checker: RecordChecker) -> list[Position]:
    """Return the same positions, with the end of an epoch as step 0 of the next one.

    The last step of a stream is known only once some rank has recorded a later epoch.
    """
    epochs = {epoch for epoch, _ in recorded if checker.description.n is not None or epoch < newest_epoch}
    steps = {epoch: checker.steps_in_epoch(live[live["epoch"] == epoch]) for epoch in epochs}
    return [(epoch + 1, 0) if step >= steps.get(epoch, step + 1) else (epoch, step) for epoch, step in recorded]


def _format(position: Position) -> str:
    return f"epoch {position[0]}, step {position[1]}"


def _position_number(position: Position) -> int:
    """Return epoch and step as one number that grows with training."""
    return (position[0] << _STEP_BITS) + position[1]


def _position_numbers(records: Records) -> npt.NDArray[np.int64]:
    return (records["epoch"].astype(np.int64) << _STEP_BITS) + records["step"].astype(np.int64)


# Evaluation


def _check_evaluations(ledger: Ledger, checker: RecordChecker, faults: list[Fault]) -> list[EvaluationReport]:
    generations = {generation.number: generation for generation in ledger.generations}
    finished_later = set[int]()
    reports = list[EvaluationReport]()
    # From last to first: if all ranks finished an evaluation, then the records before it were written too.
    for generation_number, number, records, ends in _group_evaluations(ledger):
        generation = generations.get(generation_number)
        if generation is None:
            continue
        finished = np.unique(ends["rank"])
        complete = len(finished) >= generation.world_size
        later = generation.succeeded or generation_number in finished_later
        if complete:
            finished_later.add(generation_number)
        reports.insert(0, EvaluationReport(generation_number, number, complete, count_samples(records)))
        faults += checker.check_evaluation(generation, number, records, complete or (len(finished) > 0 and later))
    return reports


def _group_evaluations(ledger: Ledger) -> Iterator[tuple[int, int, Records, Records]]:
    """Yield (generation, number, records, end records) of each evaluation, the last one first."""
    records, record_keys = _sort_by_evaluation(ledger.evaluated)
    ends, end_keys = _sort_by_evaluation(ledger.evaluation_ends)
    for key in np.unique(np.concatenate([record_keys, end_keys]))[::-1].tolist():
        own = slice(*np.searchsorted(record_keys, [key, key + 1]))
        own_ends = slice(*np.searchsorted(end_keys, [key, key + 1]))
        yield key >> 32, key & 0xFFFFFFFF, records[own], ends[own_ends]


def _sort_by_evaluation(records: Records) -> tuple[Records, npt.NDArray[np.int64]]:
    keys = (records["generation"].astype(np.int64) << 32) + records["epoch"]
    order = np.argsort(keys, kind="stable")
    return records[order], keys[order]
