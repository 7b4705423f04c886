"""The cost of what `samestep report` shows: CPU time that recording adds to a step of 10 ms.

    python benchmarks/recording.py [--rounds 9] [--steps 300]

One process trains a small model in steps of 10 ms, of which it sleeps most, so that metrics are exchanged once per 100
steps as in a real run. Rounds with and without recording alternate: phases of each step, what the rank uses, and the
lines of times.jsonl. The difference of the CPU seconds of the process, between the fastest rounds, must be below 0.5 % of a
step. Other processes on the machine disturb CPU seconds less than wall seconds. Then the time of one event and of the page of 1e6 points.
"""

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack, nullcontext, redirect_stdout
from os import devnull
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.distributed.step_times import PHASES, StepInterval, StepTimes
from samestep.loggers.event_log import EventLog
from samestep.report import read_run, write_report
from samestep.training.rank_usage import RankUsage, Usage

STEP_SECONDS = 10e-3
SLEEP_SECONDS = 8e-3
MAX_SHARE = 0.005
EVENTS = 5000
POINTS = 1_000_000


def nothing(*_: object) -> None:
    """Take the place of a method."""


def without_recording() -> ExitStack:
    """Turn off what measures and records; metrics.jsonl and the exchange of metrics stay."""
    off = ExitStack()
    interval = StepInterval(0.0, dict.fromkeys(PHASES, 0.0))
    for name in ("begin_step", "begin_micro_batch", "end_step", "start_waiting", "stop_waiting"):
        off.enter_context(patch.object(StepTimes, name, nothing))
    off.enter_context(patch.object(StepTimes, "enter", lambda *_: "other"))
    off.enter_context(patch.object(StepTimes, "take", lambda *_: (interval, [])))
    off.enter_context(patch.object(Usage, "take", lambda *_: RankUsage(0.0, 0.0, 0.0)))
    off.enter_context(patch.object(EventLog, "_append", nothing))
    return off


def cpu_seconds_per_step(folder: Path, steps: int) -> float:
    """Train, and return the CPU seconds of this process per step, without the first ones."""
    data = TensorDataset(torch.randn(8 * steps, 16, generator=torch.Generator().manual_seed(0)))
    began = 0.0
    with Run(global_batch=8, seed=0, folder=folder) as run:
        model = run.wrap(nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for epoch in run.shard(data, shuffle=True, num_workers=0).epochs(1):
            for step in epoch:
                if step.number == steps // 3:
                    began = time.process_time()
                for (inputs,) in step:
                    step.mean(model(inputs).square().squeeze(1)).backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(SLEEP_SECONDS)
        return (time.process_time() - began) / (steps - steps // 3)


def seconds_per_event(folder: Path) -> float:
    """The seconds of one event of usual size, with its write."""
    log = EventLog()
    log.open(folder)
    fields = {"checkpoint": "/runs/first/checkpoints/step-400", "step": 400, "bytes": 123_456_789, "seconds": 1.234}
    begin = time.perf_counter()
    for _ in range(EVENTS):
        log.record("checkpoint", fields)
    seconds = (time.perf_counter() - begin) / EVENTS
    log.close()
    return seconds


def seconds_and_bytes_of_page(folder: Path) -> tuple[float, int]:
    """Write a metrics.jsonl with many points, then the page of the run."""
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(POINTS):
            file.write(f'{{"step": {step}, "time": {1.7e9 + step}, "train/loss": {1 / (1 + step)}}}\n')
    begin = time.perf_counter()
    page = write_report([read_run(folder)], folder / "report.html")
    return time.perf_counter() - begin, page.stat().st_size


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as folder, Path(devnull).open("w") as silence:
        here = Path(folder)
        with redirect_stdout(silence):
            cpu_seconds_per_step(here / "warm-up", args.steps // 3)
            for number in range(args.rounds):
                for name in ("with", "without") if number % 2 else ("without", "with"):
                    with without_recording() if name == "without" else nullcontext():
                        seconds[name].append(cpu_seconds_per_step(here / f"{number}-{name}", args.steps))
        added = min(seconds["with"]) - min(seconds["without"])
        median = statistics.median(a - b for a, b in zip(seconds["with"], seconds["without"], strict=True))
        event, (page, size) = seconds_per_event(here), seconds_and_bytes_of_page(here / "page")
    share = added / STEP_SECONDS
    for name, found in seconds.items():
        print(f"{name} recording: {min(found) * 1e6:.0f} us of CPU per step in the fastest of {len(found)} rounds")
    print(f"recording adds {added * 1e6:.1f} us of CPU per step = {share:.2%} of {STEP_SECONDS * 1e3:.0f} ms")
    print(f"median of the differences of rounds: {median * 1e6:.1f} us")
    print(f"one event, with its write: {event * 1e6:.0f} us")
    print(f"page of {POINTS:,} points: {page:.1f} s, {size / 1e6:.2f} MB")
    assert share < MAX_SHARE, f"recording costs {share:.2%} of a step, more than {MAX_SHARE:.1%}"


if __name__ == "__main__":
    main()
