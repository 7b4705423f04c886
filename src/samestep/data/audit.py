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
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from samestep.data.ledger import (
    BUFFER_RECORDS,
    OPTIONS,
    VERSION,
    Described,
    FileState,
    RecordKind,
    Records,
    has_weight,
    hash_option,
)
from samestep.data.ledger_reader import (
    STEP_BITS,
    Fault,
    FaultKind,
    Generation,
    Ledger,
    Missing,
    Position,
    RankFile,
    count_samples,
    format_ranks,
    read_described,
    read_ledger,
    read_probe,
)
from samestep.data.partition import Positions, Ranges, find_gaps, steps_per_epoch
from samestep.data.permutation import SampleOrder
from samestep.errors import LedgerError

Verdict = Literal["sound", "incomplete", "faulty"]
"""Every sample counted exactly once; the ledger lacks something to prove it; or it shows that it is not so."""

_SHOWN: Final = 5  # samples, steps and ranges that a fault lists; it counts all of them


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


class _LedgerAudit:
    """Checks of the files and the data of one shard; each adds what it finds to `_faults`, `_missing` and `_notes`."""

    def __init__(self, ledger: Ledger, described: Mapping[str, Described]) -> None:
        self._ledger, self._description, self._generations = ledger, ledger.description, ledger.generations
        self._faults, self._missing, self._notes = [*ledger.faults], list[Missing](), [*ledger.notes]
        self._described = {source: files[ledger.name] for source, files in described.items() if ledger.name in files}

    def _check_starts(self) -> None:
        """Find starts of the run that have no records."""
        numbers, starts = {generation.number for generation in self._generations}, self._ledger.starts
        last = max(numbers, default=-1)
        if not numbers:
            self._missing.append(Missing("no rank has records: the files rank-*.bin are missing or empty"))
        elif lost := sorted(set(range(max(last + 1, starts))) - numbers):
            text = f"the run was started {max(last + 1, starts)} times, and there are no records of generation"
            self._missing.append(Missing(f"{text}{'s' * (len(lost) > 1)} {', '.join(map(str, lost[:_SHOWN]))}"))
        if any(generation.version < VERSION for generation in self._generations):
            self._notes.append("an older samestep wrote it, without running hashes: changed records may not be found")

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
            if (silent := generation.silent) and ranks.size:
                absent = tuple(rank for rank in silent if rank not in self._ledger.files)
                why = f"no file of {format_ranks(absent)}" if absent else "the file is cut off or was replaced"
                text = f"{had}, but {format_ranks(silent)} recorded nothing: {why}"
                self._missing.append(Missing(text, silent, *generation.start))

    def _check_sums(self) -> None:
        """Find ranks that have recorded another number of samples than they say at their end."""
        trained = self._ledger.trained
        for generation in self._generations if not self._faults else ():  # otherwise the reason is already known
            own = trained[trained["generation"] == generation.number]
            sums = np.bincount(own["rank"], own["count"] * has_weight(own), max(generation.ends, default=0) + 1)
            for rank, (_, _, samples) in generation.ends.items() if generation.version >= VERSION else ():
                if (found := int(sums[rank])) != samples:
                    text = f"generation {generation.number}: rank {rank} counted {samples} samples and recorded {found}"
                    self._faults.append(Fault("corrupt file", text, count=abs(samples - found), ranks=(rank,)))

    def _compare_files(self, source: str, states: list[FileState | None]) -> None:
        """Find files that are shorter than summary.json or a checkpoint says, or that were replaced."""
        short, changed = list[tuple[int, str]](), list[int]()
        for rank, state in enumerate(states):
            own = self._ledger.files.get(rank, RankFile(0, {}, 0))
            if state is not None and own.length < state.records:
                short.append((rank, f"rank {rank} has {own.length} of {state.records} records"))
            elif state is not None and (own.hashes.get(state.records), own.began) != (state.hash, state.began):
                changed.append(rank)
        if short:
            ranks = tuple(rank for rank, _ in short)
            end = max((state.epoch, state.step) for state in states if state is not None)
            has = "; ".join(text for _, text in short[:_SHOWN])
            text = f"{source} says that training came to {_format(end)}, and {has}"
            begin = min(_last_position(self._ledger.trained, rank) for rank in ranks)
            self._missing.append(Missing(text, ranks, *begin))
        if changed:
            text = f"{source} belongs to other files of {format_ranks(tuple(changed))}: they were replaced or changed"
            self._faults.append(Fault("corrupt file", text, ranks=tuple(changed)))

    # Data

    def _check_options(self) -> None:
        """Find options that are not the same on all ranks and in all starts."""
        options = self._ledger.options
        for number, name in enumerate(OPTIONS):
            own = options[options["epoch"] == number]
            value = getattr(self._description, "weighted" if name == "sampling_weights" else name)
            is_none = own["first"] == np.uint64(hash_option(None))
            same = is_none != value if name == "sampling_weights" else own["first"] == np.uint64(hash_option(value))
            if len(own) and not same.any():
                text = f"shard.json has {name}={value}, and {_format_process(own[0])} recorded another value"
                self._faults.append(Fault("different data", text, ranks=(int(own["rank"][0]),)))
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
            missing = tuple(sorted(ranks - probed))
            text = f"generation {generation.number}: {format_ranks(missing)} recorded no probes of the data"
            if missing and probed:
                self._faults.append(Fault("corrupt file", f"{text}, but other ranks did", ranks=missing))
            elif missing and generation.world_size > 1:
                text += ", so it is unknown whether all ranks read the same data"
                self._missing.append(Missing(text, missing, *generation.start))


