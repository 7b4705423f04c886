"""Checks from the ledger of a run that every sample counted exactly once, across restarts and changes of world size.

Over all ranks, the positions of every epoch must be recorded once, with weight 1, in the step they belong to. A new
generation (start of the run) supersedes what earlier ones recorded at or after its first step, since it continues from
weights that have not seen those samples. Epochs that some rank has finished must be complete. The last epoch is checked
up to the step that all ranks have recorded, since a rank may still hold its newest records in memory.

Positions prove nothing if ranks read different data at them: options and probes of the data (content_probe.py) must be
the same on all ranks and in all generations.

A ledger can prove only what it contains. The verdict is `incomplete` if a rank or the end of the run is missing, or if
summary.json or a checkpoint names more records than the files have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from samestep.data.ledger import (
    BUFFER_RECORDS,
    VERSION,
    RecordKind,
    Records,
    has_weight,
)
from samestep.data.ledger_reader import (
    SHOWN,
    STEP_BITS,
    Fault,
    FaultKind,
    Generation,
    LedgerChecks,
    Missing,
    Position,
    count_samples,
    format_position,
    format_ranks,
    read_described,
    read_ledger,
)
from samestep.data.partition import Positions, Ranges, find_gaps, steps_per_epoch
from samestep.data.permutation import SampleOrder
from samestep.errors import LedgerError

Verdict = Literal["sound", "incomplete", "faulty"]
"""Every sample counted exactly once; the ledger lacks something to prove it; or it shows that it is not so."""


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
    missing: tuple[Missing, ...]  # what the ledger would need for a proof
    notes: tuple[str, ...]  # messages that are neither

    @property
    def verdict(self) -> Verdict:
        """Faulty if there is a fault, incomplete if something is missing, otherwise sound."""
        return "faulty" if self.faults else "incomplete" if self.missing else "sound"

    @property
    def exactly_once(self) -> bool:
        """Whether the ledger proves that every sample counted exactly once."""
        return self.verdict == "sound"


@dataclass(frozen=True)
class AuditReport:
    """What the audit found in a run's folder."""

    folder: Path
    shards: tuple[ShardReport, ...]
    missing: tuple[Missing, ...]  # of the run: full shards, or samples
    compared: tuple[str, ...]
    """summary.json and the checkpoints that the ledger was compared with."""
    not_compared: tuple[str, ...]  # those that could not be compared, each with the reason

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of any shard, at least incomplete if the run lacks something."""
        verdicts = {shard.verdict for shard in self.shards}
        return "faulty" if "faulty" in verdicts else "incomplete" if self.missing or verdicts - {"sound"} else "sound"

    @property
    def exactly_once(self) -> bool:
        """Whether the ledger proves that every sample of every shard counted exactly once."""
        return self.verdict == "sound"

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain values for JSON."""
        shards = [{"verdict": each.verdict, "exactly_once": each.exactly_once, **asdict(each)} for each in self.shards]
        own = {"verdict": self.verdict, "exactly_once": self.exactly_once}
        return {**own, **asdict(replace(self, shards=())), "folder": str(self.folder), "shards": shards}


def audit(folder: Path) -> AuditReport:
    """Check the ledgers of all shards in a run's folder, and compare them with its summary and checkpoints."""
    parent = folder / "ledger"
    try:
        shards = sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []
    except OSError as error:
        raise LedgerError(f"{parent} cannot be read: {error.strerror}; check the path and its permissions") from error
    if not shards:
        raise LedgerError(
            f"{folder} is not the folder of a run with a ledger (there is no {parent}/SHARD/shard.json): name the "
            "folder of a run with ledger=True"
        )
    summary, described, not_compared = read_described(folder)
    ledgers = [read_ledger(shard) for shard in shards]
    began = {ledger.name: ledger.files[0].began for ledger in ledgers if 0 in ledger.files}
    for source, files in list(described.items()):  # a folder of checkpoints may have those of runs in other folders
        times = {name: states[0].began for name, states in files.items() if states and states[0] is not None}
        if source != "summary.json" and any(began.get(name, time) != time for name, time in times.items()):
            not_compared.append(f"{source} (it belongs to another ledger)")
            del described[source]
    reports = tuple(_ShardAudit(ledger, described).report() for ledger in ledgers)
    missing = [
        Missing(f"{source} names the shard {name}, and ledger/{name} is missing")
        for source, files in described.items() for name in files if not (parent / name).is_dir()
    ]  # fmt: skip
    missing += _check_samples(summary, reports)
    return AuditReport(folder, reports, tuple(missing), tuple(described), tuple(not_compared))


