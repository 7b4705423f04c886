"""Reads ledgers: the records of all ranks, damage in their files, and what summary.json and checkpoints say of them."""

import json
import re
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from samestep.data.content_probe import Probe
from samestep.data.ledger import (
    MAX_RANKS,
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
    read_description,
    running_hash,
    valid_mask,
)
from samestep.errors import LedgerError

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
    )  # fmt: skip
    selected = (records[records["kind"] == kind] for kind in kinds)
    return Ledger(
        shard.name, description, starts, files, generations, *selected, faults=tuple(faults), notes=tuple(notes)
    )


def _possible_mask(records: Records, global_batch: int) -> npt.NDArray[np.bool_]:
    """Return which records have numbers that a run can have, so that sums and products of them fit into 64 bits."""
    kind = records["kind"]
    trained, counted = kind == RecordKind.TRAINED, np.isin(kind, (RecordKind.TRAINED, RecordKind.EVALUATED))
    placed = trained | np.isin(kind, (RecordKind.START, RecordKind.END, RecordKind.CHECK))
    sizes = (records["count"] >= 1) & (records["count"] <= MAX_RANKS)
    return (
        (~placed | ((records["epoch"] < MAX_EPOCHS) & (records["step"] < 1 << STEP_BITS)))
        & (~trained | (records["step"] < _MAX_POSITION // global_batch))
        & (~counted | (records["first"] <= _MAX_POSITION))
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
        generations.append(Generation(number, (epoch, step), world_size, started_at, ranks, version, own_ends))
    return tuple(generations)


def read_probe(record: np.void) -> Probe:
    """Return the probe in a record."""
    first, second = struct.unpack("<2f", struct.pack("<Q", int(record["first"])))
    return Probe(int(record["epoch"]), int(record["step"]), int(record["count"]), (first, second))


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
    named = [Path(path) for path in summary.get("checkpoints") or () if isinstance(path, str)]
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
