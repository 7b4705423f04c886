"""Recipes on images: they learn their task, with the same result on one rank and on two.

The values by seed come from `OMP_NUM_THREADS=1 python -m tests.recipes.seed_spread RUN`.
"""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from recipes import cfg_diffusion, progressive_images
from samestep import read_metrics
from samestep.assets import scene
from samestep.data.sample_rng import SampleContext
from samestep.nn import saliency_metrics
from tests.recipes.trained import FASHION_MNIST, TIMEOUT, assert_same_metrics, small_run, train, train_on_one_and_two

pytestmark = pytest.mark.slow  # importing the recipes takes a second
LIMIT = 1e-6
NEED_DATA = "SAMESTEP_TESTS_NEED_DATA"  # set in CI, so that a missing dataset fails the test


def test_cfg_diffusion_generates_the_prompts_and_guidance_helps(ranks, tmp_path):
    difference, one, two = train_on_one_and_two(ranks, small_run("cfg_diffusion"), tmp_path)
    assert difference < LIMIT
    assert_same_metrics(one, two)
    # seeds 0 to 4: 0.72 0.94 0.68 0.72 0.82 guided, 0.40 0.62 0.28 0.40 0.58 unguided; chance is 0.1
    assert two["samples/guided_accuracy"] >= 0.4
    assert two["samples/guided_accuracy"] > two["samples/unguided_accuracy"]
    with Image.open(tmp_path / "two" / "samples.png") as grid:
        assert grid.size == (4 * 10 * 22, 4 * 10 * 5)  # frames of one pixel, and a gap after each block


def test_progressive_images_learns_digits(ranks, tmp_path):
    difference, one, two = train_on_one_and_two(ranks, small_run("progressive_images"), tmp_path)
    assert difference < LIMIT
    assert_same_metrics(one, two)
    assert two["val/accuracy"] > 0.5  # seeds 0 to 4: 0.667 0.700 0.727 0.710 0.663; chance is 0.1
    for name in ("log.txt", "metrics.jsonl", "tensorboard", "checkpoints"):
        assert (tmp_path / "two" / name).exists()


def test_contrastive_learns_digits_without_labels(ranks, tmp_path):
    difference, one, two = train_on_one_and_two(ranks, small_run("contrastive"), tmp_path)
    assert difference < LIMIT
    assert_same_metrics(one, two)
    # seeds 0 to 5: 0.832 0.872 0.865 0.832 0.832 0.882; with the pixels as features 0.721
    assert two["epoch/accuracy"] > 0.78


def test_saliency_predicts_the_fixations_of_synthetic_scenes(ranks, tmp_path):
    scenes = tmp_path / "one" / "synthetic"  # the run on one rank writes the scenes, the other one reads them
    difference, one, two = train_on_one_and_two(ranks, small_run("saliency"), tmp_path, data=scenes)
    assert difference < LIMIT
    assert_same_metrics(one, two)
    warning = "the images and fixations of this run are SYNTHETIC"
    assert [warning in (tmp_path / run / "log.txt").read_text() for run in ("one", "two")] == [True, False]
    assert (tmp_path / "two" / "maps.png").exists()
    # A model that ignores the image can at best predict the center. Seeds 0 to 4, with the values of center and truth:
    # NSS 2.64 2.57 2.65 2.69 2.66 (0.4, 2.9), AUC 0.904 0.905 0.908 0.909 0.903 (0.65, 0.92),
    # CC 0.842 0.820 0.848 0.854 0.855 (0.17, 0.92), KL 0.414 0.430 0.384 0.401 0.403 (1.7, 0.25)
    center, truth = (mean_metrics(kind) for kind in ("center", "truth"))
    for name, sign in {"nss": 1, "auc_judd": 1, "cc": 1, "kl": -1}.items():
        halfway = (center[name] + truth[name]) / 2
        assert sign * two[f"val/{name}"] > sign * halfway, name


def mean_metrics(kind: str) -> dict[str, float]:
    """The metrics of the true densities of some scenes, or of a Gaussian in the center."""
    rng, found = np.random.default_rng(1), []
    for number in range(0, 100, 5):
        _, density = scene(number, 64, 48)
        counts = np.bincount(rng.choice(64 * 48, 60, p=density.ravel()), minlength=64 * 48).reshape(1, 48, 64)
        rows, columns = np.mgrid[:48, :64]
        gaussian = np.exp(-(((columns - 31.5) / 64) ** 2 + ((rows - 23.5) / 48) ** 2) / 0.08)
        predicted = density if kind == "truth" else gaussian / gaussian.sum()
        log_density = torch.tensor(predicted, dtype=torch.float32)[None].log()
        found.append(saliency_metrics(log_density, torch.tensor(counts, dtype=torch.float32), 64 / 30))
    return {name: float(torch.cat([each[name] for each in found]).mean()) for name in found[0]}


def test_mixup_and_crops_are_keyed_by_sample():
    images = progressive_images.Images(progressive_images.digits()[0], every=1, train=True, mirror=False)

    def read(index: int, epoch: int) -> tuple[torch.Tensor, ...]:
        with SampleContext(seed=0, epoch=epoch, index=index, setting=12):
            return images[index]

    assert read(3, 0)[0].shape == (1, 12, 12)
    assert all(torch.equal(a, b) for a, b in zip(read(3, 0), read(3, 0), strict=True))
    assert not torch.equal(read(3, 0)[0], read(3, 1)[0])


def test_progressive_images_learns_fashion_mnist(ranks, tmp_path):
    if not FASHION_MNIST.is_dir() and NEED_DATA in os.environ:
        pytest.fail(f"{NEED_DATA} is set, but {FASHION_MNIST} does not exist: run `make data` as root", pytrace=False)
    if not FASHION_MNIST.is_dir():
        pytest.skip(f"{FASHION_MNIST} does not exist: apt install dataset-fashion-mnist")
    recipe, options = small_run("fashion")
    ((_, metrics),) = ranks(1, train, recipe, tmp_path, options, timeout=TIMEOUT)
    assert metrics["val/accuracy"] > 0.5  # seeds 0 to 4: 0.696 0.720 0.720 0.696 0.720; chance is 0.1
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["epoch/image_size"] for record in records if "epoch/loss" in record] == [8, 12, 16, 16]


def test_captions_become_word_indices():
    assert cfg_diffusion.tokenize(["a b", "b"]).tolist() == [[1, 2], [2, 0]]
