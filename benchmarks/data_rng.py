"""What seeding the global generators per sample costs: the time of an epoch, relative to reading without seeding.

`python benchmarks/data_rng.py`: three datasets in memory, read in the training process in batches of 32 and 256. Each
epoch is read with and without seeding, in turns and in both orders. The ratio is the median of those of the pairs, and
the first line of each batch size shows the noise: samestep never seeds for a TensorDataset.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from samestep.data.loader import BatchRequest, Loader
from samestep.data.sample_rng import NO_SETTING

SAMPLES = 4096


class Pairs(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """What a script writes by hand; it draws nothing."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.labels[index]


class Flipped(Pairs):
    """A random flip, drawn from Python's generator."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, label = super().__getitem__(index)
        return (inputs.flip(0) if random.random() < 0.5 else inputs), label


def requests(batch: int) -> Iterator[BatchRequest]:
    """One epoch in order."""
    for start in range(0, SAMPLES, batch):
        yield BatchRequest(0, np.arange(start, start + batch), NO_SETTING)


def epoch_seconds(loader: Loader, batch: int) -> float:
    """Return the time of an epoch."""
    start = time.process_time()
    for _ in loader.read(requests(batch)):
        pass
    return time.process_time() - start


def compare(dataset: Dataset[object], batch: int, rounds: int) -> None:
    """Print the time of an epoch with seeding, relative to one without."""
    seeded, plain = (Loader(dataset, 0, 0, None, 0, torch.device("cpu")) for _ in range(2))  # pyright: ignore[reportArgumentType]
    plain._loader.dataset._calls = None  # pyright: ignore
    ratios, costs = list[float](), list[float]()
    for number in range(rounds + 1):
        order = (plain, seeded) if number % 2 else (seeded, plain)
        times = {loader: epoch_seconds(loader, batch) for loader in order}
        ratios.append(times[seeded] / times[plain])
        costs.append((times[seeded] - times[plain]) / SAMPLES * 1e6)
    ratio, cost = statistics.median(ratios[1:]), statistics.median(costs[1:])  # without the first, which learns
    print(
        f"{type(dataset).__name__:14} batch {batch:3}: {ratio:.3f}, {cost:+.2f} microseconds per sample, "
        f"{cost * batch:+.1f} per batch"
    )


def main() -> None:
    """Print one line per dataset and batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    inputs, labels = torch.rand(SAMPLES, 64), torch.arange(SAMPLES)
    for batch in (32, 256):
        for dataset in (TensorDataset(inputs, labels), Pairs(inputs, labels), Flipped(inputs, labels)):
            compare(dataset, batch, rounds)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()
