"""The proof from a ledger that every sample counted exactly once, through restarts and changes of world size.

Proved is what the records say: that over all ranks the positions of every epoch were counted once, with weight 1, in
the step they belong to. A new start supersedes what earlier ones recorded at or after its position, since the weights
that it continues from have not seen that. Epochs that some rank has left must be whole; the last one is judged up to
the step that all ranks have written down, since a rank may still hold its newest records in memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from samestep.data.audit_checks import (
    EpochReport,
    EvaluationReport,
    Fault,
    Judge,
    Report,
    ShardReport,
    StartReport,
    counted,
)
from samestep.data.ledger import CAPACITY, Records, ShardDescription
from samestep.data.ledger_reader import Generation, Ledger, Position, ranks_text, read_ledger
from samestep.errors import LedgerError

_STEP_BITS: Final = 40
"""Epoch and step in one number, for comparing: steps below 2**40."""


def audit(folder: Path) -> Report:
    """Read the ledgers of a run's folder and judge each shard."""
    ledgers = folder / "ledger"
    shards = sorted(path for path in ledgers.iterdir() if path.is_dir()) if ledgers.is_dir() else []
    if not shards:
        raise LedgerError(
            f"{folder} is not the folder of a run with a ledger: there is no {ledgers}/SHARD/shard.json; name the "
            "folder that a run with ledger=True writes to"
        )
    return Report(folder, tuple(audit_shard(read_ledger(shard)) for shard in shards))


def audit_shard(ledger: Ledger) -> ShardReport:
    """Judge what was recorded of one shard."""
    faults = [Fault("damaged file", damage.text, ranks=damage.ranks) for damage in ledger.damages]
    faults += _strange_ranks(ledger)
    judge = Judge(ledger.description, ledger.generations)
    epochs, evaluations = list[EpochReport](), list[EvaluationReport]()
    notes = [*ledger.notes, *_dropped(ledger.description)]
    if ledger.generations:
        live = _live(ledger)
        frontier = _frontier(ledger, live, judge)
        faults += frontier.faults
        notes += frontier.notes
        for epoch, found in _epochs(live, frontier, judge):
            epochs.append(epoch)
            faults += found
    for evaluation, found in _evaluations(ledger, judge):
        evaluations.insert(0, evaluation)
        faults += found
    starts = tuple(StartReport(g.number, *g.start, g.size, g.seconds) for g in ledger.generations)
    return ShardReport(ledger.name, starts, tuple(epochs), tuple(evaluations), tuple(faults), tuple(notes))


def _dropped(description: ShardDescription) -> Iterator[str]:
    if description.drop_last and description.n is not None and description.n % description.global_batch:
        left = description.n % description.global_batch
        yield f"drop_last leaves {left} of {description.n} samples out of every epoch, as asked"


@dataclass(frozen=True)
class _Frontier:
    """Between which positions everything must have been recorded."""

    begin: Position
    end: Position
    """Epochs before this one must be whole, and this one up to this step."""
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]


def _frontier(ledger: Ledger, live: Records, judge: Judge) -> _Frontier:
    last = ledger.generations[-1]
    begin = min(generation.start for generation in ledger.generations)
    notes = list[str]()
    if begin > (0, 0):
        notes.append(f"the ledger begins at {_place(begin)}: nothing is known of what was before")
    recorded = _recorded(live, last)
    newest, newest_step = max(recorded)
    reached = _turned(recorded, newest, live, judge)
    near, far = min(reached), max(reached)
    if last.ended_well or near == far:
        return _Frontier(begin, far, (), tuple(notes))
    behind = tuple(rank for rank, position in enumerate(reached) if position == near)
    told = f"{ranks_text(behind)} recorded up to {_place(near)}, others up to {_place(far)}"
    if near[0] == newest and newest_step - near[1] <= CAPACITY:
        return _Frontier(begin, near, (), (*notes, f"{told}: judged is what all ranks have written down"))
    fault = Fault("cut off", f"{told}: the file is cut off, or that rank stopped long before them", ranks=behind)
    return _Frontier(begin, max(near, (newest, 0)), (fault,), tuple(notes))


def _recorded(live: Records, last: Generation) -> list[Position]:
    """Up to where each rank of the last start has trained, as far as its file tells."""
    own = live[(live["generation"] == last.number) & (live["rank"] < last.size)]
    furthest = np.full(last.size, _number(last.start), dtype=np.int64)
    np.maximum.at(furthest, own["rank"], _numbers(own) + 1)
    found = [(key >> _STEP_BITS, key & ((1 << _STEP_BITS) - 1)) for key in furthest.tolist()]
    for rank, (position, _) in last.ends.items():
        if rank < last.size:
            found[rank] = max(found[rank], position)
    return found


