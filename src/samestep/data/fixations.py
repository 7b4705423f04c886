"""Images and the places people looked at, out of pysaliency's files, as one HDF5 file with a row a sample."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from samestep.data.hdf5 import require_h5py
from samestep.data.images import require_pillow
from samestep.errors import DataError

_LAYOUT: Final = (
    "a folder with the files of pysaliency: stimuli.hdf5 (datasets 0, 1, 2, ... of (height, width, 3) bytes; or "
    "`filenames`, relative to it) and fixations.hdf5 (train_xs, train_ys: a scanpath a row; train_ns: the image; or a "
    "group `scanpaths` with xs, ys, n and length)"
)
Floats = npt.NDArray[np.float64]


def pair_fixations(folder: str | Path, target: str | Path, width: int, height: int) -> None:
    """Write images and fixations at one size into `target`, for `HDF5Dataset(target, keys=["images", "fixations"])`.

    `images` are bytes (n, 3, height, width), `fixations` whole numbers (n, most, 2), row and column of a pixel, -1
    where an image has fewer than most. Those outside of their image are left out. Call it on one rank,
    `run.once(pair_fixations, ...)`: what every rank and worker reads from then on is the file.
    """
    place, h5py = Path(folder), require_h5py()
    for name in ("stimuli.hdf5", "fixations.hdf5"):
        if not (place / name).is_file():
            raise DataError(f"{place} has no {name}: expected is {_LAYOUT}")
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(place / "stimuli.hdf5", "r") as stimuli, h5py.File(target, "w") as out:
        names = stimuli["filenames"].asstr()[:] if "filenames" in stimuli else None
        count = len(stimuli) if names is None else len(names)
        with h5py.File(place / "fixations.hdf5", "r") as file:
            xs, ys, ns = _scanpaths(file, place / "fixations.hdf5")
        most = max((int(np.isfinite(xs[ns == number]).sum()) for number in range(count)), default=0)
        images = out.create_dataset("images", (count, 3, height, width), np.uint8, chunks=(1, 3, height, width))
        fixations = out.create_dataset("fixations", (count, most, 2), np.int32, fillvalue=-1)
        for number in range(count):
            image = _image(place, stimuli, number, None if names is None else str(names[number]))
            images[number] = np.asarray(image.convert("RGB").resize((width, height))).transpose(2, 0, 1)
            x, y = xs[ns == number] * width / image.width, ys[ns == number] * height / image.height
            inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)  # not so where a scanpath has ended: NaN
            if not inside.any():
                raise DataError(f"image {number} of {place} has no fixation inside of it: leave it out of both files")
            fixations[number, : inside.sum()] = np.stack([y[inside], x[inside]], axis=1)


def _scanpaths(file: Any, path: Path) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """Columns and rows of pixels, a scanpath a row with NaN behind its end, and the image of each."""
    newer = "scanpaths" in file
    group, wanted = (file["scanpaths"], ("xs", "ys", "n")) if newer else (file, ("train_xs", "train_ys", "train_ns"))
    if missing := [name for name in wanted if name not in group]:
        raise DataError(f"{path} lacks {', '.join(missing)}: expected is {_LAYOUT}")
    xs, ys, ns = (group[name][:] for name in wanted)
    if newer:  # what stands behind the end of a scanpath is whatever was there
        xs = np.where(np.arange(xs.shape[1]) < group["length"][:][:, None], xs, np.nan)
    return xs.astype(np.float64), ys.astype(np.float64), ns.astype(np.int64)


def _image(folder: Path, stimuli: Any, number: int, name: str | None) -> Any:
    pillow = require_pillow()
    if name is not None:
        if not (folder / name).is_file():
            raise DataError(f"{folder / name} is missing, which stimuli.hdf5 lists: expected is {_LAYOUT}")
        return pillow.open(folder / name)
    if str(number) not in stimuli:
        raise DataError(f"{folder / 'stimuli.hdf5'} lacks {number}: expected is {_LAYOUT}")
    return pillow.fromarray(stimuli[str(number)][:])
