"""Ranks killed at random moments on 2, 1, 3 and 2 ranks: the run ends as one that nobody disturbed."""

import random
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from samestep import read_metrics
from tests.elastic.killing import Kill, audited_world_sizes, draw_moments, furthest_weight, launch

STEPS, SAVED_EVERY = 200, 4  # an epoch has 50 steps, and its end is saved as well
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Stage:
    """One launch: how many ranks, and at what they are killed."""

    ranks: int
    phases: str
    finishes: bool = False
    """Whether it may be restarted once more after the last kill, and then ends well."""


STAGES = (Stage(2, "cssrcs"), Stage(1, "srcsc"), Stage(3, "rcssr"), Stage(2, "scrsc", finishes=True))


@dataclass
class Story:
    """The launches of one training, each made once."""

    folder: Path
    kills: list[list[Kill]] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)

    def reach(self, stage: int) -> list[Kill]:
        """Make the launches up to this one; the kills of it."""
        while len(self.kills) <= stage:
            self.kills.append(self._launch(len(self.kills)))
        return self.kills[stage]

    def _launch(self, number: int) -> list[Kill]:
        stage, luck = STAGES[number], random.Random(number)
        restarts = len(stage.phases) - (not stage.finishes)
        # One node of up to three, which waits a second for others at every start.
        meeting = ("--nnodes", "1:3", "--rdzv-endpoint", "localhost:0", "--rdzv-conf", "last_call_timeout=1,is_host=1")
        live = launch(
            self.folder, self.folder / "out", "--nproc-per-node", str(stage.ranks), *meeting,
            "--max-restarts", str(restarts),
        )  # fmt: skip
        try:
            kills = [live.kill(moment) for moment in draw_moments(luck, stage.phases)]
        finally:
            ended = live.started.finish()
        assert ended.left == []
        self.codes.append(ended.code)
        return kills


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return Story(tmp_path_factory.mktemp("story"))


@pytest.mark.timeout(170)
@pytest.mark.parametrize("stage", range(len(STAGES)))
def test_killed_ranks_come_back_every_time(story: Story, stage: int):
    kills = story.reach(stage)
    wanted = STAGES[stage]
    assert len(kills) == len(wanted.phases)
    assert {kill.victim.size for kill in kills} == {wanted.ranks}
    assert "".join(kill.victim.phase[0] for kill in kills) == wanted.phases
    assert story.codes[stage] == (0 if wanted.finishes else 137)


def test_after_all_kills_the_weights_are_those_of_an_undisturbed_run(story: Story, undisturbed: Path):
    story.reach(len(STAGES) - 1)
    assert sum(map(len, story.kills)) >= 20
    assert furthest_weight(undisturbed, story.folder / "out") < 1e-6


def test_after_all_kills_every_sample_counted_once(story: Story):
    story.reach(len(STAGES) - 1)
    assert audited_world_sizes(story.folder / "out") == [2, 1, 3, 2]


def test_after_all_kills_the_logs_tell_every_step_once_or_as_trained_again(story: Story, undisturbed: Path):
    story.reach(len(STAGES) - 1)
    out = story.folder / "out"
    theirs, ours = (read_metrics(each / "metrics.jsonl", by_step=True) for each in (undisturbed, out))
    assert [record["step"] for record in ours] == [record["step"] for record in theirs] == list(range(STEPS))
    for before, now in zip(theirs, ours, strict=True):
        for name in ("train/loss", "train/learning_rate", "epoch/accuracy"):
            assert (name in before) == (name in now), (name, now)
            assert now.get(name, 0.0) == pytest.approx(before.get(name, 0.0), abs=1e-5)
    # A step stands there again only where a start went back to the checkpoint before it, and none is passed over.
    written = [int(record["step"]) for record in read_metrics(out / "metrics.jsonl") if "train/loss" in record]
    jumps = [(before, now) for before, now in pairwise(written) if now != before + 1]
    assert len(jumps) <= sum(map(len, story.kills))
    assert all(now <= before and now % SAVED_EVERY in (0, 50 % SAVED_EVERY) for before, now in jumps), jumps