def _turned(recorded: list[Position], newest: int, live: Records, judge: Judge) -> list[Position]:
    """The same, with who has done the last step of an epoch at the beginning of the next.

    Which step is the last of a stream is known only once some rank has gone on to a newer epoch.
    """
    epochs = {epoch for epoch, _ in recorded if judge.description.n is not None or epoch < newest}
    steps = {epoch: judge.steps_of(live[live["epoch"] == epoch]) for epoch in epochs}
    return [(epoch + 1, 0) if step >= steps.get(epoch, step + 1) else (epoch, step) for epoch, step in recorded]


def _place(position: Position) -> str:
    return f"epoch {position[0]}, step {position[1]}"


def _number(position: Position) -> int:
    """Epoch and step as one number that grows with time."""
    return (position[0] << _STEP_BITS) + position[1]


def _numbers(records: Records) -> npt.NDArray[np.int64]:
    return (records["epoch"].astype(np.int64) << _STEP_BITS) + records["step"].astype(np.int64)


def _live(ledger: Ledger) -> Records:
    """Records of training that no later start supersedes, by epoch."""
    records = ledger.trained
    numbers = _numbers(records)
    keep = np.zeros(len(records), dtype=bool)
    limit = np.iinfo(np.int64).max
    for generation in reversed(ledger.generations):
        keep |= (records["generation"] == generation.number) & (numbers < limit)
        limit = min(limit, _number(generation.start))
    live = records[keep]
    return live[np.argsort(live["epoch"], kind="stable")]


def _epochs(live: Records, frontier: _Frontier, judge: Judge) -> Iterator[tuple[EpochReport, list[Fault]]]:
    (begin, begin_step), (end, end_step) = frontier.begin, frontier.end
    for epoch in range(begin, end + 1):
        low, high = np.searchsorted(live["epoch"], [epoch, epoch + 1])
        records = live[low:high]
        start = begin_step if epoch == begin else 0
        stop = judge.steps_of(records) if epoch < end else end_step
        if stop <= start and not len(records):
            continue  # nothing of it has begun
        proved = records[(records["step"] >= start) & (records["step"] < stop)]
        report = EpochReport(epoch, epoch < end, max(0, stop - start), counted(proved))
        yield report, judge.training(epoch, records, start, stop)


def _evaluations(ledger: Ledger, judge: Judge) -> Iterator[tuple[EvaluationReport, list[Fault]]]:
    """From the last to the first: one that all ranks finished shows that those before it were written down too."""
    generations = {generation.number: generation for generation in ledger.generations}
    followed = set[int]()
    for number, evaluation, records, marks in _passes(ledger):
        if number not in generations:
            continue
        generation, finished = generations[number], np.unique(marks["rank"])
        complete = len(finished) >= generation.size
        due = complete or (len(finished) > 0 and (generation.ended_well or number in followed))
        if complete:
            followed.add(number)
        report = EvaluationReport(number, evaluation, complete, counted(records))
        yield report, judge.evaluation(generation, evaluation, records, due)


def _passes(ledger: Ledger) -> Iterator[tuple[int, int, Records, Records]]:
    """Start, number, records and marks of the end of each evaluation, the last one first."""
    records, record_keys = _by_pass(ledger.evaluated)
    marks, mark_keys = _by_pass(ledger.passed)
    for key in np.unique(np.concatenate([record_keys, mark_keys]))[::-1].tolist():
        own = slice(*np.searchsorted(record_keys, [key, key + 1]))
        own_marks = slice(*np.searchsorted(mark_keys, [key, key + 1]))
        yield key >> 32, key & 0xFFFFFFFF, records[own], marks[own_marks]


def _by_pass(records: Records) -> tuple[Records, npt.NDArray[np.int64]]:
    keys = (records["generation"].astype(np.int64) << 32) + records["epoch"]
    order = np.argsort(keys, kind="stable")
    return records[order], keys[order]


def _strange_ranks(ledger: Ledger) -> Iterator[Fault]:
    """Ranks that a world of its size cannot have, or that never told of a start at which others did work."""
    records = np.concatenate([ledger.trained, ledger.evaluated])
    for generation in ledger.generations:
        ranks = np.unique(records["rank"][records["generation"] == generation.number])
        had = f"start {generation.number} had {generation.size} ranks"
        beyond = tuple(ranks[ranks >= generation.size].tolist())
        if beyond:
            yield Fault("wrong rank", f"{had}, and there are records of {ranks_text(beyond)}", ranks=beyond)
        silent = tuple(rank for rank in range(generation.size) if rank not in generation.ranks)
        if silent and ranks.size:
            yield Fault("wrong rank", f"{had}, and {ranks_text(silent)} never told of it", ranks=silent)
