"""Recipes learn what they are for, and the same on one rank and on two."""

import os
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from recipes import cfg_diffusion, progressive_images, saliency
from samestep import read_metrics
from samestep.data.sample_rng import sample_luck
from samestep.errors import DataError
from tests.recipes.learnt import PATIENCE, on_one_and_two, train

LIMIT = 1e-6
FASHION = Path("/usr/share/datasets/fashion-mnist")
NEEDED = "SAMESTEP_TESTS_NEED_DATA"  # set where a skipped test would be a hole that nobody sees


def same(alone: dict[str, float], together: dict[str, float]) -> None:
    """Hold everything logged on two ranks against one, but for the clock."""
    clock = {"time", "train/samples_per_s"}
    assert alone.keys() - clock == together.keys() - clock
    for name in alone.keys() - clock:
        assert together[name] == pytest.approx(alone[name], abs=1e-5), name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_cfg_diffusion_draws_what_is_asked_for_and_better_with_guidance(ranks, tmp_path):
    gap, alone, together = on_one_and_two(ranks, "cfg_diffusion", tmp_path, epochs=6, draws=5, passes=16)
    assert gap < LIMIT
    same(alone, together)
    assert together["draws/guided_accuracy"] >= 0.4  # blind to its caption a net is right in 0.1
    assert together["draws/guided_accuracy"] > together["draws/unguided_accuracy"]
    with Image.open(tmp_path / "two" / "samples.png") as grid:
        assert grid.size == (4 * 10 * 22, 4 * 10 * 5)  # frames of a pixel, a gap behind each kind


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_progressive_images_learns_digits(ranks, tmp_path):
    gap, alone, together = on_one_and_two(ranks, "progressive_images", tmp_path, epochs=4, size=16, global_batch=128)
    assert gap < LIMIT
    same(alone, together)
    assert together["val/accuracy"] > 0.5  # one that learnt nothing has 0.1
    for written in ("log.txt", "metrics.jsonl", "tensorboard", "checkpoints"):
        assert (tmp_path / "two" / written).exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_saliency_finds_where_synthetic_people_look(ranks, tmp_path):
    gap, alone, together = on_one_and_two(ranks, "saliency", tmp_path, epochs=2, entropy=0.01)
    assert gap < LIMIT
    same(alone, together)
    middle, truth = (mean_measures(kind) for kind in ("middle", "truth"))
    for name, better in {"nss": 1, "auc_judd": 1, "cc": 1, "kl": -1}.items():
        halfway = (middle[name] + truth[name]) / 2  # a net that sees no image knows of the middle at best
        assert better * together[f"val/{name}"] > better * halfway, name


def mean_measures(kind: str) -> dict[str, float]:
    """What the recipe measures, of the known densities of some scenes or of a bell in the middle."""
    luck, found = np.random.default_rng(1), []
    for number in range(0, 100, 5):
        _, density = saliency.scene(number, 64, 48)
        counts = np.bincount(luck.choice(64 * 48, 60, p=density.ravel()), minlength=64 * 48).reshape(1, 48, 64)
        rows, columns = np.mgrid[:48, :64]
        bell = np.exp(-(((columns - 31.5) / 64) ** 2 + ((rows - 23.5) / 48) ** 2) / 0.08)
        shown = torch.tensor(density if kind == "truth" else bell / bell.sum(), dtype=torch.float32)[None].log()
        found.append(saliency.measures(shown, torch.tensor(counts, dtype=torch.float32), 64 / 30))
    return {name: float(torch.cat([each[name] for each in found]).mean()) for name in found[0]}