class _ShardAudit(LedgerChecks):
    """All checks of one shard."""

    @cached_property
    def _lengths(self) -> dict[int, int]:
        """The records of a stream in each epoch whose end it reached, as the last generation recorded it."""
        ends = self._ledger.stream_ends[np.argsort(self._ledger.stream_ends["generation"], kind="stable")]
        return dict(zip(ends["epoch"].tolist(), ends["first"].tolist(), strict=True))

    def report(self) -> ShardReport:
        """Run all checks."""
        self._check_starts()
        self._check_ranks()
        self._check_sums()
        for source, states in self._described.items():
            self._compare_files(source, states)
        self._check_options()
        self._check_probes()
        n, batch = self._description.n, self._description.global_batch
        if self._description.drop_last and n is not None and n % batch:
            self._notes.append(f"drop_last=True leaves {n % batch} of {n} samples out of every epoch")
        if self._description.weighted:
            self._notes.append("samples were drawn with sampling weights: positions counted exactly once, not samples")
        epochs = self._check_epochs() if self._generations else []
        evaluations = self._check_evaluations()
        self._check_last_epoch(epochs, bool(evaluations))
        generations = tuple(GenerationReport(g.number, *g.start, g.world_size, g.started_at) for g in self._generations)
        found = tuple(self._faults), tuple(self._missing), tuple(self._notes)
        return ShardReport(self._ledger.name, generations, tuple(epochs), tuple(evaluations), *found)

    def _check_epochs(self) -> list[EpochReport]:
        live = self._without_superseded()
        begin_epoch, begin_step = begin = min(generation.start for generation in self._generations)
        if begin > (0, 0):
            text = f"the ledger begins at {format_position(begin)}: earlier steps are not in it"
            self._missing.append(Missing(text, epoch=0, step=0))
        end_epoch, end_step = self._checked_until(live)
        reports, previous = list[EpochReport](), begin_epoch - 1
        known = {epoch for epoch in np.unique(live["epoch"]).tolist() if begin_epoch <= epoch <= end_epoch}
        for epoch in sorted({begin_epoch, end_epoch, *known}):
            self._check_skipped(previous + 1, epoch)
            records = live[slice(*np.searchsorted(live["epoch"], [epoch, epoch + 1]))]
            start, previous = begin_step if epoch == begin_epoch else 0, epoch
            stop = self._steps_in_epoch(records, epoch) if epoch < end_epoch else end_step
            if stop <= start and not len(records):
                self._check_skipped(epoch, epoch + (epoch < end_epoch and not start))  # only in a stream
                continue  # it has not begun
            checked = records[(records["step"] >= start) & (records["step"] < stop)]
            reports.append(EpochReport(epoch, epoch < end_epoch, max(0, stop - start), count_samples(checked)))
            self._check_epoch(epoch, records, start, stop)
        return reports

    def _check_last_epoch(self, epochs: list[EpochReport], evaluated: bool) -> None:
        """Note if the script has left the last epoch early, and report other epochs of a stream without an end."""
        if any(generation.version < VERSION for generation in self._generations):
            return
        if self._description.n is None:
            for epoch in (each.number for each in epochs if each.complete and each.number not in self._lengths):
                text = f"epoch {epoch}: the end of the stream was not reached, so its later records are unknown"
                self._missing.append(Missing(text, epoch=epoch))
        last = self._generations[-1] if self._generations else None
        if last is None or not last.succeeded or last.early:
            return
        if epochs and not epochs[-1].complete:
            n = f" of {self._description.n}" if self._description.n is not None else ""
            counted, number = epochs[-1].samples, epochs[-1].number
            self._notes.append(f"the script left epoch {number} early, after {counted}{n} samples: they were checked")
        elif not epochs and not evaluated:
            self._notes.append("no sample counted in training or in an evaluation")

    def _check_skipped(self, first: int, stop: int) -> None:
        """Report epochs from `first` to `stop` - 1, which have no records, although a later epoch has."""
        if first < stop:
            where = f"epoch {first}" if stop == first + 1 else f"epochs {first} to {stop - 1}"
            batch, n = self._description.global_batch, self._description.n or 0
            count = (stop - first) * min(n, self._steps_in_epoch(self._ledger.trained[:0], first) * batch)
            self._faults.append(Fault("never counted", f"{where}: no sample counted", first, count))

    def _without_superseded(self) -> Records:
        """Return the training records that no later generation supersedes, sorted by epoch."""
        records = self._ledger.trained
        numbers = _position_numbers(records)
        keep = np.zeros(len(records), dtype=bool)
        limit = np.iinfo(np.int64).max
        for generation in reversed(self._generations):
            own, start = records["generation"] == generation.number, _position_number(generation.start)
            if (own & (numbers < start)).any():
                at = format_position(generation.start)
                text = f"generation {generation.number} has records before its start at {at}"
                self._faults.append(Fault("wrong step", text))
            keep |= own & (numbers < limit)
            limit = min(limit, start)
        live = records[keep]
        return live[np.argsort(live["epoch"], kind="stable")]

    def _checked_until(self, live: Records) -> Position:
        """Return the position before which everything must be recorded."""
        last = self._generations[-1]
        recorded = _recorded_until(live, last)
        newest_epoch, newest_step = max(recorded)
        # The end of an epoch is step 0 of the next one. That of a stream is recorded, or known once a later epoch is.
        known = self._description.n is not None
        epochs = {epoch for epoch, _ in recorded if known or epoch < newest_epoch or epoch in self._lengths}
        steps = {epoch: self._steps_in_epoch(live[live["epoch"] == epoch], epoch) for epoch in epochs}
        reached = [(epoch + 1, 0) if step >= steps.get(epoch, step + 1) else (epoch, step) for epoch, step in recorded]
        slowest, fastest = min(reached), max(reached)
        open_ranks = tuple(rank for rank in sorted(last.ranks) if rank < last.world_size and rank not in last.ends)
        if open_ranks:
            self._add_missing_end(last, open_ranks, slowest, min(reached[rank] for rank in open_ranks))
        if last.ends and not open_ranks and (last.early or not last.succeeded):
            how = "was stopped early" if last.early else "failed"
            text = f"the run {how} at {format_position(fastest)} in generation {last.number} and was not resumed"
            self._missing.append(Missing(f"{text}; sound up to {format_position(slowest)}", (), *slowest))
        if slowest == fastest or (last.succeeded and not open_ranks and not last.silent):
            return fastest
        behind = tuple(rank for rank, position in enumerate(reached) if position == slowest)
        progress = (
            f"{format_ranks(behind)} recorded up to {format_position(slowest)}, others up to {format_position(fastest)}"
        )
        if last.ends and open_ranks:
            return slowest  # as already reported
        if slowest[0] == newest_epoch and newest_step - slowest[1] <= BUFFER_RECORDS:
            self._notes.append(f"{progress}: steps that all ranks have recorded are checked")
        elif not last.ends and not last.silent:
            self._missing.append(Missing(f"{progress}: the file is cut off", behind, *slowest))
        elif not open_ranks and not last.silent:
            text = f"{progress}: the rank stopped long before the others"
            self._faults.append(Fault("truncated file", text, ranks=behind))
            return max(slowest, (newest_epoch, 0))
        return slowest

    def _add_missing_end(self, last: Generation, ranks: tuple[int, ...], checked: Position, end: Position) -> None:
        not_ended = (
            f"the run has not ended (generation {last.number} has no end record: it is still running, or it was killed "
            f"and not resumed); sound up to {format_position(checked)}"
        )
        cut_off = (
            f"{format_ranks(ranks)} of generation {last.number} recorded no end, but other ranks did: the file is cut "
            f"off at {format_position(end)}, or the process was killed"
        )
        self._missing.append(Missing(cut_off if last.ends else not_ended, ranks, *end))

    def _steps_in_epoch(self, records: Records, epoch: int) -> int:
        """Return the steps of a complete epoch; for a stream whose end is unknown, the steps that were recorded."""
        if self._description.n is None and epoch in self._lengths:
            return -(-self._lengths[epoch] // self._description.global_batch)
        if self._description.n is None:
            return int(records["step"].max()) + 1 if len(records) else 0
        return steps_per_epoch(self._description.n, self._description.global_batch, self._description.drop_last)

    def _check_epoch(self, epoch: int, records: Records, start: int, stop: int) -> None:
        """Check one epoch in which all steps from `start` to `stop` - 1 must be recorded."""
        n, batch, counting = self._description.n, self._description.global_batch, _counting(records)
        if n is None:
            end = self._lengths.get(epoch, _end_position(records))
        else:
            end = min(n, self._steps_in_epoch(counting, epoch) * batch)
        missing, repeated = find_gaps(*_ranges(counting), min(start * batch, end), min(stop * batch, end))
        if any(generation.silent for generation in self._generations):  # their files are missing, as already reported
            steps = (missing.start // batch).tolist()
            known = np.array([not self._generation_of(epoch, step).silent for step in steps], dtype=bool)
            missing = Ranges(missing.start[known], missing.stop[known])
        where = f"epoch {epoch}"
        self._check_weights(where, records, epoch)
        self._check_steps(counting, epoch, end)
        if missing.total:
            step = missing.head(1)[0] // batch
            generation = self._generation_of(epoch, step)
            absent = _absent_ranks(generation, records[records["step"] == step])
            who = f"{format_ranks(absent)} recorded nothing in" if absent else "every rank recorded something in"
            if not absent and not (counting["step"] == step).any():
                who = "the script skipped"
            detail = f"; {who} step {step} (generation {generation.number}, {generation.world_size} ranks)"
            self._add_fault("never counted", where, missing, epoch, absent, detail)
        self._check_repeated(where, counting, repeated, epoch)
        if n is None and epoch not in self._lengths and len(records) and stop >= 1:
            # The number of samples in the last step of a stream is unknown, but every rank must have recorded it.
            absent = _absent_ranks(self._generation_of(epoch, stop - 1), records[records["step"] == stop - 1])
            if absent:
                text = f"{where}: {format_ranks(absent)} recorded nothing in step {stop - 1}, the last of the stream"
                self._faults.append(Fault("never counted", text, epoch, steps=(stop - 1,), ranks=absent))

    def _generation_of(self, epoch: int, step: int) -> Generation:
        """Return the generation whose records of a step count."""
        found = (g for g in reversed(self._generations) if g.start <= (epoch, step))
        return next(found, self._generations[0])

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
        steps = tuple(np.unique(step[wrong])[:SHOWN].tolist())
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
            left = set(range(generation.world_size)) - set(finished.tolist())
            ended = generation.succeeded and left <= generation.ends.keys()  # otherwise their files are cut off
            later = ended or generation.number in finished_later
            if complete:
                finished_later.add(generation.number)
            reports.insert(0, EvaluationReport(generation.number, number, complete, count_samples(evaluated)))
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

    def _check_repeated(self, where: str, counting: Records, repeated: Ranges, epoch: int | None) -> None:
        if not repeated.total:
            return
        ranks = set[int]()
        first, count = _ranges(counting)
        for start, stop in zip(repeated.start[:SHOWN], repeated.stop[:SHOWN], strict=True):
            ranks |= set(counting["rank"][(first < stop) & (first + count > start)].tolist())
        by = tuple(sorted(ranks))
        self._add_fault("counted more than once", where, repeated, epoch, by, f"; by {format_ranks(by)}")

    def _add_fault(
        self, kind: FaultKind, where: str, ranges: Ranges, epoch: int | None, ranks: tuple[int, ...], detail: str
    ) -> None:
        positions, total = ranges.head(SHOWN), ranges.total
        samples = self._samples(positions, epoch)
        steps = () if epoch is None else ranges.blocks(self._description.global_batch, SHOWN)
        listed = ", ".join(map(str, samples or positions)) + (", ..." if total > len(positions) else "")
        noun = ("sample" if samples else "position") + ("s" if total > 1 else "")
        more = ", ..." if len(steps) == SHOWN else ""
        in_steps = f" in {'step' if len(steps) == 1 else 'steps'} {', '.join(map(str, steps))}{more}" if steps else ""
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
    found = [(number >> STEP_BITS, number & ((1 << STEP_BITS) - 1)) for number in furthest.tolist()]
    for rank, (position, _, _) in last.ends.items():
        if rank < last.world_size:
            found[rank] = max(found[rank], position)
    return found


def _position_number(position: Position) -> int:
    """Return epoch and step as one number that grows with training."""
    return (position[0] << STEP_BITS) + position[1]


def _position_numbers(records: Records) -> npt.NDArray[np.int64]:
    return (records["epoch"].astype(np.int64) << STEP_BITS) + records["step"].astype(np.int64)


def _counting(records: Records) -> Records:
    """Return the records that are not padding."""
    return records[has_weight(records) & (records["count"] > 0)]


def _ranges(records: Records) -> tuple[Positions, Positions]:
    return records["first"].astype(np.int64), records["count"].astype(np.int64)


def _end_position(counting: Records) -> int:
    first, count = _ranges(counting)
    return int((first + count).max()) if len(counting) else 0


def _absent_ranks(generation: Generation, records: Records) -> tuple[int, ...]:
    """Return the ranks of a generation that have none of these records."""
    present = set(records["rank"].tolist())
    return tuple(rank for rank in range(generation.world_size) if rank not in present)


def _check_samples(summary: Mapping[str, Any], reports: Sequence[ShardReport]) -> list[Missing]:
    """Find samples that were trained according to summary.json, but not recorded."""
    trained, counted = summary.get("samples"), sum(epoch.samples for each in reports for epoch in each.epochs)
    from_start = all((first.epoch, first.step) == (0, 0) for each in reports for first in each.generations[:1])
    # A run that failed may have counted a step that did not end.
    known = not from_start or any(each.missing for each in reports)
    lost = type(trained) is int and trained > counted and not known and summary.get("status") != "failed"
    text = (
        f"summary.json says that {trained} samples were trained, and the ledger has {counted}: a start had no "
        "ledger=True, or its checkpoint did not contain the position in the data, or records were removed"
    )
    return [Missing(text)] * lost
