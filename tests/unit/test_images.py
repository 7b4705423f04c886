"""Labeled images from folders and idx files, and images with fixations from the files of pysaliency."""

import gzip
import re
import shutil
import sys

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from samestep.assets import scene, write_scenes
from samestep.data import HDF5Dataset, convert_pysaliency, crop_square, read_images
from samestep.errors import DataError


@pytest.mark.parametrize("split", [True, False])
def test_folders_of_images_are_read(tmp_path, split):
    tops = (tmp_path / "train", tmp_path / "val") if split else (tmp_path,)
    for top in tops:
        for at, name in enumerate(("cat", "dog")):
            (top / name).mkdir(parents=True)
            for number in range(10):
                Image.new("L" if number else "RGBA", (12, 9 + number), 100 * at).save(top / name / f"{number}.png")
    training, validation = read_images(tmp_path)
    assert (len(training), validation.labels.tolist()) == ((20, [0] * 10 + [1] * 10) if split else (18, [0, 1]))
    assert training.images[0].shape == (3, 9, 12)
    assert training.images[len(training) - 1].unique().tolist() == [100]


def write_idx(path, array):
    sides = b"".join(side.to_bytes(4, "big") for side in array.shape)
    path.write_bytes(gzip.compress(bytes([0, 0, 8, array.ndim]) + sides + array.tobytes()))