def test_measures_of_saliency_are_those_of_their_definitions():
    luck = torch.Generator().manual_seed(0)
    logs = torch.randn(2, 6, 8, generator=luck).flatten(1).log_softmax(1).view(2, 6, 8)
    fixations = torch.tensor([[[0, 0], [5, 7], [2, 3], [2, 3], [-1, -1]], [[1, 1], [4, 4], [3, 0], [-1, -1], [-1, -1]]])
    counts = saliency.looks(fixations, 6, 8)
    assert counts.sum((1, 2)).tolist() == [4, 3]
    assert counts[0, 2, 3] == 2
    found = saliency.measures(logs, counts, sigma=1.0)
    for row, density in enumerate(logs.exp()):
        standard = (density - density.mean()) / density.std(correction=0)
        seen = [standard[y, x] for y, x in fixations[row].tolist() if y >= 0]
        assert found["nss"][row] == pytest.approx(float(torch.stack(seen).mean()), abs=1e-5)
        truth = saliency.blurred(counts, 1.0)[row]
        assert truth.sum() == pytest.approx(1, abs=1e-5)
        pair = torch.stack([density.flatten(), truth.flatten()])
        assert found["cc"][row] == pytest.approx(float(torch.corrcoef(pair)[0, 1]), abs=1e-5)
        assert found["kl"][row] == pytest.approx(float((truth * (truth / density).log()).nansum()), abs=1e-4)
        assert found["auc_judd"][row] == pytest.approx(judd(density.numpy(), counts[row].numpy() > 0), abs=1e-5)


def judd(density: np.ndarray, seen: np.ndarray) -> float:
    """AUC-Judd step by step, as its authors write it."""
    right, wrong = [0.0], [0.0]
    for number, level in enumerate(sorted(density[seen], reverse=True), start=1):
        right.append(number / seen.sum())
        wrong.append(((density >= level).sum() - number) / (seen.size - seen.sum()))
    return float(np.trapezoid([*right, 1.0], [*wrong, 1.0]))


def test_files_of_pysaliency_are_read_whether_images_lie_inside_or_beside(tmp_path):
    saliency.generate(tmp_path / "inside", 3, 64, 48)
    shutil.copytree(tmp_path / "inside", tmp_path / "beside")
    with h5py.File(tmp_path / "inside" / "stimuli.hdf5") as inside:
        images = [inside[str(number)][:] for number in range(3)]
    (tmp_path / "beside" / "stimuli.hdf5").unlink()
    with h5py.File(tmp_path / "beside" / "stimuli.hdf5", "w") as beside:
        beside.attrs["type"], beside.attrs["version"] = b"FileStimuli", b"2.1"
        beside["filenames"] = [f"{number}.png" for number in range(3)]
        beside["shapes"] = np.array([image.shape for image in images])
    for number, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / "beside" / f"{number}.png")
    with h5py.File(tmp_path / "beside" / "fixations.hdf5", "r+") as file:  # scanpaths end early, and leave the image
        file["train_xs"][0, 4:] = file["train_ys"][0, 4:] = np.nan
        file["train_xs"][1, 5] = 64.5
    for folder in ("inside", "beside"):
        saliency.pair(tmp_path / folder, tmp_path / f"{folder}.hdf5", 32, 24)
    with h5py.File(tmp_path / "inside.hdf5") as one, h5py.File(tmp_path / "beside.hdf5") as two:
        assert one["images"].shape == (3, 3, 24, 32)
        assert np.array_equal(one["images"], two["images"])
        assert [int((file["fixations"][0, :, 0] >= 0).sum()) for file in (one, two)] == [60, 57]
        assert one["fixations"][:].max(axis=(0, 1)) == pytest.approx([23, 31], abs=1)


def test_mixing_and_cropping_belong_to_the_sample():
    images = progressive_images.Images(progressive_images.read(None)[0], every=1, train=True, mirror=False)

    def look(index: int, epoch: int) -> tuple[torch.Tensor, ...]:
        with sample_luck(seed=0, epoch=epoch, index=index, setting=12):
            return images[index]

    assert look(3, 0)[0].shape == (1, 12, 12)
    assert all(torch.equal(a, b) for a, b in zip(look(3, 0), look(3, 0), strict=True))
    assert not torch.equal(look(3, 0)[0], look(3, 1)[0])


