"""Reads ledgers and checks their files: damage, missing ranks, other data, claims of summary.json and checkpoints."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from samestep.data.ledger import (
    MAX_RANKS,
    OPTIONS,
    RECORD,
    RECORD_BYTES,
    VERSION,
    Described,
    FileState,
    RecordKind,
    Records,
    ShardDescription,
    check_is_file,
    has_weight,
    hash_option,
    read_description,
    read_probe,
    running_hash,
    valid_mask,
)
from samestep.errors import LedgerError

SHOWN: Final = 5  # samples, steps and ranges that a fault lists; it counts all of them
MAX_EPOCHS: Final = 1 << 26
STEP_BITS: Final = 36
_MAX_POSITION: Final = 1 << 62  # of a sample: sums of two positions fit into 64 bits
_RANK_FILE: Final = re.compile(r"rank-(\d{5})\.bin")

Position = tuple[int, int]
"""(epoch, step)."""

FaultKind = Literal[
    "never counted", "counted more than once", "wrong step", "wrong weight", "wrong rank",
    "corrupt file", "truncated file", "different data",
]  # fmt: skip


@dataclass(frozen=True)
class Generation:
    """One start of the run at (epoch, step) in a world of some size."""

    number: int
    start: Position
    world_size: int
    started_at: float  # seconds since 1970
    ranks: frozenset[int]  # the ranks that have a start record
    version: int  # of the ledger; 1 for versions 1 and 2
    ends: dict[int, tuple[Position, bool, int]]
    """For each rank that has an end record: up to where it trained, whether the run succeeded, and its samples."""
    early: bool = False  # whether it was stopped early, by a signal or a time limit

    @cached_property
    def silent(self) -> tuple[int, ...]:
        """Ranks without a start record."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.ranks)

    @property
    def succeeded(self) -> bool:
        """Whether some rank recorded that the run succeeded: then every rank must have recorded everything."""
        return any(success for _, success, _ in self.ends.values())


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
class Missing:
    """Something that the ledger must contain before the audit can certify the run."""

    text: str  # the message for the user
    ranks: tuple[int, ...] = ()
    epoch: int | None = None  # from where on it is missing, if this is known
    step: int | None = None


@dataclass(frozen=True)
class RankFile:
    """The file of one rank, as far as it is valid."""

    length: int  # records
    hashes: dict[int, int]  # the running hash, by the number of records up to and including the `CHECK`
    began: int  # microseconds since 1970, of the first record


@dataclass(frozen=True)
class Ledger:
    """Everything that was recorded for one shard."""

    name: str
    description: ShardDescription
    starts: int  # how often the run was started according to shard.json; 0 if it does not say
    files: dict[int, RankFile]
    generations: tuple[Generation, ...]  # sorted by number
    trained: Records
    evaluated: Records
    evaluation_ends: Records
    options: Records
    probes: Records
    stream_ends: Records
    faults: tuple[Fault, ...]  # what is corrupt in the files
    notes: tuple[str, ...]


def read_ledger(shard: Path) -> Ledger:
    """Read the files of all ranks in the folder of one shard."""
    description, starts = read_description(shard)
    faults, notes, files = list[Fault](), list[str](), dict[int, RankFile]()
    paths = [path for path in sorted(shard.glob("rank-*.bin")) if _RANK_FILE.fullmatch(path.name)]
    parts = [np.empty(0, dtype=RECORD)]
    for path in paths:
        rank = int(path.stem.removeprefix("rank-"))
        own, files[rank] = _read_file(path, rank, faults, notes)
        possible = _possible_mask(own, description.global_batch)
        if not possible.all():
            record = own[~possible][0]
            text = (
                f"{path.name}: {int((~possible).sum())} record(s) with impossible numbers, the first has epoch "
                f"{record['epoch']}, step {record['step']}, first {record['first']} and count {record['count']}"
            )
            faults.append(Fault("corrupt file", text, ranks=(rank,)))
        parts.append(own[possible])
    records = np.concatenate(parts)
    generations = _read_generations(records, faults)
    kinds = (
        RecordKind.TRAINED, RecordKind.EVALUATED, RecordKind.EVALUATION_END, RecordKind.OPTION, RecordKind.PROBE,
        RecordKind.STREAM_END,
    )  # fmt: skip
    selected = (records[records["kind"] == kind] for kind in kinds)
    return Ledger(
        shard.name, description, starts, files, generations, *selected, faults=tuple(faults), notes=tuple(notes)
    )