class _ShardAudit(_LedgerAudit):
    """All checks of one shard."""

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
        epochs = self._check_epochs() if self._generations else []
        evaluations = self._check_evaluations()
        generations = tuple(GenerationReport(g.number, *g.start, g.world_size, g.started_at) for g in self._generations)
        found = tuple(self._faults), tuple(self._missing), tuple(self._notes)
        return ShardReport(self._ledger.name, generations, tuple(epochs), tuple(evaluations), *found)

    def _check_epochs(self) -> list[EpochReport]:
        live = self._without_superseded()
        begin_epoch, begin_step = begin = min(generation.start for generation in self._generations)
        if begin > (0, 0):
            text = f"the ledger begins at {_format(begin)}: earlier steps are not in it"
            self._missing.append(Missing(text, epoch=0, step=0))
        end_epoch, end_step = self._checked_until(live)
        reports, previous = list[EpochReport](), begin_epoch - 1
        known = {epoch for epoch in np.unique(live["epoch"]).tolist() if begin_epoch <= epoch <= end_epoch}
        for epoch in sorted({begin_epoch, end_epoch, *known}):
            self._check_skipped(previous + 1, epoch)
            records = live[slice(*np.searchsorted(live["epoch"], [epoch, epoch + 1]))]
            start, previous = begin_step if epoch == begin_epoch else 0, epoch
            stop = self._steps_in_epoch(records) if epoch < end_epoch else end_step
            if stop <= start and not len(records):
                self._check_skipped(epoch, epoch + (epoch < end_epoch and not start))  # only in a stream
                continue  # it has not begun
            checked = records[(records["step"] >= start) & (records["step"] < stop)]
            reports.append(EpochReport(epoch, epoch < end_epoch, max(0, stop - start), count_samples(checked)))
            self._check_epoch(epoch, records, start, stop)
        return reports

    def _check_skipped(self, first: int, stop: int) -> None:
        """Report epochs from `first` to `stop` - 1, which have no records, although a later epoch has."""
        if first < stop:
            where = f"epoch {first}" if stop == first + 1 else f"epochs {first} to {stop - 1}"
            batch, n = self._description.global_batch, self._description.n or 0
            count = (stop - first) * min(n, self._steps_in_epoch(self._ledger.trained[:0]) * batch)
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
                text = f"generation {generation.number} has records before its start at {_format(generation.start)}"
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
        # The end of an epoch is step 0 of the next one. That of a stream is known once a rank recorded a later epoch.
        epochs = {epoch for epoch, _ in recorded if self._description.n is not None or epoch < newest_epoch}
        steps = {epoch: self._steps_in_epoch(live[live["epoch"] == epoch]) for epoch in epochs}
        reached = [(epoch + 1, 0) if step >= steps.get(epoch, step + 1) else (epoch, step) for epoch, step in recorded]
        slowest, fastest = min(reached), max(reached)
        open_ranks = tuple(rank for rank in sorted(last.ranks) if rank < last.world_size and rank not in last.ends)
        if open_ranks:
            self._add_missing_end(last, open_ranks, slowest, min(reached[rank] for rank in open_ranks))
        if last.ends and not last.succeeded:
            self._notes.append(f"the run failed at {_format(fastest)} in generation {last.number} and was not resumed")
        if slowest == fastest or (last.succeeded and not open_ranks and not last.silent):
            return fastest
        behind = tuple(rank for rank, position in enumerate(reached) if position == slowest)
        progress = f"{format_ranks(behind)} recorded up to {_format(slowest)}, others up to {_format(fastest)}"
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
            f"and not resumed); sound up to {_format(checked)}"
        )
        cut_off = (
            f"{format_ranks(ranks)} of generation {last.number} recorded no end, but other ranks did: the file is cut "
            f"off at {_format(end)}, or the process was killed"
        )
        self._missing.append(Missing(cut_off if last.ends else not_ended, ranks, *end))

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
        for start, stop in zip(repeated.start[:_SHOWN], repeated.stop[:_SHOWN], strict=True):
            ranks |= set(counting["rank"][(first < stop) & (first + count > start)].tolist())
        by = tuple(sorted(ranks))
        self._add_fault("counted more than once", where, repeated, epoch, by, f"; by {format_ranks(by)}")

    def _add_fault(
        self, kind: FaultKind, where: str, ranges: Ranges, epoch: int | None, ranks: tuple[int, ...], detail: str
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
    found = [(number >> STEP_BITS, number & ((1 << STEP_BITS) - 1)) for number in furthest.tolist()]
    for rank, (position, _, _) in last.ends.items():
        if rank < last.world_size:
            found[rank] = max(found[rank], position)
    return found


def _last_position(trained: Records, rank: int) -> Position:
    """Return up to where a rank has recorded training."""
    own = trained[trained["rank"] == rank]
    return (int(own[-1]["epoch"]), int(own[-1]["step"]) + 1) if len(own) else (0, 0)


def _format_process(record: np.void) -> str:
    return f"rank {int(record['rank'])} of generation {int(record['generation'])}"


def _format(position: Position) -> str:
    return f"epoch {position[0]}, step {position[1]}"


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
