"""Ranks killed at random moments on 2, 1, 3 and 2 ranks: the result equals that of an undisturbed run."""

import random
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from samestep import read_metrics
from tests.elastic.kills import Kill, audited_world_sizes, draw_moments, largest_weight_difference, launch

STEPS, SAVED_EVERY = 200, 4  # an epoch has 50 steps, and its end is saved too
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Stage:
    """One launch: the number of ranks, and the phases in which they are killed."""

    ranks: int
    phases: str
    finishes: bool = False
    """Whether it restarts after the last kill and completes."""


STAGES = (Stage(2, "cssrcs"), Stage(1, "srcsc"), Stage(3, "rcssr"), Stage(2, "scrsc", finishes=True))


@dataclass
class KilledTraining:
    """The launches of one training, each run once."""

    folder: Path
    kills: list[list[Kill]] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)

    def reach(self, stage: int) -> list[Kill]:
        """Run the launches up to this one; returns its kills."""
        while len(self.kills) <= stage:
            self.kills.append(self._launch(len(self.kills)))
        return self.kills[stage]

    def _launch(self, number: int) -> list[Kill]:
        stage, rng = STAGES[number], random.Random(number)
        restarts = len(stage.phases) - (not stage.finishes)
        # One node of up to three, which waits a second for others at every start.
        rendezvous = (
            "--nnodes",
            "1:3",
            "--rdzv-endpoint",
            "localhost:0",
            "--rdzv-conf",
            "last_call_timeout=1,is_host=1",
        )
        started = launch(
            self.folder, self.folder / "out", "--nproc-per-node", str(stage.ranks), *rendezvous,
            "--max-restarts", str(restarts),
        )  # fmt: skip
        try:
            kills = [started.kill(moment) for moment in draw_moments(rng, stage.phases)]
        finally:
            ended = started.started.finish()
        assert ended.left == []
        self.codes.append(ended.code)
        return kills


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> KilledTraining:
    return KilledTraining(tmp_path_factory.mktemp("training"))


@pytest.mark.parametrize("stage", range(len(STAGES)))
def test_killed_ranks_are_restarted_every_time(training: KilledTraining, stage: int):
    kills = training.reach(stage)
    expected = STAGES[stage]
    assert len(kills) == len(expected.phases)
    assert {kill.victim.size for kill in kills} == {expected.ranks}
    assert "".join(kill.victim.phase[0] for kill in kills) == expected.phases
    assert training.codes[stage] == (0 if expected.finishes else 137)


def test_after_all_kills_the_weights_are_those_of_an_undisturbed_run(training: KilledTraining, undisturbed: Path):
    training.reach(len(STAGES) - 1)
    assert sum(map(len, training.kills)) >= 20
    assert largest_weight_difference(undisturbed, training.folder / "out") < 1e-6


def test_after_all_kills_every_sample_counted_once(training: KilledTraining):
    training.reach(len(STAGES) - 1)
    assert audited_world_sizes(training.folder / "out") == [2, 1, 3, 2]


def test_after_all_kills_the_logs_contain_every_step_once_or_as_trained_again(
    training: KilledTraining, undisturbed: Path
):
    training.reach(len(STAGES) - 1)
    out = training.folder / "out"
    expected, logged = (read_metrics(each / "metrics.jsonl", by_step=True) for each in (undisturbed, out))
    assert [record["step"] for record in logged] == [record["step"] for record in expected] == list(range(STEPS))
    for before, now in zip(expected, logged, strict=True):
        for name in ("train/loss", "train/learning_rate", "epoch/accuracy"):
            assert (name in before) == (name in now), (name, now)
            assert now.get(name, 0.0) == pytest.approx(before.get(name, 0.0), abs=1e-5)
    # A step is logged again only after a restart from the checkpoint before it, and no step is skipped.
    written = [int(record["step"]) for record in read_metrics(out / "metrics.jsonl") if "train/loss" in record]
    jumps = [(before, now) for before, now in pairwise(written) if now != before + 1]
    assert len(jumps) <= sum(map(len, training.kills))
    assert all(now <= before and now % SAVED_EVERY in (0, 50 % SAVED_EVERY) for before, now in jumps), jumps
