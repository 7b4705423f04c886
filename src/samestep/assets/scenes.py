"""Synthetic images with a known density of looks at them, as files of pysaliency: for a saliency model's first run."""

from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import interpolate

from samestep.assets.whole import publish
from samestep.data.hdf5 import require_h5py

_PEOPLE, _LOOKS = 10, 6


def scene(number: int, width: int, height: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
    """A SYNTHETIC image and the density of looks at it: at warm discs, not at cold ones, and a little at the middle."""
    luck = np.random.default_rng(number)
    rows, columns = np.mgrid[:height, :width] + 0.5
    ground = interpolate(torch.tensor(luck.uniform(60, 150, (1, 3, 4, 5))), (height, width), mode="bicubic")[0]
    image = ground.permute(1, 2, 0).numpy() + luck.normal(0, 8, (height, width, 3))
    off = (columns / width - 0.5) ** 2 + (rows / height - 0.5) ** 2
    density = 0.2 * np.exp(-off / 0.08) / (0.25 * width * height)
    for warm in (True,) * luck.integers(1, 4) + (False,) * luck.integers(2, 5):
        x, y, radius = luck.uniform(0.1, 0.9) * width, luck.uniform(0.1, 0.9) * height, luck.uniform(0.04, 0.08) * width
        square = (columns - x) ** 2 + (rows - y) ** 2
        colours = ((180, 60, 0), (255, 160, 60)) if warm else ((0, 60, 120), (90, 160, 255))
        image[square < radius**2] = luck.uniform(*colours)
        density += warm * np.exp(-square / (2 * radius**2)) / (2 * np.pi * radius**2)
    return image.clip(0, 255).astype(np.uint8), density / density.sum()


def write_scenes(folder: str | Path, count: int, width: int, height: int) -> None:
    """Write scenes, and six looks of ten made-up people at each, as pysaliency would: stimuli.hdf5, fixations.hdf5.

    The folder is there when both are whole.
    """
    publish(Path(folder), partial(_write, count, width, height))


def _write(count: int, width: int, height: int, place: Path) -> None:
    h5py = require_h5py()
    luck, looks = np.random.default_rng(0), list[npt.NDArray[np.int64]]()
    with h5py.File(place / "stimuli.hdf5", "w") as file:
        file.attrs["type"], file.attrs["version"] = b"Stimuli", b"1.1"
        for number in range(count):
            file[str(number)], density = scene(number, width, height)
            looks.append(luck.choice(width * height, (_PEOPLE, _LOOKS), p=density.ravel()))
    with h5py.File(place / "fixations.hdf5", "w") as file:
        file.attrs["type"], file.attrs["version"] = b"FixationTrains", b"1.2"
        places = np.concatenate(looks)
        file["train_ys"], file["train_xs"] = (each + 0.5 for each in np.divmod(places, width))
        file["train_ts"] = np.tile(np.arange(float(_LOOKS)), (len(places), 1))
        file["train_ns"] = np.repeat(np.arange(count), _PEOPLE)
        file["train_subjects"] = np.tile(np.arange(_PEOPLE), count)