def test_idx_files_of_any_size_are_read_and_corrupt_ones_are_errors(tmp_path):
    for kind, count in (("train", 5), ("t10k", 3)):
        images = np.arange(count * 6, dtype=np.uint8).reshape(count, 2, 3)
        write_idx(tmp_path / f"{kind}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"{kind}-labels-idx1-ubyte.gz", np.arange(count, dtype=np.uint8))
    training, validation = read_images(tmp_path)
    assert training.images.shape == (5, 1, 2, 3)
    assert validation.images[2].flatten().tolist() == list(range(12, 18))
    assert (validation.labels.tolist(), validation.labels.dtype) == ([0, 1, 2], torch.int64)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match=r"labels-idx1-ubyte\.gz is not a complete idx file \(.*\): copy or download"):
        read_images(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz is missing: expected a folder of classes"):
        read_images(tmp_path)


def test_a_path_without_images_is_an_error_with_the_expected_layout(tmp_path):
    with pytest.raises(DataError, match=r"nowhere is not a folder: expected a folder of classes \(CLASS/\*\.jpg"):
        read_images(tmp_path / "nowhere")
    (tmp_path / "cat").mkdir()
    Image.new("L", (3, 3)).save(tmp_path / "cat" / "one.png")
    with pytest.raises(DataError, match=r"has no images of several classes: expected a folder of classes"):
        read_images(tmp_path)


def test_without_pillow_the_error_names_the_extra(tmp_path, monkeypatch):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(9):
            Image.new("L", (3, 3)).save(tmp_path / name / f"{number}.png")
    training, _ = read_images(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"image files need Pillow, which is not installed: pip install 'samestep\[rec"):
        training.images[0]


def test_a_square_is_cropped_at_the_given_position():
    image = torch.arange(24.0).view(1, 4, 6)
    assert crop_square(image, 4).tolist() == image[:, :, 1:5].tolist()
    assert crop_square(image, 2, scale=0.5, position=(1.0, 0.0)).tolist() == image[:, 2:, :2].tolist()
    assert crop_square(image, 9).shape == (1, 9, 9)
    with pytest.raises(DataError, match=r"crop_square got size=8 and scale=1\.5: size must be at least 1 pixel"):
        crop_square(image, 8, scale=1.5)


@pytest.fixture
def pysaliency(tmp_path):
    write_scenes(tmp_path / "inside", 3, 64, 48)
    return tmp_path / "inside"


def test_scenes_are_written_completely_or_not_at_all(tmp_path, monkeypatch):
    def interrupted(number, width, height):
        if number == 2:
            raise KeyboardInterrupt
        return scene(number, width, height)

    with monkeypatch.context() as patch:
        patch.setattr("samestep.assets.scene", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_scenes(tmp_path / "new" / "scenes", 3, 16, 12)
    assert list((tmp_path / "new").iterdir()) == []
    write_scenes(tmp_path / "new" / "scenes", 3, 16, 12)
    assert sorted(path.name for path in (tmp_path / "new" / "scenes").iterdir()) == ["fixations.hdf5", "stimuli.hdf5"]


def test_pysaliency_files_are_read_with_images_inside_or_in_separate_files(pysaliency, tmp_path):
    shutil.copytree(pysaliency, tmp_path / "separate")
    with h5py.File(pysaliency / "stimuli.hdf5") as inside:
        images = [inside[str(number)][:] for number in range(3)]
    (tmp_path / "separate" / "stimuli.hdf5").unlink()
    with h5py.File(tmp_path / "separate" / "stimuli.hdf5", "w") as separate:
        separate.attrs["type"], separate.attrs["version"] = b"FileStimuli", b"2.1"
        separate["filenames"] = [f"{number}.png" for number in range(3)]
        separate["shapes"] = np.array([image.shape for image in images])
    for number, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / "separate" / f"{number}.png")
    with h5py.File(tmp_path / "separate" / "fixations.hdf5", "r+") as file:  # scanpaths end early, and leave the image
        file["train_xs"][0, 4:] = file["train_ys"][0, 4:] = np.nan
        file["train_xs"][1, 5] = 64.5
    for folder in ("inside", "separate"):
        convert_pysaliency(tmp_path / folder, tmp_path / "made" / f"{folder}.hdf5", 32, 24)
    with h5py.File(tmp_path / "made" / "inside.hdf5") as one, h5py.File(tmp_path / "made" / "separate.hdf5") as two:
        assert one["images"].shape == (3, 3, 24, 32)
        assert np.array_equal(one["images"], two["images"])
        assert [int((file["fixations"][0, :, 0] >= 0).sum()) for file in (one, two)] == [60, 57]
        assert one["fixations"][:].max(axis=(0, 1)) == pytest.approx([23, 31], abs=1)


def test_scanpaths_of_newer_files_end_at_their_length(pysaliency, tmp_path):
    convert_pysaliency(pysaliency, tmp_path / "old.hdf5", 64, 48)
    with h5py.File(pysaliency / "fixations.hdf5", "r+") as file:
        arrays = {name: file[name][:] for name in ("train_xs", "train_ys", "train_ns")}
        for name in list(file):
            del file[name]
        file.attrs["type"], file.attrs["version"] = b"ScanpathFixations", b"1.0"
        group, length = file.create_group("scanpaths"), np.full(30, 6)
        length[0] = 4
        group["xs"], group["ys"], group["n"], group["length"] = *arrays.values(), length
    convert_pysaliency(pysaliency, tmp_path / "new.hdf5", 64, 48)
    (_, old), (_, new) = (HDF5Dataset(tmp_path / f"{name}.hdf5", ["images", "fixations"])[0] for name in ("old", "new"))
    assert [int((fixations[:, 0] >= 0).sum()) for fixations in (old, new)] == [60, 58]
    assert torch.equal(new[:4], old[:4])
    assert torch.equal(new[4:58], old[6:])


def break_file(folder, case):
    if case == "fixations":
        (folder / "fixations.hdf5").unlink()
    name = "stimuli.hdf5" if case in ("image", "listed") else "fixations.hdf5"
    if case not in ("fixations",):
        with h5py.File(folder / name, "r+") as file:
            if case == "listed":
                file["filenames"] = ["0.png"]
            elif case == "no fixations":
                file["train_ns"][...] = 0
            else:
                file.move({"image": "1", "columns": "train_xs"}[case], "gone")


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (
            "fixations",
            "inside has no fixations.hdf5: expected a folder with the files of pysaliency: stimuli.hdf5 (",
        ),
        ("columns", "fixations.hdf5 has no train_xs: expected a folder with the files of pysaliency"),
        ("image", "stimuli.hdf5 has no 1: expected a folder with the files of pysaliency"),
        ("listed", "0.png is missing, but stimuli.hdf5 lists it: expected a folder with the files of pysaliency"),
        ("no fixations", "image 1 of "),
    ],
)
def test_incomplete_files_are_errors(pysaliency, tmp_path, case, text):
    break_file(pysaliency, case)
    with pytest.raises(DataError, match=re.escape(text)):
        convert_pysaliency(pysaliency, tmp_path / "pairs.hdf5", 64, 48)


def test_scenes_are_deterministic_and_their_density_sums_to_one():
    image, density = scene(3, 32, 24)
    again, _ = scene(3, 32, 24)
    assert np.array_equal(image, again)
    assert image.shape == (24, 32, 3)
    assert density.sum() == pytest.approx(1)
    assert not np.array_equal(image, scene(4, 32, 24)[0])
