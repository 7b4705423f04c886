"""The throughput of a slow dataset: samestep compared with a plain DataLoader with as many workers.

    python benchmarks/data_pipeline.py [--workers 8] [--sample-ms 10] [--step-ms 10] [--rounds 5]

Reading a sample takes 10 ms, in which a data worker sleeps, and 8 workers read: at most 800 samples per second. A step
of 16 samples computes for 10 ms: with matrix products on a GPU, otherwise by sleeping. Both loops read the same
samples and train the same small model on one rank, and take turns. The first steps of a turn, which start the workers,
are not timed, and neither is the first round. The limit is what the slower of the two allows: workers or computation.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from samestep import Run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, WIDTH, CLASSES = 16, 3 * 64 * 64, 10
WARM_UP, TIMED = 20, 200  # steps of a turn


class SlowImages(Dataset):
    """Samples that take a while to read, as images that are decoded."""

    def __init__(self, samples: int, seconds: float) -> None:
        self.samples, self.seconds = samples, seconds

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.seconds)
        return torch.full((WIDTH,), index % CLASSES / CLASSES), index % CLASSES


class Work:
    """The computation of a step, beside that of the small model."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._repeats = seconds, 1
        if DEVICE == "cuda":
            self._matrix = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
            once = self._measure(20) / 20
            self._repeats = max(1, round(seconds / once))

    def __call__(self) -> None:  # noqa: D102 see the class
        if DEVICE == "cpu":
            time.sleep(self._seconds)
            return
        for _ in range(self._repeats):
            torch.mm(self._matrix, self._matrix)

    def _measure(self, repeats: int) -> float:
        for _ in range(5):
            torch.mm(self._matrix, self._matrix)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            torch.mm(self._matrix, self._matrix)
        torch.cuda.synchronize()
        return time.perf_counter() - start


def by_hand(args: argparse.Namespace, data: SlowImages, work: Work) -> Iterator[None]:
    """Yield after every step of a hand-written loop."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    pinned = DEVICE == "cuda"
    for inputs, labels in DataLoader(data, BATCH, shuffle=True, num_workers=args.workers, pin_memory=pinned):
        inputs, labels = inputs.to(DEVICE, non_blocking=True), labels.to(DEVICE, non_blocking=True)
        work()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def by_samestep(args: argparse.Namespace, data: SlowImages, work: Work) -> Iterator[None]:
    """Yield after every step of samestep."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, Run(global_batch=BATCH, folder=Path(folder)) as run:
        model = run.wrap(nn.Linear(WIDTH, CLASSES))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for epoch in run.shard(data, shuffle=True, num_workers=args.workers).epochs(1):
            for step in epoch:
                for inputs, labels in step:
                    work()
                    step.mean(nn.functional.cross_entropy(model(inputs), labels, reduction="none")).backward()
                optimizer.step()
                optimizer.zero_grad()
                yield


LOOPS = {"DataLoader": by_hand, "samestep": by_samestep}


def samples_per_second(steps: Iterator[None]) -> float:
    """Run one turn."""
    for _ in range(WARM_UP):
        next(steps)
    finish()
    start = time.perf_counter()
    for _ in range(TIMED):
        next(steps)
    finish()
    seconds = time.perf_counter() - start
    for _ in steps:  # to the end of the epoch: samestep warns if a loop is left early
        pass
    return TIMED * BATCH / seconds


def finish() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--sample-ms", type=float, default=10.0)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    data, work = SlowImages((WARM_UP + TIMED) * BATCH, args.sample_ms / 1e3), Work(args.step_ms / 1e3)
    rates = {name: [] for name in LOOPS}
    for number in range(args.rounds + 1):
        for name, loop in LOOPS.items():
            rate = samples_per_second(loop(args, data, work))
            if number:  # the first round includes lazy imports
                rates[name].append(rate)
    limit = 1e3 / max(args.sample_ms / args.workers, args.step_ms / BATCH)
    for name, values in rates.items():
        ratio = statistics.median(own / plain for own, plain in zip(values, rates["DataLoader"], strict=True))
        median = statistics.median(values)
        print(f"{name:12} {median:7.1f} samples/s   {median / limit:.1%} of the limit   x {ratio:.3f} of a DataLoader")


if __name__ == "__main__":
    main()
