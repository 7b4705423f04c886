"""Killing the ranks of a live launch at chosen moments, and judging what has come of the training."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

from tests.launch.started import Started, start

TRAINING = Path(__file__).with_name("training.py")
EPOCHS, SAMPLES = 4, 397
PATIENCE = 60.0  # seconds in which killed ranks must be back at work, on cores that others use too


@dataclass(frozen=True)
class Told:
    """One line of a rank: what it was about to do."""

    pid: int
    phase: str
    step: int
    rank: int
    size: int


@dataclass(frozen=True)
class Moment:
    """When to kill, and whom."""

    phase: str
    """What the victim is at."""
    times: int
    """How often it must have been at it since its start."""
    delay: float
    """Seconds after that."""
    luck: float
    """Which rank, as a share of all."""


@dataclass(frozen=True)
class Kill:
    """A kill that was done."""

    moment: Moment
    victim: Told
    seconds: float
    """How long the launch took from the kill before, or its start, to this moment."""


@dataclass
class Launch:
    """A launch whose ranks tell their phases in `out`."""

    started: Started
    out: Path
    _old: set[int] = field(default_factory=set)

    def told(self) -> dict[int, list[Told]]:
        """What every process told that has come since the last kill."""
        files = {int(path.name): path for path in (self.out / "phases").glob("*")}
        return {pid: read_phases(pid, path) for pid, path in files.items() if pid not in self._old}

    def ignore_all_so_far(self) -> None:
        """Forget the processes that are there: their generation is over."""
        self._old |= set(self.told())

    def wait_until(self, phase: str, times: int = 1, luck: float = 0.0, size: int | None = None) -> Told:
        """Wait until the rank that luck chooses has been at `phase` so often, in a world of `size` if given."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for lines in self.told().values():
                at = [line for line in lines if line.phase == phase and line.size == (size or line.size)]
                if len(at) >= times and at[-1].rank == int(luck * at[-1].size):
                    return at[-1]
            assert self.started.process.poll() is None, f"the launch has ended:\n{self.started.finish().err}"
            time.sleep(0.005)
        raise AssertionError(f"no rank came to {phase} within {PATIENCE:g} s: {self.told()}")

    def kill(self, moment: Moment) -> Kill:
        """Wait for the moment, then kill."""
        since = time.monotonic()
        victim = self.wait_until(moment.phase, moment.times, moment.luck)
        seconds = time.monotonic() - since
        time.sleep(moment.delay)
        self.ignore_all_so_far()
        os.kill(victim.pid, signal.SIGKILL)
        return Kill(moment, victim, seconds)


def read_phases(pid: int, path: Path) -> list[Told]:
    """Whole lines only: the last may be half written."""
    found = re.findall(r"(\w+) (\d+) (\d+) (\d+)\n", path.read_text())
    return [Told(pid, phase, *map(int, numbers)) for phase, *numbers in found]


def launch(folder: Path, out: Path, *options: str, pause: float = 0.0) -> Launch:
    """Start the training by `samestep run OPTIONS`; every process before it counts as old."""
    arguments = ("--folder", "kept", *options, "train.py", str(out), str(EPOCHS), str(pause))
    live = Launch(start(folder, TRAINING.read_text(), *arguments, env={"OMP_NUM_THREADS": "1"}), out)
    live.ignore_all_so_far()
    return live


def draw_moments(luck: random.Random, phases: str) -> list[Moment]:
    """Moments for phases told by their first letters: c(omputing), s(aving), r(estoring)."""
    choices = {
        "c": lambda: Moment("computing", luck.randint(1, 9), luck.uniform(0, 0.05), luck.random()),
        # From the taking of the state over the files to after the publishing.
        "s": lambda: Moment("saving", luck.randint(1, 2), luck.uniform(0, 0.2), luck.random()),
        "r": lambda: Moment("restoring", 1, luck.uniform(0, 0.1), luck.random()),
    }
    return [choices[letter]() for letter in phases]


def furthest_weight(one: Path, other: Path) -> float:
    """The largest difference between the final weights of two trainings."""
    theirs, ours = (json.loads((out / "weights.json").read_text()) for out in (one, other))
    assert theirs.keys() == ours.keys()
    return max(float((torch.tensor(theirs[name]) - torch.tensor(ours[name])).abs().max()) for name in theirs)


def audited_world_sizes(out: Path) -> list[int]:
    """The world sizes one after the other, once `samestep audit` has proved that each sample counted once an epoch."""
    audit = subprocess.run(
        [sys.executable, "-m", "samestep", "audit", "--json", str(out)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert audit.returncode == 0, audit.stdout
    train = next(shard for shard in json.loads(audit.stdout)["shards"] if shard["name"] == "train")
    assert [epoch["samples"] for epoch in train["epochs"]] == [SAMPLES] * EPOCHS
    assert all(epoch["complete"] for epoch in train["epochs"])
    sizes = [start["world_size"] for start in train["starts"]]
    return [sizes[0], *(now for before, now in pairwise(sizes) if now != before)]
