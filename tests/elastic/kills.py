"""Kill the ranks of a running launch at chosen moments, and check the result of the training."""

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

from tests.launch.launched import Started, start

TRAINING = Path(__file__).with_name("training.py")
EPOCHS, SAMPLES = 4, 397
TIMEOUT = 150.0  # seconds in which killed ranks must train again, on cores that are shared


@dataclass(frozen=True)
class PhaseLine:
    """One line of a rank's phase file: what it was about to do."""

    pid: int
    phase: str
    step: int
    rank: int
    size: int


@dataclass(frozen=True)
class Moment:
    """When to kill which rank."""

    phase: str
    """What the rank is doing."""
    times: int
    """How often it must have done this since its start."""
    delay: float
    """Seconds after that."""
    fraction: float
    """Which rank, as a fraction of the world size."""


@dataclass(frozen=True)
class Kill:
    """A completed kill."""

    moment: Moment
    victim: PhaseLine
    seconds: float
    """Time from the previous kill, or from the start, to this one."""


@dataclass
class Launch:
    """A launch whose ranks write their phases to `out`."""

    started: Started
    out: Path
    _ignored: set[int] = field(default_factory=set)

    def phases(self) -> dict[int, list[PhaseLine]]:
        """The lines of every process that started after the last kill, by process id."""
        files = {int(path.name): path for path in (self.out / "phases").glob("*")}
        return {pid: read_phases(pid, path) for pid, path in files.items() if pid not in self._ignored}

    def ignore_all_so_far(self) -> None:
        """Ignore all processes that have started up to now."""
        self._ignored |= set(self.phases())

    def wait_until(self, phase: str, times: int = 1, fraction: float = 0.0, size: int | None = None) -> PhaseLine:
        """Wait until the chosen rank has been in `phase` this often, in a world of `size` if given."""
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end:
            for lines in self.phases().values():
                matching = [line for line in lines if line.phase == phase and line.size == (size or line.size)]
                if len(matching) >= times and matching[-1].rank == int(fraction * matching[-1].size):
                    return matching[-1]
            assert self.started.process.poll() is None, f"the launch has ended:\n{self.started.finish().err}"
            time.sleep(0.005)
        raise AssertionError(f"no rank reached {phase} within {TIMEOUT:g} s: {self.phases()}")

    def kill(self, moment: Moment) -> Kill:
        """Wait for the moment, then kill."""
        start_time = time.monotonic()
        victim = self.wait_until(moment.phase, moment.times, moment.fraction)
        seconds = time.monotonic() - start_time
        time.sleep(moment.delay)
        self.ignore_all_so_far()
        os.kill(victim.pid, signal.SIGKILL)
        return Kill(moment, victim, seconds)


def read_phases(pid: int, path: Path) -> list[PhaseLine]:
    """The complete lines; the last one may be half written."""
    found = re.findall(r"(\w+) (\d+) (\d+) (\d+)\n", path.read_text())
    return [PhaseLine(pid, phase, *map(int, numbers)) for phase, *numbers in found]


def launch(folder: Path, out: Path, *options: str, pause: float = 0.0) -> Launch:
    """Start the training with `samestep run OPTIONS`; processes of earlier launches are ignored."""
    arguments = ("--folder", "kept", *options, "train.py", str(out), str(EPOCHS), str(pause))
    started = Launch(start(folder, TRAINING.read_text(), *arguments, env={"OMP_NUM_THREADS": "1"}), out)
    started.ignore_all_so_far()
    return started


def draw_moments(rng: random.Random, phases: str) -> list[Moment]:
    """Random moments for phases given by their first letters: c(omputing), s(aving), r(estoring)."""
    choices = {
        "c": lambda: Moment("computing", rng.randint(1, 9), rng.uniform(0, 0.05), rng.random()),
        # From copying the state to after the checkpoint is published.
        "s": lambda: Moment("saving", rng.randint(1, 2), rng.uniform(0, 0.2), rng.random()),
        "r": lambda: Moment("restoring", 1, rng.uniform(0, 0.1), rng.random()),
    }
    return [choices[letter]() for letter in phases]


def largest_weight_difference(one: Path, other: Path) -> float:
    """The largest difference between the final weights of two trainings."""
    first, second = (json.loads((out / "weights.json").read_text()) for out in (one, other))
    assert first.keys() == second.keys()
    return max(float((torch.tensor(first[name]) - torch.tensor(second[name])).abs().max()) for name in first)


def audited_world_sizes(out: Path) -> list[int]:
    """The world sizes in order, after `samestep audit` has proved that each sample counted once per epoch."""
    audit = subprocess.run(
        [sys.executable, "-m", "samestep", "audit", "--json", str(out)],
        capture_output=True, text=True, check=False, timeout=150,
    )  # fmt: skip
    assert audit.returncode == 0, audit.stdout
    train = next(shard for shard in json.loads(audit.stdout)["shards"] if shard["name"] == "train")
    assert [epoch["samples"] for epoch in train["epochs"]] == [SAMPLES] * EPOCHS
    assert all(epoch["complete"] for epoch in train["epochs"])
    sizes = [generation["world_size"] for generation in train["generations"]]
    return [sizes[0], *(now for before, now in pairwise(sizes) if now != before)]