def _possible_mask(records: Records, global_batch: int) -> npt.NDArray[np.bool_]:
    """Return which records have numbers that a run can have, so that sums and products of them fit into 64 bits."""
    kind = records["kind"]
    trained, counted = kind == RecordKind.TRAINED, np.isin(kind, (RecordKind.TRAINED, RecordKind.EVALUATED))
    placed = trained | np.isin(kind, (RecordKind.START, RecordKind.END, RecordKind.CHECK, RecordKind.STREAM_END))
    sizes = (records["count"] >= 1) & (records["count"] <= MAX_RANKS)
    return (
        (~placed | ((records["epoch"] < MAX_EPOCHS) & (records["step"] < 1 << STEP_BITS)))
        & (~trained | (records["step"] < _MAX_POSITION // global_batch))
        & (~(counted | (kind == RecordKind.STREAM_END)) | (records["first"] <= _MAX_POSITION))
        & ((kind != RecordKind.START) | sizes)
    )


def _read_file(path: Path, rank: int, faults: list[Fault], notes: list[str]) -> tuple[Records, RankFile]:
    """Return the valid records of one rank; add what is wrong with its file to the two lists."""
    try:
        check_is_file(path)
        size = path.stat().st_size
        # A live run may append meanwhile: read only what is there now.
        records = np.fromfile(path, dtype=RECORD, count=size // RECORD_BYTES)
    except (OSError, MemoryError) as error:
        reason = "it does not fit into memory" if isinstance(error, MemoryError) else error.strerror
        raise LedgerError(f"{path} cannot be read: {reason}; check the path and its permissions") from error
    valid = valid_mask(records)
    end = int(np.flatnonzero(valid)[-1]) + 1 if valid.any() else 0
    if incomplete := size - end * RECORD_BYTES:
        notes.append(f"{path.name}: the last {incomplete} bytes are an incomplete record of a killed process; ignored")
    corrupt = np.flatnonzero(~valid[:end])
    if corrupt.size:
        text = f"{path.name}: {corrupt.size} corrupt record{'s' * (corrupt.size > 1)}, first record {corrupt[0]}"
        faults.append(Fault("corrupt file", text, ranks=(rank,)))
    hashes, changed = _check_hashes(records[:end])
    if changed and not corrupt.size:
        faults.append(Fault("corrupt file", f"{path.name}: {changed}", ranks=(rank,)))
    own = records[:end][valid[:end]]
    foreign = own["rank"][own["rank"] != rank]
    if foreign.size:
        others = tuple(int(other) for other in np.unique(foreign))
        text = f"{path.name}: {foreign.size} record{'s' * (foreign.size > 1)} of {format_ranks(others)}"
        faults.append(Fault("corrupt file", text, ranks=(rank, *others)))
    if (own["weight"][own["kind"] == RecordKind.START] == VERSION).any():
        # What follows the last CHECK was cut off in the middle of a write: the process has not ended its file.
        tail = np.arange(len(own)) >= max(hashes, default=0) - corrupt.size
        own = own[~(tail & (own["kind"] == RecordKind.END))]
    return own, RankFile(end, hashes, int(records["first"][0]) if end else 0)


def _check_hashes(records: Records) -> tuple[dict[int, int], str]:
    """Return the running hashes in a file, and what is wrong with the first one that does not fit to its records."""
    hashes, changed = dict[int, int](), ""
    data, start, previous = records.view(np.uint8).data, 0, 0
    for at in np.flatnonzero(records["kind"] == RecordKind.CHECK).tolist():
        before, written = int(records["count"][at]), int(records["first"][at])
        found = running_hash(previous, data[start * RECORD_BYTES : at * RECORD_BYTES])
        if not changed and before != at % (1 << 32):
            changed = f"{before} records were written before record {at}, so records were removed or added"
        elif not changed and found != written:
            changed = f"records {start} to {at - 1} were changed after they were written (the running hash differs)"
        hashes[at + 1], start, previous = written, at + 1, written
    return hashes, changed


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
        started_at, ranks = int(own["first"].min()) / 1e6, frozenset(own["rank"].tolist())
        own_ends = {
            int(end["rank"]): ((int(end["epoch"]), int(end["step"])), bool(end["weight"]), int(end["first"]))
            for end in ends[ends["generation"] == number]
        }
        version = VERSION if (own["weight"] == VERSION).any() else 1
        early = bool(ends["count"][ends["generation"] == number].any())
        generations.append(Generation(number, (epoch, step), world_size, started_at, ranks, version, own_ends, early))
    return tuple(generations)


def count_samples(records: Records) -> int:
    """Return how many samples these records counted."""
    return int(records["count"][has_weight(records)].sum(dtype=np.int64))


def format_ranks(ranks: tuple[int, ...] | npt.NDArray[np.integer], shown: int = 8) -> str:
    """Return 'rank 3', or 'ranks 1, 2, 5', shortened if there are many."""
    names = ", ".join(str(rank) for rank in ranks[:shown])
    more = f" and {len(ranks) - shown} more" if len(ranks) > shown else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {names}{more}"


# What summary.json and checkpoints say about the files


def read_described(folder: Path) -> tuple[dict[str, Any], dict[str, Described], list[str]]:
    """Return the summary of a run, the files by summary.json and each checkpoint, and what describes none."""
    summary = _read_object(folder / "summary.json")
    described, others, manifests = dict[str, Described](), list[str](), set[Path]()
    named = [folder / path for path in summary.get("checkpoints") or () if isinstance(path, str)]
    for parent, pattern in ((folder, "step-*"), (folder, "*/step-*"), *((path, "step-*") for path in named)):
        with suppress(OSError, ValueError):
            manifests |= {path.resolve() for path in parent.glob(pattern) if (path / "manifest.json").exists()}
    records: dict[str, Any] = {"summary.json": summary} if (folder / "summary.json").exists() else {}
    for path in sorted(manifests):
        inside = path.is_relative_to(folder.resolve())
        source = str(path.relative_to(folder.resolve()) if inside else path)
        records[source] = _read_object(path / "manifest.json").get("run")
    for source, record in records.items():
        try:
            described[source] = {name: [_parse(state) for state in states] for name, states in record["ledger"].items()}
        except (KeyError, TypeError, AttributeError, ValueError):
            others.append(f"{source} (it does not describe the ledger)")
    return summary, described, others


def _read_object(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, TypeError, RecursionError):
        check_is_file(path)
        return dict(json.loads(path.read_bytes()))
    return {}


def _parse(state: dict[str, Any] | None) -> FileState | None:
    found = None if state is None else FileState(**state)
    if found is not None and not all(type(value) is int for name, value in asdict(found).items() if name != "shard"):
        raise ValueError("the numbers must be integers")
    return found


# Checks


class LedgerChecks:
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
            self._missing.append(Missing(f"{text}{'s' * (len(lost) > 1)} {', '.join(map(str, lost[:SHOWN]))}"))
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
            has = "; ".join(text for _, text in short[:SHOWN])
            text = f"{source} says that training came to {format_position(end)}, and {has}"
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


def _format_process(record: np.void) -> str:
    return f"rank {int(record['rank'])} of generation {int(record['generation'])}"


def format_position(position: Position) -> str:
    """Return a position in words."""
    return f"epoch {position[0]}, step {position[1]}"


def _last_position(trained: Records, rank: int) -> Position:
    """Return up to where a rank has recorded training."""
    own = trained[trained["rank"] == rank]
    return (int(own[-1]["epoch"]), int(own[-1]["step"]) + 1) if len(own) else (0, 0)
