"""Recipes learn what they are for, and the same on one rank and on two."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.recipes.learnt import PATIENCE, on_one_and_two, same_numbers, train

from recipes import cfg_diffusion, progressive_images
from samestep import read_metrics
from samestep.assets import scene
from samestep.data.sample_rng import SampleContext
from samestep.nn import saliency_measures

LIMIT = 1e-6
FASHION = Path("/usr/share/datasets/fashion-mnist")
NEEDED = "SAMESTEP_TESTS_NEED_DATA"  # set where a skipped test would be a hole that nobody sees


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_cfg_diffusion_draws_what_is_asked_for_and_better_with_guidance(ranks, tmp_path):
    small = {"epochs": 6, "width": 48, "layers": 2, "draws": 5, "passes": 8}
    gap, alone, together = on_one_and_two(ranks, "cfg_diffusion", tmp_path, **small)
    assert gap < LIMIT
    same_numbers(alone, together)
    assert together["draws/guided_accuracy"] >= 0.4  # blind to its caption a net is right in 0.1
    assert together["draws/guided_accuracy"] > together["draws/unguided_accuracy"]
    with Image.open(tmp_path / "two" / "samples.png") as grid:
        assert grid.size == (4 * 10 * 22, 4 * 10 * 5)  # frames of a pixel, a gap behind each kind


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_progressive_images_learns_digits(ranks, tmp_path):
    gap, alone, together = on_one_and_two(ranks, "progressive_images", tmp_path, epochs=4, size=16, global_batch=128)
    assert gap < LIMIT
    same_numbers(alone, together)
    assert together["val/accuracy"] > 0.5  # one that learnt nothing has 0.1
    for written in ("log.txt", "metrics.jsonl", "tensorboard", "checkpoints"):
        assert (tmp_path / "two" / written).exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_saliency_finds_where_synthetic_people_look(ranks, tmp_path):
    made = {"data": tmp_path / "one" / "synthetic"}  # two ranks take by path what one rank made
    gap, alone, together = on_one_and_two(ranks, "saliency", tmp_path, then=made, epochs=2, entropy=0.01)
    assert gap < LIMIT
    same_numbers(alone, together)
    told = "the images and fixations of this run are SYNTHETIC"
    assert [told in (tmp_path / run / "log.txt").read_text() for run in ("one", "two")] == [True, False]
    assert (tmp_path / "two" / "maps.png").exists()
    middle, truth = (mean_measures(kind) for kind in ("middle", "truth"))
    for name, better in {"nss": 1, "auc_judd": 1, "cc": 1, "kl": -1}.items():
        halfway = (middle[name] + truth[name]) / 2  # a net that sees no image knows of the middle at best
        assert better * together[f"val/{name}"] > better * halfway, name


def mean_measures(kind: str) -> dict[str, float]:
    """What the recipe measures, of the known densities of some scenes or of a bell in the middle."""
    luck, found = np.random.default_rng(1), []
    for number in range(0, 100, 5):
        _, density = scene(number, 64, 48)
        counts = np.bincount(luck.choice(64 * 48, 60, p=density.ravel()), minlength=64 * 48).reshape(1, 48, 64)
        rows, columns = np.mgrid[:48, :64]
        bell = np.exp(-(((columns - 31.5) / 64) ** 2 + ((rows - 23.5) / 48) ** 2) / 0.08)
        shown = torch.tensor(density if kind == "truth" else bell / bell.sum(), dtype=torch.float32)[None].log()
        found.append(saliency_measures(shown, torch.tensor(counts, dtype=torch.float32), 64 / 30))
    return {name: float(torch.cat([each[name] for each in found]).mean()) for name in found[0]}


def test_mixing_and_cropping_belong_to_the_sample():
    images = progressive_images.Images(progressive_images.digits()[0], every=1, train=True, mirror=False)

    def look(index: int, epoch: int) -> tuple[torch.Tensor, ...]:
        with SampleContext(seed=0, epoch=epoch, index=index, setting=12):
            return images[index]

    assert look(3, 0)[0].shape == (1, 12, 12)
    assert all(torch.equal(a, b) for a, b in zip(look(3, 0), look(3, 0), strict=True))
    assert not torch.equal(look(3, 0)[0], look(3, 1)[0])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_progressive_images_learns_fashion(ranks, tmp_path):
    if not FASHION.is_dir() and NEEDED in os.environ:
        pytest.fail(f"{NEEDED} is set, and {FASHION} is not there: type `make data` as root", pytrace=False)
    if not FASHION.is_dir():
        pytest.skip(f"{FASHION} is not there: apt install dataset-fashion-mnist")
    options = {"data": FASHION, "epochs": 4, "size": 16, "every": 40}
    ((_, last),) = ranks(1, train, "progressive_images", tmp_path, options, timeout=PATIENCE)
    assert last["val/accuracy"] > 0.5  # one that learnt nothing has 0.1
    sizes = [
        record["epoch/image_size"] for record in read_metrics(tmp_path / "metrics.jsonl") if "epoch/loss" in record
    ]
    assert sizes == [8, 12, 16, 16]


def test_captions_become_numbers_of_words():
    assert cfg_diffusion.spell(["a b", "b"]).tolist() == [[1, 2], [2, 0]]
