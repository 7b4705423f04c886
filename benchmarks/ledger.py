"""Measure the cost of the ledger: a record next to a step of 1 ms, and an audit of a billion samples.

    python benchmarks/ledger.py [--audit]

Rounds with and without the ledger alternate in one process. A record must take less than 1 % of the step.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from samestep.data.audit import audit
from samestep.data.content_probe import Probe
from samestep.data.ledger import ShardDescription, ShardLedger

STEP_SECONDS = 1e-3
STEPS = 100
ROUNDS = 100
RECORDS = 50_000
MAX_SHARE = 0.01


def busy_step() -> None:
    """Keep the CPU busy for a millisecond; sleeping would hide the cost of a record."""
    until = time.perf_counter() + STEP_SECONDS
    while time.perf_counter() < until:
        pass


def time_steps(ledger: ShardLedger | None, done: int) -> float:
    """Return the seconds of one round of steps."""
    begin = time.perf_counter()
    for step in range(done, done + STEPS):
        busy_step()
        if ledger is not None:
            ledger.record_training(epoch=0, step=step, first=256 * step, count=256)
    return time.perf_counter() - begin


def time_records(ledger: ShardLedger) -> float:
    """Return the seconds per record, including the checksum and the write."""
    begin = time.perf_counter()
    for step in range(RECORDS):
        ledger.record_training(epoch=1, step=step, first=256 * step, count=256)
    ledger.flush()
    return (time.perf_counter() - begin) / RECORDS


def measure_writing(folder: Path) -> bool:
    description = ShardDescription(n=10**9, seed=0, shuffle=True, global_batch=256)
    ledger = ShardLedger(folder, "train", description, rank=0, world_size=1, generation=0)
    ledger.begin(0, 0)
    pairs = [(time_steps(None, 0), time_steps(ledger, STEPS * number)) for number in range(ROUNDS)]
    ratio = statistics.median(recorded / bare for bare, recorded in pairs) - 1
    seconds = statistics.median(time_records(ledger) for _ in range(9))
    ledger.close()
    print(f"one record, including the write: {seconds * 1e6:.2f} us = {seconds / STEP_SECONDS:.3%} of a step of 1 ms")
    print(f"{ROUNDS} x {STEPS} steps of 1 ms, with and without the ledger: {ratio:+.3%} (median of rounds)")
    return seconds / STEP_SECONDS < MAX_SHARE


def measure_audit(folder: Path, n: int = 10**9, global_batch: int = 8192, size: int = 64) -> None:
    description = ShardDescription(n=n, seed=0, shuffle=True, global_batch=global_batch)
    share, number = global_batch // size, -(-n // global_batch)
    for rank in range(size):
        ledger = ShardLedger(folder, "large", description, rank, size, generation=0)
        ledger.begin(0, 0)
        ledger.record_data([Probe(epoch=0, index=0, checksum=0, sketch=(0.0, 0.0))])
        tail = n - (number - 1) * global_batch  # the last step is smaller and partitioned again over all ranks
        each, extra = divmod(tail, size)
        for step in range(number - 1):
            ledger.record_training(0, step, step * global_batch + rank * share, share)
        ledger.record_training(0, number - 1, n - tail + rank * each + min(rank, extra), each + (rank < extra))
        ledger.close()
    begin = time.perf_counter()
    report = audit(folder)
    seconds = time.perf_counter() - begin
    (shard,) = (shard for shard in report.shards if shard.name == "large")
    samples = sum(epoch.samples for epoch in shard.epochs)
    print(f"audit of {samples:,} samples, {number * size:,} records: {seconds:.1f} s, {shard.verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--audit", action="store_true", help="also write and audit a ledger of 250 MB")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cheap = measure_writing(Path(folder))
        if arguments.audit:
            measure_audit(Path(folder))
    print(f"less than {MAX_SHARE:.0%} of a step: {'yes' if cheap else 'NO'}")
    return 0 if cheap else 1


if __name__ == "__main__":
    raise SystemExit(main())
