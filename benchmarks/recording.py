"""The cost of what `samestep report` shows: CPU time that recording adds to a step of 10 ms.

    python benchmarks/recording.py

In each step: the phases, the hook that sees the backward pass, and the times of records. Once per second, which is
100 steps: what the rank uses, the numbers that it sends, and a line of times.jsonl. Each part is measured alone, the
fastest of many repetitions, which other processes on the machine disturb least; the sum must be below 0.5 % of a step.
Then one event, and the page of 1e6 points.
"""

import argparse
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from samestep.distributed.step_times import StepTimes
from samestep.loggers.run_files import EventLog
from samestep.report import read_run, write_report
from samestep.training.rank_times import Usage, pack_usage, usage_record

STEP_SECONDS = 10e-3
STEPS_PER_SYNC = 100
MAX_SHARE = 0.005
RANKS = 8  # in a line of times.jsonl
POINTS = 1_000_000
REPEATS = 2000
CPU = torch.device("cpu")


def fastest(function: Callable[[], object], number: int = 4) -> float:
    """The seconds of one call, in the fastest of many repetitions."""
    return min(timeit.repeat(function, number=number, repeat=REPEATS)) / number


def seconds_of_phases(times: StepTimes) -> float:
    """What a step with one micro-batch calls, but for the backward pass."""

    def step() -> None:
        times.begin_step()
        for _ in times.time_reads(iter((None,))):
            times.begin_micro_batch()
        for phase in ("optimizer", "other"):
            times.enter(phase)
        times.end_step()
        time.time()  # of the two values that every step logs
        time.time()

    return fastest(step)


def seconds_of_backward(times: StepTimes) -> float:
    """What watching adds to a backward pass: a hook of the loss and a callback at the end."""
    weight = torch.ones(1, requires_grad=True)

    def plain() -> None:
        (weight * 2).sum().backward()

    def watched() -> None:
        loss = (weight * 2).sum()
        times.watch_backward(loss, reduces=False)
        loss.backward()

    return max(0.0, fastest(watched) - fastest(plain))


def seconds_of_line(times: StepTimes, log: EventLog) -> float:
    """What is measured, packed and written once per second."""
    usage, rows = Usage(CPU), np.zeros((RANKS, 0))
    times.begin_step()
    times.end_step()
    interval, waits = times.take()
    rows = np.array([pack_usage(interval, waits, usage.take())] * RANKS) + 0.123456

    def line() -> None:
        pack_usage(*times.take(), usage.take())
        log.record_times(400, usage_record(rows))

    return fastest(line, 1)


def seconds_and_bytes_of_page(folder: Path) -> tuple[float, int]:
    """Write a metrics.jsonl with many points, then the page of the run."""
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(POINTS):
            file.write(f'{{"step": {step}, "time": {1.7e9 + step}, "train/loss": {1 / (1 + step)}}}\n')
    begin = time.process_time()
    page = write_report([read_run(folder)], folder / "report.html")
    return time.process_time() - begin, page.stat().st_size


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(1)
    times = StepTimes(SimpleNamespace(waited=0.0, alone=True), CPU)  # pyright: ignore[reportArgumentType]  # no peers
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), EventLog()
        log.open(folder)
        phases, backward, line = seconds_of_phases(times), seconds_of_backward(times), seconds_of_line(times, log)
        fields = {"checkpoint": "/runs/first/checkpoints/step-400", "step": 400, "bytes": 123_456_789, "seconds": 1.234}
        event = fastest(lambda: log.record("checkpoint", fields), 1)
        log.close()
        page, size = seconds_and_bytes_of_page(folder / "page")
    step = phases + backward + line / STEPS_PER_SYNC
    share = step / STEP_SECONDS
    print(f"phases of a step: {phases * 1e6:.1f} us; backward pass: {backward * 1e6:.1f} us")
    print(f"a line of times.jsonl for {RANKS} ranks, once per second: {line * 1e6:.0f} us")
    print(f"together {step * 1e6:.1f} us per step = {share:.3%} of {STEP_SECONDS * 1e3:.0f} ms")
    print(f"one event, with its write: {event * 1e6:.0f} us")
    print(f"page of {POINTS:,} points: {page:.1f} s of CPU, {size / 1e6:.2f} MB")
    assert share < MAX_SHARE, f"recording costs {share:.2%} of a step, more than {MAX_SHARE:.1%}"


if __name__ == "__main__":
    main()
