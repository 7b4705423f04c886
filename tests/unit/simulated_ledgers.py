"""Ledgers of simulated runs, for the tests of the audit."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from samestep.data.audit import ShardReport, audit
from samestep.data.content_probe import Probe
from samestep.data.ledger import (
    RECORD,
    RecordKind,
    ShardDescription,
    ShardLedger,
    checksums,
    next_generation,
    rank_file,
    running_hash,
    shard_folder,
)
from samestep.data.ledger_reader import count_samples
from samestep.data.partition import EvaluationPartition, Partition

DESCRIPTION = ShardDescription(n=100, seed=7, shuffle=True, global_batch=10)


@dataclass(frozen=True)
class Generation:
    """One start of a simulated run."""

    world_size: int
    begin: int
    """The first global step."""
    steps: int
    ending: str = "success"
    """success, error, or killed, which loses records that were not yet written."""
    save_every: int = 3
    """Steps between two saved positions; the ledger is synced before each."""


def simulate(folder: Path, description: ShardDescription, *run: Generation, evaluate_every: int = 0) -> None:
    """Write the ledger that a run with these generations would leave."""
    for generation in run:
        number = next_generation(folder, "train")
        for rank in range(generation.world_size):
            _simulate_rank(folder, description, generation, number, rank, evaluate_every)


def _simulate_rank(
    folder: Path, description: ShardDescription, generation: Generation, number: int, rank: int, evaluate_every: int
) -> None:
    world_size = generation.world_size
    partition = Partition(description.n, description.global_batch, rank, world_size, drop_last=description.drop_last)
    start = divmod(generation.begin, partition.steps)
    ledger = open_ledger(folder, description, rank, world_size, number, start)
    for done in range(generation.begin, generation.begin + generation.steps):
        epoch, step = divmod(done, partition.steps)
        record_step(ledger, partition, epoch, step)
        if rank == world_size - 1:  # padding, which must not count
            ledger.record_training(epoch, step, partition.read_range(step)[0], 1, weight=0.0)
        if (done + 1) % generation.save_every == 0 or (generation.ending == "killed" and (done * 7 + rank) % 5 == 0):
            ledger.sync()
        if evaluate_every and (done + 1) % evaluate_every == 0:
            evaluate(ledger, EvaluationPartition(description.n, 7, rank, world_size))
    if generation.ending == "killed":
        os.close(ledger._file)
    else:
        ledger.close(failed=generation.ending == "error")


def open_ledger(
    folder: Path,
    description: ShardDescription,
    rank: int,
    world_size: int,
    generation: int = 0,
    start: tuple[int, int] = (0, 0),
    name: str = "train",
) -> ShardLedger:
    ledger = ShardLedger(folder, name, description, rank, world_size, generation)
    ledger.begin(*start)
    ledger.record_data([Probe(0, 5, checksum=3, sketch=(0.25, -1.5))])
    return ledger


def record_step(ledger: ShardLedger, partition: Partition, epoch: int, step: int) -> None:
    start, stop = partition.slice(step)
    ledger.record_training(epoch, step, start, stop - start)


def evaluate(ledger: ShardLedger, batches: EvaluationPartition) -> None:
    number = ledger.begin_evaluation(0, 0)
    for k in range(len(batches)):
        batch = batches.batch(k)
        ledger.record_evaluation(number, k, batch.start, batch.real)
    ledger.end_evaluation(number)


def audit_train(folder: Path) -> ShardReport:
    """Audit a folder that has the shard `train` only."""
    (only,) = audit(folder).shards
    return only


def file_of(folder: Path, rank: int) -> Path:
    return rank_file(shard_folder(folder, "train"), rank)


def edit(folder: Path, rank: int, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change the records of a rank, their checksums, the sums at the end and the running hashes."""
    records = change(np.fromfile(file_of(folder, rank), dtype=RECORD))
    for at in np.flatnonzero(records["kind"] == RecordKind.END):
        own = records[(records["generation"] == records["generation"][at]) & (records["kind"] == RecordKind.TRAINED)]
        records["first"][at] = count_samples(own)
    write(folder, rank, records)


def replace_records(folder: Path, rank: int, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change the records of a rank, their checksums and the running hashes, but not the sums at the end."""
    write(folder, rank, change(np.fromfile(file_of(folder, rank), dtype=RECORD)))


def write(folder: Path, rank: int, records: np.ndarray, hashes: bool = True) -> None:
    """Replace the records of a rank, with their checksums and, unless told otherwise, their running hashes."""
    records["checksum"] = checksums(records)
    start = previous = 0
    for at in np.flatnonzero(records["kind"] == RecordKind.CHECK).tolist() if hashes else ():
        previous = running_hash(previous, records[start:at].tobytes())
        records["first"][at], records["count"][at], start = previous, at, at + 1
        records[at : at + 1]["checksum"] = checksums(records[at : at + 1])
    records.tofile(file_of(folder, rank))


def find_trained(records: np.ndarray, epoch: int, step: int) -> int:
    """Return the index of the record in which samples of a step counted."""
    found = (records["kind"] == RecordKind.TRAINED) & (records["epoch"] == epoch) & (records["step"] == step)
    return int(np.flatnonzero(found & (records["weight"] > 0))[0])