@pytest.mark.parametrize("split", [True, False])
def test_folders_of_images_are_read(tmp_path, split):
    tops = (tmp_path / "train", tmp_path / "val") if split else (tmp_path,)
    for top in tops:
        for at, name in enumerate(("cat", "dog")):
            (top / name).mkdir(parents=True)
            for number in range(10):
                Image.new("L" if number else "RGBA", (12, 9 + number), 100 * at).save(top / name / f"{number}.png")
    (train_images, train_labels), (_, labels) = progressive_images.read(tmp_path)
    assert (len(train_labels), labels.tolist()) == ((20, [0] * 10 + [1] * 10) if split else (18, [0, 1]))
    assert train_images[0].shape == (3, 9, 12)
    assert train_images[len(train_labels) - 1].unique().tolist() == [100]


def test_macro_f1_and_accuracy_are_those_of_scikit_learn():
    from sklearn.metrics import accuracy_score, f1_score

    luck = torch.Generator().manual_seed(0)
    labels, guesses = torch.randint(0, 5, (2, 100), generator=luck)
    weights = (torch.arange(100) < 90).float()  # what stands for padding counts nowhere
    counts = progressive_images.tally(labels, guesses, weights, 5)
    told = progressive_images.metrics("val", 0.0, counts)
    assert told["val/accuracy"] == pytest.approx(accuracy_score(labels[:90], guesses[:90]))
    assert told["val/macro_f1"] == pytest.approx(f1_score(labels[:90], guesses[:90], average="macro"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_progressive_images_learns_fashion(ranks, tmp_path):
    if not FASHION.is_dir() and NEEDED in os.environ:
        pytest.fail(f"{NEEDED} is set, and {FASHION} is not there: type `make data` as root", pytrace=False)
    if not FASHION.is_dir():
        pytest.skip(f"{FASHION} is not there: apt install dataset-fashion-mnist")
    options = {"data": FASHION, "epochs": 4, "size": 16, "every": 20}
    ((_, last),) = ranks(1, train, "progressive_images", tmp_path, options, timeout=PATIENCE)
    assert last["val/accuracy"] > 0.5  # one that learnt nothing has 0.1
    sizes = [
        record["epoch/image_size"] for record in read_metrics(tmp_path / "metrics.jsonl") if "epoch/loss" in record
    ]
    assert sizes == [8, 12, 16, 16]


def test_a_missing_path_says_what_is_expected(tmp_path):
    with pytest.raises(
        DataError, match=r"no\.npz does not exist: --data expects a \.npz file with images \(n, side, side\)"
    ):
        cfg_diffusion.read(tmp_path / "no.npz")
    np.savez(tmp_path / "half.npz", images=np.zeros((1, 8, 8)))
    with pytest.raises(DataError, match=r"half\.npz lacks captions, labels: --data expects a \.npz file"):
        cfg_diffusion.read(tmp_path / "half.npz")
    with pytest.raises(
        DataError, match=r"nowhere has no images of several classes: --data expects a folder of classes"
    ):
        progressive_images.read(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"has no stimuli\.hdf5: --data expects a folder with the files of pysaliency"):
        saliency.pair(tmp_path, tmp_path / "pairs.hdf5", 64, 48)


def test_captions_of_a_file_are_read_as_those_of_the_digits(tmp_path):
    images, labels, captions = cfg_diffusion.read(None)
    np.savez(tmp_path / "digits.npz", images=images, labels=labels, captions=captions)
    again = cfg_diffusion.read(tmp_path / "digits.npz")
    assert torch.equal(again[0], images)
    assert torch.equal(again[1], labels)
    assert again[2] == captions
    assert captions[:3] == ["the digit zero", "a handwritten one", "two"]
    assert cfg_diffusion.spell(["a b", "b"]).tolist() == [[1, 2], [2, 0]]
