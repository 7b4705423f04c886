"""What the ledger costs: a record beside a step of 1 ms (1,000 steps a second), and an audit of a billion samples.

    python benchmarks/ledger.py [--audit]

Rounds with and without the ledger alternate in one process; the claim is less than 1 % of the step.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from samestep.data.audit import audit
from samestep.data.ledger import RECORD, Kind, LedgerWriter, ShardDescription, check_bytes

STEP_SECONDS = 1e-3
STEPS = 100
ROUNDS = 100
RECORDS = 50_000
MOST = 0.01


def busy_step() -> None:
    """Work until a millisecond is over; sleeping would hide what a record costs."""
    until = time.perf_counter() + STEP_SECONDS
    while time.perf_counter() < until:
        pass


def steps(writer: LedgerWriter | None, done: int) -> float:
    """Seconds for one round of steps."""
    begin = time.perf_counter()
    for step in range(done, done + STEPS):
        busy_step()
        if writer is not None:
            writer.add(epoch=0, step=step, first=256 * step, count=256)
    return time.perf_counter() - begin


def records_alone(writer: LedgerWriter) -> float:
    """Seconds for one record, writing and checking included."""
    begin = time.perf_counter()
    for step in range(RECORDS):
        writer.add(epoch=1, step=step, first=256 * step, count=256)
    writer.flush()
    return (time.perf_counter() - begin) / RECORDS


def measure_writing(folder: Path) -> bool:
    description = ShardDescription(n=10**9, seed=0, shuffle=True, global_batch=256)
    writer = LedgerWriter(folder, "train", description, rank=0, size=1, generation=0)
    pairs = [(steps(None, 0), steps(writer, STEPS * number)) for number in range(ROUNDS)]
    ratio = statistics.median(recorded / bare for bare, recorded in pairs) - 1
    one = statistics.median(records_alone(writer) for _ in range(9))
    writer.close()
    print(f"one record, writing included: {one * 1e6:.2f} us = {one / STEP_SECONDS:.3%} of a step of 1 ms")
    print(f"{ROUNDS} x {STEPS} steps of 1 ms, with against without: {ratio:+.3%} (median of rounds)")
    return one / STEP_SECONDS < MOST


def measure_audit(folder: Path, n: int = 10**9, global_batch: int = 8192, size: int = 64) -> None:
    description = ShardDescription(n=n, seed=0, shuffle=True, global_batch=global_batch)
    share, number = global_batch // size, -(-n // global_batch)
    for rank in range(size):
        writer = LedgerWriter(folder, "large", description, rank=rank, size=size, generation=0)
        records = np.zeros(number, dtype=RECORD)
        records["kind"], records["rank"], records["weight"] = Kind.TRAINED, rank, 1
        records["step"] = np.arange(number)
        records["first"] = records["step"] * global_batch + rank * share
        records["count"] = np.clip(n - records["first"].astype(np.int64), 0, share)
        # The last step is smaller and cut anew over all ranks.
        tail = n - (number - 1) * global_batch
        each, extra = divmod(tail, size)
        records["first"][-1] = (number - 1) * global_batch + rank * each + min(rank, extra)
        records["count"][-1] = each + (rank < extra)
        records["check"] = check_bytes(records)
        with (folder / "ledger" / "large" / f"rank-{rank:05}.bin").open("ab") as file:
            records.tofile(file)
        writer.close()
    begin = time.perf_counter()
    report = audit(folder)
    seconds = time.perf_counter() - begin
    (shard,) = (shard for shard in report.shards if shard.name == "large")
    samples = sum(epoch.samples for epoch in shard.epochs)
    print(f"audit of {samples:,} samples, {number * size:,} records: {seconds:.1f} s, sound: {shard.exactly_once}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--audit", action="store_true", help="also write and audit a ledger of 250 MB")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cheap = measure_writing(Path(folder))
        if arguments.audit:
            measure_audit(Path(folder))
    print(f"less than {MOST:.0%} of a step: {'yes' if cheap else 'NO'}")
    return 0 if cheap else 1


if __name__ == "__main__":
    raise SystemExit(main())
